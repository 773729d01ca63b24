"""Which classes may be cut, which need whole tensors, and which cannot be sharded at all."""

from __future__ import annotations

import copy
import inspect
import logging
import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import lion_pytorch
import prodigyopt
import pytest
import schedulefree
import torch
from harness import World, distributed
from inside import PROBED_KINDS, known_kinds, probe_kind
from models import (
    assert_equal_params,
    give_equal_gradients,
    params_of_shapes,
    random_parameter,
)
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from onecopy import ZeroRedundancyOptimizer
from onecopy.planning.traits import (
    Kind,
    is_elementwise,
    partition_kind,
    traits_of,
    update_cost,
)
from onecopy.torch_private import step_without_hooks

TORCH_CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
]


# ------------------------------------------------------------------ classes written by hand


class Rule(Optimizer):
    """SGD, and the frame of what follows: a subclass says how it moves one parameter."""

    def __init__(self, params: Iterable[Any], lr: Any = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(p, p.grad, group))
        return loss

    def change(self, _p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return grad * group["lr"]


class Lamb(Rule):
    """A trust ratio per tensor."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return grad * group["lr"] * p.norm() / grad.norm()


class RowStatistics(Rule):
    """Rows are scaled alike, and the statistics are kept as state."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        rows = self.state[p].setdefault("rows", torch.zeros((*grad.shape[:-1], 1)))
        rows.add_(grad.square().mean(-1, keepdim=True))
        return grad * group["lr"] / (rows.sqrt() + 1e-3)


class RowNorm(Rule):
    """The same without any state that would tell."""

    def change(self, _p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return grad * group["lr"] / grad.norm(dim=-1, keepdim=True)


class NotesRowsOfMatrices(Rule):
    """State that no update depends on, and that shards do not have: still it must be kept right."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        if p.ndim > 1:
            self.state[p]["rows"] = grad.norm(dim=1)
        return grad * group["lr"]


class FactorisesLargeOnes(Rule):
    """Elementwise on everything small, which is all that many a test would show it."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        if p.ndim > 1 and min(p.shape) >= 128:
            return grad * group["lr"] / grad.norm(dim=-1, keepdim=True)
        return grad * group["lr"]


class CountsInATensorOfOne(Rule):
    """State of shape (1,), which a cut tensor's shards could not be told from."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        count = self.state[p].setdefault("count", torch.zeros(1))
        count.add_(1)
        return grad * group["lr"] / count


class CountsInAScalar(Rule):
    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[p]
        state["count"] = state.get("count", torch.zeros(())) + 1
        state["number"] = state.get("number", 0) + 1
        state["sum"] = state.get("sum", torch.zeros_like(p)) + grad
        return state["sum"] * group["lr"] / state["count"]


class HidesTensorsInAList(Rule):
    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        self.state[p].setdefault("history", []).append(grad.clone())
        return grad * group["lr"]


class DecaysMatricesOnly(Rule):
    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return group["lr"] * (grad + 0.1 * p if p.ndim > 1 else grad)


class MatricesOnly(Rule):
    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        rows, _ = p.shape
        return grad * group["lr"] / rows


class Noisy(Rule):
    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return group["lr"] * (grad + 0.01 * torch.randn_like(p))


class ClipsGlobally(Rule):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.5)
        return super().step(closure)


class StepsShrinkWithEveryParameter(Rule):
    """A counter in the group advances once per parameter: an accidental coupling."""

    def change(self, _p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        group["updates"] = group.get("updates", 0) + 1
        return grad * group["lr"] / group["updates"]


class SharpnessAware(Rule):
    """Climbs, evaluates the closure again up there, and comes down."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        closure()
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=0.05)
        return super().step(closure)


class ClosureIsRequired(Rule):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        return super().step(closure)


class NoClosureAtAll(Rule):
    def step(self) -> Any:  # type: ignore[override]
        return super().step()


class NeedsAnAccelerator(Rule):
    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        params = list(params)
        if params[0].device.type == "cpu":
            raise RuntimeError("this needs CUDA")
        super().__init__(params, **options)


class StepNeedsTheLoss(Rule):
    def step(self, loss: float) -> Any:  # type: ignore[override]
        return super().step(lambda: loss)


class ShrinksItsOwnOption(Rule):
    """Changes a tensor that it was given as an option."""

    def change(self, _p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        group["lr"] *= 0.5
        return grad * group["lr"]


@pytest.fixture(autouse=True)
def nothing_is_known_from_earlier_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PROBED_KINDS, weakref.WeakKeyDictionary())


# ------------------------------------------------------------------ torch's own


def test_every_class_of_torch_is_known() -> None:
    assert set(known_kinds) == set(TORCH_CLASSES)


@pytest.mark.parametrize("cls", TORCH_CLASSES, ids=lambda cls: cls.__name__)
def test_the_probe_confirms_what_is_known_of_a_torch_class(
    cls: type[Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    assert probe_kind(cls, {"lr": 0.01}).kind is known_kinds[cls].kind
    assert traits_of(cls, {"lr": 0.01}) is known_kinds[cls]
    # SparseAdam takes sparse gradients only, which toys do not have.
    assert [r.levelname for r in caplog.records] == ["WARNING"] * (cls is torch.optim.SparseAdam)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"maximize": True, "momentum": 0.9, "dampening": 0.1}),
        (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"betas": (0.5, 0.7), "eps": 1e-3}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
        (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"capturable": True}),
        (torch.optim.AdamW, {"differentiable": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": True, "capturable": True}),
    ],
    ids=str,
)
def test_options_do_not_disturb_the_probe(cls: type[Optimizer], options: dict[str, Any]) -> None:
    assert probe_kind(cls, options).kind is Kind.ELEMENTWISE


def test_a_subclass_is_not_taken_for_its_parent() -> None:
    class ClippedSGD(torch.optim.SGD):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.grad.div_(p.grad.norm())
            return super().step(closure)

    assert is_elementwise(torch.optim.SGD, lr=0.1)
    assert traits_of(ClippedSGD, {"lr": 0.1}).kind is Kind.WHOLE


# ------------------------------------------------------------------ everybody else's


@pytest.mark.parametrize(
    ("cls", "kind", "reason"),
    [
        (schedulefree.AdamWScheduleFree, Kind.ELEMENTWISE, "by itself"),
        (schedulefree.SGDScheduleFree, Kind.ELEMENTWISE, "by itself"),
        (schedulefree.RAdamScheduleFree, Kind.ELEMENTWISE, "by itself"),
        (lion_pytorch.Lion, Kind.ELEMENTWISE, "by itself"),
        (prodigyopt.Prodigy, Kind.GLOBAL, "depends on the other parameters"),
        (Rule, Kind.ELEMENTWISE, "by itself"),
        (CountsInAScalar, Kind.ELEMENTWISE, "by itself"),
        (ClosureIsRequired, Kind.ELEMENTWISE, "by itself"),
        (NoClosureAtAll, Kind.ELEMENTWISE, "by itself"),
        (Lamb, Kind.WHOLE, "the rest of the tensor"),
        (RowNorm, Kind.WHOLE, "the rest of the tensor"),
        (DecaysMatricesOnly, Kind.WHOLE, "the rest of the tensor"),
        (RowStatistics, Kind.WHOLE, "not shaped like the parameter"),
        (FactorisesLargeOnes, Kind.WHOLE, "large torch.float32 tensor depends on the rest"),
        (NotesRowsOfMatrices, Kind.WHOLE, "not shaped like the parameter"),
        (CountsInATensorOfOne, Kind.WHOLE, "not shaped like the parameter"),
        (HidesTensorsInAList, Kind.WHOLE, "not shaped like the parameter"),
        (MatricesOnly, Kind.WHOLE, "one-dimensional"),
        (ClipsGlobally, Kind.GLOBAL, "depends on the other parameters"),
        (StepsShrinkWithEveryParameter, Kind.GLOBAL, "depends on the other parameters"),
        (SharpnessAware, Kind.GLOBAL, "closure more than once"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_unknown_class_is_tried_out(
    cls: type[Optimizer], kind: Kind, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = traits_of(cls, {"lr": 0.05})
    assert found.kind is kind
    assert reason in found.reason
    assert is_elementwise(cls, lr=0.05) is (kind is Kind.ELEMENTWISE)
    assert not caplog.records
    if kind is Kind.GLOBAL:
        with pytest.raises(ValueError, match=f"{cls.__name__} cannot be sharded: .*{reason}"):
            partition_kind(cls, {"lr": 0.05}, "auto")
    else:
        assert partition_kind(cls, {"lr": 0.05}, "auto") is kind


def test_the_kind_may_depend_on_the_options() -> None:
    class Optional(Lamb):
        def change(
            self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
        ) -> torch.Tensor:
            return (Lamb if group["trust"] else Rule).change(self, p, grad, group)

    assert is_elementwise(Optional, trust=False)
    assert not is_elementwise(Optional, trust=True)


def test_a_class_is_tried_out_once_for_all_groups_of_equal_options() -> None:
    built = []

    class Counted(Rule):
        def __init__(self, params: Iterable[Any], **options: Any) -> None:
            built.append(options)
            super().__init__(params, **options)

    assert is_elementwise(Counted, lr=0.1, flag=True)
    once = len(built)
    assert is_elementwise(Counted, lr=0.1, flag=True)
    assert is_elementwise(Counted, lr=0.2, flag=True)  # groups often differ by their lr only
    assert len(built) == once
    assert is_elementwise(Counted, lr=0.1, flag=False)
    assert len(built) == 2 * once


@pytest.mark.parametrize("first", [float("inf"), 1e9, 1.0])
def test_the_kind_does_not_depend_on_options_tried_before(first: float) -> None:
    class Clipped(Rule):
        def change(
            self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
        ) -> torch.Tensor:
            return super().change(p, grad / max(1.0, grad.norm() / group["max_norm"]), group)

    is_elementwise(Clipped, max_norm=first)
    assert is_elementwise(Clipped, max_norm=float("inf"))
    assert not is_elementwise(Clipped, max_norm=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_kind_may_depend_on_the_dtype(dtype: torch.dtype) -> None:
    class Scaled(Rule):
        def change(
            self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
        ) -> torch.Tensor:
            return super().change(p, grad / grad.norm() if p.dtype == dtype else grad, group)

    assert traits_of(Scaled, {}).kind is Kind.ELEMENTWISE
    assert traits_of(Scaled, {}, [dtype]).kind is Kind.WHOLE
    assert partition_kind(Scaled, {}, "auto", [torch.float32, dtype]) is Kind.WHOLE
    assert partition_kind(Scaled, {}, "auto", [torch.float32]) is Kind.ELEMENTWISE
    assert traits_of(lion_pytorch.Lion, {}, [dtype]).kind is Kind.ELEMENTWISE


def test_a_class_that_draws_random_numbers_is_not_cut_unasked() -> None:
    assert not is_elementwise(Noisy)
    with pytest.raises(ValueError, match="random numbers"):
        partition_kind(Noisy, {}, "auto")
    assert partition_kind(Noisy, {}, "whole") is Kind.WHOLE
    assert partition_kind(Noisy, {}, "elementwise") is Kind.ELEMENTWISE


@pytest.mark.parametrize(
    ("cls", "why"),
    [(NeedsAnAccelerator, "this needs CUDA"), (StepNeedsTheLoss, "'loss'")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_class_that_cannot_be_tried_out_is_kept_whole_with_one_warning(
    cls: type[Optimizer], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert partition_kind(cls, {}, "auto") is Kind.WHOLE
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("onecopy", logging.WARNING)
    for part in (cls.__name__, why, 'partition="whole"'):
        assert part in record.getMessage()


@pytest.mark.parametrize("partition", ["elementwise", "whole"])
def test_no_probe_and_no_warning_where_the_user_has_decided(
    partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert partition_kind(NeedsAnAccelerator, {}, partition) is Kind(partition)
    assert not caplog.records


# ------------------------------------------------------------------ the probe leaves no trace


def test_the_probe_leaves_the_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.default_generator.manual_seed(1234)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    for cls in (Noisy, Rule, NeedsAnAccelerator, SharpnessAware):
        traits_of(cls, {})
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert seeded == []  # nor those of the accelerators, which nobody restores


def test_the_probe_does_not_run_global_step_hooks() -> None:
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post")),
    ]
    try:
        for cls in (Rule, lion_pytorch.Lion, schedulefree.AdamWScheduleFree, torch.optim.AdamW):
            assert probe_kind(cls, {"lr": 0.1}).kind is Kind.ELEMENTWISE
    finally:
        for handle in handles:
            handle.remove()
    assert calls == []


def test_the_probe_does_not_change_the_options() -> None:
    options = {"lr": torch.tensor(0.25), "table": [1, 2, {"a": 3}]}
    before = copy.deepcopy(options)
    assert traits_of(ShrinksItsOwnOption, options).kind is Kind.GLOBAL
    assert torch.equal(options["lr"], before["lr"])
    assert options["table"] == before["table"]


@pytest.mark.parametrize("lr", [0.0, 1e-12, torch.tensor(0.0), 1e3], ids=str)
@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (Rule, Kind.ELEMENTWISE),
        (CountsInAScalar, Kind.ELEMENTWISE),
        (RowNorm, Kind.WHOLE),
        (Lamb, Kind.WHOLE),
        (ClipsGlobally, Kind.GLOBAL),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_kind_does_not_depend_on_the_learning_rate(
    cls: type[Optimizer], kind: Kind, lr: Any
) -> None:
    """A warm-up that starts at zero moves nothing at first, which is no sign of independence."""
    assert traits_of(cls, {"lr": lr}).kind is kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_kind_does_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert is_elementwise(lion_pytorch.Lion)
        assert probe_kind(torch.optim.AdamW, {}).kind is Kind.ELEMENTWISE
        assert traits_of(Lamb, {}).kind is Kind.WHOLE
        assert traits_of(ClipsGlobally, {}).kind is Kind.GLOBAL
    finally:
        torch.set_default_dtype(default)


def test_the_kind_does_not_depend_on_the_default_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with torch.device("meta"):
        assert is_elementwise(lion_pytorch.Lion)
        assert traits_of(ClipsGlobally, {}).kind is Kind.GLOBAL
    assert not caplog.records


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_kind_does_not_depend_on_the_grad_mode(mode: Callable[[], Any]) -> None:
    with mode():
        assert is_elementwise(lion_pytorch.Lion)
        assert traits_of(Lamb, {}).kind is Kind.WHOLE


# ------------------------------------------------------------------ what the user decides


@pytest.mark.parametrize(
    ("cls", "partition", "kind"),
    [
        (torch.optim.AdamW, "auto", Kind.ELEMENTWISE),
        (torch.optim.AdamW, "elementwise", Kind.ELEMENTWISE),
        (torch.optim.AdamW, "whole", Kind.WHOLE),
        (torch.optim.Adafactor, "auto", Kind.WHOLE),
        (torch.optim.Adafactor, "whole", Kind.WHOLE),
        (torch.optim.SparseAdam, "auto", Kind.WHOLE),
        (Lamb, "elementwise", Kind.ELEMENTWISE),
        (Rule, "whole", Kind.WHOLE),
        (prodigyopt.Prodigy, "whole", Kind.WHOLE),
        (ClipsGlobally, "whole", Kind.WHOLE),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_partition_overrides_the_probe(cls: type[Optimizer], partition: str, kind: Kind) -> None:
    assert partition_kind(cls, {}, partition) is kind


@pytest.mark.parametrize(
    "name", ["Adafactor", "SparseAdam", *(["Muon"] if hasattr(torch.optim, "Muon") else [])]
)
def test_a_class_known_to_need_whole_tensors_is_never_cut(name: str) -> None:
    cls = getattr(torch.optim, name)
    with pytest.raises(ValueError, match=f"elementwise.*{name}.*{known_kinds[cls].reason}"):
        partition_kind(cls, {}, "elementwise")


@pytest.mark.parametrize("partition", ["auto", "elementwise", "whole"])
def test_lbfgs_is_refused_with_the_reason_whatever_the_partition(partition: str) -> None:
    with pytest.raises(ValueError, match=r"LBFGS cannot be sharded: .*one vector.*unsharded"):
        partition_kind(torch.optim.LBFGS, {}, partition)


def test_a_refused_third_party_class_may_be_run_at_the_users_own_risk() -> None:
    with pytest.raises(ValueError, match=r'Prodigy.*partition="whole".*not the unsharded'):
        partition_kind(prodigyopt.Prodigy, {}, "auto")


@pytest.mark.parametrize("cls", [torch.optim.AdamW, Rule], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("partition", ["", "rows", "Whole", "global", None, 3, Kind.WHOLE])
def test_an_unknown_partition_is_refused_naming_the_known_ones(
    cls: type[Optimizer], partition: Any
) -> None:
    with pytest.raises(ValueError, match=r"'auto', 'elementwise', 'whole'.*got "):
        partition_kind(cls, {}, partition)


# ------------------------------------------------------------------ the cost of an update


class ThirdPartyMuonWithAuxAdam(Rule):
    pass


@pytest.mark.parametrize(
    ("shape", "cost"),
    [
        ((30, 20), 30 * 20 * 20),
        ((20, 30), 30 * 20 * 20),
        ((8, 3, 2, 2), 12 * 8 * 8),  # a convolution counts as the matrix (8, 12)
        ((16, 3, 2, 2), 16 * 12 * 12),
        ((7,), 7),
        ((), 1),
        ((0, 5), 0),
        ((5, 0), 0),
    ],
    ids=str,
)
def test_muon_costs_the_long_side_times_the_square_of_the_short_one(
    shape: tuple[int, ...], cost: int
) -> None:
    assert update_cost(ThirdPartyMuonWithAuxAdam, shape) == cost
    if hasattr(torch.optim, "Muon"):
        assert update_cost(torch.optim.Muon, shape) == cost
    for cls in (torch.optim.Adafactor, Lamb):
        assert update_cost(cls, shape) == torch.Size(shape).numel()


# ------------------------------------------------------------------ a step without global hooks


def test_a_step_without_hooks_runs_the_instances_own_and_not_the_global_ones() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = torch.optim.SGD([param], lr=0.5)
    calls: list[str] = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    try:
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        assert step_without_hooks(optimizer)(closure=lambda: 7.0) == 7.0
    finally:
        handle.remove()
    assert calls == ["pre", "post"]
    assert param.tolist() == [0.5] * 3


def test_an_instance_hook_may_change_the_arguments_of_the_step() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.5)

    def give_a_closure(
        opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        assert args == (opt, 1)
        return (opt,), {"closure": lambda: 11.0}

    optimizer.register_step_pre_hook(give_a_closure)
    assert step_without_hooks(optimizer)(1) == 11.0


# ---------------------------------------- classes that depend on size and dtype


class QuantisesLarge(torch.optim.SGD):
    """Rounds its steps to the largest one, but only in tensors of 4096 elements or more."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = p.grad.abs().max() if p.numel() >= 4096 else 1.0
                    p.sub_(p.grad / scale * group["lr"])


class RoundsNarrow(torch.optim.SGD):
    """Rounds stochastically, but only in 16 bits."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    noise = torch.rand_like(p) if p.dtype == torch.bfloat16 else 0.0
                    p.sub_(p.grad * group["lr"] * (1 + noise))


def test_a_class_that_treats_large_tensors_in_another_way_is_not_cut() -> None:
    assert not is_elementwise(QuantisesLarge, lr=0.1)


@distributed(2)
def test_a_class_that_rounds_at_random_in_16_bits_is_refused_there_only(world: World) -> None:
    ZeroRedundancyOptimizer([random_parameter(5)], RoundsNarrow, lr=0.1)
    narrow = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="random"):
        ZeroRedundancyOptimizer([narrow], RoundsNarrow, lr=0.1)


# ---------------------------------------- classes that depend on their options


class Normed(Optimizer):
    """SGD; with `normalize=True` a gradient is divided by the norm of its tensor."""

    def __init__(self, params: Any, lr: float = 0.1, normalize: bool = False) -> None:
        super().__init__(params, {"lr": lr, "normalize": normalize})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    direction = param.grad
                    if group["normalize"]:
                        direction = direction / direction.norm()
                    param.sub_(direction, alpha=group["lr"])


@distributed(1, 2, 3)
def test_a_loaded_flag_that_makes_a_class_need_whole_tensors_changes_the_plan(world: World) -> None:
    plain, ours = (params_of_shapes((3, 4), (7,), (5, 5)) for _ in range(2))
    a = Normed(plain, normalize=True)
    b = ZeroRedundancyOptimizer(ours, Normed)
    b.load_state_dict(a.state_dict())
    assert b.param_groups[0]["normalize"] is True
    for step in range(2):
        give_equal_gradients(step, plain, ours)
        a.step()
        b.step()
        assert_equal_params(ours, plain)


@distributed(1, 2, 3)
def test_such_a_flag_set_by_hand_is_refused_where_it_would_be_wrong(world: World) -> None:
    plain, ours = (params_of_shapes((3, 4), (7,)) for _ in range(2))
    a = Normed(plain)
    b = ZeroRedundancyOptimizer(ours, Normed)
    a.param_groups[0]["normalize"] = b.param_groups[0]["normalize"] = True
    give_equal_gradients(0, plain, ours)
    if world.size == 1:
        a.step()
        b.step()
    else:
        before = [param.detach().clone() for param in ours]
        with pytest.raises(RuntimeError):
            b.step()
        assert_equal_params(ours, before)
        b.param_groups[0]["normalize"] = a.param_groups[0]["normalize"] = False
        a.step()
        b.step()
    assert_equal_params(ours, plain)
