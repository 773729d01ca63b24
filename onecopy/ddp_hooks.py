"""Steps inside backward: DDP communication hooks for ``overlap_with_ddp=True``.

For code written for the hooks of the same names in torch. The update happens when the gradients of
the last bucket have arrived, in every backward from the first on, and with whatever classes, groups
and schedulers the optimizer has; ``backward()`` returns with updated parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from onecopy.feeds import after_ddp
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.patches import AfterJoinHook
from onecopy.torch_private import in_backward

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """A communication hook that averages with ``hook`` and then steps ``zero``::

        zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))

    Args:
        hook: averages a bucket, for example torch's ``allreduce_hook``.
        ddp: the module to register the result with.
        zero: built on the parameters of ``ddp``, with ``overlap_with_ddp=True``.
        shard_buckets: accepted for compatibility. The plan is even either way.
    """
    del shard_buckets
    _require_partners(ddp, zero)
    AfterJoinHook(ddp, zero._take_part_joined)

    def step_after(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        # A rank that has run out of inputs is in no backward: its turn comes when DDP is through.
        if bucket.is_last() and in_backward():
            after_ddp(zero._step_in_backward)
        return future

    # DDP looks at the annotations, and wants the classes themselves.
    step_after.__annotations__.update(
        {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    )
    return step_after


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """The same as :func:`hook_with_zero_step`: the gathers of the step overlap each other, and
    nothing waits on a thread that communication needs."""
    return hook_with_zero_step(hook, ddp, zero, shard_buckets)


def _require_partners(ddp: Any, zero: Any) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp must be a DistributedDataParallel, got {type(ddp).__name__}")
    if not isinstance(zero, ZeroRedundancyOptimizer):
        raise TypeError(f"zero must be onecopy's optimizer, got {type(zero).__name__}")
    if not zero._steps_in_backward:
        raise ValueError(
            "the optimizer does not step inside backward: build it with overlap_with_ddp=True"
        )
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if ranks != dist.get_process_group_ranks(zero.process_group):
        raise ValueError(
            f"the DDP module averages over ranks {ranks}, the optimizer is sharded over "
            f"{dist.get_process_group_ranks(zero.process_group)}: give both the same process_group"
        )
