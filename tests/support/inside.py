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

from onecopy import (
    ZeroRedundancyOptimizer,
    archive,
    exchange,
    groups,
    kinds,
    lanes,
    loading,
    local,
    neighbours,
    notes,
    parcels,
    recorded,
    saving,
    shards,
    torch_private,
    transport,
)
from onecopy import optimizer as optimizer_module
from onecopy.flights import Flight, Flights
from onecopy.gatherer import Gatherer
from onecopy.lanes import Lane
from onecopy.lazy import LazyWaits
from onecopy.ledger import Traffic
from onecopy.lending import SharedMemory
from onecopy.local import LocalOptimizer
from onecopy.plan import Plan
from onecopy.reducer import Reducer
from onecopy.sentry import Sentry
from onecopy.shards import Shards
from onecopy.transfers import Transfer
from onecopy.transport import Transport

# ---------------------------------------- of an optimizer ----------------------------------------


def plan_of(optimizer: ZeroRedundancyOptimizer) -> Plan:
    return optimizer._plan


def params_of(optimizer: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the plan's indices."""
    return optimizer._roster.params


def shards_of(optimizer: ZeroRedundancyOptimizer) -> Shards:
    return optimizer._shards


def local_of(optimizer: ZeroRedundancyOptimizer) -> LocalOptimizer:
    """The inner optimizers and the pieces of parameters that they update."""
    return optimizer._local


def transport_of(optimizer: ZeroRedundancyOptimizer) -> Transport:
    return optimizer._transport


def traffic_of(optimizer: ZeroRedundancyOptimizer) -> Traffic:
    """Messages and bytes sent since construction."""
    return optimizer._transport.traffic


def private_group_of(
    owner: ZeroRedundancyOptimizer | Transport,
) -> torch.distributed.ProcessGroup | None:
    """The process group that the package made for itself."""
    found = owner if isinstance(owner, Transport) else owner._transport
    return found._group


def gatherer_of(optimizer: ZeroRedundancyOptimizer) -> Gatherer:
    return optimizer._shards.gatherer


def transfers_of(optimizer: ZeroRedundancyOptimizer) -> list[Transfer]:
    """The prepared all-gathers, one per bucket."""
    return optimizer._shards.gatherer._transfers


def in_flight(optimizer: ZeroRedundancyOptimizer) -> Collection[int]:
    """The buckets whose all-gather was launched and not awaited."""
    return optimizer._shards.gatherer._launched


def staged_bytes(optimizer: ZeroRedundancyOptimizer) -> int:
    """Memory of the all-gathers besides the parameters."""
    return optimizer._shards.gatherer.staged_bytes


def is_attached(optimizer: ZeroRedundancyOptimizer) -> bool:
    return optimizer._attachment is not None


def reducer_of(optimizer: ZeroRedundancyOptimizer) -> Reducer:
    """Of an attached optimizer."""
    assert optimizer._attachment is not None
    return optimizer._attachment.reducer


def lanes_of(optimizer: ZeroRedundancyOptimizer) -> list[Lane]:
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
    optimizer._attachment.feed._arrived(index, param)


def end_backward(optimizer: ZeroRedundancyOptimizer) -> None:
    """What autograd calls at the end; the optimizer is attached to a bare module."""
    optimizer._attachment.feed._ended()


def watch_begin(optimizer: ZeroRedundancyOptimizer, watch: Callable[[Callable], None]) -> None:
    """Let `watch(begin)` run in place of `begin()` when a gradient is delivered by hand: the end of
    the backward counts as queued."""
    feed = optimizer._attachment.feed
    begin = feed._begin
    feed._begin, feed._is_queued = lambda: watch(begin), True


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
    feed: Any = optimizer._attachment.feed
    return set(feed._accumulating)


def ddps_around(optimizer: ZeroRedundancyOptimizer) -> Collection[Any]:
    """The DDP modules that were found around the parameters."""
    return optimizer._shards._in_modules._ddps


def has_full_state(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Whether this rank holds a consolidated state."""
    return optimizer._full_state.is_here


def refusal_of(optimizer: ZeroRedundancyOptimizer) -> Any:
    """Why the optimizer refuses to go on; None if it does not."""
    return optimizer._condition.refusal


def is_tracing(optimizer: ZeroRedundancyOptimizer) -> bool:
    return optimizer._tracing is not None


def corruption_check_of(optimizer: ZeroRedundancyOptimizer) -> Sentry:
    """Of an optimizer that was built with ``check_every``."""
    assert optimizer._sentry is not None
    return optimizer._sentry


def set_corruption_check(
    optimizer: ZeroRedundancyOptimizer, check: Sentry | None, every: int
) -> None:
    optimizer._sentry, optimizer._check_every = check, every


def count_steps(optimizer: ZeroRedundancyOptimizer, by: int) -> None:
    """As if the optimizer had taken `by` steps more on this rank alone."""
    optimizer._steps += by


def step_in_backward(optimizer: ZeroRedundancyOptimizer) -> None:
    """What DDP's communication hook calls with ``overlap_with_ddp=True``."""
    optimizer._step_in_backward()


def watch_joined(optimizer: ZeroRedundancyOptimizer, watch: Callable[[Callable], None]) -> None:
    """Let `watch(take_part)` run in place of `take_part()`, the step of a joined rank."""
    take_part = optimizer._take_part_joined
    optimizer._take_part_joined = lambda: watch(take_part)  # type: ignore[method-assign]


# ---------------------------------------- of a process ----------------------------------------


def private_groups() -> Mapping[Any, Any]:
    """The process groups that the package made and has not destroyed."""
    return groups._private_groups


def forget_lent_memory() -> None:
    """Release what was lent to other ranks; all of them have read it."""
    for neighbourhood in transport._neighbourhoods.values():
        neighbourhood.forget()


_host = neighbours._host


def set_host(name: int) -> None:
    """As if this process were on host number `name`, for optimizers built from now on."""
    neighbours._host = lambda: hashlib.sha256(_host() + bytes([name])).digest()[:16]


def share_memory_from(nbytes: int) -> None:
    """Parts of at least so many bytes are read in place by ranks of the same host."""
    neighbours.WORTH_LENDING = nbytes


def share_no_memory() -> None:
    """As if each rank were on a host of its own, for optimizers built from now on."""
    share_memory_from(sys.maxsize)


def was_read(memory: SharedMemory) -> bool:
    return memory._was_read.take()


def take_first(flights: Flights) -> Flight:
    """Remove the flight that was launched first."""
    return flights._under_way.popleft()


# ------------------------------- functions and constants of modules -------------------------------

TRIES_A_STEP = "_try_step"  # raises what an optimizer class raised on empty tensors
RECORDS_A_REFUSAL = "_tear"
wait_for_readers = neighbours._linger
known_kinds = kinds._KNOWN
probe_kind = kinds._probe
pack, unpack = parcels._pack, parcels._unpack
OWN_PARCEL_BYTES = parcels._WORTH_ITS_OWN_PARCEL
parse_recorded = recorded._understood
ArchiveIndex = archive._Index
store_grows = notes._grows
without_split = torch_private._without_split

# ------------------------------- to be patched: (owner, name) -------------------------------

AFTER_GATHER = (Gatherer, "_arrive")
ADD_CONTRIBUTIONS = (Lane, "add")  # to the reduced gradient of a bucket
ADD_RUN = (lanes, "_add")  # the same for a run of its elements
ALL_GATHER_SINGLE = (transport, "_all_gather_single")
BACKENDS = (transport, "backends")
BEFORE_LAZY_FORWARD = (LazyWaits, "_before")
CLAIM_BUCKET = (Reducer, "_claim")  # for the thread that will launch it
CAN_READ = (neighbours, "_can_read")
EXCHANGE_ANSWER_SECONDS = (exchange, "_ANSWER_SECONDS")
EXCHANGE_BEAT_SECONDS = (exchange, "_BEAT_SECONDS")
EXCHANGE_DEAD_SECONDS = (exchange, "_DEAD_SECONDS")
EXCHANGE_LONGEST_NAP = (exchange, "_LONGEST_NAP")
FIND_NEIGHBOURS = (transport, "find")
NOTES_ANSWER_SECONDS = (notes, "ANSWER_WITHIN")
NOTES_REPORT_SECONDS = (notes, "REPORT_WITHIN")
PACKED_BYTES = (parcels, "PACKED_BYTES")
PARCEL_BYTES = (parcels, "_WORTH_ITS_OWN_PARCEL")
PROBED_KINDS = (kinds, "_probed")
RANGE_BYTES = (parcels, "RANGE_BYTES")
READ_CHECKPOINT = (loading, "_read")
READ_METADATA = (loading, "read_metadata")
REDUCE_SCATTER_SINGLE = (transport, "_reduce_scatter_single")
RELEASE = (optimizer_module, "__version__")
SAVING_READS_METADATA = (saving, "read_metadata")
SEARCH_FOR_MODULES = (shards, "HomeWatch")
SEND_GRADIENTS = (Flights, "_send")
SHARED_MEMORY = (transport, "SharedMemory")
STEP_WITHOUT_HOOKS = (local, "step_without_hooks")  # of an inner optimizer
WRITE_METADATA = (saving, "write_metadata")
