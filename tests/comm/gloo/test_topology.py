"""Which ranks share a host, and who carries what to other topology."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onecopy.comm.gloo.comm import add_up
from onecopy.comm.gloo.topology import ReduceRoutes, Topology
from onecopy.comm.interface import BucketLayout
from onecopy.planning.plan import ParamSpec, make_plan
from onecopy.planning.sizes import sum_dtype

# ------------------------------------------------------------------ who carries what, pure


anything = settings(deadline=None)  # a busy machine is no fault of a test
LAYOUTS_OF_ANY = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(Topology.by_name)


@pytest.mark.parametrize("ranks", [((0, 2), (1, 4)), ((1,), (0,)), ((1, 0),), ((0,), (0,)), ((),)])
def test_hosts_that_leave_a_rank_out_or_have_no_order_cannot_be(ranks: Any) -> None:
    with pytest.raises(ValueError, match="expected every rank once, in order"):
        Topology(ranks)


def test_ranks_are_apart_or_together() -> None:
    assert Topology.by_name("abc") == Topology(((0,), (1,), (2,)))
    assert Topology.by_name("aaa") == Topology(((0, 1, 2),))
    assert Topology.by_name("").world_size == 0


@given(LAYOUTS_OF_ANY)
@anything
def test_an_owner_has_one_porter_on_every_other_host_and_they_share_the_work(
    topology: Topology,
) -> None:
    for owner in range(topology.world_size):
        relays = topology.relays_of(owner)
        place = topology.hosts.index(topology.host_of(owner))
        after = topology.hosts[place + 1 :] + topology.hosts[:place]
        assert tuple(topology.host_of(relay) for relay in relays) == after
        assert all(owner in topology.relayed_by(relay) for relay in relays)
    for host in topology.hosts:
        for other in topology.hosts:
            if other is not host:
                counts = [len({*topology.relayed_by(rank)} & {*other}) for rank in host]
                assert sum(counts) == len(other)
                assert max(counts) - min(counts) <= 1


@given(LAYOUTS_OF_ANY, st.data())
@anything
def test_every_contribution_reaches_its_owner_once(topology: Topology, data: st.DataObject) -> None:
    everybody = range(topology.world_size)
    fate = [data.draw(st.sampled_from(["lent", "sent", "owns nothing"])) for _ in everybody]
    lent = {rank for rank in everybody if fate[rank] == "lent"}
    sent = {rank for rank in everybody if fate[rank] == "sent"}
    routes_of = [ReduceRoutes.of(rank, topology, lent, sent) for rank in everybody]
    for owner, routes in enumerate(routes_of):
        counted: Counter[int] = Counter()
        contributors = {owner, *routes.senders, *(routes.sources if owner in lent else ())}
        for each in contributors if owner in lent | sent else ():
            is_sum = owner in lent and each not in topology.host_of(owner)
            counted.update(topology.host_of(each) if is_sum else [each])
        assert counted == (Counter(everybody) if owner in lent | sent else Counter())
        # Whoever is waited for sends, and nobody else does.
        assert set(routes.senders) == {
            rank for rank in everybody if owner in routes_of[rank].direct + routes_of[rank].relayed
        }
        if owner in lent:
            assert len(routes.senders) == len(topology.hosts) - 1
            beside = set(topology.local_peers(owner))
            assert beside <= set(routes.sources)
    for rank, routes in enumerate(routes_of):
        assert set(routes.sources) == {
            other for other in everybody if rank in routes_of[other].read_by
        }
        for reader, owners in routes.read_by.items():
            mine = {reader} & lent
            assert set(owners) == mine | set(routes_of[reader].relayed)
        assert not routes.relayed or routes.sources


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
    topology = Topology.by_name([host for host, size in enumerate(sizes) for _ in range(size)])
    wire, slot = DTYPES[on_wire], DTYPES[in_slot]
    owner, mine = topology.hosts[1][0], topology.hosts[0]
    torch.manual_seed(len(mine))
    plan = make_plan([ParamSpec(0, 1000, "float32", 4)], topology.world_size)
    layout = BucketLayout(plan, 0)
    staging = [torch.randn(1000).to(wire) for _ in mine]
    start, stop = layout.range(owner)
    me = topology.relay(owner, mine)
    routes = ReduceRoutes.of(me, topology, set(range(topology.world_size)), set())
    if len(mine) == 1:  # what is sent on is the contribution itself
        assert not routes.relayed
        return
    summed_in = sum_dtype(wire, slot)
    own, is_wide = staging[mine.index(me)], summed_in != wire
    total = torch.full((stop - start,), torch.nan, dtype=summed_in) if is_wide else own[start:stop]
    kept = [each.clone() for each in staging]
    add_up([layout.part(each, owner) for each in staging], total)
    assert total.nbytes <= len(mine) * (stop - start) * wire.itemsize
    narrower = {"bf16": 4, "f4": 8}[on_wire] < slot.itemsize
    assert summed_in == (
        torch.float32 if narrower else max(wire, slot, key=lambda dtype: dtype.itemsize)
    )
    expected = torch.zeros(stop - start, dtype=torch.promote_types(summed_in, torch.float32))
    for each in kept:
        expected += each[start:stop]
    assert torch.equal(total, expected.to(summed_in))
    for each, before in zip(staging, kept, strict=True):
        if each is not own or is_wide:  # in place of this rank's own, if it fits there
            assert torch.equal(each, before)
        assert torch.equal(each[:start], before[:start])
        assert torch.equal(each[stop:], before[stop:])
