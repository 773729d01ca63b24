"""Errors that torch's classes raise: the sharded optimizer raises the same class of exception."""

from __future__ import annotations

import copy
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import World, distributed
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop

from onecopy import ZeroRedundancyOptimizer


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (2, 3)))


def raised(build: Callable[[], Any], is_stepped: bool = False) -> BaseException | None:
    """What building an optimizer, and its first step, raises or warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            optimizer = build()
            if is_stepped:
                optimizer.step()
        except Exception as error:
            return error
    return None


def require_same_class(
    plain: BaseException | None, ours: BaseException | None, what: str, is_same_text: bool = True
) -> None:
    assert plain is not None, what
    assert isinstance(ours, type(plain)), f"{what}: torch raises {plain!r}, the package {ours!r}"
    if is_same_text:
        assert str(plain) in str(ours), what


# What torch's own list of errors (``optim_error_inputs_func``) has for every class, and more: the
# class, parameters, options, and whether the text contains torch's.
P, Q = param(), param()
CASES: dict[str, tuple[Any, Callable[[], Any], dict[str, Any], bool]] = {
    "a tensor": (AdamW, param, {}, True),
    "no iterable": (AdamW, lambda: 3, {}, False),
    "no parameters": (AdamW, list, {}, False),
    "twice in a group": (SGD, lambda: [P, P], {}, True),
    "in two groups": (SGD, lambda: [{"params": P}, {"params": P}], {}, True),
    "some with names": (SGD, lambda: [("weight", P), Q], {}, True),
    "some without names": (SGD, lambda: [P, ("weight", Q)], {}, True),
    "a name and a group": (SGD, lambda: [("weight", P), {"params": Q}], {}, True),
    "some with names in a group": (SGD, lambda: [{"params": [("weight", P), Q]}], {}, True),
    "groups with and without": (
        SGD,
        lambda: [{"params": [P]}, {"params": [("weight", Q)]}],
        {},
        True,
    ),
    "a tensor and a group": (SGD, lambda: [P, {"params": Q}], {}, False),
    "a group and a tensor": (SGD, lambda: [{"params": Q}, P], {}, False),
    "a group and a name": (SGD, lambda: [{"params": Q}, ("weight", P)], {}, False),
    "numbers": (SGD, lambda: [1, 2], {}, False),
    "a name without a tensor": (SGD, lambda: [("weight", 1)], {}, False),
    "a number in a group": (SGD, lambda: [{"params": [P, 1]}], {}, True),
    "a group without params": (SGD, lambda: [{"lr": 0.1}], {}, False),
    "a group that is a set": (SGD, lambda: [{"params": {P}}], {}, True),
    "no leaf": (SGD, lambda: [P * 2], {}, True),
    "lr of two elements": (Adam, lambda: [P], {"lr": torch.tensor([0.1, 0.1])}, True),
    "a negative lr": (SGD, lambda: [P], {"lr": -0.5}, True),
    "rho": (Adadelta, lambda: [P], {"rho": 1.1}, True),
    "lr_decay": (Adagrad, lambda: [P], {"lr_decay": -0.5}, True),
    "betas": (AdamW, lambda: [P], {"betas": (1.0, 0.0)}, True),
    "momentum": (RMSprop, lambda: [P], {"momentum": -1.0}, True),
    "nesterov": (SGD, lambda: [P], {"nesterov": True}, True),
    "an unknown option": (SGD, lambda: [P], {"learning_rate": 1}, False),
    "fused and foreach": (AdamW, lambda: [P], {"fused": True, "foreach": True}, True),
}


@distributed(1, 2)
def test_every_rank_raises_what_torch_raises(world: World) -> None:
    for what, (cls, params, options, is_same_text) in CASES.items():
        plain = raised(lambda: cls(params(), **options))
        ours = raised(lambda: ZeroRedundancyOptimizer(params(), cls, **options))
        require_same_class(plain, ours, what, is_same_text)


@distributed(2)
def test_a_mixture_on_one_rank_is_a_value_error_on_all(world: World) -> None:
    params = [("weight", P), Q] if world.rank == 1 else [("weight", P), ("bias", Q)]
    with pytest.raises(ValueError, match="entry 1 of params is a Parameter"):
        ZeroRedundancyOptimizer(params, SGD)


@distributed(1, 2)
def test_a_group_that_is_added_raises_what_torch_raises(world: World) -> None:
    more: dict[str, tuple[Any, bool]] = {
        "no dict": ([P], False),
        "no params": ({"lr": 0.1}, False),
        "in two groups": ({"params": P}, True),
        "with names": ({"params": [("bias", Q)]}, True),
        "some with names": ({"params": [("bias", Q), param()]}, True),
        "a set": ({"params": {Q}}, True),
        "a number": ({"params": [1]}, True),
    }
    ours, plain = ZeroRedundancyOptimizer([P], SGD), SGD([P])
    for what, (group, is_same_text) in more.items():
        by_torch = raised(lambda: plain.add_param_group(copy.copy(group)))
        by_us = raised(lambda: ours.add_param_group(copy.copy(group)))
        require_same_class(by_torch, by_us, what, is_same_text)


# What torch's texts say of parameters or classes that are refused for a reason of our own.
OTHER_TEXTS = {
    "dense params required",
    "dense params required in param_groups",
}


@distributed(1, fresh=True, timeout=180)  # the import changes settings of the process
def test_torchs_own_list_of_errors(world: World) -> None:
    try:
        import expecttest  # noqa: F401
    except ImportError:  # its test cases are not used here
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    try:
        from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db
    except ImportError as error:
        pytest.skip(f"torch's own tests cannot be imported: {error}")
    count = 0
    for info in optim_db:
        cls = info.optim_cls
        for error_input in info.optim_error_inputs_func("cpu", torch.float32):
            given, count = error_input.optimizer_error_input, count + 1
            params = [P, Q] if given.params is None else given.params
            is_stepped = error_input.error_on is OptimizerErrorEnum.STEP_ERROR
            plain = raised(lambda: cls(params, **given.kwargs), is_stepped)
            ours = raised(
                lambda: ZeroRedundancyOptimizer(params, cls, **given.kwargs),
                is_stepped,
            )
            # Some wait for a device that is not there; of some torch says that it will refuse them.
            if plain is not None and not isinstance(plain, FutureWarning):
                is_same_text = given.desc not in OTHER_TEXTS and cls is not torch.optim.LBFGS
                what = f"{info.name}, {given.desc}"
                require_same_class(plain, ours, what, is_same_text)
    assert count > 100
