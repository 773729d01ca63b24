"""The private parts of the package that tests, trials and benchmarks look at or replace.

No other test file uses a private name of the package, or replaces a name in one of its modules
(test_inside.py). When a private attribute is renamed or moves, only this module changes; when a
public class or function moves to another file, imports of it have to follow.

Most functions take an optimizer and return a part of it. What tests replace is given as a pair
(owner, name), for ``monkeypatch.setattr(*CAN_READ, value)`` or ``mock.patch.object(*CAN_READ)``.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onecopy import ZeroRedundancyOptimizer, optimizer, torch_private
from onecopy.checkpoint import load, save
from onecopy.checkpoint.files import DataFileWriter
from onecopy.checks.corruption_check import CorruptionCheck
from onecopy.comm import agreement, c10d, group, interface, monitor, transfer
from onecopy.comm.gloo import comm as gloo
from onecopy.comm.gloo import local_ranks
from onecopy.comm.gloo.shared_memory import SharedMemory
from onecopy.comm.gloo.topology import ReduceRoutes, Topology
from onecopy.comm.group import RankGroup
from onecopy.comm.interface import Comm, CopyList, GradientSlot
from onecopy.comm.stats import Traffic
from onecopy.gradients import reducer
from onecopy.gradients.hooks import LazyGather
from onecopy.gradients.reducer import GradBucket, GradientReducer
from onecopy.planning import sizes, traits
from onecopy.planning.plan import Plan
from onecopy.sharding import inner, sharded_params
from onecopy.sharding.engine import AllGathers
from onecopy.sharding.inner import InnerOptimizers
from onecopy.sharding.sharded_params import ShardedParams

# ---------------------------------------- of an optimizer ----------------------------------------


def plan_of(optimizer: ZeroRedundancyOptimizer) -> Plan:
    return optimizer._params.plan


def params_of(optimizer: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the plan's indices."""
    return optimizer._params.registry.params


def shards_of(optimizer: ZeroRedundancyOptimizer) -> ShardedParams:
    return optimizer._params


def local_of(optimizer: ZeroRedundancyOptimizer) -> InnerOptimizers:
    """The inner optimizers and the pieces of parameters that they update."""
    return optimizer._inner


def transport_of(optimizer: ZeroRedundancyOptimizer) -> RankGroup:
    return optimizer._rank_group


def traffic_of(optimizer: ZeroRedundancyOptimizer) -> Traffic:
    """Messages and bytes sent since construction."""
    return optimizer._rank_group.traffic


def private_group_of(
    owner: ZeroRedundancyOptimizer | RankGroup,
) -> torch.distributed.ProcessGroup | None:
    """The process group that the package made for itself."""
    found = owner if isinstance(owner, RankGroup) else owner._rank_group
    return found.process_group


def gatherer_of(optimizer: ZeroRedundancyOptimizer) -> AllGathers:
    return optimizer._params.all_gathers


def comm_of(optimizer: ZeroRedundancyOptimizer) -> Comm:
    """The collectives of the all-gathers, of tensors on the CPU."""
    return optimizer._params.all_gathers.queue.comm_for(torch.device("cpu"))


@dataclass(frozen=True)
class PreparedGather:
    """What the all-gather of a bucket sends, receives and copies."""

    copy_in: CopyList
    copy_out: CopyList
    parts: list[tuple[int, torch.Tensor]]  # by owner: sent or received in messages
    slots: torch.Tensor | None  # of all ranks, for a collective of the backend
    shared: torch.Tensor | None  # what local ranks read of this rank's
    reads: int  # in the memory of so many others


def gathers_of(optimizer: ZeroRedundancyOptimizer) -> list[Any]:
    """The prepared all-gathers, one per bucket."""
    buckets = optimizer._params.all_gathers.buckets
    assert buckets is not None
    return list(buckets)


def transfers_of(optimizer: ZeroRedundancyOptimizer) -> list[PreparedGather]:
    return [_prepared_gather(op) for op in gathers_of(optimizer)]


def _prepared_gather(op: Any) -> PreparedGather:
    if isinstance(op, gloo._AllGather):
        sent = {id(tensor): (op._comm.group.rank, tensor) for _, tensor in op.sent}.values()
        parts = sorted([*sent, *op.received], key=operator.itemgetter(0))
        shared = None if op.shared is None else op.shared[1]
        return PreparedGather(op.copy_in, op.copy_out, parts, None, shared, len(op.sources))
    within = inspect.getclosurevars(op.launch).nonlocals
    parts = list(map(tuple, within.get("parts", ())))
    return PreparedGather(op.copy_in, op.copy_out, parts, within.get("slots"), None, 0)


def in_flight(optimizer: ZeroRedundancyOptimizer) -> Collection[int]:
    """The buckets whose all-gather was launched and not awaited."""
    return optimizer._params.all_gathers.queue.in_flight


def staged_bytes(optimizer: ZeroRedundancyOptimizer) -> int:
    """Memory of the all-gathers besides the parameters."""
    return optimizer._params.all_gathers.staged_bytes


def is_attached(optimizer: ZeroRedundancyOptimizer) -> bool:
    return optimizer._attachment is not None


def reducer_of(optimizer: ZeroRedundancyOptimizer) -> GradientReducer:
    """Of an attached optimizer."""
    assert optimizer._attachment is not None
    return optimizer._attachment.reducer


def gradients_in_flight_and_held(optimizer: ZeroRedundancyOptimizer) -> tuple[int, int]:
    """How many buckets of gradients are in flight, and how many slots hold some."""
    reducer = reducer_of(optimizer)
    held = sum(bucket.slot.holds for bucket in reducer.prepared.buckets)
    return len(reducer.queue.in_flight), held


def lanes_of(optimizer: ZeroRedundancyOptimizer) -> list[GradBucket]:
    """The reduce-scatters of an attached optimizer, one per bucket."""
    return reducer_of(optimizer).prepared.buckets


def routes_of(bucket: GradBucket) -> ReduceRoutes:
    """By which ranks the gradients of a bucket leave this one; by all, without messages."""
    op = bucket.op
    return op.routes if isinstance(op, gloo._ReduceScatter) else ReduceRoutes()


def staging_used(reducer: GradientReducer) -> Iterator[tuple[torch.Tensor, int]]:
    """Every buffer of every bucket of ranks that send messages, and the bytes used of it."""
    for bucket in reducer.prepared.buckets:
        op: Any = bucket.op
        yield op._whole, op._whole.nbytes
        tensors = [*dict(op.received).values(), *op._relayed.values()]
        for buffer in op.buffers[1:]:
            storage = buffer.tensor.untyped_storage().data_ptr()
            inside = [t for t in tensors if t.untyped_storage().data_ptr() == storage]
            yield buffer.tensor, sum(tensor.nbytes for tensor in inside)


def prepare_fills(
    bucket: GradBucket, params: Sequence[torch.Tensor], staging: torch.Tensor
) -> None:
    """Let a bucket that no reducer knows be filled in this staging."""
    bucket.send = interface.Buffer(staging)
    bucket.fills = reducer._fills(bucket.layout.segments(), params, staging)


class Pending(gloo._Operation):
    """What is in flight, without what it is for."""

    def __init__(self, comm: gloo.GlooComm) -> None:
        super().__init__(comm, 0, ())

    def _relay(self) -> None:
        pass

    complete = _relay


def pending_reads(comm: gloo.GlooComm, tag: int, sources: Any = None) -> Pending:
    """What these ranks, or all on this host, will share next with a tag; to be awaited."""
    pending = Pending(comm)
    sources = comm.peers if sources is None else sources
    pending.reads = [comm.local_ranks.read_from(source, tag) for source in sources]
    return pending


def pending_task(comm: gloo.GlooComm, task: Any) -> Pending:
    """What the relay thread does; to be awaited."""
    pending = Pending(comm)
    pending.tasks.append(task)
    return pending


def pretend_local_ranks(group: Any, topology: Topology) -> None:
    """As if ranks had found one another, in a group that cannot communicate."""
    pids = dict.fromkeys(topology.local_peers(group.rank), 0)
    found = local_ranks.LocalRanks(group.rank, topology, pids)
    gloo._local_ranks[group.user_group] = found


def staging_of(bucket: GradBucket) -> list[torch.Tensor]:
    """The buffers of the reduce-scatter of a bucket."""
    return [buffer.tensor for buffer in bucket.op.buffers]


def begin_backward(optimizer: ZeroRedundancyOptimizer) -> None:
    """What the first gradient of a backward calls."""
    assert optimizer._attachment is not None
    optimizer._attachment._begin()


def phase_of(optimizer: ZeroRedundancyOptimizer) -> Any:
    """Which buckets of the present backward were launched, and what they wait for."""
    return reducer_of(optimizer)._backward


def next_bucket(optimizer: ZeroRedundancyOptimizer) -> int:
    """The first bucket that the present backward has not launched."""
    reducer = reducer_of(optimizer)
    return reducer._next(reducer._backward)


def deliver(optimizer: ZeroRedundancyOptimizer, index: int, param: torch.Tensor) -> None:
    """What the hook of a parameter calls; the optimizer is attached to a bare module."""
    optimizer._attachment.hooks._arrived(index, param)


def end_backward(optimizer: ZeroRedundancyOptimizer) -> None:
    """What autograd calls at the end; the optimizer is attached to a bare module."""
    optimizer._attachment.hooks._ended()


def watch_begin(optimizer: ZeroRedundancyOptimizer, watch: Callable[[Callable], None]) -> None:
    """Let `watch(begin)` run in place of `begin()` when a gradient is delivered by hand: the end of
    the backward counts as queued."""
    hooks = optimizer._attachment.hooks
    begin = hooks._begin
    hooks._begin, hooks._is_queued = lambda: watch(begin), True


def held_gradients(optimizer: ZeroRedundancyOptimizer) -> list[torch.Tensor | None]:
    """What the next step of this rank will use: the reduced gradients of its pieces if attached,
    else ``param.grad`` of all parameters."""
    if not is_attached(optimizer):
        return [param.grad for param in params_of(optimizer)]
    reducer = reducer_of(optimizer)
    reducer.judge()
    return [grad for bucket in lanes_of(optimizer) for grad in reducer.gradients_in(bucket.number)]


def hooked_for_no_sync(optimizer: ZeroRedundancyOptimizer) -> set[int]:
    """The parameters with hooks that accumulate gradients inside no_sync(), attached to DDP."""
    assert optimizer._attachment is not None
    hooks: Any = optimizer._attachment.hooks
    return set(hooks._accumulating)


def ddps_around(optimizer: ZeroRedundancyOptimizer) -> Collection[Any]:
    """The DDP modules that were found around the parameters."""
    return optimizer._params.modules._ddps


def has_full_state(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Whether this rank holds a consolidated state."""
    return not isinstance(optimizer._full_state, str)


def refusal_of(optimizer: ZeroRedundancyOptimizer) -> Any:
    """Why the optimizer refuses to go on; None if it does not."""
    return optimizer._params.status.refusal


def is_tracing(optimizer: ZeroRedundancyOptimizer) -> bool:
    return optimizer._tracing is not None and optimizer._tracing._file is not None


def corruption_check_of(optimizer: ZeroRedundancyOptimizer) -> CorruptionCheck:
    """Of an optimizer that was built with ``check_every``."""
    assert optimizer._corruption.every
    return optimizer._corruption


def set_corruption_check(
    optimizer: ZeroRedundancyOptimizer, check: CorruptionCheck | None, every: int
) -> None:
    optimizer._corruption = check or CorruptionCheck(0)
    if check is not None:
        check.every = every


def count_steps(optimizer: ZeroRedundancyOptimizer, by: int) -> None:
    """As if the optimizer had taken `by` steps more on this rank alone."""
    optimizer._steps += by


def step_in_backward(optimizer: ZeroRedundancyOptimizer) -> None:
    """What DDP's communication hook calls with ``overlap_with_ddp=True``."""
    optimizer._step_in_backward()


def watch_joined(optimizer: ZeroRedundancyOptimizer, watch: Callable[[Callable], None]) -> None:
    """Let `watch(take_part)` run in place of `take_part()`, the step of a joined rank."""
    take_part = optimizer._run_joined
    optimizer._run_joined = lambda: watch(take_part)  # type: ignore[method-assign]


# ---------------------------------------- of a process ----------------------------------------


def private_groups() -> Mapping[Any, Any]:
    """The process groups that the package made and has not destroyed."""
    return group._private_groups


def forget_lent_memory() -> None:
    """Release what was lent to other ranks; all of them have read it."""
    for found in gloo._local_ranks.values():
        found.release_unused()


_host = local_ranks._host_id


def set_host(name: int) -> None:
    """As if this process were on host number `name`, for optimizers built from now on."""
    local_ranks._host_id = lambda: hashlib.sha256(_host() + bytes([name])).digest()[:16]


def share_memory_from(nbytes: int) -> None:
    """Parts of at least so many bytes are read in place by ranks of the same host."""
    sizes.MIN_SHARED_BYTES = nbytes


def share_no_memory() -> None:
    """As if each rank were on a host of its own, for optimizers built from now on."""
    share_memory_from(sys.maxsize)


def pack(message: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Views of bytes, one after the other; `unpack` is the inverse."""
    transfer._copy(message, buffer, packs=True)


def unpack(message: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    transfer._copy(message, buffer, packs=False)


def write_past_the_cache(writer: DataFileWriter) -> None:
    """On any file system."""
    writer._is_direct = True


def was_read(memory: SharedMemory) -> bool:
    return memory._was_read.take()


# ------------------------------- functions and constants of modules -------------------------------

TRIES_A_STEP = "_step_on"  # raises what an optimizer class raised on empty tensors
RECORDS_A_REFUSAL = "_tear"
wait_for_readers = local_ranks._linger
known_kinds = traits._KNOWN
probe_kind = traits._probe
MIN_MESSAGE_BYTES = transfer._MIN_MESSAGE_BYTES
without_split = torch_private._without_split

# ------------------------------- to be patched: (owner, name) -------------------------------

ALLOCATE_STAGING = (reducer, "allocate_staging")
AFTER_GATHER = (gloo._AllGather, "complete")
ADD_CONTRIBUTIONS = (GradientSlot, "add")  # to the reduced gradient of a bucket
ADD_RUN = (interface, "_add_run")  # the same for a run of its elements
ALL_GATHER_SINGLE = (c10d, "_all_gather_single")
BACKENDS = (group, "backends")
BEFORE_LAZY_FORWARD = (LazyGather, "_before")
CLAIM_BUCKET = (GradientReducer, "_claim")  # for the thread that will launch it
CAN_READ = (local_ranks, "_inboxes")  # none, if not
STORE_ANSWER_SECONDS = (agreement, "_ANSWER_SECONDS")
STORE_BEAT_SECONDS = (agreement, "_BEAT_SECONDS")
STORE_DEAD_SECONDS = (agreement, "_DEAD_SECONDS")
STORE_LONGEST_NAP = (agreement, "_LONGEST_NAP")
FIND_LOCAL_RANKS = (gloo, "find_local_ranks")
NOTES_ANSWER_SECONDS = (monitor, "ANSWER_WITHIN")
NOTES_REPORT_SECONDS = (monitor, "REPORT_WITHIN")
PACKED_BYTES = (transfer, "PACKED_BYTES")
SHORTEST_MESSAGE = (transfer, "_MIN_MESSAGE_BYTES")
PROBED_KINDS = (traits, "_probed")
RANGE_BYTES = (transfer, "RANGE_BYTES")
READ_CHECKPOINT = (load, "_read")
READ_METADATA = (load, "read_metadata")
REDUCE_SCATTER_SINGLE = (c10d, "_reduce_scatter_single")
RELEASE = (optimizer, "__version__")
SAVING_READS_METADATA = (save, "read_metadata")
SEARCH_FOR_MODULES = (sharded_params, "ModuleWatch")
AFTER_REDUCE = (gloo._ReduceScatter, "complete")
WAIT_FOR_GRADIENTS = (gloo._ReduceScatter, "wait")
WAIT_FOR_READERS = (gloo.SharedBuffer, "wait_until_read")
SEND_GRADIENTS = (gloo._ReduceScatter, "start")
SHARED_MEMORY = (gloo, "SharedMemory")
STEP_WITHOUT_HOOKS = (inner, "step_without_hooks")  # of an inner optimizer
WRITE_METADATA = (save, "write_metadata")
