"""The full state dict: what the plain class writes, on one rank, and back.

Most tests hold *twins*: the plain class on parameters of its own, and ours on equal ones. Both get
the same gradients, the average of data that differ on every rank. What ours consolidates must be
what the plain one writes, to the order of the keys.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from inside import params_of, traffic_of
from models import assert_equal_params, give_equal_gradients, params_of_shapes
from states import (
    ALL_SIZES,
    ELEMENTWISE,
    SMALL_BUCKETS,
    WHOLE,
    LiveBytes,
    Twins,
    adam,
    assert_same,
    assorted,
    class_named,
    consolidated_everywhere,
    in_order,
    matrices,
    needs_muon,
    one_group,
    own_tensors,
    parameter,
    set_gradients,
    small_parcels,
    tensors_in,
    two_groups,
)
from torch.optim import Adam, Optimizer

from onecopy import ZeroRedundancyOptimizer

# ------------------------------------------------------------------------------- who has it


@distributed(*ALL_SIZES)
def test_only_the_rank_that_asked_has_the_state_dict(world: World) -> None:
    twins = adam(world)
    twins.step(2)
    with pytest.raises(RuntimeError, match=rf"rank {world.rank}\b.*consolidate_state_dict"):
        twins.opt.state_dict()
    for to in range(world.size):
        twins.step()
        twins.opt.consolidate_state_dict(to=to)
        if world.rank == to:
            assert_same(twins.opt.state_dict(), twins.plain.state_dict())
        else:
            reason = rf"rank {world.rank}\b.*consolidated to rank {to}"
            with pytest.raises(RuntimeError, match=reason):
                twins.opt.state_dict()
    twins.step()
    twins.opt.consolidate_state_dict()
    if world.rank == 0:
        assert_same(twins.opt.state_dict(), twins.plain.state_dict())
    twins.step()


@distributed(*ALL_SIZES)
def test_before_the_first_step_every_rank_has_the_dict(world: World) -> None:
    twins = Twins(assorted, two_groups, torch.optim.AdamW)
    assert_same(twins.opt.state_dict(), twins.plain.state_dict())
    for _ in range(2):
        twins.opt.load_state_dict(twins.opt.state_dict())  # as trainers do, to move it to a device
        assert_same(twins.opt.state_dict(), twins.plain.state_dict())
    twins.step(2)
    with pytest.raises(RuntimeError, match="has stepped"):
        twins.opt.state_dict()
    assert_same(consolidated_everywhere(twins.opt), twins.plain.state_dict())
    new = Twins(assorted, two_groups, torch.optim.AdamW)
    new.opt.load_state_dict(twins.plain.state_dict())
    with pytest.raises(RuntimeError, match="a state dict was loaded"):
        new.opt.state_dict()


@distributed(*ALL_SIZES)
def test_a_new_optimizer_with_another_group_loads_its_own_empty_state(
    world: World, tmp_path: Path
) -> None:
    twins = Twins(assorted, two_groups, torch.optim.AdamW)
    extra = [[parameter((5,), 3)] for _ in range(2)]
    for opt, params in zip((twins.opt, twins.plain), extra, strict=True):
        opt.add_param_group({"params": params, "lr": 0.5})
    expected = copy.deepcopy(twins.plain.state_dict())
    assert_same(twins.opt.state_dict(), expected)
    twins.opt.load_state_dict(twins.opt.state_dict())
    assert_same(twins.opt.state_dict(), expected)
    twins.opt.save(tmp_path / "empty")
    twins.opt.load(tmp_path / "empty")
    assert_same(twins.opt.state_dict(), expected)
    twins.step(2)
    twins.opt.save(tmp_path / "trained")
    twins.opt.load_state_dict(expected)  # to a trained one this may be news to some ranks only
    with pytest.raises(RuntimeError, match="a state dict was loaded"):
        twins.opt.state_dict()
    new = Twins(assorted, two_groups, torch.optim.AdamW)
    new.opt.add_param_group({"params": [parameter((5,), 3)]})
    new.opt.load(tmp_path / "trained")
    with pytest.raises(RuntimeError, match="a state dict was loaded"):
        new.opt.state_dict()


@distributed(1, 2, 3)
def test_a_class_that_makes_state_at_once_has_no_dict_before_it_is_consolidated(
    world: World,
) -> None:
    opt = ZeroRedundancyOptimizer([parameter((1,), 0)], torch.optim.Adagrad)  # on one rank only
    with pytest.raises(RuntimeError, match=rf"rank {world.rank}\b.*consolidate_state_dict"):
        opt.state_dict()


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("to", [-1, 4, "0", 1.0, None])
def test_a_target_that_is_no_rank_is_refused_everywhere(world: World, to: Any) -> None:
    twins = adam(world).step()
    with pytest.raises(ValueError, match=rf"0 to {world.size - 1}.*{re.escape(repr(to))}"):
        twins.opt.consolidate_state_dict(to)
    with pytest.raises(RuntimeError):
        twins.opt.state_dict()
    twins.assert_equal_dicts()  # nothing was left on the wire
    twins.step()


@distributed(2, 3, 4)
def test_ranks_that_name_different_targets_all_raise_the_same_error(world: World) -> None:
    twins = adam(world).step()
    with pytest.raises(ValueError, match="disagree") as caught:
        twins.opt.consolidate_state_dict(to=1 if world.rank == 1 else 0)
    texts: list[Any] = [None] * world.size
    dist.all_gather_object(texts, str(caught.value))
    assert set(texts) == {texts[0]}
    assert "rank 1: to rank 1" in texts[0]
    twins.assert_equal_dicts()
    twins.step()


@distributed(2, 3, 4, pg_timeout=10)
def test_a_wrong_target_on_one_rank_raises_on_all_of_them(world: World) -> None:
    twins = adam(world).step()
    with pytest.raises(ValueError, match=r"99"):
        twins.opt.consolidate_state_dict(to=99 if world.rank == 1 else 0)
    twins.assert_equal_dicts()


@distributed(2, 3, 4)
def test_ranks_of_a_subgroup_are_counted_within_it(world: World) -> None:
    members = list(range(1, world.size))
    group = dist.new_group(members)
    if world.rank == 0:
        return
    opt = ZeroRedundancyOptimizer(
        matrices(), torch.optim.Adam, group, bucket_mb=SMALL_BUCKETS, lr=0.01
    )
    reference = matrices()
    plain = torch.optim.Adam(reference, lr=0.01)
    for params in (reference, params_of(opt)):
        for number, param in enumerate(params):
            param.grad = torch.full_like(param, number + 1.0)
    plain.step()
    opt.step()
    last = len(members) - 1
    opt.consolidate_state_dict(to=last)
    if world.rank == members[last]:
        assert_same(opt.state_dict(), plain.state_dict())
    else:
        with pytest.raises(RuntimeError, match=rf"rank {world.rank - 1}\b"):
            opt.state_dict()
    with pytest.raises(ValueError, match="0 to"):
        opt.consolidate_state_dict(to=len(members))


# ------------------------------------------------------------------------------- equal to plain


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_dict_of_an_elementwise_class_is_the_plain_one(world: World, name: str) -> None:
    twins = Twins(assorted, two_groups, class_named(name), **ELEMENTWISE[name])
    twins.assert_equal_dicts()  # before the first step
    twins.step(1, unused=[4])
    twins.assert_equal_dicts(to=world.size - 1)
    twins.step(2, unused=[4])
    twins.assert_equal_dicts()


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("name", WHOLE)
def test_the_dict_of_a_class_that_needs_whole_tensors_is_the_plain_one(
    world: World, name: str
) -> None:
    twins = Twins(matrices, two_groups, class_named(name), **WHOLE[name])
    twins.assert_equal_dicts()
    twins.step(2, unused=[1])
    twins.assert_equal_dicts(to=world.size - 1)


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("partition", ["elementwise", "whole"])
@pytest.mark.parametrize("bucket_view", [False, True])
def test_no_way_of_sharding_shows_in_the_dict(
    world: World, partition: str, bucket_view: bool
) -> None:
    ours = {"partition": partition, "parameters_as_bucket_view": bucket_view}
    twins = Twins(assorted, two_groups, torch.optim.AdamW, ours, lr=0.01).step(2)
    twins.assert_equal_dicts()


@distributed(*ALL_SIZES)
def test_the_dict_of_sparse_adam_is_the_plain_one(world: World) -> None:
    twins = Twins(lambda: matrices()[:3], one_group, torch.optim.SparseAdam, lr=0.01)
    for step in range(3):
        set_gradients([twins.plain_params, twins.params], step)
        for param in (*twins.plain_params, *twins.params):
            rows = torch.arange(0, param.shape[0], step + 1)
            param.grad = torch.sparse_coo_tensor(
                rows[None], param.grad[rows], param.shape, check_invariants=True
            )
        twins.plain.step()
        twins.opt.step()
    twins.assert_equal_parameters()
    twins.assert_equal_dicts()


@needs_muon
@distributed(*ALL_SIZES)
def test_muon_and_adamw_in_one_object_write_what_each_would_write_alone(world: World) -> None:
    vectors = [parameter((n,), 20 + n) for n in (5, 40, 1)]
    plain_vectors = copy.deepcopy(vectors)
    weights, plain_weights = matrices(), matrices()
    opt = ZeroRedundancyOptimizer(
        [
            {"params": vectors[:2]},
            {"params": weights, "optimizer_class": torch.optim.Muon, "lr": 0.02},
            {"params": vectors[2:], "lr": 0.5},
        ],
        torch.optim.AdamW,
        bucket_mb=SMALL_BUCKETS,
        lr=0.01,
    )
    adamw = torch.optim.AdamW(
        [{"params": plain_vectors[:2]}, {"params": plain_vectors[2:], "lr": 0.5}], lr=0.01
    )
    muon = torch.optim.Muon([{"params": plain_weights}], lr=0.02)
    for step in range(2):
        set_gradients([vectors + weights, plain_vectors + plain_weights], step)
        for each in (opt, adamw, muon):
            each.step()
    full = consolidated_everywhere(opt)
    vectors_dict, weights_dict = adamw.state_dict(), muon.state_dict()
    first, last = vectors_dict["param_groups"]
    (middle,) = weights_dict["param_groups"]
    expected = {
        "state": {
            **{i: vectors_dict["state"][i] for i in (0, 1)},
            **{2 + i: state for i, state in weights_dict["state"].items()},
            7: vectors_dict["state"][2],
        },
        "param_groups": [
            first,
            {**middle, "params": [2, 3, 4, 5, 6]},
            {**last, "params": [7]},
        ],
    }
    assert_same(full, expected, ordered=False)
    assert list(full["state"]) == list(range(8))
    assert "optimizer_class" not in full["param_groups"][1]


@distributed(*ALL_SIZES)
def test_neither_class_nor_partition_of_a_group_enter_the_dict(world: World) -> None:
    params, plain_params = matrices(), matrices()
    own = {"optimizer_class": torch.optim.SGD, "partition": "whole"}
    opt = ZeroRedundancyOptimizer(
        [{"params": params, **own, "momentum": 0.9, "lr": 0.1}], torch.optim.SGD, lr=0.3
    )
    plain = torch.optim.SGD([{"params": plain_params, "momentum": 0.9, "lr": 0.1}], lr=0.3)
    set_gradients([params, plain_params], 1)
    opt.step()
    plain.step()
    assert_same(consolidated_everywhere(opt), plain.state_dict())


@distributed(*ALL_SIZES)
def test_names_are_written_as_the_plain_class_writes_them(world: World) -> None:
    def named(params: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        return [(f"layer{i}.weight", param) for i, param in enumerate(params)]

    def named_groups(params: list[torch.Tensor]) -> list[dict[str, Any]]:
        pairs = named(params)
        return [{"params": pairs[:2], "lr": 0.5}, {"params": pairs[2:]}]

    for groups in (named, named_groups):
        twins = Twins(matrices, groups, torch.optim.AdamW, lr=0.01).step(2)
        twins.assert_equal_dicts()
        assert "param_names" in twins.consolidated()["param_groups"][0]


@distributed(*ALL_SIZES)
def test_frozen_parameters_have_no_state_until_they_are_trained(world: World) -> None:
    def partly_frozen() -> list[torch.Tensor]:
        params = assorted()
        for i in (0, 3, 5):
            params[i].requires_grad_(False)
        return params

    twins = Twins(partly_frozen, two_groups, torch.optim.Adam, lr=0.01).step(2)
    twins.assert_equal_dicts()
    assert len(twins.consolidated()["state"]) == len(twins.params) - 3
    for params in (twins.plain_params, twins.params):
        params[3].requires_grad_(True)
        params[4].requires_grad_(False)
    twins.step(2)
    assert_same(twins.consolidated(), in_order(twins.plain.state_dict()))


@distributed(*ALL_SIZES)
def test_a_class_that_makes_state_at_once_has_it_for_frozen_parameters_too(world: World) -> None:
    """The plain Adagrad cannot step a parameter whose state is missing from the dict."""

    def partly_frozen() -> list[torch.Tensor]:
        params = matrices()
        params[1].requires_grad_(False)
        return params

    twins = Twins(partly_frozen, one_group, torch.optim.Adagrad, lr=0.1)
    twins.step(2)
    twins.assert_equal_dicts()


@distributed(*ALL_SIZES)
def test_tied_weights_are_written_once(world: World) -> None:
    def tied() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.ReLU(), torch.nn.Linear(9, 9))
        model[2].weight = model[0].weight
        return list(model.parameters())

    twins = Twins(tied, one_group, torch.optim.AdamW, lr=0.01).step(2)
    assert len(twins.params) == 3
    twins.assert_equal_dicts()


@distributed(*ALL_SIZES)
def test_a_parameter_listed_twice_has_the_number_that_torch_gives_it(world: World) -> None:
    def doubled(params: list[torch.Tensor]) -> list[dict[str, Any]]:
        return [{"params": [*params[:2], params[0]]}, {"params": params[2:]}]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, and accepts
        twins = Twins(matrices, doubled, torch.optim.Adam, lr=0.01).step(2)
        full = twins.consolidated()
        assert len(full["param_groups"][0]["params"]) == 3
        assert len(full["state"]) == 5
        assert_same(full, in_order(twins.plain.state_dict()))
        twins.opt.load_state_dict(full)
        twins.step(2)
        assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)


@distributed(*ALL_SIZES)
def test_more_ranks_than_elements_is_no_difficulty(world: World) -> None:
    def tiny() -> list[torch.Tensor]:
        return [parameter((2,), 1), parameter((), 2)]

    twins = Twins(tiny, one_group, torch.optim.Adam, lr=0.01).step(2)
    twins.assert_equal_dicts(to=world.size - 1)
    twins.opt.load_state_dict(twins.consolidated())
    twins.step().assert_equal_dicts()


@distributed(*ALL_SIZES)
def test_momentum_that_sgd_does_not_keep_is_none(world: World) -> None:
    twins = Twins(matrices, one_group, torch.optim.SGD, lr=0.1).step()
    full = twins.consolidated()
    assert_same(full, twins.plain.state_dict())
    assert all(state == {"momentum_buffer": None} for state in full["state"].values())
    twins.opt.load_state_dict(full)
    twins.step()


@distributed(*ALL_SIZES)
def test_a_parameter_that_gets_its_first_gradient_late_has_its_own_step(world: World) -> None:
    twins = adam(world).step(2, unused=[2, 3])
    twins.assert_equal_dicts()
    twins.step(1, unused=[3])
    ours = twins.consolidated()
    assert_same(ours, in_order(twins.plain.state_dict()))
    assert {float(state["step"]) for state in ours["state"].values()} == {1.0, 3.0}


# ------------------------------------------------------------------------------- age


@distributed(*ALL_SIZES)
def test_w29_the_dict_is_a_copy_of_one_moment(world: World) -> None:
    twins = adam(world).step(2)
    full = twins.consolidated()
    expected = copy.deepcopy(twins.plain.state_dict())
    live = {t.untyped_storage().data_ptr() for t in own_tensors(twins.opt) if t.numel()}
    assert live.isdisjoint(t.untyped_storage().data_ptr() for t in tensors_in(full["state"]))
    twins.step(2)
    assert_same(full, expected)
    for tensor in tensors_in(full["state"]):
        tensor.fill_(1e6)  # the user's own now
    twins.step()
    twins.assert_equal_dicts()


@distributed(*ALL_SIZES)
def test_a_stale_dict_is_refused(world: World) -> None:
    twins = adam(world).step()
    again = r"consolidate_state_dict\(to=0\)"

    def expect_refusal(reason: str) -> None:
        if world.rank == 0:
            with pytest.raises(RuntimeError, match=f"rank 0.*{reason}.*{again}"):
                twins.opt.state_dict()

    full = twins.consolidated()
    twins.step()
    expect_refusal("stepped")
    twins.consolidated()
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    expect_refusal("loaded")
    twins.consolidated()
    twins.opt.state = dict(twins.opt.state)
    expect_refusal("replaced")
    twins.consolidated()
    for optimizer, params in ((twins.opt, twins.params), (twins.plain, twins.plain_params)):
        params.append(parameter((4, 4), 99))
        optimizer.add_param_group({"params": [params[-1]], "lr": 0.3})
    expect_refusal("added")
    twins.assert_equal_dicts()
    twins.step(1)
    twins.assert_equal_dicts()


@distributed(*ALL_SIZES)
def test_the_dict_may_be_read_again_until_the_next_step(world: World) -> None:
    twins = adam(world).step()
    twins.opt.consolidate_state_dict()
    if world.rank == 0:
        first = twins.opt.state_dict()
        first["state"].clear()
        first["param_groups"][0]["lr"] = 77.0
        second = twins.opt.state_dict()
        second["state"][0].clear()
        assert_same(twins.opt.state_dict(), twins.plain.state_dict())
    twins.step()


@distributed(*ALL_SIZES)
def test_a_scheduler_that_moves_after_consolidation_shows_in_the_dict(world: World) -> None:
    twins = adam(world)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for optimizer in (twins.plain, twins.opt)
    ]
    twins.step()
    twins.opt.consolidate_state_dict()
    before = twins.plain.param_groups[0]["lr"]
    for scheduler in schedulers:
        scheduler.step()
    if world.rank == 0:
        full = twins.opt.state_dict()
        assert full["param_groups"][0]["lr"] == before / 2
        assert_same(full, twins.plain.state_dict())
    twins.step()


@distributed(*ALL_SIZES)
def test_memory_is_released_at_the_next_step_once_the_user_has_dropped_the_dict(
    world: World,
) -> None:
    twins = adam(world).step()

    def references() -> list[weakref.ref[torch.Tensor]]:
        if world.rank != 0:
            return []
        return [weakref.ref(t) for t in tensors_in(twins.opt.state_dict()["state"])]

    twins.opt.consolidate_state_dict()
    seen = references()
    assert all(ref() is not None for ref in seen)  # held for the next `state_dict()`
    twins.step()
    assert all(ref() is None for ref in seen)
    twins.opt.consolidate_state_dict()
    seen = references()
    twins.opt.consolidate_state_dict()
    assert all(ref() is None for ref in seen)  # replaced by the new one


# ------------------------------------------------------------------------------- the wire


@contextlib.contextmanager
def pickling_forbidden() -> Iterator[mock.Mock]:
    forbidden = mock.Mock(side_effect=AssertionError("something was pickled"))
    c10d = dist.distributed_c10d
    with contextlib.ExitStack() as stack:
        for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
            stack.enter_context(mock.patch.object(pickle, name, forbidden))
        for name in ("save", "load"):
            stack.enter_context(mock.patch.object(torch, name, forbidden))
        for name in ("_pickler", "_unpickler"):
            if hasattr(c10d, name):
                stack.enter_context(mock.patch.object(c10d, name, forbidden))
        yield forbidden


@distributed(*ALL_SIZES)
def test_nothing_is_pickled_on_the_way(world: World) -> None:
    twins = Twins(assorted, two_groups, torch.optim.Adam, lr=0.01).step()
    with pickling_forbidden() as forbidden:
        twins.opt.consolidate_state_dict()
        full = twins.opt.state_dict() if world.rank == 0 else None
    assert not forbidden.called  # not even where the exception would have been caught
    if world.rank == 0:
        assert_same(full, twins.plain.state_dict())
    with pickling_forbidden(), pytest.raises(AssertionError, match="pickled"):
        dist.all_gather_object([None] * world.size, "this check does catch pickles")


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_what_is_saved_loads_with_weights_only(world: World, name: str) -> None:
    options = {**ELEMENTWISE, **WHOLE}[name]
    twins = Twins(matrices, two_groups, class_named(name), **options).step(2)
    saved = [b""]
    twins.opt.consolidate_state_dict()
    if world.rank == 0:
        file = io.BytesIO()
        torch.save(twins.opt.state_dict(), file)
        saved = [file.getvalue()]
    dist.broadcast_object_list(saved, src=0)
    loaded = torch.load(io.BytesIO(saved[0]), weights_only=True)
    assert_same(loaded, twins.plain.state_dict())
    twins.step(1)  # somewhere else, so that loading matters
    twins.opt.load_state_dict(loaded)
    twins.plain.load_state_dict(torch.load(io.BytesIO(saved[0]), weights_only=True))
    twins.step(2)
    assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)


def long_lists() -> list[torch.Tensor]:
    """About 100 kB: some large ones, and many small ones that are packed together."""
    return [parameter((113, 31), 1), parameter((7001,), 2)] + [
        parameter((37, 5), 10 + i) for i in range(40)
    ]


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("limits", [(2048, 3000, 700), (64, 64, 8), (900, 33, 900)])
@pytest.mark.parametrize("partition", ["elementwise", "whole"])
def test_a_state_larger_than_a_parcel_travels_in_many(
    world: World, limits: tuple[int, int, int], partition: str
) -> None:
    def some() -> list[torch.Tensor]:
        return assorted() + long_lists()[1:6]

    ours = {"partition": partition}
    twins = Twins(some, two_groups, torch.optim.AdamW, ours, lr=0.01).step()
    before = traffic_of(twins.opt).messages
    with small_parcels(*limits):
        twins.assert_equal_dicts(to=world.size - 1)
    if world.rank != world.size - 1:
        assert traffic_of(twins.opt).messages - before > 5


@distributed(2, 3, 4)
@pytest.mark.parametrize("partition", ["elementwise", "whole"])
def test_bystanders_allocate_at_most_one_parcel(world: World, partition: str) -> None:
    ours = {"partition": partition}
    twins = Twins(long_lists, one_group, torch.optim.AdamW, ours, lr=0.01).step()
    shard = sum(t.numel() * t.element_size() for t in own_tensors(twins.opt))
    assert shard > 25_000
    twins.opt.consolidate_state_dict()
    small_things = 1024  # lengths and digests
    with small_parcels(), LiveBytes() as memory:
        twins.opt.consolidate_state_dict()
    if world.rank != 0:
        assert memory.peak <= 3000 + small_things
    else:
        states = tensors_in(twins.plain.state_dict()["state"])
        full = sum(t.numel() * t.element_size() for t in states)
        assert memory.peak >= full  # it does see what is allocated


@distributed(2, 3, 4)
def test_the_target_holds_the_result_and_a_few_parcels(world: World) -> None:
    twins = Twins(long_lists, one_group, torch.optim.AdamW, lr=0.01).step()
    full = sum(t.numel() * t.element_size() for t in tensors_in(twins.plain.state_dict()["state"]))
    with small_parcels(), LiveBytes() as memory:
        twins.opt.consolidate_state_dict()
    if world.rank == 0:
        in_flight = 4 * 3000 * world.size
        steps_of_pieces = 4 * 64 * 200  # a few bytes for each, in storages of their own
        assert memory.peak <= full + in_flight + steps_of_pieces
        # What stays is the result, and nothing that was needed to make it.
        del twins.opt.state_dict()["state"]
        assert memory.now == full


@distributed(*ALL_SIZES)
def test_consolidating_again_does_not_hold_two_results(world: World) -> None:
    twins = Twins(long_lists, one_group, torch.optim.AdamW, lr=0.01).step()
    full = sum(t.numel() * t.element_size() for t in tensors_in(twins.plain.state_dict()["state"]))
    with small_parcels(), LiveBytes() as memory:
        twins.opt.consolidate_state_dict()
        first = memory.peak
        twins.opt.consolidate_state_dict()
    assert memory.peak < first + full / 2


# ------------------------------------------------------------------------------- odd states


class Hoarder(torch.optim.Optimizer):
    """Whole tensors, and state of every kind that a class may think of."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.fill(self.state[param], param)
                    change = param.grad.sum() * self.state[param]["rows"][:, None]
                    param.sub_(group["lr"] * change)

    def fill(self, state: dict[Any, Any], param: torch.Tensor) -> None:
        grad = param.grad
        if not state:
            state.update({"rows": torch.zeros(param.shape[0]), "count": 0, "history": []})
        state["count"] += 1
        state["rows"] += grad.sum(1)
        state["history"].append(float(grad.sum()))
        state["pair"] = (grad.mean(0), [grad.amax(), None, {"deep": grad[:1].clone(), 3: -1.5}])
        state["bfloat16"] = grad.to(torch.bfloat16)
        state["long"] = (grad * 1000).long()
        state["tiny"] = (grad * 10).to(torch.int8)
        state["mask"] = grad > 0
        state["complex"] = torch.complex(grad, -grad)
        state["double"] = grad.double()
        state["transposed"] = grad.t().contiguous().t()
        state["every other"] = grad.repeat(1, 2)[:, ::2]
        state["broadcast"] = grad[:, :1].expand(-1, 4)
        state["cube"] = grad.flatten()[:6].clone().view(1, 2, 3)
        state["empty"] = grad.new_empty(0, 4)
        state["flag"] = True
        state["nothing"] = None
        state["infinite"] = float("inf")
        state["large"] = 2**70
        state["word"] = 'a "quoted" \u00e9 \n line'
        state[17] = "keys may be numbers"
        state["nested"] = {"list": [1, [2, (3,)]], "empty": {}, "none": [], "pair": ()}


def big_enough() -> list[torch.Tensor]:
    return [parameter((4, 3), 1), parameter((2, 7), 2), parameter((9, 5), 3)]


@pytest.mark.smoke
@distributed(*ALL_SIZES)
@pytest.mark.parametrize("in_small_parcels", [False, True])
def test_state_of_any_shape_arrives_as_it_was(world: World, in_small_parcels: bool) -> None:
    ours = {"partition": "whole"}
    twins = Twins(big_enough, two_groups_of_lr, Hoarder, ours).step(2)
    with small_parcels(100, 50, 30) if in_small_parcels else contextlib.nullcontext():
        full = twins.consolidated(to=world.size - 1)
    theirs = copy.deepcopy(twins.plain.state_dict())
    for state in theirs["state"].values():  # gaps in memory do not travel
        state["every other"] = state["every other"].contiguous()
        state["broadcast"] = state["broadcast"].contiguous()
    assert_same(full, theirs)
    assert not any(t.requires_grad for t in tensors_in(full))
    file = io.BytesIO()
    torch.save(full, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), theirs)


def two_groups_of_lr(params: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]


@distributed(*ALL_SIZES)
def test_odd_state_loads_as_the_plain_class_loads_it(world: World) -> None:
    twins = Twins(big_enough, two_groups_of_lr, Hoarder, {"partition": "whole"}).step(2)
    full = twins.consolidated()
    for state in full["state"].values():
        del state["word"], state[17]  # torch's own load makes nonsense of strings,
        del state["complex"]  # and real numbers of complex ones, with a warning
    snapshot = copy.deepcopy(full)
    twins.step()
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    assert_same(full, snapshot)
    assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
    twins.step(2)
    assert_same(full, snapshot)  # `history` is appended to in a copy


class ViewHoarder(Hoarder):
    """Keeps views that share memory in unusual ways."""

    def fill(self, state: dict[Any, Any], param: torch.Tensor) -> None:
        grad = param.grad
        state["rows"] = grad.sum(1)
        state["conjugate"] = torch.complex(grad, grad * 2).conj()
        state["negative"] = torch.complex(grad, grad * 2).conj().imag
        state["shared"] = [grad, grad[1:]]
        state["tracked"] = torch.nn.Parameter(grad * 3)


@distributed(*ALL_SIZES)
def test_lazy_views_in_the_state_arrive_with_their_values(world: World) -> None:
    twins = Twins(big_enough, one_group, ViewHoarder, {"partition": "whole"}).step()
    full = twins.consolidated()
    for number, state in twins.plain.state_dict()["state"].items():
        ours = full["state"][number]
        assert torch.equal(ours["conjugate"].resolve_conj(), state["conjugate"].resolve_conj())
        assert torch.equal(ours["negative"].resolve_neg(), state["negative"].resolve_neg())
        assert torch.equal(ours["shared"][1], state["shared"][1])
        assert torch.equal(ours["tracked"], state["tracked"])


class Generators(Hoarder):
    """Keeps what cannot be written down, for one parameter only."""

    def fill(self, state: dict[Any, Any], param: torch.Tensor) -> None:
        state["rows"] = param.grad.sum(1)
        if param.shape == (2, 7):
            state["random"] = {"source": torch.Generator()}


@distributed(*ALL_SIZES)
def test_state_that_cannot_be_carried_is_named_on_all_ranks(world: World) -> None:
    params = big_enough()
    opt = ZeroRedundancyOptimizer(params, Generators, partition="whole")
    set_gradients([params], 1)
    opt.step()
    with pytest.raises(TypeError, match=r"parameter 1 .*Generator"):
        opt.consolidate_state_dict()
    with pytest.raises(RuntimeError, match=rf"rank {world.rank}\b"):
        opt.state_dict()
    for state in opt.state.values():
        state.pop("random", None)
    assert list(consolidated_everywhere(opt)["state"]) == [0, 1, 2]


class Counting(torch.optim.Optimizer):
    """Keeps a counter that belongs to no parameter, as some classes do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        self.state["common"] = {"count": self.state.get("common", {"count": 0})["count"] + 1}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    sum_ = self.state[param].setdefault("sum", torch.zeros_like(param))
                    sum_ += param.grad
                    param.sub_(group["lr"] / self.state["common"]["count"] * sum_)


@distributed(*ALL_SIZES)
def test_state_that_belongs_to_no_parameter_is_kept(world: World) -> None:
    twins = Twins(matrices, one_group, Counting).step(3)
    full = twins.consolidated()
    assert_same(full, twins.plain.state_dict(), ordered=False)
    fresh = Twins(matrices, one_group, Counting)
    fresh.opt.load_state_dict(full)
    fresh.plain.load_state_dict(copy.deepcopy(full))
    fresh.step(2)


# ------------------------------------------------------------------------------- hooks


@distributed(*ALL_SIZES)
def test_w25_state_dict_hooks_see_and_change_the_real_dict(world: World) -> None:
    twins = adam(world).step(2)
    calls: list[tuple[str, Any]] = []

    def before(optimizer: torch.optim.Optimizer) -> None:
        calls.append(("before", optimizer))
        optimizer.param_groups[0]["note"] = "from the hook"

    def after(optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> dict[str, Any]:
        calls.append(("after", optimizer))
        states = full["state"]
        assert len(states) == len(twins.params)
        first = {**states[0], "exp_avg": states[0]["exp_avg"] + 1}
        return {**full, "state": {**states, 0: first}, "extra": 5}

    for optimizer in (twins.plain, twins.opt):
        optimizer.register_state_dict_pre_hook(before)
        handle = optimizer.register_state_dict_post_hook(after)
        optimizer.register_state_dict_post_hook(lambda _, full: full.update(more=6))
    theirs = twins.plain.state_dict()
    calls.clear()
    twins.opt.consolidate_state_dict()
    if world.rank == 0:
        ours = twins.opt.state_dict()
        assert (ours["extra"], ours["more"]) == (5, 6)
        assert_same(ours, theirs)
        assert calls == [("before", twins.opt), ("after", twins.opt)]
        handle.remove()
        assert "extra" not in twins.opt.state_dict()
    twins.step()


@distributed(*ALL_SIZES)
def test_w25_load_hooks_change_the_live_state_and_not_the_callers_dict(world: World) -> None:
    twins = adam(world).step(2)
    full = twins.consolidated()
    snapshot = copy.deepcopy(full)
    seen = []

    def replace(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        seen.append(("replace", set(given) == {"state", "param_groups"}))
        changed = copy.deepcopy(given)
        for state in changed["state"].values():
            state["exp_avg"].fill_(7.0)
        changed["param_groups"][0]["lr"] = 0.25
        return changed

    def in_place(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
        given["param_groups"] = [{**g, "eps": 1e-3} for g in given["param_groups"]]

    for optimizer in (twins.plain, twins.opt):
        optimizer.register_load_state_dict_pre_hook(replace)
        optimizer.register_load_state_dict_pre_hook(in_place)
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("after", o)))
        optimizer.load_state_dict(full)
    assert seen == [
        ("replace", True),
        ("after", twins.plain),
        ("replace", True),
        ("after", twins.opt),
    ]
    assert_same(full, snapshot)
    for state in twins.opt.state.values():
        assert torch.equal(state["exp_avg"], torch.full_like(state["exp_avg"], 7.0))
    assert [g["lr"] for g in twins.opt.param_groups] == [0.25, 0.05]
    assert [g["eps"] for g in twins.opt.param_groups] == [1e-3, 1e-3]
    twins.step(2)


# ---------------------------------------- state that cannot be put together


@distributed(1, 2, 3)
def test_a_differentiable_optimizers_dict_is_refused_on_several_ranks(world: World) -> None:
    ours, plain = params_of_shapes((4, 4)), params_of_shapes((4, 4))
    b = ZeroRedundancyOptimizer(ours, Adam)
    saved = Adam(plain, differentiable=True).state_dict()
    if world.size == 1:
        b.load_state_dict(saved)
        assert b.param_groups[0]["differentiable"] is True
        return
    with pytest.raises(ValueError, match="differentiable=True cannot be sharded"):
        b.load_state_dict(saved)
    assert b.param_groups[0]["differentiable"] is False
    a = Adam(plain)
    give_equal_gradients(0, plain, ours)
    a.step()
    b.step()
    assert_equal_params(ours, plain)


class Memories(Optimizer):
    """Two momenta, kept in a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["both"] = [torch.zeros_like(param), torch.zeros_like(param)]
                slow, fast = state["both"]
                slow.mul_(0.9).add_(param.grad)
                fast.mul_(0.5).add_(param.grad)
                param.sub_(slow + fast, alpha=group["lr"])


@distributed(2, 3)
def test_cut_state_in_containers_is_refused_when_consolidating(world: World) -> None:
    ours = params_of_shapes((3, 4), (5,))
    b = ZeroRedundancyOptimizer(ours, Memories, partition="elementwise")
    give_equal_gradients(0, ours)
    b.step()
    with pytest.raises(TypeError, match='partition="whole"'):
        b.consolidate_state_dict()
    give_equal_gradients(1, ours)
    b.step()
    b.assert_replicas_equal()


@distributed(1, 2, 3)
def test_whole_state_in_containers_is_consolidated(world: World) -> None:
    plain, ours = params_of_shapes((3, 4), (5,)), params_of_shapes((3, 4), (5,))
    a, b = Memories(plain), ZeroRedundancyOptimizer(ours, Memories, partition="whole")
    give_equal_gradients(0, plain, ours)
    a.step()
    b.step()
    b.consolidate_state_dict()
    if world.rank == 0:
        for number, state in a.state_dict()["state"].items():
            found = b.state_dict()["state"][number]["both"]
            assert all(map(torch.equal, found, state["both"]))
