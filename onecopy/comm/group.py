"""The ranks of one optimizer: small messages, tensors from rank to rank, broadcasts.

Collectives run on a group of our own, so that nothing on the user's group can interleave with them.
There is one for each group of the user's, however many optimizers share it, and it goes with it.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import io
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onecopy.comm.agreement import DIGEST_BYTES, same_outcome
from onecopy.comm.monitor import GroupMonitor, Handle
from onecopy.comm.stats import Traffic
from onecopy.comm.waiting import (
    ask_store,
    let_threads_finish,
    marking_interruptions,
    never_destroy,
    wait_interruptibly,
)
from onecopy.planning.param_groups import forces_c10d
from onecopy.torch_private import destroy_process_group, make_process_group, store_of, timeout_of

# Groups with an optimizer whose buckets are all-gathered by gloo, too: with ONECOPY_COMM=c10d.
_gathering_by_gloo: weakref.WeakSet[Any] = weakref.WeakSet()
# All-gathers have the tags below, reduce-scatters those from here on.
GATHER_TAGS = 1 << 20


class Part(NamedTuple):
    """A contiguous tensor that its owner fills and all others receive in place."""

    owner: int
    tensor: torch.Tensor


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
        waits_on_cpu = device is None or device.type == "cpu"
        self.monitor = GroupMonitor(self.user_group, waits_on_cpu)
        self.rank, self.world_size = self.monitor.rank, self.monitor.world_size
        self.whose = self.monitor.whose
        # Of parameters in flight. Why one for each optimizer: if ranks step two of them in
        # different orders, each waits for what it will not get, instead of taking the other's.
        self.tag = self.monitor.number % GATHER_TAGS
        with self.monitor.naming_absentees():
            self.process_group = private_group(self.monitor, self.control_device)
        self.monitor.group = self.process_group
        self.global_ranks = dist.get_process_group_ranks(self.process_group)
        # Before all others: ranks with another ONECOPY_COMM wait in other collectives.
        chosen = f"ONECOPY_COMM={os.environ.get('ONECOPY_COMM') or 'auto'}"
        same_outcome(self, "building the optimizer", lambda: [chosen])
        self._is_native_everywhere = forces_c10d(os.environ)
        if self._is_native_everywhere and self._backends.get(self.control_device.type) == "gloo":
            _gathering_by_gloo.add(self.user_group)

    def is_native(self, device: torch.device) -> bool:
        """Whether tensors on this device travel in collectives of the backend.

        gloo has none that uses both directions of the wire: its ranks send to one another instead,
        from the CPU. Tensors on an accelerator it broadcasts, and exchanges in one all-to-all.
        """
        return self._is_native_everywhere or self._backends.get(device.type) != "gloo"

    # ------------------------------------------------------------------ tensors

    def broadcast_tensors(self, parts: Sequence[Part]) -> Handle:
        """Every part goes from its owner to all other ranks: in this order, from each owner."""
        works: list[Any] = []
        group, tag, ranks = self.process_group, self.tag, self.global_ranks
        with self.monitor.naming_absentees():
            for owner, tensor in parts:
                if owner == self.rank:
                    self.traffic.add(tensor, self.world_size - 1)
                if tensor.device.type != "cpu" or self.is_native(tensor.device):
                    real = as_real(tensor)
                    works.append(dist.broadcast(real, ranks[owner], group=group, async_op=True))
                elif owner == self.rank:
                    for other in ranks_after(self.rank, self.world_size):
                        works.append(dist.isend(tensor, ranks[other], group=group, tag=tag))
                else:
                    works.append(dist.irecv(tensor, ranks[owner], group=group, tag=tag))
        return Handle(self.monitor, works, parts)

    def launch(self, collective: Callable[..., Any], *args: Any, **options: Any) -> Handle:
        """A function of torch.distributed on the private group. The handle holds what it gets."""
        with self.monitor.naming_absentees():
            work = collective(*args, group=self.process_group, **options)
        return Handle(self.monitor, [work], args)

    def nothing(self) -> Handle:
        """Communication that is over."""
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
        return self.launch(dist.all_reduce, values, operation, async_op=True)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Handle:
        self.traffic.add(tensor)
        return self.launch(dist.isend, tensor, self.global_ranks[to], tag=tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Handle:
        return self.launch(dist.irecv, tensor, self.global_ranks[source], tag=tag)

    # ------------------------------------------------------------------ small things

    def extremes(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The least of one and the greatest of the other, elementwise over the ranks."""
        # ~x reverses the order of integers: one all-reduce
        both = torch.stack([low, ~high]).to(self.control_device)
        self.launch(dist.all_reduce, both, dist.ReduceOp.MIN, async_op=True).wait()
        return both[0].cpu(), (~both[1]).cpu()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Equally long payloads of all ranks, by rank.

        Short ones travel in messages of ``DIGEST_BYTES``: gloo ends a process in which all-gathers
        of two lengths meet, and the first message of anything may meet that of anything else.
        """
        if self.user_group in _gathering_by_gloo:  # buckets are all-gathered, too
            self.launch(dist.barrier, async_op=True).wait()  # it meets nothing but a barrier
        mine = tensor_from_bytes(payload.ljust(DIGEST_BYTES, b"\0")).to(self.control_device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        self.launch(dist.all_gather, everyone, mine, async_op=True).wait()
        return [bytes_from_tensor(theirs)[: len(payload)] for theirs in everyone]

    def broadcast_bytes(self, payload: bytes | None, source: int) -> bytes:
        """The payload of ``source``, which alone passes one, on all ranks."""
        length = torch.tensor([len(payload or b"")], device=self.control_device)
        root = self.global_ranks[source]
        self.launch(dist.broadcast, length, root, async_op=True).wait()
        data = torch.empty(int(length), dtype=torch.uint8, device=self.control_device)
        if payload is not None:
            data.copy_(tensor_from_bytes(payload))
        self.launch(dist.broadcast, data, root, async_op=True).wait()
        return bytes_from_tensor(data)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        return self


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
    future: torch.futures.Future[torch.Tensor]
    future = work.get_future().then(lambda done: done.value()[0])
    return future


def ranks_after(rank: int, world_size: int) -> list[int]:
    """All other ranks, the next one first: else all would send to rank 0 first."""
    return [(rank + i) % world_size for i in range(1, world_size)]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs, which every backend and every release of torch can send."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def tensor_from_bytes(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload) or bytearray(1), dtype=torch.uint8)[: len(payload)]


def bytes_from_tensor(tensor: torch.Tensor) -> bytes:
    on_cpu = tensor.cpu()
    return ctypes.string_at(on_cpu.data_ptr(), on_cpu.numel())


# ------------------------------------------------------------------ process groups


class WrongProcessGroup(TypeError, AttributeError):
    """``process_group`` is no process group.

    A TypeError by its nature; also an AttributeError because that is what torch's class raises.
    """


def checked_group(process_group: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "no process group is initialised: call torch.distributed.init_process_group(...) "
            "before building the optimizer"
        )
    if process_group is None:
        return dist.group.WORLD
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of process_group: build the optimizer "
            "only on the ranks of the group"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise WrongProcessGroup(
            f"process_group must be a torch.distributed.ProcessGroup or None, "
            f"got {type(process_group).__name__}"
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not a member of process_group")
    return process_group


# One private group per group of the user's, however many optimizers share it.
_private_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def private_group(monitor: GroupMonitor, device: torch.device) -> Any:
    """Ours, of the same ranks. Collective; a small message travels from this device."""
    user_group = monitor.user_group
    if dist.get_world_size(user_group) == 1:
        return user_group
    group = _private_groups.get(user_group)
    if group is None:
        config = dist.get_backend_config(user_group)
        kinds = {entry.partition(":")[2] for entry in config.split(",")}
        timeout = monitor.status.timeout = timeout_of(user_group)
        group = make_process_group(
            _new_name(monitor, device),
            dist.get_process_group_ranks(user_group),
            kinds.pop() if len(kinds) == 1 else config,
            timeout,
        )
        _private_groups[user_group] = group
        weakref.finalize(user_group, _destroy, weakref.ref(group)).atexit = False
    return group


def _new_name(monitor: GroupMonitor, device: torch.device) -> str:
    """The name of a private group: the same on all members, and never used before. Collective.

    Why never before: a group finds its members by keys in the store, and those of a group that was
    destroyed stay there. Why the ranks are part of the name: groups that overlap may have the same
    number. All ranks make the private group of the default group, so their count of those is the
    same without being asked for.
    """
    user_group = monitor.user_group
    if user_group is dist.group.WORLD:
        _await_members(monitor)
        number = _worlds_used[user_group] = _worlds_used.get(user_group, 0) + 1
        return f"onecopy_world_{number}"
    greatest = torch.tensor([_numbers_used[0] + 1], device=device)
    work = dist.all_reduce(greatest, dist.ReduceOp.MAX, group=user_group, async_op=True)
    if device.type == "cpu":
        wait_interruptibly([work])
    else:
        work.wait()
    number = _numbers_used[0] = int(greatest)
    ranks = ",".join(map(str, dist.get_process_group_ranks(user_group)))
    digest = hashlib.sha256(ranks.encode()).hexdigest()[:16]
    return f"onecopy_{number}_{digest}"


_numbers_used = [0]  # the last number of a private group of a subgroup
_worlds_used: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _await_members(monitor: GroupMonitor) -> None:
    """Until all members are here, or a signal handler raises.

    Why: to make a group waits for them, too, but in a way that no signal ends. It is done through
    the store, since what the user does in the group is not ours to mix with. Keys stay: if somebody
    gives up and makes the group anew in the same store, then only the making itself waits.
    """
    store, patience = store_of(monitor.user_group), monitor.patience()
    until = time.monotonic() + patience
    keys = [f"onecopy/meeting/{member}" for member in range(monitor.world_size)]
    ask_store(store, lambda: store.set(keys[monitor.rank], ""), patience)
    nap = _SHORTEST_NAP
    while not ask_store(store, lambda: store.check(keys), patience):
        if time.monotonic() > until:
            raise RuntimeError("not all ranks have come to make a process group")
        with marking_interruptions():
            time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)


_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.1  # seconds


@atexit.register
def _abandon_groups() -> None:
    """What is under way in them when the process ends may never end."""
    for group in list(_private_groups.values()):
        never_destroy(group)
    let_threads_finish()


def _destroy(reference: weakref.ref[Any]) -> None:
    """The user has destroyed a group: ours goes with it."""
    group = reference()
    if group is not None:
        destroy_process_group(group)


def backends(group: Any) -> dict[str, str]:
    """Backend by device type, for example {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return dict(entry.split(":", 1) for entry in config.split(","))
