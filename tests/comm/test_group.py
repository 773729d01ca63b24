"""The one file that talks to other ranks: what arrives, and what must not mix with it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed, lend_nothing
from inside import gathers_of, plan_of, private_group_of, transport_of
from models import (
    give_equal_gradients,
    params_of_shapes,
    random_parameter,
    train_on_constants,
)
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm.agreement import DIGEST_BYTES
from onecopy.comm.group import Part, RankGroup, bytes_from_tensor, tensor_from_bytes

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.uint8]


def filled(length: int, value: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((length,), value, dtype=dtype)


# ------------------------------------------------------------------ tensors


@distributed(1, 2, 3, 4)
def test_a_broadcast_brings_every_part_from_its_owner_to_all(world: World) -> None:
    rank_group = RankGroup()
    for dtype in DTYPES:
        lengths = [5, 0, 1, 300]
        parts = [
            Part(owner, filled(length, 10 * owner + world.rank, dtype))
            for owner in reversed(range(world.size))
            for length in lengths
        ]
        rank_group.broadcast_tensors(parts).wait()
        for owner, tensor in parts:
            # What the owner had put there: ten times its rank, plus its rank.
            assert torch.equal(tensor, filled(tensor.numel(), 11 * owner, dtype))
    rank_group.broadcast_tensors([]).wait()


@distributed(2, 3)
def test_broadcasts_of_two_optimizers_in_different_orders_do_not_mix(world: World) -> None:
    """Each optimizer has a tag of its own for parameters."""
    transports = [
        transport_of(ZeroRedundancyOptimizer([Parameter(torch.zeros(4))], SGD, lr=1.0))
        for _ in range(2)
    ]
    numbers = [1, 0] if world.rank else [0, 1]
    launched = []
    for number in numbers:
        parts = [
            Part(owner, filled(7, 100 * number + 10 * owner + world.rank))
            for owner in range(world.size)
        ]
        launched.append((number, parts, transports[number].broadcast_tensors(parts)))
    for number, parts, pending in launched:
        pending.wait()
        for owner, tensor in parts:
            assert torch.equal(tensor, filled(7, 100 * number + 11 * owner))


@pytest.mark.of_messages
@distributed(2, 3)
def test_all_gathers_of_two_optimizers_in_different_orders_do_not_mix(world: World) -> None:
    lend_nothing()
    params = [Parameter(torch.zeros(6)) for _ in range(2)]
    gathers = []
    for number, param in enumerate(params):
        optimizer = ZeroRedundancyOptimizer([param], SGD, lr=1.0)
        (gather,) = gathers_of(optimizer)
        gathers.append(gather)
        start, stop = plan_of(optimizer).slot(0, world.rank)
        param.data[start:stop] = 100 * number + world.rank
    numbers = [1, 0] if world.rank else [0, 1]
    for number in numbers:
        gathers[number].start()
    for number in numbers:
        gathers[number].wait()
        gathers[number].complete()
    each = 6 // world.size
    for number, param in enumerate(params):
        assert param.tolist() == [100 * number + place // each for place in range(6)]


@pytest.mark.slow
@distributed(2, 3, pg_timeout=10, fresh=True)
def test_ranks_that_step_two_optimizers_in_different_orders_do_not_mix_them(world: World) -> None:
    """Each rank waits for parameters that do not come, until the timeout of the process group."""
    lend_nothing()
    params = [Parameter(torch.zeros(64)) for _ in range(2)]
    optimizers = [ZeroRedundancyOptimizer([param], SGD, lr=1.0) for param in params]

    def step(numbers: list[int]) -> None:
        for number in numbers:
            params[number].grad = torch.full((64,), float(10**number))
            optimizers[number].step()

    step([0, 1])
    with pytest.raises((RuntimeError, OSError), match="collective failed"):
        step([1, 0] if world.rank else [0, 1])
    for number, param in enumerate(params):
        assert set((-param.detach() / 10**number).tolist()) <= {0.0, 1.0, 2.0}


@distributed(1, 2, 3, 4)
def test_several_broadcasts_in_flight_do_not_mix(world: World) -> None:
    rank_group = RankGroup()
    rounds = [
        [
            Part(owner, filled(7 + r, 100 * r + 10 * owner + world.rank))
            for owner in range(world.size)
        ]
        for r in range(5)
    ]
    pending = [rank_group.broadcast_tensors(parts) for parts in rounds]
    for p in reversed(pending):
        p.wait()
    for r, parts in enumerate(rounds):
        for owner, tensor in parts:
            assert torch.equal(tensor, filled(7 + r, 100 * r + 11 * owner))


@distributed(2, 3, 4)
def test_send_and_receive_match_by_tag(world: World) -> None:
    rank_group = RankGroup()
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    messages = [filled(4, 100 * tag + world.rank) for tag in range(3)]
    room = [torch.empty(4) for _ in range(3)]
    receives = [rank_group.receive(room[tag], left, tag) for tag in (2, 0, 1)]
    sends = [rank_group.send(messages[tag], right, tag) for tag in (1, 2, 0)]
    for pending in (*sends, *receives):
        pending.wait()
    for tag in range(3):
        assert torch.equal(room[tag], filled(4, 100 * tag + left))


@distributed(1, 2, 3)
def test_traffic_counts_what_this_rank_sends(world: World) -> None:
    rank_group = RankGroup()
    others = world.size - 1
    rank_group.broadcast_tensors(
        [Part(0, torch.ones(10)), Part(world.size - 1, torch.ones(3))]
    ).wait()
    expected = 40 * others * (world.rank == 0) + 12 * others * (world.rank == world.size - 1)
    assert rank_group.traffic.bytes == expected
    messages = rank_group.traffic.messages
    if world.size > 1 and world.rank == 1:
        rank_group.send(torch.ones(2), 0).wait()
        assert rank_group.traffic.messages == messages + 1
        assert rank_group.traffic.bytes == expected + 8
    elif world.size > 1 and world.rank == 0:
        rank_group.receive(torch.empty(2), 1).wait()
        assert rank_group.traffic.messages == messages


# ------------------------------------------------------------------ small things


@distributed(1, 2, 3, 4)
def test_minimum_and_maximum_of_any_integers(world: World) -> None:
    rank_group = RankGroup()
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    columns = [
        [0, 0, 0, 0],
        [-5, 3, -7, 0],
        [low, high, 0, -1],
        [high, high, high, high],
        [low, low, low, low],
        [-1, -2, -3, -4],
    ]
    mine = torch.tensor([column[world.rank] for column in columns])
    kept = mine.clone()
    lowest, highest = rank_group.extremes(mine, mine)
    assert lowest.tolist() == [min(column[: world.size]) for column in columns]
    assert highest.tolist() == [max(column[: world.size]) for column in columns]
    assert torch.equal(mine, kept)
    nothing = torch.empty(0, dtype=torch.int64)
    empty = rank_group.extremes(nothing, nothing)
    assert [part.numel() for part in empty] == [0, 0]


@distributed(1, 2, 3, 4)
def test_bytes_go_everywhere(world: World) -> None:
    rank_group = RankGroup()
    payload = bytes([world.rank]) * 3 + b"\0\xff"
    everyone = [bytes([rank]) * 3 + b"\0\xff" for rank in range(world.size)]
    assert rank_group.all_gather_bytes(payload) == everyone
    assert rank_group.all_gather_bytes(b"") == [b""] * world.size


@distributed(2, 3, 4)
def test_short_payloads_of_two_lengths_meet_without_ending_a_process(world: World) -> None:
    """As where one rank looks for those of its host, with 16 bytes, and another one compares what
    it builds, with 32. The next things that they do together work."""
    rank_group = RankGroup()
    for shortest in (0, 1, 8, 16):
        length = shortest if world.rank else DIGEST_BYTES
        rank_group.all_gather_bytes(bytes(length))
        everyone = [bytes([rank]) * DIGEST_BYTES for rank in range(world.size)]
        assert rank_group.all_gather_bytes(everyone[world.rank]) == everyone
    for source in range(world.size):
        for text in (b"", b"x", bytes(range(256)) * 20):
            mine = text + bytes([world.rank]) if text else b""
            expected = text + bytes([source]) if text else b""
            got = rank_group.broadcast_bytes(mine if world.rank == source else None, source)
            assert got == expected


@pytest.mark.parametrize("payload", [b"", b"\0", bytes(range(256)), b"ab" * 5000], ids=len)
def test_bytes_survive_being_a_tensor(payload: bytes) -> None:
    tensor = tensor_from_bytes(payload)
    assert (tensor.dtype, tensor.numel()) == (torch.uint8, len(payload))
    assert bytes_from_tensor(tensor) == payload


# ------------------------------------------------------------------ groups


@distributed(2, 3, 4)
def test_all_optimizers_of_a_group_share_one_private_group(world: World) -> None:
    def groups() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    before = groups()
    opts = [ZeroRedundancyOptimizer([Parameter(torch.ones(9))], SGD, lr=0.1) for _ in range(5)]
    assert groups() == before + 1
    private = {id(private_group_of(opt)) for opt in opts}
    assert len(private) == 1
    assert private_group_of(opts[0]) is not dist.group.WORLD
    assert opts[0].process_group is dist.group.WORLD
    subgroup = dist.new_group(list(range(world.size)))
    other = ZeroRedundancyOptimizer([Parameter(torch.ones(9))], SGD, subgroup, lr=0.1)
    assert id(private_group_of(other)) not in private
    assert groups() == before + 3


@distributed(1)
def test_one_rank_needs_no_group_of_its_own(world: World) -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    ZeroRedundancyOptimizer([Parameter(torch.ones(9))], SGD, lr=0.1)
    assert len(dist.distributed_c10d._world.pg_map) == before


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


@distributed(2, 3, pg_timeout=47)
def test_the_private_group_has_the_timeout_and_the_ranks_of_the_users(world: World) -> None:
    if not hasattr(dist.group.WORLD._get_backend(torch.device("cpu")), "options"):
        pytest.skip("this torch does not tell a gloo group's timeout")
    default = RankGroup()
    assert timeout_of(dist.group.WORLD) == timedelta(seconds=47)
    assert timeout_of(private_group_of(default)) == timedelta(seconds=47)
    ranks = list(range(1, world.size))
    subgroup = dist.new_group(ranks, timeout=timedelta(seconds=33))
    if world.rank in ranks:
        rank_group = RankGroup(subgroup)
        assert (rank_group.rank, rank_group.world_size) == (world.rank - 1, world.size - 1)
        if world.size > 2:
            assert timeout_of(private_group_of(rank_group)) == timedelta(seconds=33)
        assert dist.get_process_group_ranks(private_group_of(rank_group)) == ranks


@distributed(3, 4)
def test_a_subgroup_uses_its_own_ranks(world: World) -> None:
    members = [0, world.size - 1]
    subgroup = dist.new_group(members)
    if world.rank not in members:
        return
    rank_group = RankGroup(subgroup)
    parts = [Part(owner, filled(5, 10 * owner + rank_group.rank)) for owner in (0, 1)]
    rank_group.broadcast_tensors(parts).wait()
    assert [part.tensor[0].item() for part in parts] == [0, 11]
    assert rank_group.broadcast_bytes(b"hi" if rank_group.rank == 1 else None, 1) == b"hi"
    if rank_group.rank == 0:
        rank_group.send(filled(2, 7), 1).wait()
    else:
        room = torch.empty(2)
        rank_group.receive(room, 0).wait()
        assert room.tolist() == [7, 7]


# ------------------------------------------------------------------ nothing mixes


def make_optimizer(world: World) -> tuple[ZeroRedundancyOptimizer, list[Parameter]]:
    params = [Parameter(torch.ones(n)) for n in (300, 41, 1000)]
    return ZeroRedundancyOptimizer(params, Adam, lr=0.01, bucket_mb=0.001), params


def train(opt: torch.optim.Optimizer, params: list[Parameter], steps: int) -> None:
    for number in range(steps):
        for param in params:
            param.grad = torch.linspace(-1, 1, param.numel()) * (number + 1)
        opt.step()


def require_trained(params: list[Parameter], steps: int) -> None:
    twins = [Parameter(torch.ones(param.numel())) for param in params]
    train(Adam(twins, lr=0.01), twins, steps)
    assert all(map(torch.equal, params, twins))


@distributed(2, 3, 4)
def test_collectives_of_the_user_may_be_in_flight_during_a_step(world: World) -> None:
    opt, params = make_optimizer(world)
    total = world.size * (world.size + 1) / 2
    for _ in range(3):
        mine = [torch.full((1000,), world.rank + 1.0) for _ in range(4)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in mine]
        # Ranks wait for theirs at different times: some before our step, some after it.
        if world.rank % 2:
            works.pop(0).wait()
        train(opt, params, 1)
        for work in works:
            work.wait()
        assert all(torch.equal(tensor, torch.full((1000,), total)) for tensor in mine)
    received = torch.empty(3)
    if world.rank == 0:  # an open receive of the user's, with the tag that our sends have too
        open_receive = dist.irecv(received, src=1, tag=0)
    opt.consolidate_state_dict()
    if world.rank == 1:
        dist.send(torch.tensor([1.0, 2.0, 3.0]), dst=0, tag=0)
    if world.rank == 0:
        open_receive.wait()
        assert received.tolist() == [1, 2, 3]
        assert opt.state_dict()["state"][0]["step"] == 1 + 2


@distributed(2, 3, 4)
def test_a_thread_may_use_the_users_group_while_the_optimizer_steps(world: World) -> None:
    opt, params = make_optimizer(world)
    sums: list[float] = []
    failures: list[BaseException] = []

    def reduce_all_the_time() -> None:
        try:
            for number in range(60):
                tensor = torch.full((100,), float(number + world.rank))
                dist.all_reduce(tensor)
                sums.append(tensor[0].item())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=reduce_all_the_time)
    thread.start()
    for number in range(8):
        for param in params:
            param.grad = torch.linspace(-1, 1, param.numel()) * (number + 1)
        opt.step()
        opt.assert_replicas_equal()  # these two use collectives of the same kind as the thread
        opt.consolidate_state_dict(to=number % world.size)
    thread.join()
    assert not failures
    offset = sum(range(world.size))
    assert sums == [number * world.size + offset for number in range(60)]
    require_trained(params, 8)


@distributed(2, 3)
def test_two_optimizers_step_in_turn_on_one_private_group(world: World) -> None:
    (first, a), (second, b) = make_optimizer(world), make_optimizer(world)
    for number in range(3):
        for opt, params in ((first, a), (second, b)):
            for param in params:
                param.grad = torch.linspace(-1, 1, param.numel()) * (number + 1)
            opt.step()
    require_trained(a, 3)
    require_trained(b, 3)


# ------------------------------------------------------------------ groups of some ranks


@distributed(2, 3, 4)
def test_ranks_may_be_in_different_numbers_of_groups(world: World) -> None:
    dist.new_group([world.size - 1])  # only the last rank is a member
    param = random_parameter(7, 5)
    train_on_constants(ZeroRedundancyOptimizer([param], torch.optim.AdamW), [param])


@distributed(3, 4)
def test_subgroups_may_overlap(world: World) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    for group, members in ((first, (0, 1)), (second, (1, 2))):
        if world.rank in members:
            param = random_parameter(7, 5)
            opt = ZeroRedundancyOptimizer([param], torch.optim.AdamW, process_group=group)
            train_on_constants(opt, [param])
            opt.assert_replicas_equal()


# ------------------------------------------------------------------ a default device


@distributed(2)
def test_a_default_device_does_not_catch_what_belongs_on_the_cpu(world: World) -> None:
    params = params_of_shapes((3, 3), (7,))
    optimizer = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    give_equal_gradients(0, params)
    optimizer.step()
    with torch.device("meta"):
        optimizer.consolidate_state_dict()
    if world.rank == 0:
        states = optimizer.state_dict()["state"].values()
        assert {value.device.type for state in states for value in state.values()} == {"cpu"}
