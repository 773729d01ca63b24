"""How buckets travel: in place or packed, in what memory, and interrupted anywhere."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from attached import EVERY_FEED, AttachedTwins
from failing_jobs import Job, meet
from harness import World, distributed, lend_nothing
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inside import (
    ADD_CONTRIBUTIONS,
    ADD_RUN,
    AFTER_GATHER,
    AFTER_REDUCE,
    CLAIM_BUCKET,
    SEND_GRADIENTS,
    PreparedGather,
    gatherer_of,
    gathers_of,
    gradients_in_flight_and_held,
    in_flight,
    params_of,
    plan_of,
    prepare_fills,
    shards_of,
    traffic_of,
    transfers_of,
)
from models import (
    SMALL_BUCKETS,
    ConvNet,
    MixedNet,
    Mlp,
    assert_same_on_all_ranks,
    assert_same_parameters,
)
from states import consolidated_everywhere
from torch import nn
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer, optimizer
from onecopy.comm.interface import BucketLayout, CopyList, GradientSlot
from onecopy.gradients.reducer import GradBucket
from onecopy.planning.layout import flat_range
from onecopy.planning.plan import ParamSpec, Plan, make_plan
from onecopy.planning.sizes import IN_FLIGHT, MIN_MESSAGE_BYTES
from onecopy.planning.traits import Kind
from onecopy.sharding.engine import BucketQueue
from onecopy.sharding.inner import MasterCopies

# ------------------------------------------------------------------ parameters: in place or packed


LARGE = MIN_MESSAGE_BYTES // 4  # elements of float32


BUCKET_VIEW = pytest.mark.parametrize(
    "bucket_view", [False, True], ids=["own-storage", "bucket-view"]
)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copies(transfer: PreparedGather) -> Iterator[torch.Tensor]:
    """The staged side of all copies of a transfer."""
    yield from transfer.copy_in.targets
    yield from transfer.copy_out.sources


def staged_storages(optimizer: ZeroRedundancyOptimizer) -> dict[int, int]:
    """Bytes of every staging buffer, by address."""
    return {
        storage(tensor): tensor.untyped_storage().nbytes()
        for transfer in transfers_of(optimizer)
        for tensor in copies(transfer)
    }


def addresses(optimizer: ZeroRedundancyOptimizer) -> list[int]:
    """Where everything lies that a step sends, receives or copies."""
    return [
        tensor.data_ptr()
        for transfer in transfers_of(optimizer)
        for tensor in [
            *[tensor for _, tensor in transfer.parts],
            *([] if transfer.slots is None else [transfer.slots]),
            *transfer.copy_in.targets,
            *transfer.copy_in.sources,
            *transfer.copy_out.targets,
            *transfer.copy_out.sources,
        ]
    ]


def take_a_step(optimizer: ZeroRedundancyOptimizer, params: list[torch.Tensor]) -> None:
    """SGD with lr 1 and a gradient of one: afterwards every element is one less, everywhere."""
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, old - 1)


@distributed(2, 3, 4)
def test_large_pieces_travel_in_place_and_small_ones_packed(world: World) -> None:
    lend_nothing()
    large = nn.Parameter(torch.zeros(world.size * LARGE))
    small = [nn.Parameter(torch.zeros(3)) for _ in range(4 * world.size)]
    params = [large, *small]
    optimizer = ZeroRedundancyOptimizer(params, SGD, partition="whole", lr=1.0)
    (transfer,) = transfers_of(optimizer)
    in_place = [part for part in transfer.parts if storage(part[1]) == storage(large)]
    assert [tensor.numel() for _, tensor in in_place] == [large.numel()]
    packed = [part for part in transfer.parts if storage(part[1]) != storage(large)]
    assert len({owner for owner, _ in packed}) == len(packed), "one message per owner"
    assert sum(tensor.numel() for _, tensor in packed) == 12 * world.size
    assert len({storage(tensor) for _, tensor in packed}) == 1
    assert sum(staged_storages(optimizer).values()) == 4 * 12 * world.size
    touched = {
        storage(tensor) for tensor in [*transfer.copy_in.sources, *transfer.copy_out.targets]
    }
    assert touched <= {storage(param) for param in small}, "a large piece was copied"
    take_a_step(optimizer, params)


@distributed(2, 3, 4)
def test_the_large_pieces_of_a_cut_parameter_travel_in_place(world: World) -> None:
    lend_nothing()
    params = [nn.Parameter(torch.zeros(world.size * LARGE * 2)), nn.Parameter(torch.zeros(5))]
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=1.0)
    (transfer,) = transfers_of(optimizer)
    cut = [part for part in transfer.parts if storage(part[1]) == storage(params[0])]
    assert len(cut) == world.size
    assert sorted(owner for owner, _ in cut) == list(range(world.size))
    assert sum(staged_storages(optimizer).values()) <= 4 * (5 + 2)
    take_a_step(optimizer, params)


@distributed(2, 3, 4)
def test_the_only_piece_of_an_owner_travels_in_place_however_small(world: World) -> None:
    lend_nothing()
    param = nn.Parameter(torch.zeros(2 * world.size))
    optimizer = ZeroRedundancyOptimizer([param], SGD, lr=1.0)
    (transfer,) = transfers_of(optimizer)
    assert [owner for owner, _ in transfer.parts] == list(range(world.size))
    assert all(storage(tensor) == storage(param) for _, tensor in transfer.parts)
    assert not staged_storages(optimizer)
    take_a_step(optimizer, [param])


@distributed(2, 3, 4)
def test_parameters_in_a_bucket_view_are_never_copied(world: World) -> None:
    lend_nothing()
    for model in (Mlp(), MixedNet(), ConvNet()):
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            SGD,
            parameters_as_bucket_view=True,
            bucket_mb=SMALL_BUCKETS,
            lr=1.0,
        )
        assert len(transfers_of(optimizer)) > 1
        assert not staged_storages(optimizer)
        homes = {storage(param) for param in model.parameters()}
        assert len(homes) == len({param.dtype for param in model.parameters()})
        for transfer in transfers_of(optimizer):
            assert all(storage(tensor) in homes for _, tensor in transfer.parts)
            assert len({owner for owner, _ in transfer.parts}) == len(transfer.parts)
        take_a_step(optimizer, list(model.parameters()))


@distributed(2, 3, 4)
def test_parameters_with_gaps_are_packed_and_their_gaps_left_alone(world: World) -> None:
    lend_nothing()
    whole = torch.zeros(7, 8)
    gapped = [nn.Parameter(whole[:, ::2]), nn.Parameter(torch.zeros(5))]
    optimizer = ZeroRedundancyOptimizer(gapped, SGD, lr=1.0)
    for transfer in transfers_of(optimizer):
        for _, tensor in transfer.parts:
            assert tensor.is_contiguous()
            assert storage(tensor) != storage(whole)
    take_a_step(optimizer, gapped)
    assert not whole[:, 1::2].any()


@distributed(2, 3, 4)
@BUCKET_VIEW
@pytest.mark.parametrize("all_gather", [False, True], ids=["parts", "all-gather"])
def test_staging_is_bounded_by_the_gathers_in_flight(
    world: World, bucket_view: bool, all_gather: bool
) -> None:
    lend_nothing()
    with pytest.MonkeyPatch.context() as patch:
        if all_gather:
            patch.setenv("ONECOPY_COMM", "c10d")
        params = [nn.Parameter(torch.zeros(37)) for _ in range(200)]
        bucket_bytes = 2048
        optimizer = ZeroRedundancyOptimizer(
            params,
            SGD,
            parameters_as_bucket_view=bucket_view,
            bucket_mb=bucket_bytes / 2**20,
            lr=1.0,
        )
        assert len(transfers_of(optimizer)) > 3 * IN_FLIGHT
        staged = staged_storages(optimizer)
        assert sum(staged.values()) <= IN_FLIGHT * bucket_bytes
        plan = plan_of(optimizer)
        uneven = [b for b in range(len(plan.buckets)) if not plan.has_equal_slots(b)]
        assert len(uneven) <= 1  # only the last bucket can have a remainder
        if not bucket_view:
            assert len(staged) == IN_FLIGHT
        elif not all_gather:
            assert not staged
        else:
            assert len(staged) == len(uneven)  # padded to equal slots, which needs a copy
        if all_gather:
            assert all(transfer.slots is not None for transfer in transfers_of(optimizer))
        take_a_step(optimizer, params)


@distributed(2, 3)
def test_no_more_gathers_are_in_flight_than_there_is_staging_for(world: World) -> None:
    params = [nn.Parameter(torch.zeros(37)) for _ in range(100)]
    optimizer = ZeroRedundancyOptimizer(params, SGD, bucket_mb=SMALL_BUCKETS, lr=1.0)
    under_way: list[Any] = []
    most = 0

    start, complete = (getattr(AFTER_GATHER[0], name) for name in ("start", "complete"))

    def counting_start(op: Any) -> None:
        nonlocal most
        under_way.append(op)
        most = max(most, len(under_way))
        start(op)

    def counting_complete(op: Any) -> None:
        complete(op)
        under_way.remove(op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AFTER_GATHER[0], "start", counting_start)
        patch.setattr(AFTER_GATHER[0], "complete", counting_complete)
        take_a_step(optimizer, params)
    assert most == IN_FLIGHT
    assert not under_way


@distributed(2, 3, 4)
@BUCKET_VIEW
def test_steps_reuse_all_of_their_memory(world: World, bucket_view: bool) -> None:
    lend_nothing()
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        AdamW,
        parameters_as_bucket_view=bucket_view,
        bucket_mb=SMALL_BUCKETS,
        lr=0.01,
    )
    prepared, before = gathers_of(optimizer), addresses(optimizer)
    parameters = [param.data_ptr() for param in model.parameters()]
    assert before
    for step in range(3):
        optimizer.zero_grad()
        model(model.batch((world.rank, step))).backward()
        optimizer.step()
        assert gathers_of(optimizer) == prepared
        assert addresses(optimizer) == before
        assert [param.data_ptr() for param in model.parameters()] == parameters


@distributed(2, 3)
@BUCKET_VIEW
def test_gathering_allocates_nothing(world: World, bucket_view: bool) -> None:
    params = [nn.Parameter(torch.zeros(LARGE + 5)), *[nn.Parameter(torch.zeros(9)) for _ in "abc"]]
    optimizer = ZeroRedundancyOptimizer(params, SGD, parameters_as_bucket_view=bucket_view, lr=1.0)
    take_a_step(optimizer, params)
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True) as profile:
        shards_of(optimizer).send_all()
    # Neighbours tell each other where the data is: a few numbers each.
    allocated = [event for event in profile.events() if event.cpu_memory_usage > 100]
    assert not allocated, [(event.name, event.cpu_memory_usage) for event in allocated]


@distributed(1)
def test_one_rank_sends_and_stages_nothing(world: World) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
    take_a_step(optimizer, list(model.parameters()))
    assert not transfers_of(optimizer)
    assert traffic_of(optimizer).bytes == 0


# ---------------------------------------- gradients: where they come together


LARGE_GRADIENT = (1 << 14) + 16


def planned(
    params: Sequence[torch.Tensor],
    bucket_bytes: int,
    fused: bool = False,
    kind: Kind = Kind.ELEMENTWISE,
) -> Plan:
    specs = [
        ParamSpec(i, p.numel(), "torch.float32", 4, "cpu", kind, fused=fused)
        for i, p in enumerate(params)
    ]
    return make_plan(specs, 2, bucket_bytes / 2**20)


def buckets_of(
    plan: Plan, params: Sequence[torch.Tensor], wire: torch.dtype | None = None
) -> list[GradBucket]:
    """The buckets of the first of two ranks, with staging that holds NaN."""
    buckets = []
    for number in range(len(plan.buckets)):
        bucket = GradBucket(BucketLayout(plan, number), params, 0, wire, None)
        staging = torch.full((bucket.layout.numel,), math.nan, dtype=bucket.wire.dtype)
        prepare_fills(bucket, params, staging)
        buckets.append(bucket)
    return buckets


def require_filled(bucket: GradBucket, gradients: dict[int, torch.Tensor], share: float) -> None:
    for segment in bucket.layout.segments():
        found = bucket.send.tensor[segment.offset :][: segment.stop - segment.start]
        grad = gradients.get(segment.param)
        expected = torch.zeros_like(found)
        if grad is not None:
            whole = flat_range(grad * share, 0, grad.numel())
            expected = whole[segment.start : segment.stop].to(found.dtype)
        assert torch.equal(found, expected)


shapes = st.sampled_from([(3,), (16,), (4, 5), (2, 3, 4, 5), (), (0,), (7, 1), (LARGE_GRADIENT,)])


@given(
    st.lists(shapes, min_size=1, max_size=12),
    st.data(),
    st.sampled_from([None, torch.bfloat16, torch.float64]),
    st.sampled_from([1.0, 0.5, 1 / 3]),
)
@settings(deadline=None, max_examples=60)
def test_every_gradient_comes_to_its_place(
    sizes: list[tuple[int, ...]], data: st.DataObject, wire: torch.dtype | None, share: float
) -> None:
    params = [torch.zeros(shape) for shape in sizes]
    params = [
        p.to(memory_format=torch.channels_last) if p.dim() == 4 and data.draw(st.booleans()) else p
        for p in params
    ]
    bucket_bytes = data.draw(st.sampled_from([64, 1 << 10, 1 << 20]))
    plan = planned(params, bucket_bytes, fused=data.draw(st.booleans()))
    gradients = {i: torch.randn_like(p) for i, p in enumerate(params) if data.draw(st.booleans())}
    if wire is torch.float64:  # as if wider gradients were rounded for the wire
        gradients = {i: grad.double() for i, grad in gradients.items()}
        wire = None
    for bucket in buckets_of(plan, params, wire):
        bucket.fill(gradients, share)
        require_filled(bucket, gradients, share)


@given(
    st.lists(shapes, min_size=1, max_size=12),
    st.sampled_from([Kind.ELEMENTWISE, Kind.WHOLE]),
    st.sampled_from([64, 1 << 20]),
)
@example([(3,), (0,), (5, 2), (1,), (0, 4), (2,)], Kind.WHOLE, 1 << 20)
@settings(deadline=None, max_examples=60)
def test_parts_that_are_exchanged_at_once_lie_side_by_side(
    sizes: list[tuple[int, ...]], kind: Kind, bucket_bytes: int
) -> None:
    """Also whole tensors, with parameters without elements between them: nothing is copied."""
    params = [torch.randn(shape) for shape in sizes]
    plan = planned(params, bucket_bytes, kind=kind)
    gradients = {i: torch.randn_like(p) for i, p in enumerate(params) if i % 3}
    for bucket in buckets_of(plan, params):
        bucket.fill(gradients, 0.5)
        layout, staging = bucket.layout, bucket.send.tensor
        ranges = sorted(each for each in map(layout.range, (0, 1)) if each[0] < each[1])
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges)][: len(ranges)]
        for owner in (0, 1):
            part = layout.part(staging, owner)
            start, stop = plan.range_of(bucket.number, owner)
            assert part.numel() == stop - start
            for shard in plan.shards_in(bucket.number, owner):
                found = part[shard.offset - start :][: shard.numel]
                grad = gradients.get(shard.param, torch.zeros_like(params[shard.param]))
                assert torch.equal(found, grad.flatten()[shard.start : shard.stop] * 0.5)


def test_what_is_held_is_added_to_the_finished_sum_in_runs() -> None:
    """The contributions are added in the order of the ranks; then the sum to what the slot holds.
    With three of them, in runs of 2^17 elements: the last one is shorter here."""
    numel = 2 * (1 << 17) + 12_345
    torch.manual_seed(0)
    slot = GradientSlot(torch.zeros(numel))
    first, second, third, held = torch.randn(4, numel).unbind()
    total = (first + second) + third
    assert not torch.equal(total, (second + third) + first)
    slot.add([first, second, third])
    assert slot.holds
    assert torch.equal(slot.tensor, total)
    slot.tensor.copy_(held)
    slot.add([first, second, third])
    assert torch.equal(slot.tensor, held + total)
    assert not torch.equal(slot.tensor, ((held + first) + second) + third)
    for contributions, expected in [([first], first), ([first, second], first + second)]:
        slot.tensor.copy_(held)
        slot.add(contributions)
        assert torch.equal(slot.tensor, held + expected)


def test_runs_that_are_added_up_at_a_time_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 2 * (1 << 17) + 12_345
    filled = GradientSlot(torch.zeros(numel))
    add, lengths = getattr(*ADD_RUN), []

    def watched(slot: torch.Tensor, *args: Any) -> None:
        lengths.append(slot.numel())
        add(slot, *args)

    monkeypatch.setattr(*ADD_RUN, watched)
    for count, expected in [(2, [numel]), (3, [1 << 17, 1 << 17, 12_345])]:
        filled.add([torch.ones(numel)] * count)
        assert lengths == expected
        lengths.clear()


def test_narrow_gradients_are_widened_before_they_are_scaled() -> None:
    params = [torch.zeros(5), torch.zeros(3)]
    plan = planned(params, 1 << 20)
    (bucket,) = buckets_of(plan, params)
    gradients = {0: torch.randn(5).bfloat16(), 1: torch.randn(3)}
    bucket.fill(gradients, 1 / 3)
    require_filled(bucket, {i: grad.float() for i, grad in gradients.items()}, 1 / 3)


def test_thousands_of_small_tensors_are_a_few_stretches_without_views() -> None:
    params = [torch.zeros(16, 16) for _ in range(1000)]
    (bucket,) = buckets_of(planned(params, 1 << 20), params)
    assert [len(place.params) for place in bucket.fills] == [128] * 7 + [104]


def test_what_is_large_or_cut_or_stored_in_another_order_has_a_place_of_its_own() -> None:
    params = [
        torch.zeros(LARGE_GRADIENT),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    (bucket,) = buckets_of(planned(params, 1 << 20), params)
    assert [len(place.params) for place in bucket.fills] == [1, 1]
    small = [torch.zeros(100)]
    cut = buckets_of(planned(small, 30 * 4), small)
    assert len(cut) > 1
    assert all(place.part is not None for bucket in cut for place in bucket.fills)


def test_a_gradient_of_another_length_is_an_error_and_changes_no_staging() -> None:
    params = [torch.zeros(5), torch.zeros(3)]
    (bucket,) = buckets_of(planned(params, 1 << 20), params)
    with pytest.raises(RuntimeError, match="invalid for input of size 9"):
        bucket.fill({0: torch.zeros(6), 1: torch.zeros(3)}, 0.5)
    assert bucket.send.tensor.numel() == 8


# ------------------------------------------------------------------ phases of a bucket


@distributed(2)
def test_a_bucket_of_parameters_refuses_every_other_move(world: World) -> None:
    """Replicated, updated, in flight, replicated."""
    optimizer = ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(8))], SGD, lr=1.0)
    gathers = gatherer_of(optimizer)
    refusal = "bucket 0 was not marked as updated"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=refusal):
            gathers.launch(0)
        gathers.mark_updated(0)
        gathers.mark_updated(0)  # to stay is no move
        assert not in_flight(optimizer)
        gathers.launch(0)
        assert list(in_flight(optimizer)) == [0]
        with pytest.raises(RuntimeError, match=refusal):
            gathers.launch(0)
        gathers.queue.wait()
        assert not in_flight(optimizer)
    gathers.mark_updated(0)
    gathers.launch(0)
    gathers.mark_updated(0)  # waits for what is in flight
    assert not in_flight(optimizer)


@distributed(2)
def test_a_bucket_of_gradients_is_empty_in_flight_or_held(world: World) -> None:
    """Also held and in flight, when a second backward adds to the first one."""
    module = nn.Linear(4, 2)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=1.0)
    optimizer.attach(module)
    for _ in range(2):
        assert gradients_in_flight_and_held(optimizer) == (0, 0)
        module(torch.ones(4)).sum().backward()
        assert gradients_in_flight_and_held(optimizer) == (1, 0)
        optimizer.grad_norm()
        assert gradients_in_flight_and_held(optimizer) == (0, 1)
        module(torch.ones(4)).sum().backward()
        assert gradients_in_flight_and_held(optimizer) == (1, 1)
        optimizer.step()


@distributed(2)
def test_a_bucket_that_was_not_updated_is_not_gathered(world: World) -> None:
    params = [nn.Parameter(torch.zeros(8))]
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=1.0)
    with pytest.raises(RuntimeError, match="bucket 0 was not marked as updated"):
        gatherer_of(optimizer).launch(0)
    assert not in_flight(optimizer)
    take_a_step(optimizer, params)


# ------------------------------------------------------------------ interrupted on the way


LAUNCH = (BucketQueue, "launch")
ERRORS = pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])


@contextlib.contextmanager
def raising_once(
    owner: Any, name: str, error: type[BaseException], when: str, at: int = 1
) -> Iterator[None]:
    """The `at`-th call of a function raises, before it does anything or afterwards."""
    real, calls = getattr(owner, name), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != at:
            return real(*args, **kwargs)
        if when == "after":
            real(*args, **kwargs)
        raise error("in the middle")

    with mock.patch.object(owner, name, interrupted):
        yield
    assert calls[0], f"nobody has called {name}"


# ------------------------------------------------------------------ gradients


LANDING = [
    (*ADD_CONTRIBUTIONS, "before", MemoryError),
    (*ADD_CONTRIBUTIONS, "after", KeyboardInterrupt),
    (*AFTER_REDUCE, "after", KeyboardInterrupt),
]
USES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "clip_grad_norm_": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "full_grad": lambda optimizer: optimizer.full_grad(params_of(optimizer)[0]),
}
SLOWLY = [pytest.param(use, marks=pytest.mark.slow) for use in ("clip_grad_norm_", "full_grad")]


def train(job: Job, use: str, *numbers: int) -> None:
    for number in numbers:
        job.compute(number)  # in which buckets land, too, if more are under way than may be
        USES[use](job.optimizer)
        job.optimizer.step()


@distributed(2, 3, timeout=60, pg_timeout=3)
@pytest.mark.parametrize(("owner", "name", "when", "error"), LANDING)
@pytest.mark.parametrize("use", ["step", *SLOWLY])
def test_gradients_that_were_added_up_in_part_are_never_used(
    world: World, owner: Any, name: str, when: str, error: type[BaseException], use: str
) -> None:
    job = Job(world, "module")
    job.train(1)
    if world.rank == world.size - 1:
        with raising_once(owner, name, error, when), pytest.raises(error):
            train(job, use, 2)
        before = [param.detach().clone() for param in job.model.parameters()]
        for again in USES.values():
            with pytest.raises(RuntimeError, match=f"{error.__name__} came while this rank was"):
                again(job.optimizer)
        assert all(map(torch.equal, before, job.model.parameters()))
    else:
        with pytest.raises(RuntimeError, match=r"a collective failed|of no use any more"):
            train(job, use, 2, 3)
    meet(world, "both know")


@distributed(2, 3, timeout=60, pg_timeout=3)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_bucket_that_was_sent_in_part_is_not_sent_again(world: World, when: str) -> None:
    job = Job(world, "module")
    job.train(1)
    if world.rank == world.size - 1:
        with (
            raising_once(*SEND_GRADIENTS, KeyboardInterrupt, when),
            pytest.raises(KeyboardInterrupt),
        ):
            job.compute(2)
        with pytest.raises(RuntimeError, match="came while this rank was sending gradients"):
            job.optimizer.step()
    else:
        with pytest.raises(RuntimeError, match=r"a collective failed|of no use any more"):
            job.train(2, 3)
    meet(world, "both know")


@distributed(2, 3)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(
    ("place", "when"),
    [(CLAIM_BUCKET, "before"), (CLAIM_BUCKET, "after"), (LAUNCH, "before"), (LAUNCH, "after")],
)
def test_a_bucket_that_is_interrupted_before_or_after_it_is_sent_is_sent_once(
    world: World, place: tuple[Any, str], when: str, at: int
) -> None:
    """On one rank: the others wait for every bucket, in the order of the plan."""
    job, undisturbed = Job(world, "module"), Job(world, "module")
    job.train(1)
    undisturbed.train(1)
    if world.rank == world.size - 1:
        with raising_once(*place, KeyboardInterrupt, when, at), pytest.raises(KeyboardInterrupt):
            job.compute(2)
        # A second one, while it is given up.
        with raising_once(*LAUNCH, KeyboardInterrupt, when), contextlib.suppress(KeyboardInterrupt):
            job.optimizer.zero_grad()
    else:
        job.compute(2)
    job.optimizer.zero_grad()
    for each in (job, undisturbed):
        each.train(3, 4)
    assert_same_parameters(job.model, undisturbed.model)
    assert_same_on_all_ranks(job.model)


# ------------------------------------------------------------------ parameters


@distributed(2, 3)
@pytest.mark.parametrize(("owner", "name"), [(CopyList, "run"), AFTER_GATHER])
@pytest.mark.parametrize("when", ["before", "after"])
@ERRORS
def test_a_gather_that_is_interrupted_is_awaited_again(
    world: World, owner: Any, name: str, when: str, error: type[BaseException]
) -> None:
    job = Job(world, "lazy")
    job.compute(1)
    job.step()
    with raising_once(owner, name, error, when), pytest.raises(error):
        job.compute(2)
    job.optimizer.zero_grad()
    job.train(2)
    undisturbed = Job(world, "lazy")
    undisturbed.train(1, 2)
    assert_same_parameters(job.model, undisturbed.model)
    assert_same_on_all_ranks(job.model)


# ------------------------------------------------------------------ loading


@distributed(1, 2, 3)
@pytest.mark.parametrize("name", ["load", "options_of"])
@ERRORS
def test_a_load_that_is_interrupted_at_its_end_is_never_used_in_part(
    world: World, name: str, error: type[BaseException]
) -> None:
    saving = Job(world, "masters")
    saving.train(1)
    saved = consolidated_everywhere(saving.optimizer)
    disturbed, undisturbed = Job(world, "masters"), Job(world, "masters")
    for job in (disturbed, undisturbed):
        job.train(2)
    owner = MasterCopies if name == "load" else optimizer
    with raising_once(owner, name, error, "before"), pytest.raises(error):
        disturbed.optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=f"loading has failed in the middle .{error.__name__}"):
        disturbed.optimizer.step()
    for job in (disturbed, undisturbed):
        job.optimizer.load_state_dict(saved)
        job.train(3)
    assert_same_parameters(disturbed.model, undisturbed.model)
    assert_same_on_all_ranks(disturbed.model)


# ------------------------------------------------------------------ memory in flight


def overwrite_what_is_free(model: nn.Module) -> None:
    """Take the memory that was just given back, and fill it with NaN."""
    gc.collect()
    taken = [torch.full_like(param, math.nan) for param in model.parameters() for _ in range(8)]
    assert all(tensor.isnan().all() for tensor in taken)


@distributed(1, 2, 3, 4)
@EVERY_FEED
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_memory_is_reused_while_a_collective_still_reads_it(
    world: World, hooks: str, lazy: bool
) -> None:
    torch.manual_seed(0)
    zero = {"bucket_mb": 1e-4}  # more buckets than there are buffers for
    twins = AttachedTwins(
        *(world, Mlp(), AdamW, hooks), zero=zero, attach={"lazy_gather": lazy}, lr=0.01
    )
    # What a fast rank sends is in flight until the slowest has come to receive it.
    twins.model.norm.weight.register_hook(lambda _: time.sleep(0.004 * world.rank))
    for _ in range(4):
        twins.backward()
        overwrite_what_is_free(twins.model)
        twins.optimizer.step()
        overwrite_what_is_free(twins.model)
        twins.plain.step()
        twins.plain.zero_grad()
    twins.assert_same()
