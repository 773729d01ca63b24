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
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onecopy import ZeroRedundancyOptimizer, parcels

ALL_SIZES = (1, 2, 3, 4)
SMALL_BUCKETS = 0.001  # MiB: about 260 float32, so that tiny models have many buckets

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "SGD foreach": {"lr": 0.1, "momentum": 0.9, "foreach": True},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "Adam fused": {"lr": 0.01, "fused": True},
    "AdamW": {"lr": 0.01},
    "AdamW foreach": {"lr": 0.01, "foreach": True, "amsgrad": True},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.5},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.1, "t0": 1.0},
}
WHOLE: dict[str, dict[str, Any]] = {"Adafactor": {"lr": 0.01}}
if hasattr(torch.optim, "Muon"):
    WHOLE["Muon"] = {"lr": 0.02}

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def class_named(name: str) -> type[torch.optim.Optimizer]:
    return getattr(torch.optim, name.split(maxsplit=1)[0])


# ------------------------------------------------------------------------------- the twins


def parameter(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, generator=source).to(dtype))


def matrices() -> list[torch.Tensor]:
    return [parameter(s, i) for i, s in enumerate([(12, 7), (5, 9), (30, 11), (3, 3), (1, 8)])]


def assorted() -> list[torch.Tensor]:
    """Everything that makes cutting hard: odd sizes, no elements, strides, dtypes."""
    params = matrices()
    image = torch.randn((4, 3, 3, 5), generator=torch.Generator().manual_seed(7))
    params.append(torch.nn.Parameter(image.to(memory_format=torch.channels_last)))
    params.append(torch.nn.Parameter(torch.randn(6, 10).t()))  # dense, but transposed
    params[-1].data.copy_(torch.arange(60.0).view(10, 6) / 30)
    params += [parameter((0, 3), 8), parameter((), 9), parameter((1,), 10), parameter((301,), 11)]
    params += [parameter((70, 3), 12, torch.bfloat16), parameter((13, 5), 13, torch.float64)]
    return params


class Twins:
    """The plain optimizer and ours, on equal parameters."""

    def __init__(
        self,
        make_params: Callable[[], list[torch.Tensor]],
        make_groups: Callable[[list[torch.Tensor]], Any],
        cls: type[torch.optim.Optimizer],
        ours: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.plain_params, self.params = make_params(), make_params()
        self.plain = cls(make_groups(self.plain_params), **copy.deepcopy(options))
        self.opt = ZeroRedundancyOptimizer(
            make_groups(self.params),
            cls,
            bucket_mb=SMALL_BUCKETS,
            **(ours or {}),
            **copy.deepcopy(options),
        )
        self.steps = 0

    def step(self, count: int = 1, unused: Sequence[int] = ()) -> Twins:
        for _ in range(count):
            self.steps += 1
            set_gradients([self.plain_params, self.params], self.steps, unused)
            self.plain.step()
            self.opt.step()
        self.assert_equal_parameters()
        return self

    def assert_equal_parameters(self) -> None:
        for number, (theirs, ours) in enumerate(zip(self.plain_params, self.params, strict=True)):
            assert torch.equal(theirs, ours), f"parameter {number} differs"

    def consolidated(self, to: int = 0) -> dict[str, Any]:
        """Ours, from rank `to` to everybody, so that all ranks can assert."""
        return consolidated_everywhere(self.opt, to)

    def assert_equal_dicts(self, to: int = 0) -> None:
        assert_same(self.consolidated(to), self.plain.state_dict())


def set_gradients(
    replicas: Sequence[Sequence[torch.Tensor]], step: int, unused: Sequence[int] = ()
) -> None:
    """The average of what the ranks made of their own data, the same for all replicas."""
    source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    sizes = [param.numel() for param in replicas[0]]
    average = torch.randn(sum(sizes), generator=source) / dist.get_world_size()
    dist.all_reduce(average)
    gradients = average.split(sizes)
    for number, params in enumerate(zip(*replicas, strict=True)):
        for param in params:
            used = number not in unused and param.requires_grad
            values = gradients[number].view(param.shape)
            param.grad = torch.empty_like(param).copy_(values).detach() if used else None


def consolidated_everywhere(opt: ZeroRedundancyOptimizer, to: int = 0) -> dict[str, Any]:
    opt.consolidate_state_dict(to)
    mine = opt.state_dict() if opt.rank == to else None
    boxes = [mine]
    dist.broadcast_object_list(boxes, src=to)
    return mine if opt.rank == to else boxes[0]


def assert_same(ours: Any, theirs: Any, path: str = "state_dict", ordered: bool = True) -> None:
    """Equal to the bit, the type, the stride and the order of keys."""
    assert type(ours) is type(theirs), f"{path}: {type(ours)} and {type(theirs)}"
    if isinstance(theirs, dict):
        keys, expected = list(ours), list(theirs)
        assert keys == expected if ordered else set(keys) == set(expected), path
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{path}[{key!r}]", ordered)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), path
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{path}[{i}]", ordered)
    elif isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.device, ours.requires_grad) == (
            theirs.dtype,
            theirs.shape,
            theirs.device,
            theirs.requires_grad,
        ), path
        assert meaningful_strides(ours) == meaningful_strides(theirs), f"{path}: strides"
        assert torch.equal(ours, theirs), f"{path}: values"
    else:
        assert ours == theirs, path


def in_order(state_dict: dict[str, Any]) -> dict[str, Any]:
    """States by number; the plain class lists them in the order of their first steps."""
    return {**state_dict, "state": dict(sorted(state_dict["state"].items()))}


def meaningful_strides(tensor: torch.Tensor) -> list[int]:
    """Those of dimensions with more than one element; the others do not matter to anybody."""
    if tensor.numel() == 0:
        return []
    return [n for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def one_group(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return params


def two_groups(params: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.05, "weight_decay": 0.1}]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def own_tensors(opt: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    return tensors_in([dict(state) for state in opt.state.values()])


def adam(world: World, **options: Any) -> Twins:
    return Twins(matrices, two_groups, torch.optim.Adam, **{"lr": 0.01, **options})


# ------------------------------------------------------------------------------- who has it


@distributed(*ALL_SIZES)
def test_only_the_rank_that_asked_has_the_state_dict(world: World) -> None:
    twins = adam(world)
    with pytest.raises(RuntimeError, match=rf"rank {world.rank}\b.*consolidate_state_dict"):
        twins.opt.state_dict()
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
    for params in (reference, opt._all_params):
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


class LiveBytes(TorchDispatchMode):
    """How much memory of tensors that were made inside is alive, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors_in([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made.append((StorageWeakRef(storage), storage.nbytes()))
                self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        self._made = [(storage, size) for storage, size in self._made if not storage.expired()]
        return sum(dict(self._made).values())


@contextlib.contextmanager
def small_parcels(packed: int = 2048, largest: int = 3000, own: int = 700) -> Iterator[None]:
    """Limits that cut even tiny states into many parcels, and elements in the middle."""
    with (
        mock.patch.object(parcels, "PACKED_BYTES", packed),
        mock.patch.object(parcels, "RANGE_BYTES", largest),
        mock.patch.object(parcels, "_WORTH_ITS_OWN_PARCEL", own),
    ):
        yield


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
    before = twins.opt._transport.traffic.messages
    with small_parcels(*limits):
        twins.assert_equal_dicts(to=world.size - 1)
    if world.rank != world.size - 1:
        assert twins.opt._transport.traffic.messages - before > 5


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


# ------------------------------------------------------------------------------- loading


def assert_untouched_by(twins: Twins, full: dict[str, Any]) -> None:
    """The caller's dict stays as it was, and shares no memory with the optimizer."""
    snapshot = copy.deepcopy(full)
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    assert_same(full, snapshot)
    live = {t.untyped_storage().data_ptr() for t in own_tensors(twins.opt) if t.numel()}
    given = {t.untyped_storage().data_ptr() for t in tensors_in(full) if t.numel()}
    assert live.isdisjoint(given)
    twins.step(2)
    assert_same(full, snapshot)
    for tensor in tensors_in(full):
        tensor.fill_(-3)
    full["param_groups"][0]["lr"] = 1e9
    full["param_groups"][0]["betas"] = None
    twins.step(1)


@distributed(*ALL_SIZES)
def test_w16_loading_neither_changes_nor_keeps_the_callers_dict(world: World) -> None:
    twins = Twins(assorted, two_groups, torch.optim.Adam, lr=0.01, amsgrad=True).step(2)
    full = twins.consolidated()
    again = copy.deepcopy(full)
    twins.step()
    assert_untouched_by(twins, full)
    # The same dict a second time, and still good for the plain class.
    twins.opt.load_state_dict(again)
    twins.opt.load_state_dict(again)
    twins.plain.load_state_dict(again)
    twins.step(2)


@distributed(*ALL_SIZES)
def test_a_learning_rate_in_a_tensor_is_copied_too(world: World) -> None:
    def groups(params: list[torch.Tensor]) -> list[dict[str, Any]]:
        return [{"params": params, "lr": torch.tensor(0.01)}]

    twins = Twins(matrices, groups, torch.optim.Adam, foreach=False).step(2)
    full = copy.deepcopy(twins.consolidated())
    assert_same(full, twins.plain.state_dict())
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    assert twins.opt.param_groups[0]["lr"] is not full["param_groups"][0]["lr"]
    full["param_groups"][0]["lr"].fill_(1e9)
    twins.step(2)


@distributed(*ALL_SIZES)
def test_a_dict_taken_from_this_optimizer_loads_into_it(world: World) -> None:
    """On the target, `state_dict()` hands out tensors that the optimizer itself may still hold."""
    twins = adam(world).step(2)
    for _ in range(2):
        full = twins.consolidated()
        twins.opt.load_state_dict(full)
        twins.plain.load_state_dict(copy.deepcopy(full))
        twins.step()


class Refusals:
    """Dicts that do not fit, and what must be raised."""

    @staticmethod
    def one_group_less(full: dict[str, Any]) -> Any:
        return {**full, "param_groups": full["param_groups"][:1]}

    @staticmethod
    def one_group_more(full: dict[str, Any]) -> Any:
        return {**full, "param_groups": [*full["param_groups"], full["param_groups"][0]]}

    @staticmethod
    def a_parameter_less(full: dict[str, Any]) -> Any:
        first, second = full["param_groups"]
        return {**full, "param_groups": [first, {**second, "params": second["params"][:-1]}]}

    @staticmethod
    def an_unknown_number(full: dict[str, Any]) -> Any:
        return {**full, "state": {**full["state"], 99: full["state"][0]}}

    @staticmethod
    def no_state(full: dict[str, Any]) -> Any:
        return {"param_groups": full["param_groups"]}

    @staticmethod
    def no_groups(full: dict[str, Any]) -> Any:
        return {"state": full["state"]}

    @staticmethod
    def a_group_without_params(full: dict[str, Any]) -> Any:
        first, second = full["param_groups"]
        return {**full, "param_groups": [first, {"lr": second["lr"]}]}

    @staticmethod
    def not_a_mapping(full: dict[str, Any]) -> Any:
        return [full]

    @staticmethod
    def nothing(_full: dict[str, Any]) -> Any:
        return None

    @staticmethod
    def state_that_is_no_mapping(full: dict[str, Any]) -> Any:
        return {**full, "state": 3}

    @staticmethod
    def an_entry_that_is_none(full: dict[str, Any]) -> Any:
        return {**full, "state": {**full["state"], 4: None}}  # as torch's own class leaves it


REFUSALS = {
    "one_group_less": ValueError,
    "one_group_more": ValueError,
    "a_parameter_less": ValueError,
    "an_unknown_number": IndexError,
    "no_state": KeyError,
    "no_groups": KeyError,
    "a_group_without_params": KeyError,
    "not_a_mapping": (TypeError, ValueError),
    "nothing": TypeError,
    "state_that_is_no_mapping": TypeError,
    "an_entry_that_is_none": TypeError,
}


def expect_refusal(twins: Twins, bad: Any, error: Any) -> None:
    """`bad` is refused on every rank, and afterwards all is as if it had never been given."""
    before = copy.deepcopy(twins.plain.state_dict())
    options = copy.deepcopy([{**g, "params": None} for g in twins.opt.param_groups])
    held = [(id(t), t.clone()) for t in own_tensors(twins.opt)]
    with pytest.raises(error):
        twins.opt.load_state_dict(bad)
    assert [{**g, "params": None} for g in twins.opt.param_groups] == options
    now = own_tensors(twins.opt)
    assert [id(t) for t in now] == [number for number, _ in held]
    assert all(torch.equal(t, kept) for t, (_, kept) in zip(now, held, strict=True))
    assert_same(twins.consolidated(), before)


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("name", REFUSALS)
def test_w16_a_refused_load_changes_nothing(world: World, name: str) -> None:
    twins = adam(world).step(2)
    full = copy.deepcopy(twins.consolidated())
    for tensor in tensors_in(full):
        tensor.fill_(50.0)
    full["param_groups"][0]["lr"] = 50.0
    bad = getattr(Refusals, name)(full)
    expect_refusal(twins, bad, REFUSALS[name])
    twins.step(2)


@distributed(2, 3, 4)
@pytest.mark.parametrize("which", [0, 2, 4])
def test_state_of_another_shape_is_refused_on_every_rank(world: World, which: int) -> None:
    """Also on ranks that own nothing of that parameter: else the ranks would part."""
    twins = adam(world).step(2)
    full = copy.deepcopy(twins.consolidated())
    full["state"][which]["exp_avg"] = torch.full((3, 4), 50.0)
    expect_refusal(twins, full, ValueError)
    twins.step(2)


@distributed(2, 3, 4)
def test_a_dict_of_another_class_is_refused_and_changes_nothing(world: World) -> None:
    factored = torch.optim.Adafactor(params := matrices(), lr=0.01)
    set_gradients([params], 1)
    factored.step()
    twins = Twins(matrices, one_group, torch.optim.SGD, lr=0.1, momentum=0.9).step(2)
    expect_refusal(twins, factored.state_dict(), ValueError)
    twins.step(2)


class Picky(torch.optim.SGD):
    """Refuses in its own `load_state_dict`, as third-party classes may."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if any(group["lr"] > 1 for group in self.param_groups):
            raise ArithmeticError("a learning rate above one")


@distributed(*ALL_SIZES)
def test_a_load_that_the_inner_class_refuses_changes_nothing(world: World) -> None:
    params, plain_params = matrices(), matrices()
    groups = [{"params": p} for p in (params[:2], params[2:])]
    groups[1].update(optimizer_class=Picky, lr=0.1, momentum=0.5, partition="elementwise")
    opt = ZeroRedundancyOptimizer(
        groups, torch.optim.SGD, lr=0.1, momentum=0.9, bucket_mb=SMALL_BUCKETS
    )
    plain = torch.optim.SGD(
        [{"params": plain_params[:2]}, {"params": plain_params[2:], "momentum": 0.5}],
        lr=0.1,
        momentum=0.9,
    )
    for step in range(4):
        set_gradients([params, plain_params], step)
        opt.step()
        plain.step()
        full = copy.deepcopy(consolidated_everywhere(opt))
        assert_same(full["state"], plain.state_dict()["state"])
        for group in full["param_groups"]:
            group["lr"] = 5.0
        for tensor in tensors_in(full):
            tensor.fill_(50.0)
        with pytest.raises(ArithmeticError):
            opt.load_state_dict(full)
        assert [group["lr"] for group in opt.param_groups] == [0.1, 0.1]
    for ours, theirs in zip(params, plain_params, strict=True):
        assert torch.equal(ours, theirs)


@distributed(*ALL_SIZES)
def test_w17_loading_an_empty_state_clears_momentum(world: World) -> None:
    twins = Twins(matrices, two_groups, torch.optim.SGD, lr=0.1, momentum=0.9).step(3)
    empty = {"state": {}, "param_groups": copy.deepcopy(twins.plain.state_dict()["param_groups"])}
    twins.opt.load_state_dict(empty)
    twins.plain.load_state_dict(copy.deepcopy(empty))
    assert len(twins.opt.state) == 0
    assert twins.consolidated()["state"] == {}
    twins.step(2).assert_equal_dicts()


@distributed(*ALL_SIZES)
def test_loading_a_part_of_the_state_leaves_nothing_old(world: World) -> None:
    twins = Twins(matrices, two_groups, torch.optim.SGD, lr=0.1, momentum=0.9).step(3)
    part = copy.deepcopy(twins.consolidated())
    for number in (0, 3):
        del part["state"][number]
    twins.step()
    twins.opt.load_state_dict(part)
    twins.plain.load_state_dict(copy.deepcopy(part))
    assert list(twins.consolidated()["state"]) == [1, 2, 4]
    twins.step(2)


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize("fused", [False, True])
def test_w17_loaded_state_is_cast_as_the_plain_class_casts_it(
    world: World, source: torch.dtype, target: torch.dtype, fused: bool
) -> None:
    def made_of(dtype: torch.dtype) -> Callable[[], list[torch.Tensor]]:
        return lambda: [parameter((31, 9), 1, dtype), parameter((77,), 2, dtype)]

    full = Twins(made_of(source), one_group, torch.optim.Adam, lr=0.01).step(2).consolidated()
    for state in full["state"].values():
        state["step"] = state["step"].double()
    full["param_groups"][0]["fused"] = fused
    twins = Twins(made_of(target), one_group, torch.optim.Adam, lr=0.01, fused=fused).step(1)
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    for state in twins.opt.state.values():
        assert state["exp_avg"].dtype == target
        assert state["step"].dtype == (torch.float32 if fused else torch.float64)
    assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
    if not fused or twins.opt.state:
        twins.step(2)


@distributed(*ALL_SIZES)
def test_w31_scalar_state_follows_the_rules_of_the_class(world: World) -> None:
    """Not one rule for everything of dimension zero: a `step` is kept, anything else is cast."""
    twins = Twins(lambda: [parameter((31, 9), 1)], one_group, torch.optim.NAdam, lr=0.01).step(2)
    full = twins.consolidated()
    for state in full["state"].values():
        state["step"] = state["step"].double()
        state["mu_product"] = state["mu_product"].double()
    for flag, step_dtype in (("fused", torch.float32), ("capturable", torch.float32), (None, None)):
        given = copy.deepcopy(full)
        if flag:
            given["param_groups"][0][flag] = True
        twins.opt.load_state_dict(given)
        twins.plain.load_state_dict(copy.deepcopy(given))
        for state in twins.opt.state.values():
            assert state["step"].dtype == (step_dtype or torch.float64)
            assert state["mu_product"].dtype == torch.float32
            assert state["step"].dim() == state["mu_product"].dim() == 0
        assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
    twins.step(2)


@distributed(*ALL_SIZES)
def test_w30_after_loading_there_is_one_copy_of_the_shard(world: World) -> None:
    twins = Twins(assorted, two_groups, torch.optim.Adam, lr=0.01).step(2)
    full = twins.consolidated()
    for state in full["state"].values():  # a copy has to be made: a stand-in for cpu to gpu
        state.update({k: v.double() for k, v in state.items() if k != "step"})
    with LiveBytes() as memory:
        twins.opt.load_state_dict(full)
    owned = sum(t.untyped_storage().nbytes() for t in own_tensors(twins.opt))
    needed = sum(t.numel() * t.element_size() for t in own_tensors(twins.opt))
    assert memory.now == owned == needed
    assert {id(t) for t in twins.opt.state} == {id(t) for t in twins.opt.optim.state}
    for tensor, state in twins.opt.optim.state.items():
        assert twins.opt.state[tensor] is state


@distributed(*ALL_SIZES)
def test_flags_of_the_implementation_are_loaded(world: World) -> None:
    full = Twins(matrices, one_group, torch.optim.Adam, lr=0.01).step(2).consolidated()
    for flags in ({"foreach": True}, {"foreach": False}):
        given = copy.deepcopy(full)
        given["param_groups"][0].update(flags, lr=0.5, betas=(0.5, 0.6))
        twins = Twins(matrices, one_group, torch.optim.Adam, lr=0.01)
        twins.opt.load_state_dict(given)
        twins.plain.load_state_dict(copy.deepcopy(given))
        for group in (*twins.opt.param_groups, *twins.opt.optim.param_groups):
            assert {key: group[key] for key in flags} == flags
            assert (group["lr"], group["betas"]) == (0.5, (0.5, 0.6))
        twins.step(2)
        assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
    for flag in ("capturable", "fused"):
        given = copy.deepcopy(full)
        given["param_groups"][0][flag] = True
        twins.opt.load_state_dict(given)
        assert twins.opt.param_groups[0][flag] is True
        assert twins.opt.optim.param_groups[0][flag] is True


@pytest.mark.parametrize("bucket_view", [False, True])
@distributed(*ALL_SIZES)
def test_fused_from_a_loaded_dict_gives_the_same_bits(world: World, bucket_view: bool) -> None:
    full = Twins(matrices, one_group, torch.optim.Adam, lr=0.01, fused=True).step(2).consolidated()
    full["param_groups"][0].update(lr=0.5, betas=(0.5, 0.6))
    twins = Twins(
        matrices, one_group, torch.optim.Adam, {"parameters_as_bucket_view": bucket_view}, lr=0.01
    ).step(3)
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    twins.step(4)
    assert twins.opt.optim.param_groups[0]["fused"] is True
    assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
    twins.opt.assert_replicas_equal()


class RefusingAdam(torch.optim.Adam):
    """Loads nothing that is fused, and says so late."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.param_groups[0]["fused"]:
            raise ValueError("not fused")


@distributed(2, 3)
def test_a_refused_load_that_turns_fused_on_changes_nothing(world: World) -> None:
    twins = Twins(matrices, one_group, RefusingAdam, lr=0.01).step(2)
    bad = copy.deepcopy(twins.consolidated())
    for tensor in tensors_in(bad):
        tensor.fill_(50.0)
    bad["param_groups"][0].update(fused=True, lr=50.0)
    expect_refusal(twins, bad, ValueError)
    twins.step(2)


@distributed(*ALL_SIZES)
def test_fused_switched_on_by_hand_is_refused_where_tensors_are_cut(world: World) -> None:
    twins = Twins(matrices, one_group, torch.optim.Adam, lr=0.01).step(2)
    for optimizer in (twins.plain, twins.opt):
        optimizer.param_groups[0]["fused"] = True
    if world.size == 1:
        twins.step(2)
        return
    with pytest.raises(RuntimeError, match="fused is on"):
        twins.opt.step()
    for optimizer in (twins.plain, twins.opt):
        optimizer.param_groups[0]["fused"] = None
    twins.step(2)


@distributed(*ALL_SIZES)
def test_options_that_the_class_does_not_know_come_back(world: World) -> None:
    twins = adam(world)
    for optimizer in (twins.plain, twins.opt):
        optimizer.param_groups[0]["mine"] = {"a": [1, 2]}
        optimizer.param_groups[1]["initial_lr"] = 0.7
    twins.step()
    full = copy.deepcopy(twins.consolidated())
    assert_same(full, twins.plain.state_dict(), ordered=False)
    fresh = adam(world)
    for optimizer in (fresh.plain, fresh.opt):
        optimizer.param_groups[0]["gone"] = 1
        optimizer.load_state_dict(copy.deepcopy(full))
    assert fresh.opt.param_groups[0]["mine"] == {"a": [1, 2]}
    assert "gone" not in fresh.opt.param_groups[0]
    fresh.step()
    assert_same(fresh.consolidated(), fresh.plain.state_dict(), ordered=False)


@distributed(*ALL_SIZES)
def test_names_are_loaded_as_the_plain_class_loads_them(world: World) -> None:
    def named(params: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        return [(f"layer{i}", param) for i, param in enumerate(params)]

    with_names = Twins(matrices, named, torch.optim.Adam, lr=0.01).step()
    without = Twins(matrices, one_group, torch.optim.Adam, lr=0.01).step()
    other = copy.deepcopy(with_names.consolidated())
    other["param_groups"][0]["param_names"] = [f"other{i}" for i in range(len(matrices()))]
    for twins, full in (
        (with_names, without.consolidated()),
        (without, other),
        (with_names, other),
    ):
        twins.opt.load_state_dict(full)
        twins.plain.load_state_dict(copy.deepcopy(full))
        assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
        twins.step()


@distributed(*ALL_SIZES)
def test_saved_numbers_need_not_be_those_of_this_optimizer(world: World) -> None:
    """As in torch, parameters are matched by their position in the groups."""
    twins = adam(world).step(2)
    full = twins.consolidated()
    renumbered = {
        "state": {100 - number: state for number, state in full["state"].items()},
        "param_groups": [
            {**group, "params": [100 - number for number in group["params"]]}
            for group in full["param_groups"]
        ],
    }
    twins.step()
    twins.opt.load_state_dict(renumbered)
    twins.plain.load_state_dict(copy.deepcopy(full))
    twins.assert_equal_parameters()
    assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)


@distributed(*ALL_SIZES)
def test_state_of_other_strides_is_matched_by_element(world: World) -> None:
    """A contiguous checkpoint of a channels_last model, and the other way round."""

    def contiguous() -> list[torch.Tensor]:
        return [torch.nn.Parameter(p.detach().contiguous()) for p in assorted()]

    for source, target in ((contiguous, assorted), (assorted, contiguous)):
        full = Twins(source, two_groups, torch.optim.Adam, lr=0.01).step(2).consolidated()
        twins = Twins(target, two_groups, torch.optim.Adam, lr=0.01)
        twins.opt.load_state_dict(full)
        twins.plain.load_state_dict(copy.deepcopy(full))
        twins.step(2)


@distributed(*ALL_SIZES)
def test_state_of_a_parameter_that_is_frozen_now_is_not_lost(world: World) -> None:
    full = adam(world).step(2).consolidated()
    twins = adam(world)
    for params in (twins.plain_params, twins.params):
        params[0].requires_grad_(False)
    frozen = Twins(lambda: frozen_first(matrices()), two_groups, torch.optim.Adam, lr=0.01)
    for each in (twins, frozen):
        each.opt.load_state_dict(full)
        each.plain.load_state_dict(copy.deepcopy(full))
        each.step()
        assert list(each.consolidated()["state"]) == [0, 1, 2, 3, 4]
        for params in (each.plain_params, each.params):
            params[0].requires_grad_(True)
        each.step(2)
        assert_same(each.consolidated(), each.plain.state_dict(), ordered=False)


def frozen_first(params: list[torch.Tensor]) -> list[torch.Tensor]:
    params[0].requires_grad_(False)
    return params


@distributed(*ALL_SIZES)
def test_w23_there_is_a_state_before_the_first_step(world: World) -> None:
    for name, options in {**ELEMENTWISE, **WHOLE}.items():
        twins = Twins(matrices, two_groups, class_named(name), **options)
        for to in range(world.size):
            twins.opt.consolidate_state_dict(to)
            if world.rank == to:
                assert_same(twins.opt.state_dict(), twins.plain.state_dict())
                torch.save(twins.opt.state_dict(), io.BytesIO())
        fresh = twins.consolidated()
        twins.step(1)
        twins.opt.load_state_dict(fresh)
        twins.plain.load_state_dict(copy.deepcopy(fresh))
        twins.step(2)


@distributed(*ALL_SIZES)
def test_w23_what_each_rank_took_in_its_turn_stays_with_it(world: World) -> None:
    twins = adam(world).step()
    expected = copy.deepcopy(twins.plain.state_dict())
    mine = None
    for to in range(world.size):
        twins.opt.consolidate_state_dict(to)
        if world.rank == to:
            mine = twins.opt.state_dict()
    assert_same(mine, expected)
    assert_same(twins.opt.state_dict(), expected)  # consolidating elsewhere took nothing away
    twins.step()
    assert_same(mine, expected)
    with pytest.raises(RuntimeError, match="stepped"):
        twins.opt.state_dict()


@distributed(*ALL_SIZES)
def test_every_rank_may_load_a_dict_of_its_own_making(world: World) -> None:
    """Loading is not collective: no rank waits for another, and all end up with the same job."""
    twins = adam(world).step(2)
    full = twins.consolidated()
    before = twins.opt._transport.traffic.messages
    with mock.patch.object(dist, "all_gather", side_effect=AssertionError("a collective")):
        twins.opt.load_state_dict(copy.deepcopy(full))
    assert twins.opt._transport.traffic.messages == before
    twins.plain.load_state_dict(copy.deepcopy(full))
    twins.step(2)
