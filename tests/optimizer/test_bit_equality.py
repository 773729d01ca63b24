"""Bit-equality with the unsharded optimizer on the same averaged gradients.

Everything here trains two copies of a model, one with the plain class and one sharded, on other
data on every rank, and compares all parameters bit for bit after every step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed, is_native
from inside import ALL_GATHER_SINGLE, BACKENDS, params_of, plan_of, traffic_of
from models import (
    SMALL_BUCKETS,
    BranchNet,
    ConvNet,
    MixedNet,
    Mlp,
    TiedNet,
    Twins,
    assert_bit_equal,
    assert_same_on_all_ranks,
    average_gradients,
    noise,
)
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from onecopy import ZeroRedundancyOptimizer

# Gradients are averaged in these tests: a warning that they were not is a false alarm.
pytestmark = [pytest.mark.also_c10d, pytest.mark.filterwarnings("error:the gradient of")]


CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1}),
    "SGD-momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD-nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD-maximize": (SGD, {"lr": 0.01, "momentum": 0.5, "maximize": True}),
    "Adam": (Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "Adam-amsgrad": (Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW-amsgrad": (AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "NAdam": (NAdam, {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    # Only after a few steps, sooner with a small second beta, does it rectify.
    "RAdam": (RAdam, {"lr": 0.01, "betas": (0.9, 0.9), "weight_decay": 0.01}),
    "Adamax": (Adamax, {"lr": 0.01, "weight_decay": 0.01}),
    "Adagrad": (Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01}),
    "Adadelta": (Adadelta, {"lr": 1.0, "weight_decay": 0.01}),
    "RMSprop": (RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9, "weight_decay": 0.01}),
    "Rprop": (Rprop, {"lr": 0.01}),
    "ASGD": (ASGD, {"lr": 0.1, "t0": 2, "weight_decay": 0.01}),
}
FUSED_ON_CPU = (SGD, Adam, AdamW, Adagrad)
IMPLEMENTATIONS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
RUNS = [
    pytest.param(case, implementation, id=f"{case}-{implementation}")
    for case, (cls, _) in CASES.items()
    for implementation in IMPLEMENTATIONS
    if implementation != "fused" or cls in FUSED_ON_CPU
]


def options_of(case: str, implementation: str) -> dict[str, Any]:
    return {**CASES[case][1], **IMPLEMENTATIONS[implementation]}


def weights_and_biases(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, the second with an option of its own."""
    weights = [p for name, p in model.named_parameters() if "weight" in name]
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    return [{"params": weights}, {"params": biases, "lr": 0.003}]


def owned_elements(optimizer: ZeroRedundancyOptimizer) -> int:
    return sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])


# ---------------------------------------- classes ----------------------------------------


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize(("case", "implementation"), RUNS)
def test_every_elementwise_class_is_bit_equal_to_the_unsharded_one(
    world: World, case: str, implementation: str
) -> None:
    cls, _ = CASES[case]
    twins = Twins(world, Mlp(), cls, groups=weights_and_biases, **options_of(case, implementation))
    assert len(plan_of(twins.optimizer).buckets) > 1 or world.size == 1
    total = sum(p.numel() for p in twins.model.parameters())
    unit = 16 if implementation == "fused" else 1
    assert owned_elements(twins.optimizer) <= total / world.size + unit * world.size
    twins.train(7)
    twins.assert_moved()
    assert_same_on_all_ranks(twins.model)


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_every_elementwise_class_is_bit_equal_in_three_dtypes_at_once(
    world: World, implementation: str, bucket_view: bool
) -> None:
    for case, (cls, _) in CASES.items():
        if implementation == "fused" and cls not in FUSED_ON_CPU:
            continue
        zero = {"parameters_as_bucket_view": bucket_view}
        twins = Twins(world, MixedNet(), cls, zero=zero, **options_of(case, implementation))
        twins.train(3, check=False)
        twins.assert_equal()
        assert {p.dtype for p in twins.model.parameters()} == {
            torch.float32,
            torch.bfloat16,
            torch.float64,
        }
        if implementation == "fused" and cls is SGD:
            continue  # torch's own, on the CPU: in 16 bits it moves the last n % 16 elements only
        assert not torch.equal(twins.model.narrow.weight, twins.start.narrow.weight), case


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("size", [1, 64, 65, 300])
def test_sixteen_bit_tensors_of_any_length_are_bit_equal(world: World, size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for cls, options in (
            # Why eps: the default is zero in float16, and 0 / 0 is equal to nothing.
            (AdamW, {"lr": 0.01, "eps": 1e-4, "foreach": False}),
            (AdamW, {"lr": 0.01, "eps": 1e-4, "fused": True}),
            (SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
        ):
            make = functools.partial(parameters, (size,), (3, size), (size, 2), dtype=dtype)
            train_by_hand(world, make, cls, **options)


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_classes_that_need_whole_tensors_are_bit_equal(
    world: World, name: str, bucket_view: bool
) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")

    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.ndim == 2]

    zero = {"parameters_as_bucket_view": bucket_view}
    cls = getattr(torch.optim, name)
    twins = Twins(world, TiedNet(), cls, groups=matrices, zero=zero, lr=0.02, weight_decay=0.1)
    twins.train(4)
    twins.assert_moved()
    mine = [p for group in twins.optimizer.optim.param_groups for p in group["params"]]
    assert all(any(p is q for q in twins.model.parameters()) for p in mine), "a tensor was cut"


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_muon_and_adamw_in_one_object_are_bit_equal_to_two_plain_optimizers(
    world: World, bucket_view: bool
) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    muon = {"lr": 0.02, "momentum": 0.8}

    def split(model: nn.Module) -> list[dict[str, Any]]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        if model is twins_plain_model:
            return [{"params": rest, "weight_decay": 0.2}]
        return [
            {"params": matrices, "optimizer_class": torch.optim.Muon, **muon},
            {"params": rest, "weight_decay": 0.2},
        ]

    model = Mlp(width=24)
    twins_plain_model = model
    zero = {"parameters_as_bucket_view": bucket_view}
    twins = Twins(world, model, AdamW, groups=split, zero=zero, lr=0.01, betas=(0.8, 0.9))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    other = torch.optim.Muon(matrices, **muon)
    for _ in range(4):
        twins.backward()
        other.step()
        twins.step()
        twins.assert_equal()
    twins.assert_moved()
    groups = twins.optimizer.param_groups
    assert groups[0]["momentum"] == 0.8
    assert groups[1]["betas"] == (0.8, 0.9)
    assert "betas" not in groups[0]
    assert "momentum" not in groups[1]


# ---------------------------------------- groups, layouts, graphs ----------------------------


@pytest.mark.smoke
@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_groups_with_different_options_are_bit_equal(world: World, bucket_view: bool) -> None:
    def groups(model: TiedNet) -> list[dict[str, Any]]:
        return [
            {"params": model.embedding.parameters(), "lr": 0.3, "momentum": 0.9},
            {"params": model.mix.parameters(), "lr": 0.1, "weight_decay": 0.1},
            {"params": model.project.parameters(), "momentum": 0.5, "nesterov": True},
        ]

    zero = {"parameters_as_bucket_view": bucket_view}
    twins = Twins(world, TiedNet(), SGD, groups=groups, zero=zero, lr=0.01)
    twins.train(4)
    twins.assert_moved()


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_tied_weights_are_bit_equal_and_stay_tied(world: World, bucket_view: bool) -> None:
    zero = {"parameters_as_bucket_view": bucket_view}
    twins = Twins(world, TiedNet(), AdamW, zero=zero, lr=0.01)
    twins.train(4)
    twins.assert_moved()
    assert twins.model.head.weight is twins.model.embedding.weight


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
@pytest.mark.parametrize("foreach", [False, True], ids=["plain", "foreach"])
def test_channels_last_convolutions_are_bit_equal_and_keep_their_strides(
    world: World, bucket_view: bool, foreach: bool
) -> None:
    zero = {"parameters_as_bucket_view": bucket_view}
    for format in (torch.channels_last, torch.contiguous_format):
        twins = Twins(world, ConvNet(format), AdamW, zero=zero, lr=0.01, foreach=foreach)
        twins.train(3)
        twins.assert_moved()
        assert twins.model.first.weight.is_contiguous(memory_format=format)


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_gradients_in_another_memory_format_are_paired_with_the_right_elements(
    world: World, bucket_view: bool
) -> None:
    def in_format(format: torch.memory_format) -> list[torch.Tensor]:
        shapes = [(5, 3, 3, 3), (2, 7, 3, 1), (4, 1, 5, 5)]
        made = [noise(*shape, seed=(9, i)) for i, shape in enumerate(shapes)]
        return [nn.Parameter(tensor.contiguous(memory_format=format)) for tensor in made]

    formats = (torch.channels_last, torch.contiguous_format)
    for format in formats:
        for grad_format in formats:
            train_by_hand(
                world,
                functools.partial(in_format, format),
                AdamW,
                zero={"parameters_as_bucket_view": bucket_view},
                shape_gradient=lambda g: g.contiguous(memory_format=grad_format),
                lr=0.01,
            )


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_parameters_without_a_gradient_are_left_alone(world: World, bucket_view: bool) -> None:
    twins = Twins(
        world,
        BranchNet(lambda seed: (tuple(seed)[1] % 2 == 0, False)),  # left, in every second step
        AdamW,
        ddp={"find_unused_parameters": True},
        zero={"parameters_as_bucket_view": bucket_view},
        lr=0.01,
        weight_decay=0.1,  # would move a parameter that has a gradient of zero
    )
    twins.train(4)
    assert not torch.equal(twins.model.left.weight, twins.start.left.weight)
    for name in ("right", "idle"):
        unused = getattr(twins.model, name).weight
        assert unused.grad is None
        assert torch.equal(unused, getattr(twins.start, name).weight)


@distributed(2, 3, 4)
def test_a_branch_that_only_some_ranks_take_is_bit_equal(world: World) -> None:
    def takes(seed: Iterable[int]) -> tuple[bool, bool]:
        rank, step = seed
        return (rank + step) % 2 == 0, rank == 1

    for bucket_view in (False, True):
        twins = Twins(
            world,
            BranchNet(takes),
            AdamW,
            ddp={"find_unused_parameters": True},
            zero={"parameters_as_bucket_view": bucket_view},
            lr=0.01,
        )
        twins.train(4)
        assert not torch.equal(twins.model.right.weight, twins.start.right.weight)
        assert_same_on_all_ranks(twins.model)


@distributed(2, 3, 4)
def test_gradients_that_only_some_ranks_have_neither_hang_nor_split_the_ranks(
    world: World,
) -> None:
    # Why not a mark: that of the module is applied after those of its functions.
    warnings.filterwarnings("ignore", "the gradient of")
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), SGD, bucket_mb=SMALL_BUCKETS, lr=0.1, weight_decay=0.1
    )
    for step in range(3):
        model.zero_grad()
        if world.rank != step:
            model(model.batch((world.rank, step))).backward()
        optimizer.step()
        assert_same_on_all_ranks(model)


@distributed(2, 3, 4)
def test_a_step_before_any_gradient_changes_nothing(world: World) -> None:
    twins = Twins(world, Mlp(), AdamW, lr=0.1, weight_decay=0.1)
    twins.step()
    twins.assert_equal()
    assert torch.equal(twins.model.first.weight, twins.start.first.weight)
    twins.train(2)


# ---------------------------------------- odd tensors ----------------------------------------


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [nn.Parameter(noise(*s, seed=(7, i), dtype=dtype)) for i, s in enumerate(shapes)]


def train_by_hand(
    world: World,
    make: Callable[[], Sequence[torch.Tensor]],
    cls: type[Optimizer],
    *,
    steps: int = 3,
    zero: dict[str, Any] | None = None,
    shape_gradient: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    **options: Any,
) -> tuple[ZeroRedundancyOptimizer, list[torch.Tensor]]:
    """Train what `make` returns, twice, on gradients set by hand; compare after every step."""
    plain, ours = list(make()), list(make())
    reference = cls(plain, **options)
    optimizer = ZeroRedundancyOptimizer(
        ours, cls, **{"bucket_mb": SMALL_BUCKETS, **(zero or {})}, **options
    )
    strides = [tensor.stride() for tensor in ours]
    for step in range(steps):
        for i, p in enumerate(plain):
            gradient = noise(*p.shape, seed=(world.rank + 1, step + 1, i + 1), dtype=p.dtype)
            p.grad = shape_gradient(gradient)
        average_gradients(plain)
        for p, q in zip(plain, ours, strict=True):
            assert p.grad is not None
            q.grad = shape_gradient(p.grad)
        reference.step()
        optimizer.step()
        for i, (p, q) in enumerate(zip(plain, ours, strict=True)):
            assert_bit_equal(q, p, f"{cls.__name__}, step {step}, tensor {i}")
    start = list(make())
    for p, s in zip(plain, start, strict=True):
        assert p.numel() == 0 or not torch.equal(p, s)
    assert [tensor.stride() for tensor in ours] == strides
    return optimizer, ours


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_gradients_set_by_hand_on_plain_tensors_are_used(world: World, bucket_view: bool) -> None:
    def tensors() -> list[torch.Tensor]:
        return [noise(11, 5, seed=(3,)), noise(6, seed=(4,)).requires_grad_()]

    zero = {"parameters_as_bucket_view": bucket_view}
    train_by_hand(world, tensors, AdamW, zero=zero, lr=0.1)


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(2,)], id="fewer-elements-than-ranks"),
        pytest.param([(), (1,)], id="two-single-elements"),
        pytest.param([(3,), (0,), (4, 0, 2), ()], id="zero-elements"),
        pytest.param([(0,), (5,)], id="zero-elements-first"),
        pytest.param([(), (), (7, 3), ()], id="zero-dimensions"),
        pytest.param([(1000,)], id="one-long"),
        pytest.param([(1, 5, 1), (2, 1, 3)], id="ones"),
    ],
)
def test_odd_shapes_are_bit_equal(
    world: World, bucket_view: bool, shapes: list[tuple[int, ...]]
) -> None:
    zero = {"parameters_as_bucket_view": bucket_view}
    options: list[tuple[type[Optimizer], dict[str, Any]]] = [
        (AdamW, {"lr": 0.1, "foreach": False}),
        (AdamW, {"lr": 0.1, "foreach": True}),
        (AdamW, {"lr": 0.1, "fused": True}),
        (SGD, {"lr": 0.1, "momentum": 0.9}),
    ]
    for cls, keywords in options:
        for partition in ("elementwise", "whole"):
            optimizer, _ = train_by_hand(
                world,
                functools.partial(parameters, *shapes),
                cls,
                zero={**zero, "partition": partition},
                **keywords,
            )
    whole = [param for group in optimizer.optim.param_groups for param in group["params"]]
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, len(whole))
    assert sum(everyone) == len(shapes)


@distributed(2, 3, 4)
def test_ranks_that_own_nothing_take_part(world: World) -> None:
    optimizer, _ = train_by_hand(world, functools.partial(parameters, (1,)), Adam, lr=0.1)
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, (owned_elements(optimizer), len(optimizer.optim.state)))
    assert sorted(everyone) == [(0, 0)] * (world.size - 1) + [(1, 1)]
    assert len(optimizer.optim.param_groups) == 1


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_parameters_with_gaps_in_their_memory_are_bit_equal(
    world: World, bucket_view: bool
) -> None:
    def strided() -> list[torch.Tensor]:
        wide, cube = noise(13, 10, seed=(1,)), noise(4, 6, 5, seed=(2,))
        return [
            nn.Parameter(wide[:, ::2]),
            nn.Parameter(noise(9, seed=(3,))),
            nn.Parameter(cube[:, 1:4].transpose(0, 2)),
        ]

    for cls in (AdamW, Adadelta):
        for foreach in (False, True):
            optimizer, ours = train_by_hand(
                world,
                strided,
                cls,
                zero={"parameters_as_bucket_view": bucket_view},
                lr=0.1,
                foreach=foreach,
            )
            assert optimizer.parameters_as_bucket_view is bucket_view
            assert not ours[0].is_contiguous()


@distributed(1, 2, 3, 4)
def test_the_gaps_in_a_parameters_memory_are_not_written(world: World) -> None:
    whole = noise(6, 10, seed=(1,))
    before = whole.clone()
    param = nn.Parameter(whole[:, ::2])
    optimizer = ZeroRedundancyOptimizer([param], SGD, lr=1.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(whole[:, ::2], before[:, ::2] - 1)
    assert torch.equal(whole[:, 1::2], before[:, 1::2])


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("case", ["SGD-momentum", "Adam", "AdamW-amsgrad", "RMSprop", "Adadelta"])
def test_complex_parameters_are_bit_equal(world: World, case: str) -> None:
    cls, options = CASES[case]
    for dtype in (torch.complex64, torch.complex128):
        for foreach in (False, True):
            for bucket_view in (False, True):
                train_by_hand(
                    world,
                    functools.partial(parameters, (13, 3), (5,), dtype=dtype),
                    cls,
                    zero={"parameters_as_bucket_view": bucket_view},
                    foreach=foreach,
                    **options,
                )


@distributed(1, 2, 3, 4)
def test_a_parameter_listed_twice_is_stepped_twice_as_by_torch(world: World) -> None:
    def make() -> list[torch.Tensor]:
        a, b = parameters((7, 3), (5,))
        return [a, b, a]

    with pytest.warns(UserWarning, match="duplicate"):
        plain = SGD(make(), lr=0.1, momentum=0.9, foreach=False)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = ZeroRedundancyOptimizer(
            make(), SGD, bucket_mb=SMALL_BUCKETS, lr=0.1, momentum=0.9, foreach=False
        )
    expected, ours = plain.param_groups[0]["params"], optimizer.param_groups[0]["params"]
    for step in range(3):
        for i, (p, q) in enumerate(zip(expected[:2], ours[:2], strict=True)):
            p.grad = noise(*p.shape, seed=(world.rank + 1, step + 1, i + 1))
            average_gradients([p])
            q.grad = p.grad.clone()
        plain.step()
        optimizer.step()
        for p, q in zip(expected, ours, strict=True):
            assert_bit_equal(q, p)


# ---------------------------------------- changes while training ----------------------------


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_freezing_and_unfreezing_at_any_time_is_bit_equal(world: World, bucket_view: bool) -> None:
    def freeze(name: str, frozen: bool) -> None:
        for model, _, _ in twins.both():
            getattr(model, name).requires_grad_(not frozen)

    def sent_in(steps: int) -> int:
        before = traffic_of(twins.optimizer).bytes
        twins.train(steps)
        return traffic_of(twins.optimizer).bytes - before

    def bytes_of(*names: str) -> int:
        """On all wires, in one step."""
        modules = [getattr(twins.model, name) for name in names]
        return sum(4 * p.numel() for m in modules for p in m.parameters()) * (world.size - 1)

    def assert_sent(sent: int, expected: int) -> None:
        total = torch.tensor(sent)
        dist.all_reduce(total)
        # all_gather pads the slots of a stream's last bucket: by one element, twice in two steps.
        streams = len(plan_of(twins.optimizer).streams)
        padding = 2 * streams * 4 * world.size * (world.size - 1) if is_native() else 0
        assert expected <= int(total) <= expected + padding

    model = Mlp()
    model.first.requires_grad_(False)
    twins = Twins(
        world,
        model,
        AdamW,
        ddp=False,
        zero={"parameters_as_bucket_view": bucket_view},
        lr=0.01,
        weight_decay=0.1,
    )
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert owned_elements(twins.optimizer) in (total // world.size, total // world.size + 1)
    assert_sent(sent_in(2), 2 * bytes_of("norm", "second"))
    assert torch.equal(twins.model.first.weight, twins.start.first.weight)

    freeze("second", True)
    kept = twins.model.second.weight.detach().clone()
    twins.train(2)
    assert torch.equal(twins.model.second.weight, kept)

    freeze("first", False)
    assert_sent(sent_in(2), 2 * bytes_of("first", "norm", "second"))
    assert not torch.equal(twins.model.first.weight, twins.start.first.weight)
    assert plan_of(twins.optimizer).params == set(range(len(params_of(twins.optimizer))))

    freeze("second", False)
    freeze("first", True)
    kept = twins.model.first.weight.detach().clone()
    twins.train(2)
    assert torch.equal(twins.model.first.weight, kept)
    assert not torch.equal(twins.model.second.weight, twins.start.second.weight)

    freeze("first", False)
    twins.train(2)
    assert not torch.equal(twins.model.first.weight, kept)
    total = sum(p.numel() for p in model.parameters())
    assert abs(owned_elements(twins.optimizer) - total / world.size) < 2
    assert_same_on_all_ranks(twins.model)


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_groups_added_while_training_are_bit_equal(world: World, bucket_view: bool) -> None:
    def add(name: str, **options: Any) -> None:
        for model, _, optimizer in twins.both():
            optimizer.add_param_group({"params": getattr(model, name).parameters(), **options})

    zero = {"parameters_as_bucket_view": bucket_view}
    twins = Twins(
        world, MixedNet(), AdamW, groups=lambda m: m.usual.parameters(), zero=zero, lr=0.01
    )
    twins.train(2)
    moments = {id(state["exp_avg"]) for state in twins.optimizer.optim.state.values()}
    add("narrow", lr=0.1)  # bfloat16
    assert torch.equal(twins.model.narrow.weight, twins.start.narrow.weight)
    twins.train(2)
    add("wide", weight_decay=0.3)  # float64
    twins.train(2)
    twins.assert_moved()
    assert [p.dtype for p in twins.model.parameters()] == [
        p.dtype for p in twins.plain_model.parameters()
    ]
    now = {id(state["exp_avg"]) for state in twins.optimizer.optim.state.values()}
    assert moments <= now, "state that existed has moved"
    assert [g["lr"] for g in twins.optimizer.param_groups] == [0.01, 0.1, 0.01]


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_a_group_of_another_class_added_while_training_is_bit_equal(
    world: World, bucket_view: bool
) -> None:
    zero = {"parameters_as_bucket_view": bucket_view}
    twins = Twins(
        world, MixedNet(), AdamW, groups=lambda m: m.usual.parameters(), zero=zero, lr=0.01
    )
    twins.train(2)
    twins.optimizer.add_param_group(
        {
            "params": [*twins.model.narrow.parameters(), *twins.model.wide.parameters()],
            "optimizer_class": SGD,
            "lr": 0.1,
            "momentum": 0.9,
        }
    )
    others = [*twins.plain_model.narrow.parameters(), *twins.plain_model.wide.parameters()]
    other = SGD(others, lr=0.1, momentum=0.9)
    for _ in range(3):
        twins.backward()
        other.step()
        twins.step()
        twins.assert_equal()
    twins.assert_moved()
    assert "betas" not in twins.optimizer.param_groups[1]


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_a_parameter_added_frozen_and_unfrozen_later_is_bit_equal(
    world: World, bucket_view: bool
) -> None:
    model = Mlp()
    model.second.requires_grad_(False)
    twins = Twins(
        world,
        model,
        AdamW,
        ddp=False,
        groups=lambda m: m.first.parameters(),
        zero={"parameters_as_bucket_view": bucket_view},
        lr=0.01,
    )
    twins.train(2)
    for each, _, optimizer in twins.both():
        optimizer.add_param_group({"params": each.second.parameters(), "lr": 0.1})
    twins.train(2)
    assert torch.equal(twins.model.second.weight, twins.start.second.weight)
    for each, _, _ in twins.both():
        each.second.requires_grad_(True)
    twins.train(3)
    assert not torch.equal(twins.model.second.weight, twins.start.second.weight)
    assert_same_on_all_ranks(twins.model)


# ---------------------------------------- process groups ----------------------------------------


@distributed(3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_subgroups_with_ranks_of_their_own_are_bit_equal(world: World, bucket_view: bool) -> None:
    members = {3: [(1, 2)], 4: [(0, 2), (1, 3), (1, 2)]}[world.size]
    twins: list[Twins] = []
    for ranks in members:
        group = dist.new_group(ranks)
        if world.rank in ranks:
            zero = {"process_group": group, "parameters_as_bucket_view": bucket_view}
            pair = Twins(world, Mlp(), AdamW, ddp={"process_group": group}, zero=zero, lr=0.01)
            assert pair.optimizer.rank == ranks.index(world.rank)
            assert pair.optimizer.world_size == len(ranks)
            assert pair.optimizer.global_rank == world.rank
            total = sum(p.numel() for p in pair.model.parameters())
            assert owned_elements(pair.optimizer) == total / len(ranks)
            twins.append(pair)
    for _ in range(4):
        for pair in twins:  # some ranks are in two groups, and train two models in turn
            pair.train(1)
    for pair in twins:
        pair.assert_moved()
        assert_same_on_all_ranks(pair.model, pair.optimizer.process_group)
    assert len(twins) == sum(world.rank in ranks for ranks in members)


@distributed(3, 4)
def test_a_subgroup_whose_ranks_are_not_in_order_is_bit_equal(world: World) -> None:
    ranks = [2, 0]
    try:
        group = dist.new_group(ranks, sort_ranks=False)
    except TypeError:
        pytest.skip("this torch sorts the ranks of every group")
    if world.rank in ranks:
        twins = Twins(
            world,
            Mlp(),
            AdamW,
            ddp={"process_group": group},
            zero={"process_group": group},
            lr=0.01,
        )
        assert twins.optimizer.rank == dist.get_rank(group)
        twins.train(4)


# ---------------------------------------- other backends ----------------------------------------


@distributed(2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
def test_all_gather_and_broadcasts_of_other_backends_are_bit_equal(
    world: World, bucket_view: bool
) -> None:
    calls: list[str] = []
    all_gather, broadcast = getattr(*ALL_GATHER_SINGLE), dist.broadcast
    zero = {"parameters_as_bucket_view": bucket_view}

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    def steps_call(twins: Twins) -> set[str]:
        """What our steps use; DDP has its own ways."""
        twins.train(1)
        twins.backward()
        twins.plain.step()
        calls.clear()
        twins.optimizer.step()
        twins.assert_equal()
        twins.assert_moved()
        return set(calls)

    with pytest.MonkeyPatch.context() as patch:
        # gloo under another name is treated as any backend that we do not know.
        patch.setattr(*BACKENDS, lambda _: {"cpu": "another"})
        patch.setattr(*ALL_GATHER_SINGLE, noted("all_gather", all_gather))
        patch.setattr(dist, "broadcast", noted("broadcast", broadcast))
        for model in (Mlp(), Mlp(width=16), MixedNet(), TiedNet(), ConvNet()):
            assert steps_call(Twins(world, model, AdamW, zero=zero, lr=0.01)) == {"all_gather"}
        for model in (Mlp(), MixedNet(), ConvNet()):
            whole = {**zero, "partition": "whole"}
            assert steps_call(Twins(world, model, SGD, zero=whole, lr=0.1)) == {"broadcast"}


@distributed(2, 3, 4)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-storage", "bucket-view"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_classes_are_bit_equal_through_the_backends_all_gather(
    world: World, implementation: str, bucket_view: bool
) -> None:
    zero = {"parameters_as_bucket_view": bucket_view}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONECOPY_COMM", "c10d")
        for case in ("SGD-momentum", "Adam", "AdamW-amsgrad", "Adagrad"):
            cls, _ = CASES[case]
            twins = Twins(world, Mlp(), cls, zero=zero, **options_of(case, implementation))
            twins.train(3)
            twins.assert_moved()
