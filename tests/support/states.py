"""Optimizer state to compare: the plain class and ours as twins, with equal gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import World
from inside import PACKED_BYTES, RANGE_BYTES, SHORTEST_MESSAGE
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onecopy import ZeroRedundancyOptimizer

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
        mock.patch.object(*PACKED_BYTES, packed),
        mock.patch.object(*RANGE_BYTES, largest),
        mock.patch.object(*SHORTEST_MESSAGE, own),
    ):
        yield
