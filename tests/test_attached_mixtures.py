"""Attached mode with two classes in one object, and with compiled modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attached import EVERY_FEED, AttachedTwins
from harness import World, distributed
from models import Mlp, TiedNet, assert_same_on_all_ranks
from test_lazy import Delays
from torch import nn
from torch.optim import Adafactor, AdamW

# ---------------------------------------- classes ----------------------------------------


def matrices_and_rest(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    muon = {"optimizer_class": torch.optim.Muon, "lr": 0.02, "momentum": 0.8}
    return [{"params": rest, "weight_decay": 0.2}, {"params": matrices, **muon}]


class TwoPlain:
    """What the groups above make of the plain classes."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        rest, matrices = matrices_and_rest(model)
        muon = matrices.pop("optimizer_class")
        self.each = [AdamW([rest], **options), muon([matrices])]

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()


@distributed(1, 2, 3, 4)
@EVERY_FEED
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_muon_and_adamw_in_one_object(world: World, feed: str, lazy: bool) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    torch.manual_seed(0)
    attach = {"lazy_gather": lazy}
    twins = AttachedTwins(
        *(world, Mlp(width=24), AdamW, feed), groups=matrices_and_rest, attach=attach, lr=0.01
    )
    twins.plain = TwoPlain(twins.plain_model, lr=0.01)
    before = [param.detach().clone() for param in twins.model.parameters()]
    # Muon computes in bfloat16: one rounding of a gradient may show in the third digit.
    twins.train(4, **({"rtol": 1e-2, "atol": 2e-3} if world.size > 2 else {}))
    for param, start in zip(twins.model.parameters(), before, strict=True):
        assert not torch.equal(param, start)


@distributed(1, 2, 3, 4)
@EVERY_FEED
@pytest.mark.parametrize("model", [Mlp, TiedNet])
def test_adafactor(world: World, feed: str, model: Any) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, model(), Adafactor, feed, lr=0.05)
    # It divides by the square root of what may be as small as a rounding error.
    twins.train(4, **({"rtol": 1e-4, "atol": 1e-5} if world.size > 2 else {}))


# ---------------------------------------- torch.compile ----------------------------------------


@distributed(2)
@EVERY_FEED
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("first", ["attached", "compiled"])
def test_a_compiled_module(world: World, feed: str, lazy: bool, first: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    attach = {"lazy_gather": lazy}
    twins = AttachedTwins(world, Mlp(), AdamW, feed, attach=attach, lr=0.01)
    module = twins.ddp
    if first == "compiled":
        twins.optimizer.detach()
    twins.ddp = torch.compile(module, backend="aot_eager")
    if first == "compiled":
        twins.ddp(twins.batch())  # is compiled here
        twins.optimizer.attach(module, **attach)
    with Delays(world):
        for _ in range(4):
            twins.backward()
            twins.step()
    twins.assert_same(rtol=1e-5, atol=1e-6)
    assert_same_on_all_ranks(twins.model)
