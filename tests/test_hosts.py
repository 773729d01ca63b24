"""Ranks on several hosts: who carries what, and that it arrives."""

from __future__ import annotations

import doctest
import gc
import os
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import FEEDS, AttachedTwins
from harness import World, distributed, is_native, lend_nothing, pretend_hosts
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import CAN_READ, lanes_of, plan_of, share_memory_from, staged_bytes, transport_of
from models import Mlp, assert_same_on_all_ranks
from test_neighbours import MODES, mappings, open_files, trained
from torch import nn
from torch.optim import SGD, AdamW

import onecopy.hosts
import onecopy.neighbours
from onecopy import ZeroRedundancyOptimizer
from onecopy.hosts import Hosts, Passage
from onecopy.lanes import Lane
from onecopy.neighbours import Loan
from onecopy.plan import ParamSpec, make_plan
from onecopy.transport import Part, Transport

LAYOUTS = {3: [(0, 0, 1), (0, 1, 1)], 4: [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 1)]}
EVERY_LAYOUT = pytest.mark.parametrize("number", range(4))


def pretend_layout(world: World, number: int) -> Hosts:
    """The layout of that number for so many ranks; all parts are lent."""
    layout = LAYOUTS[world.size][number % len(LAYOUTS[world.size])]
    pretend_hosts(world, *layout)
    share_memory_from(1)
    return Hosts.by_name(layout)


# ------------------------------------------------------------------ who carries what, pure

anything = settings(deadline=None)  # a busy machine is no fault of a test
LAYOUTS_OF_ANY = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(Hosts.by_name)


def test_examples() -> None:
    assert doctest.testmod(onecopy.hosts).failed == 0


@pytest.mark.parametrize("ranks", [((0, 2), (1, 4)), ((1,), (0,)), ((1, 0),), ((0,), (0,)), ((),)])
def test_hosts_that_leave_a_rank_out_or_have_no_order_cannot_be(ranks: Any) -> None:
    with pytest.raises(ValueError, match="expected every rank once, in order"):
        Hosts(ranks)


def test_ranks_are_apart_or_together() -> None:
    assert Hosts.apart(3) == Hosts.by_name("abc") == Hosts(((0,), (1,), (2,)))
    assert Hosts.together(3) == Hosts.by_name("aaa") == Hosts(((0, 1, 2),))
    assert Hosts.apart(0).world_size == 0


@given(LAYOUTS_OF_ANY)
@anything
def test_an_owner_has_one_porter_on_every_other_host_and_they_share_the_work(hosts: Hosts) -> None:
    for owner in range(hosts.world_size):
        porters = hosts.porters_of(owner)
        place = hosts.ranks.index(hosts.host_of(owner))
        after = hosts.ranks[place + 1 :] + hosts.ranks[:place]
        assert tuple(hosts.host_of(porter) for porter in porters) == after
        assert all(owner in hosts.carried_by(porter) for porter in porters)
    for host in hosts.ranks:
        for other in hosts.ranks:
            if other is not host:
                counts = [len({*hosts.carried_by(rank)} & {*other}) for rank in host]
                assert sum(counts) == len(other)
                assert max(counts) - min(counts) <= 1


@given(LAYOUTS_OF_ANY, st.data())
@anything
def test_every_contribution_reaches_its_owner_once(hosts: Hosts, data: st.DataObject) -> None:
    everybody = range(hosts.world_size)
    fate = [data.draw(st.sampled_from(["lent", "sent", "owns nothing"])) for _ in everybody]
    lent = {rank for rank in everybody if fate[rank] == "lent"}
    sent = {rank for rank in everybody if fate[rank] == "sent"}
    passages = [Passage.of(rank, hosts, lent, sent) for rank in everybody]
    for owner, passage in enumerate(passages):
        counted: Counter[int] = Counter()
        for each in passage.contributors:
            is_sum = owner in lent and each not in hosts.host_of(owner)
            counted.update(hosts.host_of(each) if is_sum else [each])
        assert counted == (Counter(everybody) if owner in lent | sent else Counter())
        # Whoever is waited for sends, and nobody else does.
        assert set(passage.senders) == {
            rank for rank in everybody if owner in passages[rank].direct + passages[rank].carried
        }
        if owner in lent:
            assert len(passage.senders) == len(hosts.ranks) - 1
            beside = set(hosts.others_on_host_of(owner))
            assert set(passage.contributors) == beside | {owner, *passage.senders}
    for rank, passage in enumerate(passages):
        assert set(passage.lenders) == {
            other for other in everybody if rank in passages[other].read_by
        }
        for reader, owners in passage.read_by.items():
            mine = {reader} & lent
            assert set(owners) == mine | set(passages[reader].carried)
        assert not passage.carried or passage.lenders


DTYPES = {"f4": torch.float32, "bf16": torch.bfloat16, "f8": torch.float64}


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.sampled_from(["f4", "bf16"]),
    st.sampled_from(["f4", "bf16", "f8"]),
)
@anything
def test_the_sum_of_a_host_is_rounded_to_the_slot_and_never_wider_than_two_contributions(
    sizes: list[int], on_wire: str, in_slot: str
) -> None:
    """``sizes`` of hosts; the first one adds up for the first rank of the second."""
    hosts = Hosts.by_name([host for host, size in enumerate(sizes) for _ in range(size)])
    wire, slot = DTYPES[on_wire], DTYPES[in_slot]
    owner, mine = hosts.ranks[1][0], hosts.ranks[0]
    torch.manual_seed(len(mine))
    plan = make_plan([ParamSpec(0, 1000, "float32", 4)], hosts.world_size)
    ranges = tuple(plan.range_of(0, rank) for rank in range(hosts.world_size))
    staging = [torch.randn(1000).to(wire) for _ in mine]
    start, stop = ranges[owner]
    me = hosts.porter(owner, mine)
    passage = Passage.of(me, hosts, set(range(hosts.world_size)), set())
    empty = torch.empty(0, dtype=wire)
    lane = Lane(
        bucket=0,
        numel=1000,
        params=frozenset({0}),
        ranges=ranges,
        first=ranges[me][0],
        shifts=(),
        wire=empty,
        slot=torch.zeros(1, dtype=slot),
        has_equal_slots=False,
    )
    lane.passage, lane.outgoing = passage, staging[mine.index(me)]
    is_wide = lane.sums.dtype != wire
    if len(mine) == 1:  # what is sent on is the contribution itself
        assert not passage.carried
        assert not lane.relayed_numel
        return
    lane.relayed = torch.full((lane.relayed_numel,), torch.nan, dtype=lane.sums.dtype)
    kept = [each.clone() for each in staging]
    total = lane.add_up_for(owner, staging)
    assert total.nbytes <= len(mine) * (stop - start) * wire.itemsize
    narrower = {"bf16": 4, "f4": 8}[on_wire] < slot.itemsize
    summed_in = torch.float32 if narrower else max(wire, slot, key=lambda dtype: dtype.itemsize)
    assert total.dtype == summed_in
    expected = torch.zeros(stop - start, dtype=torch.promote_types(summed_in, torch.float32))
    for each in kept:
        expected += each[start:stop]
    assert torch.equal(total, expected.to(summed_in))
    in_place = torch.equal(lane.outgoing[start:stop], total)
    assert in_place != is_wide  # in place of this rank's own, if it fits there
    for each, before in zip(staging, kept, strict=True):
        if each is not lane.outgoing or is_wide:
            assert torch.equal(each, before)
        assert torch.equal(each[:start], before[:start])
        assert torch.equal(each[stop:], before[stop:])


# ------------------------------------------------------------------ who is where


@pytest.mark.of_messages
@distributed(3, 4)
@EVERY_LAYOUT
def test_all_ranks_know_who_shares_a_host(world: World, number: int) -> None:
    expected = pretend_layout(world, number)
    transport = Transport()
    assert transport.hosts == expected
    assert set(transport.neighbours.pids) == set(expected.others_on_host_of(world.rank))


@pytest.mark.of_messages
@distributed(4)
def test_a_host_on_which_memory_cannot_be_read_is_known_to_be_so_on_all_ranks(world: World) -> None:
    pretend_hosts(world, 0, 0, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 3:
            patch.setattr(*CAN_READ, lambda *_: False)
        transport = Transport()
    assert transport.hosts == Hosts(((0, 1), (2,), (3,)))
    assert bool(transport.neighbours) == (world.rank < 2)


# ------------------------------------------------------------------ training


@pytest.mark.of_messages
@distributed(3, 4)
@pytest.mark.parametrize("views", [False, True], ids=["own-storage", "bucket-view"])
@pytest.mark.parametrize("mode", MODES, ids=["drop-in", "attached", "lazy"])
def test_what_passes_between_hosts_is_what_everybody_would_have_sent(
    world: World, mode: tuple[bool, bool], views: bool
) -> None:
    """With the last rank alone on its host the order of all sums is that of the ranks."""
    pretend_hosts(world, *[0] * (world.size - 1), 1)
    share_memory_from(1)
    carried = trained(world, *mode, views)
    lend_nothing()
    sent = trained(world, *mode, views)
    assert all(map(torch.equal, carried, sent))


@distributed(3, 4)
@EVERY_LAYOUT
@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_training_on_several_hosts_is_that_of_ddp(
    world: World, number: int, feed: str, lazy: bool
) -> None:
    hosts = pretend_layout(world, number)
    twins = AttachedTwins(world, Mlp(), AdamW, feed, attach={"lazy_gather": lazy}, lr=0.1)
    if is_native():  # whatever the hosts are
        hosts = Hosts.apart(world.size)
    assert transport_of(twins.optimizer).hosts == hosts
    lanes = lanes_of(twins.optimizer)
    is_porter = len(hosts.host_of(world.rank)) > 1 and bool(hosts.carried_by(world.rank))
    assert any(lane.passage.carried for lane in lanes) == is_porter
    twins.train(4)


@distributed(4)
@EVERY_LAYOUT
def test_whole_tensors_pass_between_hosts(world: World, number: int) -> None:
    pretend_layout(world, number)
    twins = AttachedTwins(world, Mlp(), AdamW, "module", zero={"partition": "whole"}, lr=0.1)
    twins.train(3)


@pytest.mark.of_messages
@distributed(4)
@pytest.mark.parametrize("lent_from", [1, 64])
@pytest.mark.parametrize("masters", [False, True])
def test_no_byte_passes_between_hosts_twice(world: World, lent_from: int, masters: bool) -> None:
    """``comm_stats`` counts what is lent, too; so it is the messages of gloo that are counted."""
    hosts = pretend_layout(world, 0)
    share_memory_from(lent_from)
    numel = 4 * 4 * 64
    model = nn.Linear(numel // 4, 4, bias=False)
    if masters:
        model.to(torch.bfloat16)
    wide = torch.float32 if masters else None
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, master_dtype=wide)
    optimizer.attach(model)
    sent: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        isend = dist.isend

        def counted(tensor: torch.Tensor, to: int, **options: Any) -> Any:
            sent["near" if to in hosts.host_of(world.rank) else "far"] += tensor.nbytes
            return isend(tensor, to, **options)

        patch.setattr(dist, "isend", counted)
        model(torch.ones(2, numel // 4).to(model.weight.dtype)).sum().backward()
        optimizer.step()
    # Of a rank: gradients for its partner on the other host, and its own share of the parameters.
    # Two contributions of 16 bits travel as one sum of 32.
    assert sent == {"far": (4 + (2 if masters else 4)) * numel // 4}
    assert optimizer.memory_report().staging == staged(optimizer)


def staged(optimizer: ZeroRedundancyOptimizer) -> int:
    """Bytes of all buffers that the only bucket passes through."""
    (lane,) = lanes_of(optimizer)
    buffers = (lane.outgoing, lane.incoming, lane.incoming_sums, lane.relayed)
    return sum(buffer.nbytes for buffer in buffers) + staged_bytes(optimizer)


@pytest.mark.of_messages
@distributed(3, 4)
@EVERY_LAYOUT
@pytest.mark.parametrize("masters", [False, True], ids=["wire", "masters"])
def test_contributions_of_16_bits_are_summed_in_float32_wherever_the_ranks_are(
    world: World, number: int, masters: bool
) -> None:
    """Rounded once for the wire, and summed: over the host, there in rank order, then by the
    owner in the order of the hosts' relays. No other rounding, in any layout."""
    hosts = pretend_layout(world, number)
    torch.manual_seed(0)
    model = nn.Linear(67, 5, bias=False, dtype=torch.bfloat16 if masters else torch.float32)
    options = {"master_dtype": torch.float32} if masters else {}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0, **options)
    optimizer.attach(model, reduce_dtype=None if masters else torch.bfloat16)
    torch.manual_seed(world.rank)
    scale = torch.tensor([10.0 ** (world.rank - 1)])
    x = (torch.randn(1, 67) * scale).to(model.weight.dtype)
    model(x).sum().backward()
    found = optimizer.full_grad(model.weight)
    assert found.dtype == torch.float32
    every = [torch.empty_like(x) for _ in range(world.size)]
    dist.all_gather(every, x)
    shares = [(each * (1 / world.size)).to(torch.bfloat16).float()[0] for each in every]
    plan, expected = plan_of(optimizer), torch.empty(5 * 67)
    column = torch.arange(5 * 67) % 67
    for owner in range(world.size):
        for piece in plan.pieces(owner):
            messages = {rank: [rank] for rank in hosts.host_of(owner)}
            messages |= {rank: hosts.host_of(rank) for rank in hosts.porters_of(owner)}
            total = torch.zeros(piece.numel)
            for rank in sorted(messages):
                sums = [shares[each][column[piece.start : piece.stop]] for each in messages[rank]]
                total = total + sum(sums[1:], sums[0])
            expected[piece.start : piece.stop] = total
    assert torch.equal(found.flatten(), expected)


# ------------------------------------------------------------------ nobody waits for the busy


@pytest.mark.of_messages
@distributed(4)
def test_a_forward_of_one_rank_needs_nothing_of_those_that_wait_for_it(world: World) -> None:
    """A rank uses parameters that another of its host has received for it. That one sits in a
    barrier, and does not come by."""
    pretend_layout(world, 0)
    for busy in range(4):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, bucket_mb=0.0005)
        optimizer.attach(model, lazy_gather=True)
        for step in range(2):
            model(model.batch((world.rank, step))).backward()
            optimizer.step()
        if world.rank == busy:
            with torch.no_grad():
                model(model.batch((7, 7)))
        dist.barrier()
        optimizer.wait()
        assert_same_on_all_ranks(model)


class Slowly(torch.autograd.Function):
    """A backward that takes its time."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return grad


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(count)])


@pytest.mark.of_messages
@distributed(4, pg_timeout=20)
def test_two_modules_in_one_backward_may_be_reached_in_different_orders(world: World) -> None:
    """The ranks of one host reduce buckets of both in another order than those of the other, and
    what one of them has to carry comes late: nobody waits in a circle."""
    pretend_layout(world, 0)
    torch.manual_seed(0)
    first, rest, other = layers(1), layers(3), layers(5)
    both = nn.ModuleList([first, rest])
    ours = [
        ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.01, bucket_mb=1024 / 2**20)
        for module in (both, other)
    ]
    for optimizer, module in zip(ours, (both, other), strict=True):
        optimizer.attach(module)
    for _ in range(2):
        x = torch.randn(2, 16)
        middle = other(first(x)) if world.rank < 2 else first(other(x))
        x = rest(middle)
        (Slowly.apply(x) if world.rank == 1 else x).sum().backward()
        for optimizer in ours:
            optimizer.step()
    assert_same_on_all_ranks(nn.ModuleList([both, other]))


@distributed(4)
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_rank_that_owns_nothing_in_most_buckets_carries_them_all_the_same(
    world: World, lazy: bool
) -> None:
    pretend_layout(world, 0)
    torch.manual_seed(0)
    model = layers(9)
    options = {"bucket_mb": 1024 / 2**20, "partition": "whole", "check_every": 1}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.01, **options)
    optimizer.attach(model, lazy_gather=lazy)
    for _ in range(2):
        x = model(torch.randn(2, 16))
        (Slowly.apply(x) if world.rank % 2 else x).sum().backward()
        optimizer.step()
    optimizer.wait()
    assert_same_on_all_ranks(model)


@distributed(4)
def test_parameters_that_come_later_pass_between_hosts(world: World) -> None:
    pretend_layout(world, 3)
    torch.manual_seed(0)
    model = Mlp()
    model.norm.requires_grad_(False)
    model.second.requires_grad_(False)
    given = [*model.first.parameters(), *model.norm.parameters()]
    optimizer = ZeroRedundancyOptimizer(given, AdamW, lr=0.1, bucket_mb=0.0005)
    for step in range(4):
        if step == 0:
            optimizer.attach(model)
        if step == 1:
            model.norm.requires_grad_(True)
        if step == 2:
            model.second.requires_grad_(True)
            optimizer.add_param_group({"params": model.second.parameters()})
        if step == 3:
            optimizer.detach()
            optimizer.attach(model, lazy_gather=True)
        model(model.batch((world.rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    assert_same_on_all_ranks(model)


@distributed(4)
def test_a_backward_that_raises_on_one_rank_is_given_up_on_all_hosts(world: World) -> None:
    pretend_layout(world, 0)
    torch.manual_seed(0)
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, bucket_mb=0.0005)
    optimizer.attach(model)
    for raiser in range(4):
        if world.rank == raiser:
            handle = model.first.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(model.batch((world.rank, raiser))).backward()
            handle.remove()
        else:
            model(model.batch((world.rank, raiser))).backward()
        optimizer.zero_grad()
        model(model.batch((world.rank, raiser))).backward()
        optimizer.step()
        assert_same_on_all_ranks(model)


@pytest.mark.of_messages
@distributed(4)
def test_memory_of_a_porter_is_not_filled_again_before_all_have_read_it(world: World) -> None:
    pretend_layout(world, 2)
    lend_nothing()
    expected = trained(world, True, False, False)
    share_memory_from(1)
    read = Loan.tensor

    def slowly(self: Loan, dtype: torch.dtype) -> torch.Tensor:
        time.sleep(0.003)
        return read(self, dtype)

    for slow in range(4):
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == slow:
                patch.setattr(Loan, "tensor", slowly)
            found = trained(world, True, False, False)
        assert all(map(torch.equal, found, expected))


@pytest.mark.of_messages
@distributed(4)
def test_nothing_stays_open_and_no_thread_stays_when_optimizers_are_gone(world: World) -> None:
    pretend_layout(world, 0)

    def once() -> None:
        for lazy in (False, True):
            trained(world, True, lazy, False)
        gc.collect()
        dist.barrier()

    once()
    Transport().neighbours.forget()
    before = open_files(), mappings()
    for _ in range(3):
        once()
    Transport().neighbours.forget()
    assert (open_files(), mappings()) == before
    until = time.monotonic() + 10
    while threading.active_count() > 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= 4  # this one, and those who wait for it


# ------------------------------------------------------------------ ranks that are lost

LOST_IN_OTHER_WAYS = [(0, False), (3, True), (3, False)]  # each takes the timeout


@distributed(4, fresh=True, pg_timeout=12, timeout=90)
@pytest.mark.parametrize(
    ("lost", "lazy"),
    [(0, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in LOST_IN_OTHER_WAYS)],
)
def test_a_porter_that_is_lost_is_named_on_all_hosts(world: World, lost: int, lazy: bool) -> None:
    pretend_layout(world, 0)
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, bucket_mb=0.0005)
    optimizer.attach(model, lazy_gather=lazy)
    model(model.batch((world.rank, 0))).backward()
    dist.barrier()
    if world.rank == lost:
        os._exit(0)

    def step_and_wait() -> None:
        optimizer.step()
        optimizer.wait()

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank {lost}\b"):
        step_and_wait()
    assert time.monotonic() - start < 30
    time.sleep(1)  # a rank that has noticed need not end for the others to notice


@pytest.mark.of_messages
@distributed(4, fresh=True, pg_timeout=300, timeout=90)
def test_neighbours_of_a_porter_are_told_that_nothing_will_come(world: World) -> None:
    """Long before the timeout, and though the porter, which has noticed, does not end."""
    pretend_layout(world, 0)
    transport = Transport()
    dist.barrier()
    if world.rank == 2:
        os._exit(0)
    start = time.monotonic()
    if world.rank == 0:
        memory = transport.memory_to_lend(100)
        pending = transport.carry([Part(2, memory.data)], memory, memory.data)
    else:
        _, pending = transport.borrow([0] if world.rank == 1 else [], transport.carried_tag)
    if world.rank < 2:
        with pytest.raises(RuntimeError, match="a collective failed"):
            pending.wait()
    assert time.monotonic() - start < 60
