"""How buckets travel: what is sent in place, what is packed, and what memory that takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import World, distributed, lend_nothing
from inside import plan_of, shards_of, traffic_of, transfers_of
from models import SMALL_BUCKETS, ConvNet, MixedNet, Mlp
from torch import nn
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer
from onecopy.gatherer import IN_FLIGHT
from onecopy.transfers import WORTH_ITS_OWN_MESSAGE, Transfer

LARGE = WORTH_ITS_OWN_MESSAGE // 4  # elements of float32

BUCKET_VIEW = pytest.mark.parametrize(
    "bucket_view", [False, True], ids=["own-storage", "bucket-view"]
)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copies(transfer: Transfer) -> Iterator[torch.Tensor]:
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
            *[part.tensor for part in transfer.parts],
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
    in_place = [part for part in transfer.parts if storage(part.tensor) == storage(large)]
    assert [part.tensor.numel() for part in in_place] == [large.numel()]
    packed = [part for part in transfer.parts if storage(part.tensor) != storage(large)]
    assert len({part.owner for part in packed}) == len(packed), "one message per owner"
    assert sum(part.tensor.numel() for part in packed) == 12 * world.size
    assert len({storage(part.tensor) for part in packed}) == 1
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
    cut = [part for part in transfer.parts if storage(part.tensor) == storage(params[0])]
    assert len(cut) == world.size
    assert sorted(part.owner for part in cut) == list(range(world.size))
    assert sum(staged_storages(optimizer).values()) <= 4 * (5 + 2)
    take_a_step(optimizer, params)


@distributed(2, 3, 4)
def test_the_only_piece_of_an_owner_travels_in_place_however_small(world: World) -> None:
    lend_nothing()
    param = nn.Parameter(torch.zeros(2 * world.size))
    optimizer = ZeroRedundancyOptimizer([param], SGD, lr=1.0)
    (transfer,) = transfers_of(optimizer)
    assert [part.owner for part in transfer.parts] == list(range(world.size))
    assert all(storage(part.tensor) == storage(param) for part in transfer.parts)
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
            assert all(storage(part.tensor) in homes for part in transfer.parts)
            assert len({part.owner for part in transfer.parts}) == len(transfer.parts)
        take_a_step(optimizer, list(model.parameters()))


@distributed(2, 3, 4)
def test_parameters_with_gaps_are_packed_and_their_gaps_left_alone(world: World) -> None:
    lend_nothing()
    whole = torch.zeros(7, 8)
    gapped = [nn.Parameter(whole[:, ::2]), nn.Parameter(torch.zeros(5))]
    optimizer = ZeroRedundancyOptimizer(gapped, SGD, lr=1.0)
    for transfer in transfers_of(optimizer):
        for part in transfer.parts:
            assert part.tensor.is_contiguous()
            assert storage(part.tensor) != storage(whole)
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

    start, arrive = Transfer.start, Transfer.arrive

    def counting_start(transfer: Transfer, transport: Any) -> Any:
        nonlocal most
        under_way.append(transfer)
        most = max(most, len(under_way))
        return start(transfer, transport)

    def counting_arrive(transfer: Transfer, journey: Any) -> None:
        arrive(transfer, journey)
        under_way.remove(transfer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfer, "start", counting_start)
        patch.setattr(Transfer, "arrive", counting_arrive)
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
    prepared, before = transfers_of(optimizer), addresses(optimizer)
    parameters = [param.data_ptr() for param in model.parameters()]
    assert before
    for step in range(3):
        optimizer.zero_grad()
        model(model.batch((world.rank, step))).backward()
        optimizer.step()
        assert transfers_of(optimizer) is prepared
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
