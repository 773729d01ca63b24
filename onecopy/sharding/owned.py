"""What this rank owns of each parameter, as the inner optimizers know it.

A shard is known by a tensor: the user's own parameter where the shard is all of it, a 1-D view of
it where it is a part, or a *master copy* of either in a wider dtype (``master_dtype``).

Invariant: the parameters are the truth, and master copies add digits to them. If somebody else
writes into a parameter (``module.load_state_dict``, ``clamp_``), its master copy follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from onecopy.comm.interface import CopyList
from onecopy.planning.layout import flat_range, in_layout_of
from onecopy.planning.param_groups import grad_dtype, update_dtype
from onecopy.planning.plan import Shard
from onecopy.torch_private import version_of


@dataclass(slots=True, eq=False)
class OwnedShard:
    """A shard of this rank, and the tensor by which the inner optimizer knows it."""

    shard: Shard
    param: torch.Tensor  # the user's
    tensor: torch.Tensor  # `param` itself, a 1-D view of it, or a master copy
    is_cut: bool  # the tensor is 1-D; else it has the parameter's shape
    # Of a master copy: the version of the parameter that it last followed, and whether it was
    # loaded after the last step; the parameter itself may be loaded next.
    followed: int | None = None
    is_loaded: bool = False

    @classmethod
    def of(
        cls, shard: Shard, param: torch.Tensor, cut: bool, master_dtype: torch.dtype | None
    ) -> OwnedShard:
        tensor = param
        if cut:
            tensor = torch.nn.Parameter(flat_range(param.detach(), shard.start, shard.stop))
        dtype = update_dtype(param.dtype, master_dtype)
        if dtype != param.dtype:
            tensor = torch.nn.Parameter(tensor.detach().to(dtype))
        elif cut and grad_dtype(param) != tensor.dtype:
            tensor.grad_dtype = grad_dtype(param)
        return cls(shard, param, tensor, cut)

    @property
    def is_whole(self) -> bool:
        return not self.is_cut

    @property
    def has_master(self) -> bool:
        return self.tensor.dtype != self.param.dtype

    def values(self) -> torch.Tensor:
        """The elements in the memory of the parameter, not tracked by autograd."""
        memory = self.param.data
        return flat_range(memory, self.shard.start, self.shard.stop) if self.is_cut else memory

    def rebind(self) -> None:
        """Follow the parameter to the memory that it has now."""
        if self.has_master:
            self.tensor.data = self.tensor.data.to(self.param.device)
        elif self.is_cut:
            self.tensor.data = flat_range(self.param.detach(), self.shard.start, self.shard.stop)

    def gradient_from(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor's gradient, from that of the whole parameter; a view of it if possible."""
        if grad is not None and self.is_cut:
            laid_out = in_layout_of(self.param, grad)
            grad = flat_range(laid_out, self.shard.start, self.shard.stop)
        return self.in_own_dtype(grad)

    def in_own_dtype(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient of the shard in the dtype that the tensor takes."""
        return grad.to(self.tensor.dtype) if grad is not None and self.has_master else grad

    @property
    def is_ahead(self) -> bool:
        """Whether it has a master copy with digits that the parameter lacks."""
        return self.has_master and not torch.equal(
            self.tensor.detach(), self.values().to(self.tensor.dtype)
        )

    @property
    def is_behind(self) -> bool:
        """Whether the parameter may have been written to since its master copy followed it."""
        return self.followed != version_of(self.param)

    @torch.no_grad()
    def follow_param(self) -> None:
        """Copy what was written into the parameter; elsewhere the master copy keeps its digits."""
        values = self.values()
        changed = self.tensor.to(values.dtype) != values
        # Why no `if changed.any()`: it would synchronise with the device.
        self.tensor.copy_(torch.where(changed, values.to(self.tensor.dtype), self.tensor))
        self.mark_followed()

    def mark_followed(self) -> None:
        """The parameter holds the values of the master copy."""
        self.followed, self.is_loaded = version_of(self.param), False

    @torch.no_grad()
    def load_master(self, saved: torch.Tensor | None) -> None:
        """Copy a master copy that was loaded; None: the values of the parameter."""
        self.tensor.copy_(self.values() if saved is None else saved)
        self.followed, self.is_loaded = version_of(self.param), True

    def copied_to(self, param: torch.Tensor) -> OwnedShard:
        """The same for a copy of the parameter. Why: a copied view would not alias the copy."""
        master_dtype = self.tensor.dtype if self.has_master else None
        new = OwnedShard.of(self.shard, param, self.is_cut, master_dtype)
        if self.has_master:
            new.tensor.data.copy_(self.tensor.data)
            new.followed = None if self.is_behind else version_of(param)
            new.is_loaded = self.is_loaded
        return new


class OwnedShards:
    """The shards of this rank: in the order of the plan, by parameter and by bucket."""

    def __init__(self, shards: Iterable[OwnedShard] = ()) -> None:
        self.shards: list[OwnedShard] = []
        self.of: dict[torch.Tensor, list[OwnedShard]] = {}
        self.in_bucket: dict[int, list[OwnedShard]] = {}
        # By bucket: those that are not the user's own parameters. Without master copies there are
        # only a few in a bucket.
        self.needing_gradients: dict[int, list[OwnedShard]] = {}
        self.masters: list[OwnedShard] = []
        for owned in shards:
            self.add(owned)

    def add(self, owned: OwnedShard) -> None:
        bucket = owned.shard.bucket
        self.shards.append(owned)
        self.of.setdefault(owned.param, []).append(owned)
        self.in_bucket.setdefault(bucket, []).append(owned)
        if owned.tensor is not owned.param:
            self.needing_gradients.setdefault(bucket, []).append(owned)
        if owned.has_master:
            self.masters.append(owned)


class MasterCopies:
    """The master copies of this rank."""

    def __init__(self, owned_shards: OwnedShards) -> None:
        self._shards = owned_shards.masters
        self._copies: dict[int, CopyList] = {}
        for owned in self._shards:
            copies = self._copies.setdefault(owned.shard.bucket, CopyList())
            copies.add(owned.values(), owned.tensor.detach())

    def write_back(self, bucket: int) -> None:
        """Round the master copies of a bucket into the parameters."""
        if bucket in self._copies:
            self._copies[bucket].run()

    def remember(self) -> None:
        """The parameters hold the values of the master copies."""
        for owned in self._shards:
            owned.mark_followed()

    def forget(self) -> None:
        """The parameters have other memory, with unknown values in it."""
        for owned in self._shards:
            owned.followed = None

    def load(self, saved: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Load master copies, by the tensors of their shards; the others follow the parameters."""
        for owned in self._shards:
            owned.load_master(saved.get(owned.tensor))

    def follow_writes(self) -> bool:
        """Before master copies are saved: follow what was written into the parameters. Return
        whether there may have been anything.

        A master copy that was loaded stays until its parameter is written to, since the parameter
        may be loaded next.
        """
        behind = [owned for owned in self._shards if owned.is_behind]
        for owned in behind:
            owned.follow_param()
        return bool(behind)

    def are_behind(self) -> bool:
        """Whether ``follow_params`` would change one."""
        return any(owned.is_loaded or owned.is_behind for owned in self._shards)

    def follow_params(self) -> None:
        """Before an update: follow all parameters, also with master copies that were loaded."""
        for owned in self._shards:
            if owned.is_loaded or owned.is_behind:
                owned.follow_param()

    def tell_autograd(self) -> None:
        """Tell autograd that ``write_back`` has changed the parameters."""
        torch.autograd.graph.increment_version([owned.param for owned in self._shards])
