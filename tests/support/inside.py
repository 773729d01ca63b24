"""The private parts of the package that tests, trials and benchmarks look at or replace.

No other test file uses a private name of the package, or replaces a name in one of its modules
(test_inside.py). When a private attribute is renamed or moves, only this module changes; when a
public class or function moves to another file, imports of it have to follow.

Most functions take an optimizer and return a part of it. What tests replace is given as a pair
(owner, name), for ``monkeypatch.setattr(*CAN_READ, value)`` or ``mock.patch.object(*CAN_READ)``.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from onecopy import ZeroRedundancyOptimizer, optimizer, torch_private
from onecopy.checkpoint import load, metadata, save
from onecopy.checks.corruption_check import CorruptionCheck, NoCheck
from onecopy.comm import agreement, group, monitor, process_group, transfer
from onecopy.comm.gloo import local_ranks
from onecopy.comm.gloo.shared_memory import SharedMemory
from onecopy.comm.group import RankGroup
from onecopy.comm.stats import Traffic
from onecopy.gradients import reducer
from onecopy.gradients.hooks import LazyGather
from onecopy.gradients.reducer import (
    GradBucket,
    GradientReducer,
    ReduceInFlight,
    ReduceScatterQueue,
)
from onecopy.planning import sizes, traits
from onecopy.planning.plan import Plan
from onecopy.sharding import inner, sharded_params
from onecopy.sharding.all_gather import AllGatherQueue, Transfer
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
    return found._group


def gatherer_of(optimizer: ZeroRedundancyOptimizer) -> AllGatherQueue:
    return optimizer._params.all_gathers


def transfers_of(optimizer: ZeroRedundancyOptimizer) -> list[Transfer]:
    """The prepared all-gathers, one per bucket."""
    return optimizer._params.all_gathers._transfers


def in_flight(optimizer: ZeroRedundancyOptimizer) -> Collection[int]:
    """The buckets whose all-gather was launched and not awaited."""
    return optimizer._params.all_gathers._launched


def staged_bytes(optimizer: ZeroRedundancyOptimizer) -> int:
    """Memory of the all-gathers besides the parameters."""
    return optimizer._params.all_gathers.staged_bytes


def is_attached(optimizer: ZeroRedundancyOptimizer) -> bool:
    return optimizer._attachment is not None


def reducer_of(optimizer: ZeroRedundancyOptimizer) -> GradientReducer:
    """Of an attached optimizer."""
    assert optimizer._attachment is not None
    return optimizer._attachment.reducer


def lanes_of(optimizer: ZeroRedundancyOptimizer) -> list[GradBucket]:
    """The reduce-scatters of an attached optimizer, one per bucket."""
    return reducer_of(optimizer).roadway.lanes


def begin_backward(optimizer: ZeroRedundancyOptimizer) -> None:
    """What the first gradient of a backward calls."""
    assert optimizer._attachment is not None
    optimizer._attachment._begin()


def phase_of(optimizer: ZeroRedundancyOptimizer) -> Any:
    """Which buckets of the present backward were launched, and what they wait for."""
    return reducer_of(optimizer)._phase


def next_bucket(optimizer: ZeroRedundancyOptimizer) -> int:
    """The first bucket that the present backward has not launched."""
    reducer = reducer_of(optimizer)
    return reducer._next(reducer._phase)


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
    reducer.settle()
    return reducer.gradients()


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
    return optimizer._full_state.is_here


def refusal_of(optimizer: ZeroRedundancyOptimizer) -> Any:
    """Why the optimizer refuses to go on; None if it does not."""
    return optimizer._params.status.refusal


def is_tracing(optimizer: ZeroRedundancyOptimizer) -> bool:
    return optimizer._tracing is not None and optimizer._tracing._file is not None


def corruption_check_of(optimizer: ZeroRedundancyOptimizer) -> CorruptionCheck:
    """Of an optimizer that was built with ``check_every``."""
    assert isinstance(optimizer._corruption, CorruptionCheck)
    return optimizer._corruption


def set_corruption_check(
    optimizer: ZeroRedundancyOptimizer, check: CorruptionCheck | None, every: int
) -> None:
    optimizer._corruption, optimizer._check_every = check or NoCheck(), every
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
    return process_group._private_groups


def forget_lent_memory() -> None:
    """Release what was lent to other ranks; all of them have read it."""
    for found in group._local_ranks.values():
        found.forget()


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


def was_read(memory: SharedMemory) -> bool:
    return memory._was_read.take()


def take_first(flights: ReduceScatterQueue) -> ReduceInFlight:
    """Remove the flight that was launched first."""
    return flights._under_way.popleft()


# ------------------------------- functions and constants of modules -------------------------------

TRIES_A_STEP = "_try_step"  # raises what an optimizer class raised on empty tensors
RECORDS_A_REFUSAL = "_tear"
wait_for_readers = local_ranks._linger
known_kinds = traits._KNOWN
probe_kind = traits._probe
MIN_MESSAGE_BYTES = transfer._MIN_MESSAGE_BYTES
ArchiveIndex = metadata._Index
store_grows = monitor._grows
without_split = torch_private._without_split
pack, unpack = transfer._pack, transfer._unpack

# ------------------------------- to be patched: (owner, name) -------------------------------

AFTER_GATHER = (AllGatherQueue, "_arrive")
ADD_CONTRIBUTIONS = (GradBucket, "add")  # to the reduced gradient of a bucket
ADD_RUN = (reducer, "_add_run")  # the same for a run of its elements
ALL_GATHER_SINGLE = (group, "_all_gather_single")
BACKENDS = (group, "backends")
BEFORE_LAZY_FORWARD = (LazyGather, "_before")
CLAIM_BUCKET = (GradientReducer, "_claim")  # for the thread that will launch it
CAN_READ = (local_ranks, "_can_read")
STORE_ANSWER_SECONDS = (agreement, "_ANSWER_SECONDS")
STORE_BEAT_SECONDS = (agreement, "_BEAT_SECONDS")
STORE_DEAD_SECONDS = (agreement, "_DEAD_SECONDS")
STORE_LONGEST_NAP = (agreement, "_LONGEST_NAP")
FIND_NEIGHBOURS = (group, "find_local_ranks")
NOTES_ANSWER_SECONDS = (monitor, "ANSWER_WITHIN")
NOTES_REPORT_SECONDS = (monitor, "REPORT_WITHIN")
PACKED_BYTES = (transfer, "PACKED_BYTES")
SHORTEST_MESSAGE = (transfer, "_MIN_MESSAGE_BYTES")
PROBED_KINDS = (traits, "_probed")
RANGE_BYTES = (transfer, "RANGE_BYTES")
READ_CHECKPOINT = (load, "_read")
READ_METADATA = (load, "read_metadata")
REDUCE_SCATTER_SINGLE = (group, "_reduce_scatter_single")
RELEASE = (optimizer, "__version__")
SAVING_READS_METADATA = (save, "read_metadata")
SEARCH_FOR_MODULES = (sharded_params, "ModuleWatch")
SEND_GRADIENTS = (ReduceScatterQueue, "_send")
SHARED_MEMORY = (group, "SharedMemory")
STEP_WITHOUT_HOOKS = (inner, "step_without_hooks")  # of an inner optimizer
WRITE_METADATA = (save, "write_metadata")
