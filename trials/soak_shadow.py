"""The shadow of a soak: the same training, unsharded, by plain torch optimizers.

Every rank has all of it: a model of its own, computed on this rank's batches, and plain optimizers.
Gradients are averaged as the mode of the job promises, so that equal means equal bit for bit:

    attached          each rank's gradient times 1/W, added up in the order of the ranks
    drop-in, by hand  the same, rounded to the parameter's dtype
    drop-in, DDP      by a DDP of the shadow's own

Attached, gradients inside no_sync() are accumulated on the rank first: in float32 where there is a
master copy, else in the dtype of the gradient.

The shadow never reads what the job has computed, with one exception: the norm by which attached
gradients are clipped, which is defined up to rounding only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from soak_net import Batch, Case, Group, SoakNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def _share_of(param: torch.Tensor, grad: torch.Tensor | None, share: float) -> torch.Tensor:
    """Rounded as it is sent."""
    if grad is None:
        return torch.zeros(param.numel())
    return (grad * share).to(param.dtype).float().flatten()


@torch.no_grad()
def summed_in_rank_order(
    params: Sequence[torch.Tensor],
    group: Any = None,
    gradients: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor | None]:
    """The average over the ranks of each parameter's gradient, in float32; None where no rank has
    one, and zeros for ranks that have none where others do. ``gradients``: those of this rank, if
    not ``param.grad``."""
    world = dist.get_world_size(group)
    share = 1 / world
    if gradients is None:
        gradients = [param.grad for param in params]
    parts = [_share_of(p, grad, share) for p, grad in zip(params, gradients, strict=True)]
    has = torch.tensor([float(grad is not None) for grad in gradients])
    mine = torch.cat([*parts, has])
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine, group=group)
    total = everyone[0]
    for other in everyone[1:]:
        total = total + other
    *sums, anywhere = total.split([*(p.numel() for p in params), len(params)])
    return [
        torch.empty_like(param, dtype=torch.float32).copy_(each.view(param.shape)) if any_ else None
        for param, each, any_ in zip(params, sums, anywhere.tolist(), strict=True)
    ]


class Shadow:
    """A model and its plain optimizers, one for each class."""

    def __init__(self, case: Case, groups: Sequence[Group]) -> None:
        self.case = case
        self.net = SoakNet(case.dtype)
        self.module: nn.Module = self.net  # or a DDP around it
        self.groups: list[Group] = []
        self.params = dict(self.net.named_parameters())
        self._tensors = {name: self._stepped(param) for name, param in self.params.items()}
        self._optimizers: dict[Any, torch.optim.Optimizer] = {}
        self._sums: dict[str, torch.Tensor] = {}  # attached: the averaged gradients
        self._accumulated: dict[str, torch.Tensor] = {}  # attached: in no_sync(), with masters
        for group in groups:
            self.add(group)

    def _stepped(self, param: nn.Parameter) -> nn.Parameter:
        """What is stepped in place of a parameter: itself, or its master copy."""
        dtype = self.case.master_dtype
        if dtype is None or param.dtype == dtype:
            return param
        return nn.Parameter(param.detach().to(dtype))

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        return {n: t for n, t in self._tensors.items() if t is not self.params[n]}

    def add(self, group: Group) -> None:
        options = {k: v for k, v in group.options.items() if k != "optimizer_class"}
        given = {**options, "params": [self._tensors[name] for name in group.names]}
        self.groups.append(group)
        cls = group.own_class or self.case.optimizer_class
        if cls in self._optimizers:
            self._optimizers[cls].add_param_group(given)
        else:
            defaults = {} if group.own_class else self.case.options
            self._optimizers[cls] = cls([given], **defaults)

    @property
    def options(self) -> list[dict[str, Any]]:
        """The plain optimizers' groups, in the order in which they were added."""
        left = {cls: iter(each.param_groups) for cls, each in self._optimizers.items()}
        return [next(left[group.own_class or self.case.optimizer_class]) for group in self.groups]

    def state(self, name: str) -> dict[str, Any]:
        """Of one parameter."""
        tensor = self._tensors[name]
        return next((o.state[tensor] for o in self._optimizers.values() if tensor in o.state), {})

    # ------------------------------------------------------------------ training

    def backward(self, batch: Batch) -> None:
        self.module(batch.tokens, batch.branches).backward()

    def accumulate(self) -> None:
        """A backward inside ``no_sync()`` of attached mode has ended."""
        for name in self.masters:
            grad = self.params[name].grad
            if grad is not None:
                self._accumulated[name] = self._accumulated.get(name, 0) + grad.float()
                self.params[name].grad = None

    def reduce(self) -> None:
        """Average as attached mode does, on top of what is held."""
        mine = {name: param.grad for name, param in self.params.items()}
        for name, total in self._accumulated.items():
            grad = mine[name]
            mine[name] = total if grad is None else total + grad.float()
        self._accumulated = {}
        averages = summed_in_rank_order(list(self.params.values()), None, list(mine.values()))
        for (name, param), average in zip(self.params.items(), averages, strict=True):
            if average is not None:
                held = self._sums.get(name)
                self._sums[name] = average if held is None else held + average
            param.grad = None

    def average(self) -> None:
        """Average by hand, as users of drop-in mode may do it."""
        average_by_hand(self.net)

    def gradient(self, name: str) -> torch.Tensor | None:
        """As the mode holds it."""
        return self._sums.get(name, self.params[name].grad)

    def gradients(self) -> list[torch.Tensor]:
        """All there are, in the order of the optimizer."""
        names = [name for group in self.groups for name in group.names]
        return [g for g in map(self.gradient, names) if g is not None]

    def step(self) -> None:
        kept = {name: param.grad for name, param in self.params.items()}
        for name, tensor in self._tensors.items():
            grad = self.gradient(name)
            tensor.grad = None if grad is None else grad.to(tensor.dtype)
        for optimizer in self._optimizers.values():
            optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.params[name].copy_(master)
                master.grad = None
        for name, param in self.params.items():
            param.grad = kept[name]
        self._sums = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.net.zero_grad(set_to_none)
        self._sums, self._accumulated = {}, {}

    def wrap(self, in_ddp: bool) -> None:
        """Have gradients averaged by a DDP, or by the methods above."""
        self.module = ddp(self.net) if in_ddp else self.net

    # ------------------------------------------------------------------ keeping

    def snapshot(self) -> dict[str, Any]:
        """All of it, as it is now; ``torch.save`` may write it."""
        return copy.deepcopy(
            {
                "net": self.net.state_dict(),
                "masters": {name: master.detach() for name, master in self.masters.items()},
                "optimizers": [each.state_dict() for each in self._optimizers.values()],
                "trained": [name for name, p in self.params.items() if p.requires_grad],
                "grown": self.net.grown,
            }
        )

    def restore(self, kept: dict[str, Any]) -> None:
        """Back to a snapshot with the same groups. Which parameters are frozen stays."""
        self.net.load_state_dict(kept["net"])
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(kept["masters"][name])
        for optimizer, state in zip(self._optimizers.values(), kept["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))

    @classmethod
    def resumed(cls, case: Case, kept: dict[str, Any]) -> Shadow:
        """What a snapshot shows, in a new process."""
        shadow = cls(case, case.first_groups(SoakNet(case.dtype)))
        for number in range(kept["grown"]):
            for group in case.groups_of_spare(number):
                shadow.add(group)
        shadow.net.grown = kept["grown"]
        shadow.restore(kept)
        shadow.freeze_all_but(kept["trained"])
        return shadow

    def freeze_all_but(self, names: Sequence[str]) -> None:
        for name, param in self.params.items():
            param.requires_grad_(name in names)


def average_by_hand(net: nn.Module) -> None:
    """What a user does who has neither DDP nor attached mode."""
    params = list(net.parameters())
    for param, average in zip(params, summed_in_rank_order(params), strict=True):
        param.grad = None if average is None else average.to(param.dtype)


def ddp(net: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(net, find_unused_parameters=True)
