"""Names of parameters in a checkpoint: those of the bare module, however it is wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import World, distributed
from models import Mlp, TiedNet
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from onecopy import ZeroRedundancyOptimizer
from onecopy.checkpoint.state import checkpoint_names
from onecopy.planning.param_groups import Entry, ParamRegistry


def registry(params: list[torch.Tensor]) -> ParamRegistry:
    entries = tuple(Entry(param, f"parameter {i}", 0) for i, param in enumerate(params))
    return ParamRegistry(entries)


def names(params: Any, module: nn.Module | None = None) -> list[str]:
    """As an optimizer of these parameters, in any form that torch takes, would have them."""
    optimizer = SGD(params, lr=0.1)
    everything = [param for group in optimizer.param_groups for param in group["params"]]
    return checkpoint_names(registry(everything), optimizer.param_groups, module)


def plain_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


class Compiled(nn.Module):
    """What torch.compile makes of a module, as far as names are concerned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_a_module_gives_its_names_whatever_the_order_of_the_parameters() -> None:
    model = Mlp()
    expected = plain_names(model)
    assert names(model.parameters(), model) == expected
    assert names(list(model.parameters())[::-1], model) == expected[::-1]


def test_a_module_wins_over_names_given_at_construction() -> None:
    model = Mlp()
    given = [(f"other.{i}", param) for i, param in enumerate(model.parameters())]
    assert names(given, model) == plain_names(model)
    assert names(given) == [name for name, _ in given]


@distributed(1, 2)
def test_a_ddp_wrapper_leaves_no_trace(world: World) -> None:
    model = Mlp()
    expected = plain_names(model)
    ddp = DistributedDataParallel(model)
    assert names(ddp.parameters(), ddp) == expected
    assert names(ddp.parameters(), model) == expected
    assert names(ddp.named_parameters()) == expected
    assert names(ddp.parameters(), Compiled(ddp)) == expected
    assert names(ddp.parameters(), DistributedDataParallel(Compiled(model))) == expected


def test_a_submodule_that_is_called_module_keeps_its_name() -> None:
    outer = nn.Module()
    outer.module, outer.last = Mlp(), nn.Linear(2, 2)
    assert names(outer.parameters(), outer) == plain_names(outer)
    assert names(outer.named_parameters()) == plain_names(outer)


def test_compiled_and_checkpointed_blocks_leave_no_trace() -> None:
    model = Mlp()
    expected = plain_names(model)
    model.first = checkpoint_wrapper(model.first)
    model.second = Compiled(checkpoint_wrapper(model.second))
    wrapped = Compiled(model)
    assert plain_names(wrapped) != expected
    assert names(wrapped.parameters(), wrapped) == expected
    assert names(wrapped.named_parameters()) == expected


def test_what_torch_compile_returns_leaves_no_trace() -> None:
    model = Mlp()
    compiled = torch.compile(model, backend="eager")
    assert names(model.parameters(), compiled) == plain_names(model)


def test_a_tied_weight_has_its_first_name() -> None:
    model = TiedNet()
    found = names(model.parameters(), model)
    assert found == plain_names(model)
    assert "embedding.weight" in found
    assert "head.weight" not in found


@distributed(1)
def test_the_names_are_those_of_torchs_own_checkpoint_functions(world: World) -> None:
    model = DistributedDataParallel(TiedNet())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    (group,) = get_optimizer_state_dict(model, optimizer)["param_groups"]
    assert names(model.parameters(), model) == group["params"]


def test_given_names_hold_in_any_group() -> None:
    model = Mlp()
    pairs = list(model.named_parameters())
    assert names([{"params": pairs[:2]}, {"params": pairs[2:]}]) == plain_names(model)


def test_a_prefix_of_all_given_names_is_a_wrappers_and_one_of_some_is_not() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    wrapped = list(zip(["module.a", "module.b"], params, strict=True))
    assert names(wrapped) == ["a", "b"]
    some = list(zip(["module.a", "b"], params, strict=True))
    assert names(some) == ["module.a", "b"]


def test_without_names_a_parameter_is_called_by_its_position() -> None:
    assert names(Mlp().parameters()) == [f"by_index.{i}" for i in range(6)]
    assert names([{"params": p} for p in Mlp().parameters()]) == [f"by_index.{i}" for i in range(6)]


def test_two_parameters_of_one_name_are_refused() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [("same", params[0])]}, {"params": [("same", params[1])]}]
    with pytest.raises(ValueError, match=r"two parameters.*'same'.*unique"):
        names(groups)


def test_names_that_only_differ_by_a_wrapper_are_refused() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"two parameters.*'a\.w'"):
        names([("a._orig_mod.w", params[0]), ("a.w", params[1])])


def test_a_module_that_lacks_parameters_is_refused_with_their_names() -> None:
    model, foreign = Mlp(), Mlp()
    with pytest.raises(ValueError, match=r"parameter 0, parameter 1.*\.\.\..*not in the module"):
        names(model.parameters(), foreign)
    with pytest.raises(ValueError, match=r"^parameter 2, parameter 3.*not in the module"):
        names(model.parameters(), nn.Sequential(model.first, model.second))


@distributed(1, 2)
def test_saving_and_loading_refuse_a_foreign_module(world: World, tmp_path: Any) -> None:
    optimizer = ZeroRedundancyOptimizer(Mlp().parameters(), SGD, lr=0.1)
    for refused in (optimizer.save, optimizer.load):
        with pytest.raises(ValueError, match="not in the module"):
            refused(tmp_path, Mlp())
    with pytest.raises(ValueError, match="not in the module"):
        optimizer.sharded(Mlp()).state_dict()
    assert list(tmp_path.iterdir()) == []
