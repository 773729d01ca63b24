"""What the tests of good manners share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import (
    SMALL_BUCKETS,
)
from torch import nn
from torch.optim import AdamW, Optimizer

from onecopy import ZeroRedundancyOptimizer

BUCKET_VIEW = pytest.mark.parametrize(
    "bucket_view", [False, True], ids=["own-storage", "bucket-view"]
)


def sharded(model: nn.Module, cls: type[Optimizer] = AdamW, **kwargs: Any) -> Any:
    return ZeroRedundancyOptimizer(
        model.parameters(), cls, **{"bucket_mb": SMALL_BUCKETS, "lr": 0.01, **kwargs}
    )


def give_gradients(model: nn.Module, value: float = 1.0) -> None:
    """The same on every rank."""
    for param in model.parameters():
        param.grad = torch.full_like(param, value)
