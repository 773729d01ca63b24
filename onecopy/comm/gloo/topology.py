"""Which ranks share a host, and which rank relays what from one host to another.

Ranks of one host read one another's memory, which costs next to nothing; hosts are joined by a
wire. No byte passes the wire twice: what an owner exchanges with another host goes through one rank
there, its *relay*::

            host A: 0 1                                host B: 2 3
    gradients that 2 owns         0 + 1, added up by 0 --------> 2, which adds 3's and its own
    parameters that 2 owns        1 <-- 0 <--------------------- 2 --> 3

The owners of a host are dealt out evenly to the ranks of the other. A rank that can read nobody
else's memory is a host of its own: if all are, each is the relay of every owner, for itself alone,
and all send to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from onecopy.comm.group import ranks_after


@dataclass(frozen=True, slots=True)
class Topology:
    """All ranks of a process group, by host; those of a host in order, and hosts by their first.

    >>> topology = Topology(((0, 1), (2, 3)))
    >>> topology.relay(2, (0, 1)), topology.relay(3, (0, 1))
    (0, 1)
    >>> topology.relays_of(2), topology.relayed_by(0)
    ((0,), (2,))
    """

    hosts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        everybody = sorted(rank for host in self.hosts for rank in host)
        if everybody != list(range(len(everybody))) or list(self.hosts) != sorted(
            tuple(sorted(host)) for host in self.hosts if host
        ):
            raise ValueError(f"expected every rank once, in order, got {self.hosts}")

    @classmethod
    def by_name(cls, names: Sequence[object]) -> Topology:
        """Ranks whose hosts have the same name, which may be anything, share a host."""
        found: dict[object, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @property
    def world_size(self) -> int:
        return sum(map(len, self.hosts))

    def host_of(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of this one, itself included."""
        return next(host for host in self.hosts if rank in host)

    def local_peers(self, rank: int) -> tuple[int, ...]:
        """The other ranks on its host."""
        return tuple(other for other in self.host_of(rank) if other != rank)

    def relay(self, owner: int, host: tuple[int, ...]) -> int:
        """The rank of another host through which the owner exchanges data with it."""
        return host[self.host_of(owner).index(owner) % len(host)]

    def relays_of(self, owner: int) -> tuple[int, ...]:
        """On each of the other hosts, the next one first."""
        return tuple(self.relay(owner, host) for host in self._hosts_after(owner))

    def relayed_by(self, rank: int) -> tuple[int, ...]:
        """The owners, on other hosts, whose relay this rank is."""
        own = self.host_of(rank)
        return tuple(
            owner
            for host in self._hosts_after(rank)
            for place, owner in enumerate(host)
            if own[place % len(own)] == rank
        )

    def _hosts_after(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """All other hosts, the next one first: as ``ranks_after``."""
        place = self.hosts.index(self.host_of(rank))
        return self.hosts[place + 1 :] + self.hosts[:place]


@dataclass(frozen=True, slots=True)
class ReduceRoutes:
    """By which ranks the gradients of a bucket leave a rank, and by which they come to it.

    An owner's part is *shared* if ranks of one host read it in one another's memory; then each of
    the other hosts sends it as one sum. Otherwise it is *sent*, by every rank.
    """

    sources: tuple[int, ...] = ()  # whose memory this rank reads
    # Who reads this rank's memory, and what: the parts of which owners.
    read_by: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    relayed: tuple[int, ...] = ()  # owners on other hosts for whom this rank adds up its host's
    direct: tuple[int, ...] = ()  # owners to whom it sends what it contributes itself
    senders: tuple[int, ...] = ()  # who send to this rank

    @classmethod
    def of(cls, rank: int, topology: Topology, shared: Set[int], sent: Set[int]) -> ReduceRoutes:
        """``shared`` and ``sent``: the owners whose parts are; all others own nothing."""
        others = ranks_after(rank, topology.world_size)
        peers = [other for other in others if other in topology.host_of(rank)]
        # The owners for whom a rank reads what its peers contribute.
        reads = {
            r: tuple(owner for owner in (r, *topology.relayed_by(r)) if owner in shared)
            for r in (rank, *peers)
        }
        relayed = tuple(owner for owner in reads[rank] if owner != rank)
        receives = topology.relays_of(rank) if rank in shared else ()
        return cls(
            tuple(peers) if reads[rank] else (),
            {peer: reads[peer] for peer in peers if reads[peer]},
            relayed if peers else (),
            tuple(o for o in others if o in sent or (o in relayed and not peers)),
            tuple(others) if rank in sent else receives,
        )
