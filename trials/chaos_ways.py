"""The ways in which a job saves and loads. In each of them a checkpoint is complete, as in
`examples/elastic.py`, when its directory gets its name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from onecopy import ZeroRedundancyOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import elastic

Act = Callable[[Path, nn.Module, ZeroRedundancyOptimizer], None]


class Way(NamedTuple):
    """What all ranks do with the directory of a checkpoint."""

    write: Act  # rank 0 returns when all of it is on the disk
    read: Act


def write_full(saving: Path, net: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saving.mkdir(parents=True, exist_ok=True)
        with open(saving / "full.pt", "wb") as file:
            torch.save({"model": net.state_dict(), "optim": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())


def read_full(path: Path, net: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    found = torch.load(path / "full.pt", weights_only=True)
    net.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optim"])


def write_by_dcp(saving: Path, net: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    dcp.save({"model": net.state_dict(), "optim": optimizer.sharded(net)}, checkpoint_id=saving)


def read_by_dcp(path: Path, net: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    dcp.load({"model": net.state_dict(), "optim": optimizer.sharded(net)}, checkpoint_id=path)


WAYS = {
    "own": Way(elastic.write, elastic.read),
    "full": Way(write_full, read_full),
    "dcp": Way(write_by_dcp, read_by_dcp),
}


def take(way: str) -> None:
    """Let the example save and load so."""
    elastic.write, elastic.read = WAYS[way]
