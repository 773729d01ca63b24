"""Which ranks share a host, and who carries what from one host to another.

Ranks of one host read in one another's memory, which costs next to nothing; hosts are joined by a
wire, which every byte has to pass. So nothing passes it twice. What an owner exchanges with another
host goes through one rank there, its *porter*::

            host A: 0 1                                host B: 2 3
    gradients of what 2 owns      0 + 1, added up by 0 --------> 2, which adds 3's and its own
    parameters that 2 owns        1 <-- 0 <--------------------- 2 --> 3

The owners of a host are dealt out evenly to the ranks of the other. A rank that can read in nobody
else's memory is a host of its own: if all are, each is the porter of every owner, for itself alone,
and all send to all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Topology:
    """All ranks of a process group, by host; those of a host in order, and hosts by their first.

    >>> hosts = Topology(((0, 1), (2, 3)))
    >>> hosts.relay(2, (0, 1)), hosts.relay(3, (0, 1))
    (0, 1)
    >>> hosts.relays_of(2), hosts.relayed_by(0)
    ((0,), (2,))
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        everybody = sorted(rank for host in self.ranks for rank in host)
        if everybody != list(range(len(everybody))) or list(self.ranks) != sorted(
            tuple(sorted(host)) for host in self.ranks if host
        ):
            raise ValueError(f"expected every rank once, in order, got {self.ranks}")

    @classmethod
    def apart(cls, world_size: int) -> Topology:
        """Every rank on a host of its own."""
        return cls(tuple((rank,) for rank in range(world_size)))

    @classmethod
    def together(cls, world_size: int) -> Topology:
        """All ranks on one host."""
        return cls((tuple(range(world_size)),))

    @classmethod
    def by_name(cls, names: Sequence[object]) -> Topology:
        """Ranks whose hosts have the same name, which may be anything, are on the same one."""
        found: dict[object, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @property
    def world_size(self) -> int:
        return sum(map(len, self.ranks))

    def host_of(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of this one, itself included."""
        return next(host for host in self.ranks if rank in host)

    def others_on_host_of(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in self.host_of(rank) if other != rank)

    def relay(self, owner: int, host: tuple[int, ...]) -> int:
        """The rank of another host that all passes through which the owner exchanges with it."""
        return host[self.host_of(owner).index(owner) % len(host)]

    def relays_of(self, owner: int) -> tuple[int, ...]:
        """On each of the other hosts, the next one first."""
        return tuple(self.relay(owner, host) for host in self._hosts_after(owner))

    def relayed_by(self, rank: int) -> tuple[int, ...]:
        """The owners, on other hosts, whose porter this rank is."""
        own = self.host_of(rank)
        return tuple(
            owner
            for host in self._hosts_after(rank)
            for place, owner in enumerate(host)
            if own[place % len(own)] == rank
        )

    def _hosts_after(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """All other hosts, the next one first: as ``ranks_after``."""
        place = self.ranks.index(self.host_of(rank))
        return self.ranks[place + 1 :] + self.ranks[:place]


@dataclass(frozen=True, slots=True)
class ReduceRoutes:
    """By whom the gradients of a bucket leave a rank, and come to it.

    An owner's part is *lent* if ranks of one host read it in one another's memory; then it comes
    from each of the other hosts as one sum. Otherwise it is *sent*, by everybody.
    """

    lenders: tuple[int, ...] = ()  # in whose memory this rank reads
    # Who read in this one's, and what: the parts of which owners.
    read_by: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    carried: tuple[int, ...] = ()  # owners on other hosts for whom this rank adds up its host's
    direct: tuple[int, ...] = ()  # owners to whom it sends what it contributes itself
    senders: tuple[int, ...] = ()  # who send to this one
    summed: frozenset[int] = frozenset()  # those of them that send the sum of several ranks
    # Whose contributions, or those of whose host, make up this rank's part: in the order of a sum.
    contributors: tuple[int, ...] = ()

    @classmethod
    def of(cls, rank: int, hosts: Topology, lent: Set[int], sent: Set[int]) -> ReduceRoutes:
        """``lent`` and ``sent``: the owners whose parts are; all others own nothing."""
        beside, others = hosts.others_on_host_of(rank), ranks_after(rank, hosts.world_size)
        carried = [owner for owner in hosts.relayed_by(rank) if owner in lent]
        contributors: Collection[int] = range(hosts.world_size) if rank in sent else ()
        relays: tuple[int, ...] = ()
        if rank in lent:
            relays = hosts.relays_of(rank)
            contributors = {*hosts.host_of(rank), *relays}
        reads = {r: cls._read_for(r, hosts, lent) for r in (rank, *beside)}
        in_order = [r for r in others if r in beside]
        return cls(
            tuple(in_order) if reads[rank] else (),
            {r: reads[r] for r in in_order if reads[r]},
            tuple(carried) if beside else (),
            tuple(o for o in others if o in sent or (o in carried and not beside)),
            tuple(r for r in others if r in contributors and (r not in beside or rank in sent)),
            frozenset(relay for relay in relays if hosts.others_on_host_of(relay)),
            tuple(sorted(contributors)),
        )

    @staticmethod
    def _read_for(rank: int, hosts: Topology, lent: Set[int]) -> tuple[int, ...]:
        """The owners for whom a rank reads what its neighbours contribute: itself, and those to
        whom it carries it."""
        return tuple(owner for owner in (rank, *hosts.relayed_by(rank)) if owner in lent)

    @property
    def readers(self) -> tuple[int, ...]:
        return tuple(self.read_by)


def ranks_after(rank: int, world_size: int) -> list[int]:
    """All other ranks, the next one first: else all would send to rank 0 first."""
    return [(rank + i) % world_size for i in range(1, world_size)]
