"""The sharded state for ``torch.distributed.checkpoint`` (DCP): ``optimizer.sharded()``.

DCP asks a tensor which rectangular boxes of it are here (``__create_write_items__`` to write,
``__create_chunk_list__`` to read), and for the memory of each (``__get_tensor_shard__``). A
``ChunkTensor`` answers for a fragment. It has the shape of the unsharded tensor, so that DCP
compares the right sizes, but no memory for it.

What is read goes into fresh memory and reaches the optimizer when everything has been read: a load
that fails has changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onecopy.checkpoint.state import Fragment, StateView, replaced
from onecopy.planning.param_groups import MASTER
from onecopy.planning.traits import tensors_in

if TYPE_CHECKING:  # DCP brings half of torch.distributed, which training does not need
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# What DCP and its staging call on a tensor, besides the three methods.
_ALLOWED = frozenset(
    {
        *("__get__", "detach", "dim", "element_size", "is_pinned", "numel", "size"),
        *("storage_offset", "stride", "untyped_storage"),
    }
)


class ChunkTensor(torch.Tensor):
    """A tensor of which this rank holds some boxes. Not for computing."""

    fragment: Fragment
    incoming: Fragment | None  # memory for what is read, from when DCP plans to read
    arrived: list[Sequence[int]]  # offsets of the boxes that were asked for to be filled

    @classmethod
    def of(cls, fragment: Fragment) -> ChunkTensor:
        tensor = _outside(fragment.shape, fragment.dtype).as_subclass(cls)
        tensor.fragment = fragment
        tensor.incoming = None
        tensor.arrived = []
        return tensor

    # ------------------------------------------------------------------ what DCP asks for

    def __create_write_items__(self, key: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.fragment.is_mine_to_write:
            return []
        size = torch.Size(self.fragment.shape)
        properties = TensorProperties(dtype=self.fragment.dtype)
        return [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self.incoming = self.fragment.like()
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if self.incoming is not None:
            self.arrived.append(index.offset or ())
        fragment = self.incoming or self.fragment
        for box, view in fragment.boxes():
            if box.offsets == tuple(index.offset or ()):
                return view
        raise ValueError(f"{index.fqn} has no box at {index.offset} on this rank")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box, _ in self.fragment.boxes()
        ]

    # ------------------------------------------------------------------ what was read

    def loaded(self) -> Fragment:
        """The fragment as it was read; as it was shown, if nothing was asked to be read."""
        return self.incoming or self.fragment

    @property
    def is_complete(self) -> bool:
        if self.incoming is None or math.prod(self.fragment.shape) == 0:
            return True
        return {tuple(o) for o in self.arrived} == {b.offsets for b, _ in self.fragment.boxes()}

    # ------------------------------------------------------------------ and nothing else

    def staged(self) -> ChunkTensor:
        """A copy on the CPU, which the optimizer's next step does not change."""
        return ChunkTensor.of(self.fragment.staged())

    def __deepcopy__(self, memo: Any) -> ChunkTensor:
        return self.staged()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        boxes = [(box.offsets, box.sizes) for box, _ in self.fragment.boxes()]
        return f"BoxTensor({self.fragment.shape}, {self.fragment.dtype}, boxes={boxes})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _STAGING:
            return _STAGING[name](*args)
        if name not in _ALLOWED:
            raise TypeError(
                f"{name} on a part of an optimizer's sharded state: it is for dcp.save and "
                "dcp.load only. For values use optimizer.consolidate_state_dict()"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _outside(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any shape, in the memory of one element."""
    return torch.empty((), dtype=dtype, device="cpu").expand(tuple(shape))


def _empty(tensor: ChunkTensor, *shape: Any) -> ChunkTensor:
    """A tensor to which staging then gives copies of the attributes of another."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return _outside(sizes, tensor.dtype).as_subclass(ChunkTensor)


def _copy(target: torch.Tensor, source: ChunkTensor, *_: Any) -> torch.Tensor:
    if not isinstance(target, ChunkTensor):  # a scalar: staging makes a plain one
        return target.copy_(source.fragment.whole())
    for to, from_ in zip(target.fragment.parts, source.fragment.parts, strict=True):
        to.data.copy_(from_.data)
    return target


# The ways in which torch's stagers copy a tensor for async_save, from 2.6 to 2.13. That there is no
# memory at all makes them ask for a copy of the object instead of making one of its shape.
_STAGING: dict[str, Callable[..., Any]] = {
    "data_ptr": lambda tensor: 0,  # noqa: ARG005
    "new_empty": _empty,
    "to": lambda tensor, *_: tensor.staged(),
    "zeros_like": lambda tensor, *_: tensor.staged(),
    "copy_": _copy,
}


class ShardedState:
    """An optimizer's share of the state as DCP's ``Stateful``. Made by ``optimizer.sharded()``."""

    def __init__(
        self,
        show: Callable[[], dict[str, Any]],
        state_view: Callable[[], StateView],
        adopt: Callable[[StateView, Any, Any, Sequence[str]], None],
        flatten: bool,
    ) -> None:
        self._show = show
        self._state_view = state_view
        self._adopt = adopt
        self._flatten = flatten

    def state_dict(self) -> dict[str, Any]:
        """What to save, and a form to load into; DCP asks for it in both cases."""
        tree = replaced(self._show(), Fragment, ChunkTensor.of)
        return flattened(tree) if self._flatten else tree

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what DCP has read. If it is refused, nothing has changed."""
        state_view = self._state_view()
        tree = unflattened(state_dict, state_view) if self._flatten else state_dict
        _require_parts(tree["state"])
        states = {name: _without_master_not_read(state) for name, state in tree["state"].items()}
        incomplete = sorted(name for name, state in states.items() if not _is_complete(state))
        state = replaced(states, ChunkTensor, ChunkTensor.loaded)
        groups = [replaced(group, ChunkTensor, _value) for group in tree["param_groups"]]
        self._adopt(state_view, state, groups, incomplete)


def _require_parts(states: Mapping[str, Any]) -> None:
    """Refuse tensors that were not asked for as parts, and may be whole."""
    for name, state in states.items():
        for tensor in tensors_in(state):
            if not isinstance(tensor, ChunkTensor):
                raise ValueError(
                    f"the state of {name} holds plain tensors: this is for what dcp.load has read "
                    "into sharded(). For a full state dict use optimizer.load_state_dict"
                )


def _without_master_not_read(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checkpoint may lack master copies (``allow_partial_load``): they can be made anew."""
    others = [tensor for key in state if key != MASTER for tensor in tensors_in(state[key])]
    master = state.get(MASTER)
    was_read = isinstance(master, ChunkTensor) and master.incoming is not None
    if was_read or not any(isinstance(t, ChunkTensor) and t.incoming is not None for t in others):
        return state
    return {key: value for key, value in state.items() if key != MASTER}


def _is_complete(state: Any) -> bool:
    """Whether all of it was read, or nothing of it was asked for."""
    parts = [tensor for tensor in tensors_in(state) if isinstance(tensor, ChunkTensor)]
    asked = {tensor.incoming is not None for tensor in parts}
    return len(asked) < 2 and all(tensor.is_complete for tensor in parts)


def _value(tensor: ChunkTensor) -> torch.Tensor:
    return tensor.loaded().whole()


def flattened(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The form that ``flatten_optimizer_state_dict=True`` gives: one key per value, the options
    of a group repeated for each of its parameters."""
    flat = {
        f"state.{name}.{key}": value
        for name, state in tree["state"].items()
        for key, value in state.items()
    }
    for group in tree["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": value for key, value in options.items()})
    return flat


def unflattened(flat: Mapping[str, Any], state_view: StateView) -> dict[str, Any]:
    """The inverse, for the parameters and groups of a portrait."""
    tree = state_view.tree()
    state = {
        name: {key: flat[f"state.{name}.{key}"] for key in of_param}
        for name, of_param in tree["state"].items()
    }
    groups = []
    for number, group in enumerate(tree["param_groups"]):
        names, options = group["params"], {}
        for key in group.keys() - {"params"} if names else ():
            values = [flat[f"param_groups.{name}.{key}"] for name in names]
            if not isinstance(values[0], torch.Tensor) and any(v != values[0] for v in values):
                raise ValueError(
                    f"the parameters of group {number} have different values of {key!r} in the "
                    "checkpoint: they were in different groups when it was written"
                )
            options[key] = values[0]
        groups.append({**options, "params": names})
    return {"state": state, "param_groups": groups}
