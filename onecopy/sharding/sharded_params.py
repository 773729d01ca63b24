"""The plan, the owned shards and their memory, which change together or not at all.

`ShardedParams.rebuild` is the one place that prepares memory and all-gathers for the plan as it is.
It is reached from construction, growth, loads, moved parameters and ``attach``. `StepStatus` knows
whether a step or a load has failed in the middle. `MemoryWatch` and `ModuleWatch` find parameters
that somebody else has moved or replaced; `require_same_order` compares their order over the ranks.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.agreement import difference
from onecopy.comm.group import RankGroup
from onecopy.planning.layout import flat_range, is_dense, one_of_each
from onecopy.planning.param_groups import Entry, GroupPolicy, Groups, GroupsChanged, ParamRegistry
from onecopy.planning.plan import Plan
from onecopy.sharding.engine import AllGathers, FlatStorage, SendBuffers
from onecopy.sharding.inner import InnerOptimizers
from onecopy.torch_private import WRAPPED_MODULES, is_unfinished, own_parameters


class StepStatus:
    """Whether a step or a load has failed in the middle: then the optimizer cannot be used."""

    def __init__(self) -> None:
        self.refusal: str | None = None  # why it cannot be used, and what to do
        self._is_changing = False  # parameters or state, in the present step
        self._updated = 0  # buckets

    @contextlib.contextmanager
    def stepping(self, step: int, buckets: int) -> Iterator[None]:
        """Around a step, which calls ``changes`` and ``updated``. If the step raises before it has
        changed anything, the optimizer stays usable."""
        self._is_changing, self._updated = False, 0
        try:
            yield
        except BaseException as error:
            if self._is_changing:
                self._tear(
                    f"step {step} failed after {self._updated} of {buckets} buckets "
                    f"({_in_a_line(error)}): a part of the parameters and of the state is updated, "
                    "another is not. Load a checkpoint of the model and of the optimizer, on all "
                    "ranks"
                )
            raise

    def changes(self) -> None:
        """Parameters or state are about to change: from here on the step cannot be undone."""
        self._is_changing = True

    def updated(self) -> None:
        """Another bucket was updated and is being gathered."""
        self._is_changing = True  # also if this rank owns nothing of it
        self._updated += 1

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around the end of a load, which cannot be undone. After it the optimizer is usable."""
        try:
            yield
        except BaseException as error:
            self._tear(
                f"loading has failed in the middle ({_in_a_line(error)}): a part of the state is "
                "the new one, another is not. Load again, on all ranks"
            )
            raise
        self.refusal = None

    def _tear(self, refusal: str) -> None:
        self.refusal = refusal

    def require_whole(self) -> None:
        """Raise if a step or a load has failed in the middle."""
        if self.refusal is not None:
            raise RuntimeError(self.refusal)


def _in_a_line(error: BaseException) -> str:
    summary, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {summary}"


SAME_ORDER = (
    "These are different parameters, in one position. Pass the parameters in the same order on all "
    "ranks; named_parameters() instead of parameters() lets the ranks compare names."
)
# What reduces gradients in attached mode follows every change of the plan or of the memory, and
# returns the memory from which it sends.
Follow = Callable[[Plan, Sequence[torch.Tensor]], SendBuffers]


class ShardedParams:
    """The parameters of an optimizer: registry, plan, owned shards, flat storage, all-gathers."""

    def __init__(
        self, rank_group: RankGroup, inner: InnerOptimizers, plan: Plan, bucket_view: bool
    ) -> None:
        self.inner = inner
        self.plan = plan  # at first of nothing
        self.registry = ParamRegistry()
        self.is_confirmed = True  # all ranks are known to hold the same plan
        self._rank_group = rank_group
        self._flat = FlatStorage() if bucket_view else None
        self.all_gathers = AllGathers(rank_group)
        self.gathers_lazily = False  # whoever uses the parameters waits
        self._memory = MemoryWatch()
        self.modules = ModuleWatch(())
        self._unplanned: list[torch.Tensor] = []  # frozen parameters
        self.follower: Follow | None = None  # in attached mode
        self.status = StepStatus()
        self._unsent: list[int] = []  # buckets, of the present step

    # ------------------------------------------------------------------ changing

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """If the block raises, registry, plan, shards and state are as before."""
        before = self.registry, self.plan, self.is_confirmed, self.modules
        undo_inner = self.inner.snapshot()
        try:
            yield
        except BaseException:  # an interrupted load, too, leaves everything as it was
            self.registry, self.plan, self.is_confirmed, self.modules = before
            undo_inner()
            raise

    def admit(self, groups: Groups, policies: Sequence[GroupPolicy]) -> None:
        """Register the last groups, which have these policies, and plan what is trainable now."""
        for group, policy in zip(groups[-len(policies) :], policies, strict=True):
            self.registry = self.registry.with_group(group, policy)
        self.extend(groups, self.registry.to_plan(self.plan))

    def extend(self, groups: Groups, new: Sequence[int]) -> None:
        """Plan parameters that are not planned yet, and own this rank's shards of them."""
        self.plan = self.registry.extend(self.plan, new)
        self.inner.add_shards(self.plan, self._rank_group.rank, self.registry.params)
        self.inner.refill_groups(groups)

    def make_room_for(
        self, groups: Groups, with_state: Container[torch.Tensor], policies: Sequence[GroupPolicy]
    ) -> None:
        """Change the plan as the state and the policies that are to be loaded require.

        A frozen parameter that has state is planned, or its state would be lost. If a policy
        forbids the cuts of the plan, another plan is made. Loading is not collective: whether all
        ranks were given the same is compared in the next step.
        """
        before = self.plan
        late = [i for i in self.registry.unplanned(before) if self.registry.params[i] in with_state]
        changed = map(GroupPolicy.needs_other_cuts_than, policies, self.registry.policies)
        if before.world_size > 1 and any(changed):
            self.registry = replace(self.registry, policies=tuple(policies))
            self.plan = Plan(before.world_size, before.bucket_bytes)
            self.inner.remove_shards()
            self.extend(groups, [*sorted(before.params), *late])
        elif late:
            self.extend(groups, late)
        self.is_confirmed = False

    def frozen_with_constructor_state(
        self, groups: Groups, states: Mapping[torch.Tensor, Any]
    ) -> set[torch.Tensor]:
        """Frozen parameters whose state is what the class makes in its constructor."""
        found = set()
        for index in self.registry.unplanned(self.plan):
            entry = self.registry.entries[index]
            cls = self.registry.policies[entry.group].optimizer_class
            made = self.inner.constructor_state(cls, groups[entry.group], [entry.param])
            state, initial = states.get(entry.param), made.get(entry.param)
            if state is not None and initial is not None and _is_same(state, initial):
                found.add(entry.param)
        return found

    def rebuild(self) -> None:
        """Prepare memory and all-gathers for the plan as it is now."""
        if self._memory.has_moved():  # by others, with unknown values in the new memory
            for owned in self.inner.masters.shards:
                owned.followed = None
        if self._flat is not None:
            self._flat.adopt(self.plan, self.registry.params)
        self.inner.rebind()
        self.all_gathers.release_staging()  # until all is prepared, the next step comes here again
        params = self.registry.params
        self._memory = MemoryWatch(self.registry.planned(self.plan))
        self._unplanned = [params[index] for index in self.registry.unplanned(self.plan)]
        send_buffers = None if self.follower is None else self.follower(self.plan, params)
        self.all_gathers.prepare(self.plan, params, self._flat, self.gathers_lazily, send_buffers)

    def find_modules(self) -> None:
        """Find the modules that use the parameters, to notice when they no longer do."""
        self.modules = ModuleWatch(self.registry.entries)

    def require_same_order(self, doing: str, first: int = 0) -> None:
        """Raise on all ranks if one of them holds the parameters from ``first`` on in another
        order. Collective, after the ranks have agreed on shapes and on names that were given.

        Names that modules give are compared. Where there are none, or the modules differ, values
        are compared: that ranks have different values is no mistake, since DDP may still broadcast
        them; that one rank has the values of another in another order is.
        """
        group = self._rank_group
        if group.world_size == 1:
            return
        entries, names = self.registry.entries[first:], self.modules.names.of[first:]

        def refusal(entries: Sequence[Entry], views: Iterable[str]) -> Exception:
            lines = [f"{entry.name} {view}" for entry, view in zip(entries, views, strict=True)]
            return difference(group, [f"{doing}{group.whose}", *lines], SAME_ORDER)

        structure = self.modules.names.structure
        ordered, unordered, structures = gather_digests(group, names, sorted(names), structure)
        unnamed = [entry for entry, name in zip(entries, names, strict=True) if not name]
        if len(set(ordered)) > 1:
            is_same_model = len(set(structures)) == 1 and not any(
                map(any, group.all_gather_bytes(bytes([bool(unnamed)])))
            )
            if is_same_model or is_permuted(ordered, unordered):
                raise refusal(entries, (f"is {name or 'not in a module'}" for name in names))
            unnamed = list(entries)
        if unnamed:
            values = [_value(entry.param) for entry in unnamed]
            if is_permuted(*gather_digests(group, values, sorted(values))):
                raise refusal(unnamed, (f"has the values {value}" for value in values))

    def name_in_module(self, index: int) -> str:
        """The name of a parameter, with the one that its module gives it if it has no other."""
        title, name = self.registry.names[index], self.modules.names.of[index]
        return f"{title} ({name})" if name and "(" not in title else title

    # ------------------------------------------------------------------ every step

    def require_same_form(self) -> None:
        """Raise if a parameter was converted after it was planned and cannot be followed."""
        is_plain = self._flat is None and self.inner.master_dtype is None
        if self._rank_group.world_size > 1 or not is_plain:
            numbers = {id(entry): number for number, entry in enumerate(self.registry.entries)}
            self._memory.require_same_form(lambda entry: self.name_in_module(numbers[id(entry)]))

    def require_same_groups(self, groups: Groups) -> None:
        """Raise if the lists of parameters in the groups were changed by hand."""
        given = self.registry.listed
        same = len(groups) == len(given) and all(
            len(group["params"]) == len(params) and all(map(operator.is_, group["params"], params))
            for group, params in zip(groups, given, strict=True)
        )
        if not same:
            raise GroupsChanged(
                "the parameters in param_groups are not those that were given: changing the lists "
                "by hand has no effect here. Use add_param_group(...) on all ranks, or build "
                "another optimizer"
            )

    def unfrozen(self) -> list[int]:
        """The parameters that the plan left out and that have become trainable."""
        left = self._unplanned
        if not any(map(_requires_grad, left)) and all(map(operator.is_, map(_grad, left), _NONE)):
            return []
        return self.registry.to_plan(self.plan)

    def follow_memory(self) -> None:
        """Rebuild if parameters have other memory. Raise if their form has changed, too."""
        if self._memory.has_moved():
            self.require_same_form()
            self.rebuild()
        elif self.all_gathers.buckets is None:  # a rebuild failed, or the optimizer was detached
            self.rebuild()

    def begin_sending(self) -> Sequence[int]:
        """The buckets of a step, in the order in which ``all_gather`` sends them."""
        self._unsent = list(self.all_gathers.order)
        return self.all_gathers.order

    def all_gather(self, bucket: int) -> None:
        """This rank's part of the bucket is updated: start to exchange it."""
        self.all_gathers.mark_updated(bucket)
        self.inner.masters.write_back(bucket)
        self.all_gathers.launch(bucket)
        self._unsent.remove(bucket)

    def finish_step(self) -> None:
        """Wait for the all-gathers, unless they are lazy."""
        if not self.gathers_lazily:
            self.all_gathers.queue.wait()
        # What arrives, or is rounded, in place does not pass through autograd: without this, a
        # backward through a graph built before the step would silently use the new values.
        changed = self._memory.params
        if self._rank_group.world_size == 1:
            changed = [owned.param for owned in self.inner.masters.shards]
        torch.autograd.graph.increment_version(changed)
        self.inner.masters.remember()

    def send_all(self) -> None:
        """Every rank's part of every bucket is updated: exchange them."""
        for bucket in self.begin_sending():
            self.all_gather(bucket)
        self.finish_step()

    def send_remaining(self) -> None:
        """Send what a step has not sent because it failed: other ranks may be further."""
        for bucket in list(self._unsent):
            self.all_gather(bucket)

    # ------------------------------------------------------------------ describing, copying

    def description(self, groups: Groups) -> list[str]:
        """What all ranks must have alike, as lines to compare."""
        return [
            f"bucket_mb={self.plan.bucket_bytes / 2**20:g}, "
            f"parameters_as_bucket_view={self._flat is not None}, "
            f"master_dtype={self.inner.master_dtype}",
            *self.registry.description(groups, self.plan, with_storage=self._flat is not None),
        ]

    def copied(self, inner: InnerOptimizers, registry: ParamRegistry) -> ShardedParams:
        """The same for copies of the parameters."""
        new = ShardedParams(self._rank_group, inner, self.plan, bucket_view=self._flat is not None)
        new.registry, new.is_confirmed = registry, self.is_confirmed
        new.status = copy.deepcopy(self.status)
        new.find_modules()
        new.rebuild()
        return new


_requires_grad, _grad = operator.attrgetter("requires_grad"), operator.attrgetter("grad")
_NONE = itertools.repeat(None)


def _is_same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    def same(value: Any, other: Any) -> bool:
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            return value.shape == other.shape and torch.equal(value.cpu(), other.cpu())
        return bool(value == other)

    return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())


# -------------------------------------------------------------------------- changed by others
# Both are looked for in every step, and models have thousands of parameters. So what is remembered
# stands in columns, which are compared without a Python loop.

# Where a parameter is in memory, and how it is read there.
_MEMORY: tuple[Callable[[torch.Tensor], Any], ...] = (
    operator.methodcaller("data_ptr"),
    operator.attrgetter("shape"),
    operator.methodcaller("stride"),
)


class MemoryWatch:
    """Remembers the memory and the form of parameters."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self.params = [entry.param for entry in entries]
        self._memory = [one_of_each(map(of, self.params)) for of in _MEMORY]
        self._forms = list(zip(entries, one_of_each(map(_form, self.params)), strict=True))

    def has_moved(self) -> bool:
        """Whether a parameter has other memory, or views the same memory in another way."""
        return any(
            list(map(of, self.params)) != known
            for of, known in zip(_MEMORY, self._memory, strict=True)
        )

    def require_same_form(
        self, name_of: Callable[[Entry], str] = operator.attrgetter("name")
    ) -> None:
        """Raise if anything but the address of a parameter has changed, such as its dtype."""
        for entry, form in self._forms:
            if _form(entry.param) != form:
                raise RuntimeError(
                    f"{name_of(entry)} has changed since the optimizer was built, from {form} to "
                    f"{_form(entry.param)}, but its state is laid out for the former. Convert or "
                    "move the model before you build the optimizer"
                )


def _form(param: torch.Tensor) -> str:
    return f"{param.dtype}, shape {tuple(param.shape)}, stride {param.stride()}, {param.device}"


class _Place(NamedTuple):
    """Where in a module a parameter was found."""

    module: weakref.ref[torch.nn.Module]
    table: ParameterTable
    name: str
    entry: Entry


class ModuleWatch:
    """Remembers which modules hold the parameters, and finds those that were replaced there.

    All objects are searched for the modules once, when parameters are added; steps look only at the
    places that were found.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        ours = {id(entry.param): entry for entry in entries}
        self._dead: list[Any] = []  # references to modules that have died
        modules = list(all_modules()) if ours else []
        walked = walk([module for module, _ in modules])
        self.names = find_names([entry.param for entry in entries], walked)
        self._remember(
            _Place(weakref.ref(module, self._dead.append), table, name, ours[id(param)])
            for module, table in modules
            for name, param in table.items()
            if id(param) in ours
        )
        self._ddps = weakref.WeakSet(
            module
            for module, names in walked
            if isinstance(module, DistributedDataParallel) and any(id(p) in ours for p in names)
        )

    def _remember(self, places: Iterable[_Place]) -> None:
        self._places = list(places)
        # The same in columns, to compare them without a Python loop in every step.
        self._tables = [place.table for place in self._places]
        self._names = [place.name for place in self._places]
        self._params = [place.entry.param for place in self._places]

    def require_in_place(self) -> None:
        """Raise if another parameter has taken the place of one.

        A parameter that was deleted, or whose module is gone, is left alone.
        """
        if self._dead:
            self._dead.clear()
            self._remember(place for place in self._places if place.module() is not None)
        found = map(dict.get, self._tables, self._names)
        if all(map(operator.is_, found, self._params)):
            return
        now: dict[Entry, list[torch.Tensor | None]] = {}
        for place in self._places:
            now.setdefault(place.entry, []).append(place.table.get(place.name))
        for entry, params in now.items():
            if all(param is not None and param is not entry.param for param in params):
                raise RuntimeError(
                    f"{entry.name} is no longer the one that its module uses: another Parameter "
                    "has taken its place, and this optimizer would go on updating the old one. Was "
                    "it load_state_dict(..., assign=True)? Build the optimizer after that"
                )

    def require_finished_backward(self) -> None:
        """Raise if DDP waits for the end of a backward that has raised."""
        if any(map(is_unfinished, self._ddps)):
            raise RuntimeError(
                "the last backward under DDP has not come to its end, and a part of the gradients "
                "is not averaged: it raised, or parameters were not used. Call zero_grad(), wrap "
                "the module again, DistributedDataParallel(model), on all ranks, and compute the "
                "gradients again"
            )

    def forgive_backward(self) -> None:
        """The gradients were dropped: DDP modules that can never go on are no longer watched."""
        self._ddps -= set(filter(is_unfinished, self._ddps))


# -------------------------------------------------------------------------- names and order
# An optimizer is given parameters, not modules. So modules are searched for among all objects of
# the process. Names are relative to the innermost module that holds the parameters, without
# wrappers: they are equal on ranks of which only some wrap the model.

ParameterTable = dict[str, torch.Tensor | None]  # the parameters of a module itself, by name


def names_in(
    module: torch.nn.Module, known: dict[int, dict[torch.Tensor, str]] | None = None
) -> dict[torch.Tensor, str]:
    """The parameters of a module with their names, without wrappers; a tied parameter has its
    first name. ``known``: the result for modules that were walked before, by ``id``."""
    known = {} if known is None else known
    if id(module) not in known:
        # Why not module.named_parameters: a class may override it with other arguments.
        own = torch.nn.Module.named_parameters(module, recurse=False)
        found: dict[torch.Tensor, str] = {param: name for name, param in own}
        is_ddp = isinstance(module, DistributedDataParallel)
        for name, child in torch.nn.Module.named_children(module):
            is_wrapper = name in WRAPPED_MODULES or (is_ddp and name == "module")
            for param, inner_name in names_in(child, known).items():
                found.setdefault(param, inner_name if is_wrapper else f"{name}.{inner_name}")
        known[id(module)] = found
    return known[id(module)]


def all_modules() -> Iterator[tuple[torch.nn.Module, ParameterTable]]:
    """All modules of the process."""
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.nn.Module):
            try:
                table = own_parameters(obj)
            # Why: a module that raises, perhaps because it is not built yet or has its own
            # __getattribute__, must not fail an optimizer that does not use it.
            except Exception:
                continue
            if table is not None:
                yield obj, table


def walk(
    modules: Iterable[torch.nn.Module],
) -> list[tuple[torch.nn.Module, dict[torch.Tensor, str]]]:
    """Modules with the names of the parameters in them, without those that cannot be walked, such
    as one that contains itself."""
    known: dict[int, dict[torch.Tensor, str]] = {}
    found = []
    for module in modules:
        with contextlib.suppress(Exception):  # as in all_modules
            found.append((module, names_in(module, known)))
    return found


class ModuleNames(NamedTuple):
    """The names that modules give to parameters."""

    of: tuple[str, ...]  # by parameter; empty if no module names it, or two name it differently
    structure: tuple[str, ...]  # the names of all parameters of these modules


def find_names(
    params: Sequence[torch.Tensor],
    walked: Sequence[tuple[torch.nn.Module, Mapping[torch.Tensor, str]]],
) -> ModuleNames:
    """Names for the parameters, relative to the innermost module that holds most of them.

    Why the innermost: a wrapper around the model, which may exist on one rank only, must not change
    the names. Parameters of several models get the class of theirs as a prefix.
    """
    position_of = {param: position for position, param in enumerate(params)}
    held_by: dict[int, Set[int]] = {}
    holding: dict[Set[int], list[tuple[torch.nn.Module, Mapping[torch.Tensor, str]]]] = {}
    for module, names in walked:
        held = frozenset(position_of[param] for param in names if param in position_of)
        held_by[id(module)] = held
        if held:
            holding.setdefault(held, []).append((module, names))
    found = [""] * len(params)
    structure: list[str] = []
    unnamed = set(range(len(params)))
    roots: list[tuple[str, list[int]]] = []  # a class, and the parameters that it names
    for together in sorted(holding, key=lambda held: (-len(held), sorted(held))):
        positions = sorted(together & unnamed)
        if not positions:
            continue
        unnamed -= together
        innermost = [
            (module, names)
            for module, names in holding[together]
            if not any(
                held_by.get(id(child)) == together
                for _, child in torch.nn.Module.named_children(module)
            )
        ]
        ways = {tuple(names[params[i]] for i in positions) for _, names in innermost}
        if len(ways) != 1:
            continue
        module, names = innermost[0]
        roots.append((type(module).__name__, positions))
        for position, name in zip(positions, ways.pop(), strict=True):
            found[position] = name
        structure += sorted(names.values())
    for root, positions in roots if len(roots) > 1 else ():
        for position in positions:
            found[position] = f"{root}.{found[position]}"
    counts = Counter(found)
    return ModuleNames(tuple(name if counts[name] == 1 else "" for name in found), tuple(structure))


def _value(param: torch.Tensor) -> str:
    """The beginning of a parameter, and a fingerprint of all of it."""
    memory = param.detach()
    try:
        first = memory[(0,) * memory.dim()].item()
        return f"[{first:.4g}, ...], fingerprint {int(fingerprint(memory)) % (1 << 64):016x}"
    except Exception:  # it has no elements, or none that can be read, on all ranks alike
        return "[]"


def gather_digests(group: RankGroup, *mine: Sequence[str]) -> list[list[bytes]]:
    """A digest of each of these lists, of all ranks. Collective."""
    texts = ["\n".join(lines).encode(errors="backslashreplace") for lines in mine]
    everyone = group.all_gather_bytes(b"".join(hashlib.sha256(text).digest() for text in texts))
    return [[of[32 * i : 32 * (i + 1)] for of in everyone] for i in range(len(mine))]


def is_permuted(ordered: Sequence[bytes], unordered: Sequence[bytes]) -> bool:
    """Whether two ranks have the same in another order."""
    return len(set(zip(ordered, unordered, strict=True))) > len(set(unordered))


# -------------------------------------------------------------------------- fingerprints
# The bits of a tensor as one 64-bit number, computed where the tensor is: sums of the memory as
# 64-bit words, modulo 2**64. A flipped bit changes one word by a power of two, which no sum and no
# product with an odd number can hide: that single bits are noticed is certain.


CHUNK = 1 << 16  # words: what the weights are made for, so that they stay in the cache
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an arbitrary odd number, as a signed 64-bit one
WORD_BYTES = 8
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Reads the memory once, as fast as it can be read. Elements that have changed places are not
    noticed: it is for memory that nobody should have touched."""
    words, rest = words_of(tensor)
    total: torch.Tensor = words.sum()
    return total + rest.sum() if rest.numel() else total


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The same with odd weights, which notices elements in other places, too."""
    words, rest = words_of(tensor)
    weights = torch.arange(
        1, 2 * max(1, min(CHUNK, words.numel())), 2, dtype=torch.int64, device=tensor.device
    )
    total = (rest * weights.new_tensor([1, 3, 5, 7, 9, 11, 13, 15])[: rest.numel()]).sum()
    for chunk in torch.split(words, CHUNK) if words.numel() else ():
        some = weights[: chunk.numel()]
        # On the CPU in one pass; accelerators have `dot` for floats only.
        is_cpu = chunk.device.type == "cpu"
        total = total * ODD + (torch.dot(chunk, some) if is_cpu else (chunk * some).sum())
    return total


def words_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory in words, and the few elements at the end that fill none."""
    memory = tensor.detach()
    if memory.is_complex():
        memory = torch.view_as_real(memory)
    # Not as what they are: a copy of a bool need not have its bits.
    memory = memory.view(INTEGERS[memory.element_size()])
    dense = memory if is_dense(memory) else memory.contiguous()
    integers = flat_range(dense, 0, dense.numel())
    in_word = WORD_BYTES // dense.element_size()
    if integers.storage_offset() % in_word:
        integers = integers.clone()  # words begin where the tensor does, wherever in memory it lies
    end = integers.numel() // in_word * in_word
    return integers[:end].view(torch.int64), integers[end:]
