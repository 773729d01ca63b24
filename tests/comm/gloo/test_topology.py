"""Which ranks share a host, and who carries what to other hosts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onecopy.comm.gloo.topology import ReduceRoutes, Topology
from onecopy.gradients.reducer import GradBucket
from onecopy.planning.plan import ParamSpec, make_plan

# ------------------------------------------------------------------ who carries what, pure


anything = settings(deadline=None)  # a busy machine is no fault of a test
LAYOUTS_OF_ANY = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(Topology.by_name)


@pytest.mark.parametrize("ranks", [((0, 2), (1, 4)), ((1,), (0,)), ((1, 0),), ((0,), (0,)), ((),)])
def test_hosts_that_leave_a_rank_out_or_have_no_order_cannot_be(ranks: Any) -> None:
    with pytest.raises(ValueError, match="expected every rank once, in order"):
        Topology(ranks)


def test_ranks_are_apart_or_together() -> None:
    assert Topology.apart(3) == Topology.by_name("abc") == Topology(((0,), (1,), (2,)))
    assert Topology.together(3) == Topology.by_name("aaa") == Topology(((0, 1, 2),))
    assert Topology.apart(0).world_size == 0


@given(LAYOUTS_OF_ANY)
@anything
def test_an_owner_has_one_porter_on_every_other_host_and_they_share_the_work(
    hosts: Topology,
) -> None:
    for owner in range(hosts.world_size):
        relays = hosts.relays_of(owner)
        place = hosts.ranks.index(hosts.host_of(owner))
        after = hosts.ranks[place + 1 :] + hosts.ranks[:place]
        assert tuple(hosts.host_of(relay) for relay in relays) == after
        assert all(owner in hosts.relayed_by(relay) for relay in relays)
    for host in hosts.ranks:
        for other in hosts.ranks:
            if other is not host:
                counts = [len({*hosts.relayed_by(rank)} & {*other}) for rank in host]
                assert sum(counts) == len(other)
                assert max(counts) - min(counts) <= 1


@given(LAYOUTS_OF_ANY, st.data())
@anything
def test_every_contribution_reaches_its_owner_once(hosts: Topology, data: st.DataObject) -> None:
    everybody = range(hosts.world_size)
    fate = [data.draw(st.sampled_from(["lent", "sent", "owns nothing"])) for _ in everybody]
    lent = {rank for rank in everybody if fate[rank] == "lent"}
    sent = {rank for rank in everybody if fate[rank] == "sent"}
    passages = [ReduceRoutes.of(rank, hosts, lent, sent) for rank in everybody]
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
    hosts = Topology.by_name([host for host, size in enumerate(sizes) for _ in range(size)])
    wire, slot = DTYPES[on_wire], DTYPES[in_slot]
    owner, mine = hosts.ranks[1][0], hosts.ranks[0]
    torch.manual_seed(len(mine))
    plan = make_plan([ParamSpec(0, 1000, "float32", 4)], hosts.world_size)
    ranges = tuple(plan.range_of(0, rank) for rank in range(hosts.world_size))
    staging = [torch.randn(1000).to(wire) for _ in mine]
    start, stop = ranges[owner]
    me = hosts.relay(owner, mine)
    passage = ReduceRoutes.of(me, hosts, set(range(hosts.world_size)), set())
    empty = torch.empty(0, dtype=wire)
    lane = GradBucket(
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
