"""x"""
from __future__ import annotations
import torch
from harness import distributed, World
from models import *

@distributed(1, 2, 3, 4)
def test_smoke(world: World) -> None:
    for m, kw in [(Mlp(), {}), (ConvNet(), {}), (TiedNet(), {}), (MixedNet(), {}), (BranchNet(lambda s: (list(s)[0] % 2 == 0, True)), {"ddp": {"find_unused_parameters": True}})]:
        t = Twins(world, m, torch.optim.AdamW, lr=0.01, **kw)
        t.train(3)
        t.assert_moved()
        assert_same_on_all_ranks(t.model)
