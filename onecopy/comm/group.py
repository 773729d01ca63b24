"""The ranks of one optimizer: small messages, and the transfers that buckets are made of."""

from __future__ import annotations

import ctypes
import functools
import io
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onecopy.comm.agreement import RanksDisagree, same_outcome
from onecopy.comm.gloo.local_ranks import LocalRanks, Messages, SharedRead, find_local_ranks
from onecopy.comm.gloo.shared_memory import SharedMemory
from onecopy.comm.gloo.topology import Topology, ranks_after
from onecopy.comm.monitor import GroupMonitor
from onecopy.comm.process_group import backends, checked_group
from onecopy.comm.stats import Counters, Traffic
from onecopy.comm.waiting import BackgroundThread, Task, wait_here, wait_interruptibly
from onecopy.planning.param_groups import forces_c10d
from onecopy.planning.sizes import is_worth_sharing


class Handle:
    """Communication under way. It holds its tensors, so that their memory is not reused before."""

    def __init__(
        self,
        monitor: GroupMonitor,
        works: Sequence[Any],
        tensors: Sequence[object],
        shared_reads: Sequence[SharedRead] = (),
        # Of a thread that waits for something else, and then may launch more works.
        tasks: Sequence[Task] = (),
    ) -> None:
        self._monitor = monitor
        self._works = works
        self._tensors = tensors
        self._shared_reads = shared_reads
        self._tasks = tasks

    @classmethod
    def together(cls, pending: Sequence[Handle]) -> Handle:
        """Several as one: the thread that waits goes to sleep and wakes up once."""
        first = pending[0]
        works = [work for each in pending for work in each._works]
        shared_reads = [shared_read for each in pending for shared_read in each._shared_reads]
        tasks = [task for each in pending for task in each._tasks]
        return cls(first._monitor, works, [each._tensors for each in pending], shared_reads, tasks)

    def wait(self) -> None:
        """Return once the tensors may be read and written (on accelerators: in stream order)."""
        self._monitor.wait_for(self._works)
        with self._monitor.naming_absentees():
            for task in self._tasks:
                self._monitor.wait_for(task.wait() or ())
            for shared_read in self._shared_reads:
                shared_read.arrive(self._monitor.patience)
            # Here, where an interruption is final: a letter cannot be read twice.
            self._works = self._tensors = self._shared_reads = self._tasks = ()


# Who is on the same host, by group: found once, by all ranks together.
_local_ranks: weakref.WeakKeyDictionary[Any, LocalRanks] = weakref.WeakKeyDictionary()
# Groups with an optimizer whose buckets are all-gathered by gloo, too: with ONECOPY_COMM=c10d.
_gathering_by_gloo: weakref.WeakSet[Any] = weakref.WeakSet()
GATHER_TAGS = 1 << 20  # those below are of gathers, the others of gradients


def do_nothing() -> None:
    """For who is to be told of something, as long as nobody is."""


class Part(NamedTuple):
    """A contiguous tensor that its owner fills and others receive in place."""

    owner: int
    tensor: torch.Tensor
    receivers: Sequence[int] | None = None  # None: all other ranks


class RankGroup:
    """Communication among the members of the user's process group."""

    def __init__(self, process_group: Any = None, device: torch.device | None = None) -> None:
        """``device`` is where the parameters are, for small messages that the CPU cannot carry."""
        self.user_group = checked_group(process_group)
        self._backends = backends(self.user_group)
        # Where small messages live: the CPU if the backend serves it.
        cpu = torch.device("cpu")
        self.control_device = cpu if device is None or "cpu" in self._backends else device
        self.traffic = Traffic()
        self.counters = Counters(self.traffic)
        self.compares_phases = False  # ONECOPY_CHECK=step
        self.when_disagreeing: Callable[[], None] = do_nothing
        self._carrier: BackgroundThread | None = None  # as long as there is nothing to carry
        waits_on_cpu = device is None or device.type == "cpu"
        self.monitor = GroupMonitor(self.user_group, self._greatest_of_user_group, waits_on_cpu)
        self.rank, self.world_size = self.monitor.rank, self.monitor.world_size
        self._group = self.monitor.group
        self._global_ranks = dist.get_process_group_ranks(self._group)
        self._is_native_everywhere = self._agree_on_c10d()
        if self._is_native_everywhere and self._backends.get(self.control_device.type) == "gloo":
            _gathering_by_gloo.add(self.user_group)
        self.monitor.meet(self._find_neighbours())
        weakref.finalize(self, self.local_ranks.forget)

    def _greatest_of_user_group(self, value: int) -> int:
        """Before there is a group of our own."""
        number = torch.tensor([value], device=self.control_device)
        work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self.user_group, async_op=True)
        if self.control_device.type == "cpu":
            wait_interruptibly([work])
        else:
            work.wait()
        return int(number)

    def _agree_on_c10d(self) -> bool:
        """Whether ONECOPY_COMM forces native collectives: the same on all ranks, which would wait
        for each other in different collectives otherwise. So this comes before all others."""
        asked = os.environ.get("ONECOPY_COMM", "")
        chosen = f"ONECOPY_COMM={asked or 'auto'}"
        try:
            same_outcome(self, "building the optimizer", lambda: [chosen])
            return forces_c10d(os.environ)
        except ValueError:
            self.monitor.meet(self.monitor.local_ranks)  # no optimizer is being built any more
            raise

    @property
    def whose(self) -> str:
        """Which optimizer of the process group this is; of the first, nothing is said."""
        return self.monitor.whose

    def enter(self, what: str) -> None:
        """Something begins that all ranks do together: a note of it, and with
        ``ONECOPY_CHECK=step`` a comparison of what the ranks are about to do."""
        self.monitor.note(what)
        if self.compares_phases:
            try:
                same_outcome(self, what, list)
            except RanksDisagree:
                self.when_disagreeing()  # on all ranks
                raise

    # ------------------------------------------------------------------ ranks on the same host

    @property
    def hosts(self) -> Topology:
        """Which ranks share a host."""
        return self.monitor.local_ranks.hosts

    @property
    def local_ranks(self) -> LocalRanks:
        """The ranks that can read in this one's memory, and it in theirs."""
        return self.monitor.local_ranks

    def _find_neighbours(self) -> LocalRanks:
        if self.world_size == 1 or self.is_native(torch.device("cpu")):
            return LocalRanks(self.rank, Topology.apart(self.world_size))
        known = _local_ranks.get(self.user_group)
        if known is None:
            known = find_local_ranks(self.rank, self.all_gather_bytes, self.world_size)
            _local_ranks[self.user_group] = known
        return known

    def lends(self, numbytes: int, device: torch.device) -> bool:
        """Whether neighbours read so many bytes in place instead of receiving them."""
        return self.sends_one_by_one(device) and is_worth_sharing(numbytes)

    def memory_to_lend(self, numbytes: int) -> SharedMemory:
        return SharedMemory(numbytes, self.world_size)

    def wait_until_read(self, memory: SharedMemory) -> None:
        """Until nobody reads what was lent before."""
        with self.monitor.naming_absentees():
            self.local_ranks.wait_until_read(memory, self.monitor.patience)

    def lend(
        self,
        memory: SharedMemory,
        parts: Mapping[int, torch.Tensor],
        tag: int,
        read: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Tell the readers, by rank, which part of the memory is for them. ``read``: what they will
        read of that, if not all."""
        for part in parts.values() if read is None else read:
            self.traffic.add(part)
        with self.monitor.naming_absentees():
            self.local_ranks.write(self.local_ranks.lend(memory, parts, tag), self.monitor.patience)

    def borrow(self, lenders: Iterable[int], tag: int) -> tuple[list[SharedRead], Handle]:
        """What these ranks lend with ``lend``; to be read after waiting, and then given back."""
        shared_reads = [self.local_ranks.borrow(lender, tag) for lender in lenders]
        return shared_reads, Handle(self.monitor, (), (), shared_reads)

    def carry(self, parts: Sequence[Part], memory: SharedMemory, run: torch.Tensor) -> Handle:
        """Receive the parts, which lie in a run of the memory, for the neighbours, too, and tell
        them.

        By a thread of its own, in the order of the calls: a neighbour may want them when this rank
        is busy with anything else. If they do not come, the neighbours are told that.
        """
        readers = self.hosts.others_on_host_of(self.rank)
        with self.monitor.naming_absentees():
            works = [work for part in parts for work in self._launch(part)]
            self.traffic.add(run, len(readers))
            letters = self.local_ranks.lend(memory, dict.fromkeys(readers, run), self.carried_tag)
        if self._carrier is None:
            self._carrier = BackgroundThread.of(self)
        deliver = functools.partial(_deliver, works, self.local_ranks, letters, self.monitor)
        return Handle(self.monitor, (), [parts, memory], tasks=[self._carrier.send(deliver)])

    # ------------------------------------------------------------------ the way for a device

    def is_native(self, device: torch.device) -> bool:
        """Whether all_gather and reduce_scatter of the backend move equal slots."""
        return self._is_native_everywhere or self._backends.get(device.type) != "gloo"

    def sends_one_by_one(self, device: torch.device) -> bool:
        """Whether ranks send to one another, each when it likes; otherwise all take part at once.
        Both directions of the wire are used then, as in no collective of gloo. Only from the CPU:
        gloo sends nothing else."""
        return device.type == "cpu" and not self.is_native(device)

    # ------------------------------------------------------------------ parameters

    def all_gather_slots(self, buffer: torch.Tensor) -> Handle:
        """``buffer`` is W equal slots; fill all from their owners, in place."""
        slot = buffer.numel() // self.world_size
        mine = buffer.narrow(0, self.rank * slot, slot)
        self.traffic.add(mine, self.world_size - 1)
        with self.monitor.naming_absentees():
            work = _all_gather_single(buffer, mine, group=self._group, async_op=True)
        return Handle(self.monitor, [work], [buffer])

    def share(self, parts: Sequence[Part]) -> Handle:
        """Every part goes from its owner to its receivers: in this order, from each owner."""
        works: list[Any] = []
        with self.monitor.naming_absentees():
            for part in parts:
                owner, tensor, receivers = part
                if owner == self.rank:
                    self.traffic.add(tensor, len(self.others if receivers is None else receivers))
                if self.sends_one_by_one(tensor.device):
                    works += self._launch(part)
                else:
                    source, real = self._global_ranks[owner], _as_real(tensor)
                    works.append(dist.broadcast(real, source, group=self._group, async_op=True))
        return Handle(self.monitor, works, parts)

    def _launch(self, part: Part) -> list[Any]:
        if part.owner != self.rank:
            source = self._global_ranks[part.owner]
            return [dist.irecv(part.tensor, source, group=self._group, tag=self.tag)]
        return [
            dist.isend(part.tensor, self._global_ranks[rank], group=self._group, tag=self.tag)
            for rank in (self.others if part.receivers is None else part.receivers)
        ]

    @property
    def tag(self) -> int:
        """Of parameters under way. Why one for each optimizer: if ranks step two of them in
        different orders, each waits for what it will not get, instead of taking the other's."""
        return self.monitor.number % GATHER_TAGS

    @property
    def carried_tag(self) -> int:
        """The same for letters of parameters that come from other hosts; gradients have none that
        is negative."""
        return -1 - self.tag

    @property
    def others(self) -> list[int]:
        return ranks_after(self.rank, self.world_size)

    # ------------------------------------------------------------------ gradients

    def reduce_slots(self, buffer: torch.Tensor, mine: torch.Tensor) -> Handle:
        """``buffer`` is W equal slots; ``mine`` becomes the sum of this rank's over all ranks."""
        self.traffic.add(mine, self.world_size - 1)
        with self.monitor.naming_absentees():
            tensors = _as_real(mine), _as_real(buffer)
            work = _reduce_scatter_single(*tensors, group=self._group, async_op=True)
        return Handle(self.monitor, [work], [buffer, mine])

    def exchange_parts(
        self, outgoing: torch.Tensor, sizes: Sequence[int], incoming: torch.Tensor
    ) -> Handle:
        """``outgoing`` is a part for each rank, of ``sizes[r]`` elements, in the order of the
        ranks; ``incoming`` becomes what each rank has for this one, in the same order. On all ranks
        at once.

        The part for this rank is copied, too: without it the others would not be one run.
        """
        mine = sizes[self.rank]
        assert incoming.numel() == mine * self.world_size
        for start, rank in zip(accumulate(sizes, initial=0), range(self.world_size), strict=False):
            if rank != self.rank:
                self.traffic.add(outgoing[start : start + sizes[rank]])
        with self.monitor.naming_absentees():
            work = dist.all_to_all_single(
                incoming,
                outgoing,
                [mine] * self.world_size,
                list(sizes),
                group=self._group,
                async_op=True,
            )
        return Handle(self.monitor, [work], [outgoing, incoming])

    def nothing(self) -> Handle:
        """Communication that has already happened."""
        return Handle(self.monitor, (), ())

    def maximum(self, values: torch.Tensor) -> Handle:
        """Elementwise over the ranks, in place; in the background."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def total(self, values: torch.Tensor) -> Handle:
        """The sum over the ranks, in place; in the background."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def _all_reduce(self, values: torch.Tensor, operation: Any) -> Handle:
        if self.world_size == 1:
            return self.nothing()
        self.traffic.add(values)
        with self.monitor.naming_absentees():
            work = dist.all_reduce(values, operation, group=self._group, async_op=True)
        return Handle(self.monitor, [work], [values])

    def send_later(
        self,
        parts: Mapping[int, torch.Tensor],
        sums: Callable[[], Iterable[torch.Tensor]],
        shared_reads: Sequence[SharedRead],
        tag: int,
        carrier: BackgroundThread,
    ) -> Handle:
        """Send to each rank its part when the loans have arrived and ``sums``, in the same order,
        has filled it: by the carrier, in the order of the calls. Messages are told apart by their
        tags, so other than collectives they may be launched by any thread."""
        for part in parts.values():
            self.traffic.add(part)
        peers = [self._global_ranks[to] for to in parts]
        patience, group = self.monitor.patience, self._group

        def send() -> list[Any]:
            for shared_read in shared_reads:
                shared_read.arrive(patience)
            with torch.no_grad():
                return [
                    dist.isend(part, peer, group=group, tag=tag)
                    for part, peer in zip(sums(), peers, strict=True)
                ]

        return Handle(self.monitor, (), [*parts.values()], tasks=[carrier.send(send)])

    # ------------------------------------------------------------------ one to one

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Handle:
        self.traffic.add(tensor)
        with self.monitor.naming_absentees():
            work = dist.isend(tensor, self._global_ranks[to], group=self._group, tag=tag)
        return Handle(self.monitor, [work], [tensor])

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Handle:
        with self.monitor.naming_absentees():
            work = dist.irecv(tensor, self._global_ranks[source], group=self._group, tag=tag)
        return Handle(self.monitor, [work], [tensor])

    # ------------------------------------------------------------------ small things

    def minimum_and_maximum(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Elementwise over the ranks."""
        return self.extremes(values, values)

    def extremes(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The least of one and the greatest of the other, elementwise over the ranks."""
        # ~x reverses the order of integers: one all-reduce
        both = torch.stack([low, ~high]).to(self.control_device)
        with self.monitor.naming_absentees():
            work = dist.all_reduce(both, dist.ReduceOp.MIN, group=self._group, async_op=True)
        self.monitor.wait_for([work])
        return both[0].cpu(), (~both[1]).cpu()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Equally long payloads of all ranks, by rank."""
        if self.user_group in _gathering_by_gloo:
            # Why: gloo ends a process in which all-gathers of two lengths meet. A barrier meets
            # nothing but a barrier.
            with self.monitor.naming_absentees():
                work = dist.barrier(self._group, async_op=True)
            self.monitor.wait_for([work])
        mine = tensor_from_bytes(payload).to(self.control_device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self.monitor.naming_absentees():
            work = dist.all_gather(everyone, mine, group=self._group, async_op=True)
        self.monitor.wait_for([work])
        return [bytes_from_tensor(theirs) for theirs in everyone]

    def broadcast_bytes(self, payload: bytes | None, source: int) -> bytes:
        """The payload of ``source``, which alone passes one, on all ranks."""
        length = torch.tensor([len(payload or b"")], device=self.control_device)
        root = self._global_ranks[source]
        self._broadcast(length, root)
        data = torch.empty(int(length), dtype=torch.uint8, device=self.control_device)
        if payload is not None:
            data.copy_(tensor_from_bytes(payload))
        self._broadcast(data, root)
        return bytes_from_tensor(data)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        with self.monitor.naming_absentees():
            work = dist.broadcast(tensor, root, group=self._group, async_op=True)
        self.monitor.wait_for([work])

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        return self


def _deliver(
    works: list[Any], local_ranks: LocalRanks, letters: Messages, monitor: GroupMonitor
) -> None:
    try:
        wait_here(works)
    except BaseException:
        local_ranks.write(letters.of_failure(), monitor.patience)
        raise
    works.clear()  # as in waiting.py: they end before anybody knows that they are done
    local_ranks.write(letters, monitor.patience)


def broadcast_object(
    obj: Any,
    src_rank: int,
    group: Any = None,
    device: torch.device | str = "cpu",
) -> Any:
    """The object of *global* rank ``src_rank``, on all ranks, its tensors on ``device``.

    Kept for code written for torch's class. Loading admits tensors and plain containers only.
    """
    source = dist.get_rank() == src_rank
    if source:
        written = io.BytesIO()
        torch.save(obj, written)
        data = tensor_from_bytes(written.getvalue()).to(device)
    length = torch.tensor([data.numel() if source else 0], device=device)
    dist.broadcast(length, src_rank, group=group)
    if not source:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, src_rank, group=group)
    if source:
        return obj
    return torch.load(io.BytesIO(bytes_from_tensor(data)), map_location=device, weights_only=True)


def average_as_ddp(buffer: torch.Tensor, group: Any) -> torch.futures.Future[torch.Tensor]:
    """The average over a group of the user's, in place, as DDP itself computes it."""
    buffer.mul_(1 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
    return future


def _first(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs, which every backend and every release of torch can carry."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def tensor_from_bytes(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload) or bytearray(1), dtype=torch.uint8)[: len(payload)]


def bytes_from_tensor(tensor: torch.Tensor) -> bytes:
    on_cpu = tensor.cpu()
    return ctypes.string_at(on_cpu.data_ptr(), on_cpu.numel())


# torch 2.13 renamed it and warns about the old name; releases before know only the old one.
_all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
