"""The sharded state for ``torch.distributed.checkpoint`` (DCP): ``optimizer.sharded()``.

DCP asks a tensor which rectangular chunks of it are here (``__create_write_items__`` to write,
``__create_chunk_list__`` to read), and for the memory of each (``__get_tensor_shard__``). A
``ChunkTensor`` answers for the shards of one tensor. It has the shape of the unsharded tensor, so
that DCP compares the right sizes, but no memory for it.

What is read goes into fresh memory and reaches the optimizer when everything has been read: a load
that fails has changed nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from onecopy.checkpoint.full_state import Loadable, with_ranks_told
from onecopy.checkpoint.load import SAME_GROUPS, PoliciesFor, first_of, options_from, regrouped
from onecopy.checkpoint.state import (
    StateShard,
    StateView,
    Steps,
    collect,
    collect_groups,
    describe_names,
    leaves_of,
    rebuild,
    states_of,
    without_uninitialized,
)
from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup
from onecopy.planning.layout import Chunk
from onecopy.planning.param_groups import MASTER
from onecopy.planning.traits import options_of, tensors_in

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
    """A tensor of which this rank holds some chunks. Not for computing."""

    shards: list[StateShard]  # of this tensor, each with other elements
    incoming: list[StateShard] | None  # memory for what is read, from when DCP plans to read
    arrived: set[tuple[int, ...]]  # offsets of the chunks that were asked for to be filled

    @classmethod
    def of(cls, shards: Sequence[StateShard]) -> ChunkTensor:
        tensor = _outside(shards[0].shape, shards[0].data.dtype)
        # What is equal in all shards of a parameter is saved once.
        tensor.shards = list({shard.start: shard for shard in reversed(shards)}.values())[::-1]
        tensor.incoming, tensor.arrived = None, set()
        return tensor

    # ------------------------------------------------------------------ what DCP asks for

    def __create_write_items__(self, key: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not any(shard.is_writer for shard in self.shards):
            return []
        size = torch.Size(self.shards[0].shape)
        properties = TensorProperties(dtype=self.shards[0].data.dtype)
        return [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self.incoming = [shard.empty_like() for shard in self.shards]
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        offsets = tuple(index.offset or ())
        if self.incoming is not None:
            self.arrived.add(offsets)
        for chunk, view in _chunks_of(self.loaded()):
            if chunk.offsets == offsets:
                return view
        raise ValueError(f"{index.fqn} has no chunk at {index.offset} on this rank")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk, _ in _chunks_of(self.shards)
        ]

    # ------------------------------------------------------------------ what was read

    def loaded(self) -> list[StateShard]:
        """The shards as they were read; as they were shown, if nothing was asked to be read."""
        return self.shards if self.incoming is None else self.incoming

    def data_for(self, shard: StateShard) -> torch.Tensor:
        """What was read for a shard; each has a scalar of its own."""
        same = next(each for each in self.loaded() if each.start == shard.start)
        data: torch.Tensor = same.data
        return data if same.owned is shard.owned else data.clone()

    @property
    def is_complete(self) -> bool:
        if self.incoming is None or not self.numel():
            return True
        return self.arrived == {chunk.offsets for chunk, _ in _chunks_of(self.shards)}

    # ------------------------------------------------------------------ and nothing else

    def __deepcopy__(self, memo: Any) -> ChunkTensor:
        """A copy on the CPU, which the next step does not change."""
        return ChunkTensor.of(copy.deepcopy(self.shards, memo))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        first = self.shards[0]
        chunks = [(chunk.offsets, chunk.sizes) for chunk, _ in _chunks_of(self.shards)]
        return f"ChunkTensor({first.shape}, {first.data.dtype}, chunks={chunks})"

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


def _chunks_of(shards: Sequence[StateShard]) -> Iterator[tuple[Chunk, torch.Tensor]]:
    return (part for shard in shards for part in shard.chunks())


def _outside(shape: Sequence[int], dtype: torch.dtype) -> ChunkTensor:
    """A tensor of any shape, in the memory of one element."""
    return torch.empty((), dtype=dtype, device="cpu").expand(tuple(shape)).as_subclass(ChunkTensor)


def _empty(tensor: ChunkTensor, *shape: Any) -> ChunkTensor:
    """A tensor to which staging then gives copies of the attributes of another."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return _outside(sizes, tensor.dtype)


def _copy(target: torch.Tensor, source: ChunkTensor, *_: Any) -> torch.Tensor:
    if not isinstance(target, ChunkTensor):  # a scalar: staging makes a plain one
        return target.copy_(source.shards[0].data)
    for to, from_ in zip(target.shards, source.shards, strict=True):
        to.data.copy_(from_.data)
    return target


# The ways in which torch's stagers copy a tensor for async_save, from 2.6 to 2.13. That there is no
# memory at all makes them ask for a copy of the object instead of making one of its shape.
_STAGING: dict[str, Callable[..., Any]] = {
    "data_ptr": lambda tensor: 0,  # noqa: ARG005
    "new_empty": _empty,
    "to": lambda tensor, *_: copy.deepcopy(tensor),
    "zeros_like": lambda tensor, *_: copy.deepcopy(tensor),
    "copy_": _copy,
}


@dataclass(frozen=True, eq=False, repr=False)
class ShardedState:
    """An optimizer's share of the state as DCP's ``Stateful``. Made by ``optimizer.sharded()``."""

    rank_group: RankGroup
    prepare_to_save: Callable[[str], None]  # brings the state up to date, after checks. Collective
    prepare_to_load: Callable[[str], None]
    view: Callable[[], StateView]  # of the live state
    policies_for: PoliciesFor
    adopt: Callable[[Loadable], None]
    flatten: bool  # one key per value, as with ``flatten_optimizer_state_dict=True``

    def state_dict(self) -> dict[str, Any]:
        """What to save, and a form to load into; DCP asks for it in both cases. Collective: a rank
        that cannot show its share tells all."""
        doing, tree = "showing the state for a checkpoint", dict[str, Any]()
        self.prepare_to_save(doing)

        def show() -> list[str]:
            view = self.view()
            by_param = _grouped(collect(view), "param").items()
            tree["state"] = {view.names[index]: _as_tree(shards) for index, shards in by_param}
            tree["param_groups"] = [_as_tree(options) for options in collect_groups(view)]
            return describe_names(view.params.registry, view.names)

        same_outcome(self.rank_group, doing, show)
        return flattened(tree) if self.flatten else tree

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what DCP has read. If it is refused, nothing has changed."""
        view = self.view()
        expected = _grouped(collect(view), "param")
        tree = unflattened(state_dict, view, expected) if self.flatten else state_dict
        for name, state in tree["state"].items():
            if not all(isinstance(tensor, ChunkTensor) for tensor in tensors_in(state)):
                raise ValueError(  # they may be whole
                    f"the state of {name} holds plain tensors: this is for what dcp.load has read "
                    "into sharded(). For a full state dict use optimizer.load_state_dict"
                )
        read: list[StateShard] = []
        incomplete = []
        for index, shards in expected.items():
            name = view.names[index]
            if name in tree["state"]:
                found = _read(shards, leaves_of(tree["state"][name], f"the state of {name}"))
                read += found or ()
                incomplete += [name] if found is None else []
        options = leaves_of(tree["param_groups"], "a group").items()
        tensors = {p: c.loaded()[0].data for p, c in options if isinstance(c, ChunkTensor)}
        self.prepare_to_load("loading a checkpoint")
        groups = self._agree(view, rebuild(tree["param_groups"], tensors), sorted(incomplete))
        states, params = states_of(read), view.params.registry.params
        frozen = {params[key]: states.pop(key) for key in list(states) if isinstance(key, int)}
        cut = without_uninitialized(view, states, self.rank_group)
        self.adopt(with_ranks_told(self.rank_group, Loadable(groups, frozen, cut, {})))

    def _agree(
        self, view: StateView, groups: Sequence[Mapping[str, Any]], incomplete: Sequence[str]
    ) -> list[dict[str, Any]]:
        """The saved options for each of our groups, or an error on all ranks. Collective."""
        options, registry = list[dict[str, Any]](), view.params.registry

        def prepare() -> list[str]:
            if incomplete:
                raise ValueError(
                    f"the checkpoint does not cover the state of {first_of(incomplete)}: is it "
                    "complete?"
                )
            known = {name for group in groups for name in group["params"]}
            lost = [name for name in view.names if name not in known]
            if lost:
                raise ValueError(
                    f"the checkpoint does not know {first_of(lost)}: is it of another model, or "
                    "were the groups others? load(path) finds them by name"
                )
            moved, _ = regrouped(view, [group["params"] for group in groups])
            if moved:
                listed = [f"{name} ({where})" for name, where in moved.items()]
                raise ValueError(
                    "parameters are grouped otherwise than in the checkpoint: "
                    f"{first_of(listed)}. {SAME_GROUPS}"
                )
            options.extend(options_from(view, groups))
            if self.rank_group.world_size > 1:
                registry.require_plan_fits(self.policies_for(options), self.rank_group.world_size)
            return describe_names(registry, view.names)

        same_outcome(self.rank_group, "loading a checkpoint", prepare)
        return options


def _grouped(shards: Iterable[StateShard], by: str) -> dict[Any, list[StateShard]]:
    found: dict[Any, list[StateShard]] = {}
    for shard in shards:
        found.setdefault(getattr(shard, by), []).append(shard)
    return found


def _as_tree(shards: Sequence[StateShard]) -> Any:
    """The state of a parameter, or the options of a group, as DCP sees them."""
    leaves = {
        path: ChunkTensor.of(same) if same[0].is_tensor else same[0].data
        for path, same in _grouped(shards, "path").items()
    }
    return rebuild(shards[0].tree, leaves, as_saved=True)


def _read(shards: Sequence[StateShard], leaves: dict[Steps, Any]) -> list[StateShard] | None:
    """The shards of a parameter with what DCP has read for them; None if a part was not read. If
    nothing of it was asked for, they are as they were shown."""
    chunks = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, ChunkTensor)}
    asked = {path for path, tensor in chunks.items() if tensor.incoming is not None}
    # A checkpoint may lack master copies (``allow_partial_load``): they can be made anew.
    if asked and (MASTER,) not in asked:
        leaves.pop((MASTER,), None)
        chunks.pop((MASTER,), None)
    is_complete = (
        all(shard.path in leaves or shard.is_master for shard in shards)
        and (not asked or asked == chunks.keys())
        and all(tensor.is_complete for tensor in chunks.values())
    )
    if not is_complete:
        return None
    return [
        replace(
            shard,
            data=chunks[shard.path].data_for(shard) if shard.path in chunks else leaves[shard.path],
        )
        for shard in shards
        if shard.path in leaves
    ]


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


def unflattened(
    flat: Mapping[str, Any], view: StateView, expected: Mapping[int, Sequence[StateShard]]
) -> dict[str, Any]:
    """The inverse, for the parameters and groups of an optimizer."""
    state: dict[str, dict[str, Any]] = {}
    for index, shards in expected.items():
        name = view.names[index]
        keys = dict.fromkeys(str(shard.path[0]) for shard in shards)
        state[name] = {key: flat[f"state.{name}.{key}"] for key in keys}
    groups = []
    for number, group in enumerate(view.groups):
        names, options = view.names_in(number), {}
        for key in options_of(group) if names else ():
            values = [flat[f"param_groups.{name}.{key}"] for name in names]
            if not isinstance(values[0], torch.Tensor) and any(v != values[0] for v in values):
                raise ValueError(
                    f"the parameters of group {number} have different values of {key!r} in the "
                    "checkpoint: they were in different groups when it was written"
                )
            options[key] = values[0]
        groups.append({**options, "params": names})
    return {"state": state, "param_groups": groups}
