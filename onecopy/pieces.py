"""What this rank owns of each parameter, as the inner optimizers know it.

A piece is known by a tensor: the user's own parameter where the piece is all of it, a 1-D view of
it where it is a part, or a *master copy* of either in a wider dtype (``master_dtype``).

The parameters are the truth, and master copies add digits to them: what somebody else writes into a
parameter (``module.load_state_dict``, ``clamp_``) counts, and its master follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from onecopy.buffers import Copies, flat_range, in_layout_of
from onecopy.plan import Piece
from onecopy.torch_private import version_of

MASTER = "master_param"  # the key of a master copy in saved state


def grad_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient; recent releases let it be another than its own."""
    found: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if found is None else found


def updated_in(dtype: torch.dtype, master_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter is updated: that of its master copy, if its own is narrower.

    >>> updated_in(torch.bfloat16, torch.float32), updated_in(torch.float64, torch.float32)
    (torch.float32, torch.float64)
    """
    if master_dtype is None or not dtype.is_floating_point:
        return dtype
    return master_dtype if dtype.itemsize < master_dtype.itemsize else dtype


def gradient_held_in(param: torch.Tensor, master_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter's gradient is summed over the ranks, and kept for a step."""
    dtype = updated_in(param.dtype, master_dtype)
    return grad_dtype(param) if dtype == param.dtype else dtype


@dataclass(slots=True, eq=False)
class OwnedPiece:
    """A piece of this rank, and the tensor by which the inner optimizer knows it."""

    piece: Piece
    param: torch.Tensor  # the user's
    tensor: torch.Tensor  # `param` itself, a 1-D view of it, or a master copy
    is_cut: bool  # the tensor is 1-D; else it has the parameter's shape
    # Of a master copy: the version of the parameter that it last followed ...
    followed: int | None = None
    # ... and whether it was loaded since a step, maybe before the parameter itself is loaded.
    is_loaded: bool = False

    @classmethod
    def of(
        cls, piece: Piece, param: torch.Tensor, cut: bool, master_dtype: torch.dtype | None
    ) -> OwnedPiece:
        tensor = param
        if cut:
            tensor = torch.nn.Parameter(flat_range(param.detach(), piece.start, piece.stop))
        dtype = updated_in(param.dtype, master_dtype)
        if dtype != param.dtype:
            tensor = torch.nn.Parameter(tensor.detach().to(dtype))
        elif cut and grad_dtype(param) != tensor.dtype:
            tensor.grad_dtype = grad_dtype(param)
        return cls(piece, param, tensor, cut)

    @property
    def is_whole(self) -> bool:
        return not self.is_cut

    @property
    def has_master(self) -> bool:
        return self.tensor.dtype != self.param.dtype

    @property
    def is_param(self) -> bool:
        return self.tensor is self.param

    def values(self) -> torch.Tensor:
        """The piece itself, in the memory of the parameter and unseen by autograd."""
        memory = self.param.data
        return flat_range(memory, self.piece.start, self.piece.stop) if self.is_cut else memory

    def rebind(self) -> None:
        """Follow the parameter to the memory it has now."""
        if self.has_master:
            self.tensor.data = self.tensor.data.to(self.param.device)
        elif self.is_cut:
            self.tensor.data = flat_range(self.param.detach(), self.piece.start, self.piece.stop)

    def part_of(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor's gradient, from that of the whole parameter; without a copy if it can be."""
        if grad is None or not self.is_cut:
            return self.fitting(grad)
        laid_out = in_layout_of(self.param, grad)
        return self.fitting(flat_range(laid_out, self.piece.start, self.piece.stop))

    def fitting(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient of the piece in the dtype that the tensor takes."""
        return grad.to(self.tensor.dtype) if grad is not None and self.has_master else grad

    @property
    def is_ahead(self) -> bool:
        """Whether it has a master copy that says more than the parameter."""
        return self.has_master and not torch.equal(
            self.tensor.detach(), self.values().to(self.tensor.dtype)
        )

    @property
    def is_behind(self) -> bool:
        """Whether somebody may have written into the parameter since its master followed it."""
        return self.followed != version_of(self.param)

    @torch.no_grad()
    def follow_param(self) -> None:
        """Take over what was written into the parameter; elsewhere the master keeps its digits."""
        values = self.values()
        changed = self.tensor.to(values.dtype) != values
        # Whether there are any is not asked: the answer would have to come from the device.
        self.tensor.copy_(torch.where(changed, values.to(self.tensor.dtype), self.tensor))
        self.agrees()

    def agrees(self) -> None:
        """The parameter is what the master says."""
        self.followed, self.is_loaded = version_of(self.param), False

    @torch.no_grad()
    def load_master(self, saved: torch.Tensor | None) -> None:
        """Take a copy that was loaded; None: make it anew from the parameter."""
        self.tensor.copy_(self.values() if saved is None else saved)
        self.followed, self.is_loaded = version_of(self.param), True

    def copied_to(self, param: torch.Tensor) -> OwnedPiece:
        """The same of a copy of the parameter: a copied view would alias nothing."""
        master_dtype = self.tensor.dtype if self.has_master else None
        new = OwnedPiece.of(self.piece, param, self.is_cut, master_dtype)
        if self.has_master:
            new.tensor.data.copy_(self.tensor.data)
            new.followed = None if self.is_behind else version_of(param)
            new.is_loaded = self.is_loaded
        return new


class Holdings:
    """This rank's pieces: in the order of the plan, by parameter and by bucket."""

    def __init__(self, pieces: Iterable[OwnedPiece] = ()) -> None:
        self.pieces: list[OwnedPiece] = []
        self.of: dict[torch.Tensor, list[OwnedPiece]] = {}
        self.in_bucket: dict[int, list[OwnedPiece]] = {}
        # Those that are not the user's parameters, and need to be given gradients; without
        # masters no more than a few per bucket.
        self.lent: dict[int, list[OwnedPiece]] = {}
        self.masters: list[OwnedPiece] = []
        for owned in pieces:
            self.add(owned)

    def add(self, owned: OwnedPiece) -> None:
        bucket = owned.piece.bucket
        self.pieces.append(owned)
        self.of.setdefault(owned.param, []).append(owned)
        self.in_bucket.setdefault(bucket, []).append(owned)
        if not owned.is_param:
            self.lent.setdefault(bucket, []).append(owned)
        if owned.has_master:
            self.masters.append(owned)


class Masters:
    """The master copies of a rank."""

    def __init__(self, holdings: Holdings) -> None:
        self._pieces = holdings.masters
        self._copies: dict[int, Copies] = {}
        for owned in self._pieces:
            copies = self._copies.setdefault(owned.piece.bucket, Copies())
            copies.add(owned.values(), owned.tensor.detach())

    def write_back(self, bucket: int) -> None:
        """Round a bucket's masters into the parameters."""
        if bucket in self._copies:
            self._copies[bucket].run()

    def remember(self) -> None:
        """The parameters are what the masters say."""
        for owned in self._pieces:
            owned.agrees()

    def forget(self) -> None:
        """The parameters have other memory, with whatever in it."""
        for owned in self._pieces:
            owned.followed = None

    def load(self, saved: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Master copies that were loaded, by our tensors; others are made anew."""
        for owned in self._pieces:
            owned.load_master(saved.get(owned.tensor))

    def follow_writes(self) -> bool:
        """Take over what somebody else has written into the parameters, before masters are saved.
        What was loaded stays, until the parameter is written to: that may be loaded next. Whether
        there may have been anything."""
        behind = [owned for owned in self._pieces if owned.is_behind]
        for owned in behind:
            owned.follow_param()
        return bool(behind)

    def are_behind(self) -> bool:
        """Whether ``follow_params`` would change one."""
        return any(owned.is_loaded or owned.is_behind for owned in self._pieces)

    def follow_params(self) -> None:
        """Before parameters are updated: they are the truth, also for what was loaded."""
        for owned in self._pieces:
            if owned.is_loaded or owned.is_behind:
                owned.follow_param()

    def tell_autograd(self) -> None:
        """That ``write_back`` has changed the parameters, without passing through autograd."""
        torch.autograd.graph.increment_version([owned.param for owned in self._pieces])
