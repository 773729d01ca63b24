"""How many files of the package each call passes through: a reader has to open all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from harness import World, distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onecopy
from onecopy import ZeroRedundancyOptimizer

PACKAGE = os.path.dirname(onecopy.__file__) + os.sep
GLOO = os.path.join("comm", "gloo")  # behind one interface: a reader may take it as one thing
BOUNDS = {"construct": 16, "drop-in step": 12, "attached step": 16, "save": 14, "load": 18}


@contextmanager
def files_of(call: str) -> Iterator[None]:
    files = set()

    def see(frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            name = file.removeprefix(PACKAGE)
            files.add(GLOO if name.startswith(GLOO) else name)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(before)
    assert "optimizer.py" in files
    assert len(files) <= BOUNDS[call], f"{call} passes through {len(files)} files: {sorted(files)}"


@pytest.mark.of_messages
@distributed(2)
def test_each_call_passes_through_few_files(world: World, tmp_path: Path) -> None:
    torch.manual_seed(world.rank)

    def net() -> nn.Module:
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])

    def train(module: nn.Module, optimizer: ZeroRedundancyOptimizer, call: str) -> None:
        for _ in range(2):  # the first steps compare gradients, and start classes
            module(torch.randn(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        module(torch.randn(4, 64)).sum().backward()
        with files_of(call):
            optimizer.step()

    model = DistributedDataParallel(net())
    with files_of("construct"):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    train(model, optimizer, "drop-in step")
    with files_of("save"):
        optimizer.save(tmp_path, model)
    with files_of("load"):
        optimizer.load(tmp_path, model)

    bare = net()
    attached = ZeroRedundancyOptimizer(bare.parameters(), torch.optim.AdamW, lr=1e-3)
    attached.attach(bare)
    train(bare, attached, "attached step")
