"""One segment of a soak: a job that trains with our optimizer and, beside it, the reference.

A segment starts from scratch or from the checkpoint of the segment before, which may have had
another number of ranks. All ranks draw the same operations from the seed of the segment; batches
differ on every rank. Every operation is applied to the job and to its reference.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, pretend_hosts
from inside import params_of, plan_of, share_memory_from
from soak_reference import (
    ALWAYS_TRAINED,
    CASES,
    SPARES,
    Batch,
    Reference,
    SoakNet,
    average_by_hand,
    ddp,
)
from torch import nn
from trial_common import count_of_different_elements, have_equal_bits, step_timeout

from onecopy import ZeroRedundancyOptimizer
from onecopy.planning.param_groups import MASTER

# ---------------------------------------- checkpoints ----------------------------------------

# Ways to save: optimizer.save, the full state dict, dcp.save of sharded(), dcp.async_save of it.
WAYS = ("own", "full", "dcp", "async")
BY_DCP = ("dcp", "async")


@dataclass(frozen=True)
class KeptCheckpoint:
    """The last checkpoint of a segment, which an operation may load again."""

    way: str
    path: Path
    planned: frozenset[str]  # the parameters that were in the plan
    reference: dict[str, Any]  # its snapshot


def planned_names(job: Job) -> frozenset[str]:
    """The parameters in the plan: those that have been trained at some time."""
    params = params_of(job.optimizer)
    planned = {params[index] for index in plan_of(job.optimizer).params}
    return frozenset(name for name, param in job.net.named_parameters() if param in planned)


class Checkpoints:
    """Saves and loads a job."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._pending: Any = None
        self._async_group: Any = None  # async_save communicates from a thread
        self._kept: KeptCheckpoint | None = None
        self._saved = 0

    # ------------------------------------------------------------------ within a segment

    def keep(self, way: str, job: Job) -> None:
        """Save the job, and keep a snapshot of the reference."""
        self._saved += 1
        path = self._directory / f"segment{job.segment.number}-{self._saved}"
        self.save(way, path, job)
        self._kept = KeptCheckpoint(way, path, planned_names(job), job.reference.snapshot())

    def forget(self) -> None:
        """Drop the kept checkpoint: the job has more groups now, so it can no longer be loaded."""
        self._kept = None

    def can_load_kept(self, job: Job) -> bool:
        """Whether the kept checkpoint can be loaded. DCP loads what it is asked for, and has no
        state of parameters that were unfrozen since."""
        if self._kept is None:
            return False
        unfrozen = {n for n, p in job.net.named_parameters() if p.requires_grad}
        return self._kept.way not in BY_DCP or planned_names(job) | unfrozen == self._kept.planned

    def load_kept(self, job: Job) -> None:
        """Load the kept checkpoint into the job and into the reference."""
        assert self._kept is not None
        self.finish()
        self.load(self._kept.way, self._kept.path, job)
        job.reference.restore(self._kept.reference)

    def finish(self) -> None:
        """Wait for the checkpoint that is written in the background."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    # ------------------------------------------------------------------ between segments

    def save_for_next_segment(self, job: Job) -> None:
        """Save the job and the reference."""
        path = self.path_after(job.segment.number)
        self.save(job.segment.saves_by, path, job)
        self.finish()
        if self._rank == 0:
            left = {**job.reference.snapshot(), "planned": sorted(planned_names(job))}
            torch.save(left, path / "reference.pt")
        dist.barrier()

    def path_after(self, segment: int) -> Path:
        return self._directory / f"after{segment}"

    def reference_after(self, segment: int) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(
            self.path_after(segment) / "reference.pt", weights_only=True
        )
        return found

    # ------------------------------------------------------------------ each way to save

    def save(self, way: str, path: Path, job: Job) -> None:
        self.finish()  # two at once would use the same process group
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        if way in BY_DCP:
            form = {"net": job.net.state_dict(), "optim": job.optimizer.sharded(job.net)}
            if way == "dcp":
                dcp.save(form, checkpoint_id=path)
            else:
                self._async_group = self._async_group or dist.new_group()
                group = {"process_group": self._async_group}
                self._pending = dcp.async_save(form, checkpoint_id=path, **group)
        else:
            if way == "own":
                job.optimizer.save(path / "optimizer", job.net)
            else:
                to = job.random.randrange(job.world.size)
                job.optimizer.consolidate_state_dict(to)
                if self._rank == to:
                    torch.save(job.optimizer.state_dict(), path / "optimizer.pt")
            state = job.net.state_dict()  # on all ranks: it may wait for lazy gathers
            if self._rank == 0:
                torch.save(state, path / "net.pt")
        job.tally.checkpoints += 1
        dist.barrier()

    def load(self, way: str, path: Path, job: Job) -> None:
        """Load the model and the optimizer, in a random order where they are separate."""
        if way in BY_DCP:
            form = {"net": job.net.state_dict(), "optim": job.optimizer.sharded(job.net)}
            dcp.load(form, checkpoint_id=path)
            return

        def read(name: str) -> dict[str, Any]:
            found: dict[str, Any] = torch.load(path / name, weights_only=True)
            return found

        parts: list[Callable[[], Any]] = [lambda: job.net.load_state_dict(read("net.pt"))]
        if way == "own":
            parts.append(lambda: job.optimizer.load(path / "optimizer", job.net))
        else:
            parts.append(lambda: job.optimizer.load_state_dict(read("optimizer.pt")))
        job.random.shuffle(parts)
        for part in parts:
            part()


# ---------------------------------------- the job ----------------------------------------

# torch gives `differentiable` to groups that are added after a load; DCP does not bring it back.
NOT_OPTIONS = {"params", "param_names", "optimizer_class", "partition", "differentiable"}


class Difference(AssertionError):
    """The job and its reference are not equal, bit for bit."""


@dataclass(frozen=True)
class Mode:
    """Whether the optimizer is attached, the model is in a DDP, and gathers are lazy."""

    is_attached: bool
    in_ddp: bool
    is_lazy: bool = False

    def __str__(self) -> str:
        module = "DDP" if self.in_ddp else "bare" if self.is_attached else "by hand"
        return f"{'attached' if self.is_attached else 'drop-in'} {module}{' lazy' * self.is_lazy}"


MODES = [
    *(Mode(False, in_ddp) for in_ddp in (False, True)),
    *(Mode(True, in_ddp, is_lazy) for in_ddp in (False, True) for is_lazy in (False, True)),
]

# Ranks of one host read parts of at least so many bytes in each other's memory: all parts; some
# buckets, while others are sent; none.
SHARED_FROM = (1, 2048, sys.maxsize)


@dataclass(frozen=True)
class Segment:
    """What the ranks of a segment are told. Equal segments do the same."""

    seed: int
    number: int  # in the whole soak
    case: str
    rounds: int  # each of an operation and a step
    directory: Path  # of the run: where each segment saves what the next one loads
    saves_by: str  # the way in which it saves at its end
    loads_by: str | None = None  # the way of the segment before; None: there was none
    shared_from: int = 1  # bytes


@dataclass
class Tally:
    """What was done, in one segment or in several."""

    steps: int = 0
    modes: Counter[str] = field(default_factory=Counter)  # steps in each mode
    operations: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0
    comparisons: int = 0

    def add(self, other: Tally) -> None:
        self.steps += other.steps
        self.modes += other.modes
        self.operations += other.operations
        self.checkpoints += other.checkpoints
        self.comparisons += other.comparisons


class Job:
    """A model, our optimizer and its mode, and the reference."""

    def __init__(self, world: World, segment: Segment) -> None:
        share_memory_from(segment.shared_from)
        self.world, self.segment, self.case = world, segment, CASES[segment.case]
        self.random = random.Random(f"{segment.seed} {segment.number}")  # the same on all ranks
        self.tally = Tally()
        self.log: list[str] = []  # of operations, for error messages
        self.checkpoints = Checkpoints(segment.directory, world.rank)
        self.net = SoakNet(self.case.dtype)
        self.mode = Mode(is_attached=False, in_ddp=False)
        self.module: nn.Module = self.net
        self.has_unfrozen = False  # since the last step
        if segment.loads_by is None:
            self.reference = Reference(self.case, self.case.first_groups(self.net))
            self.optimizer = self._built()
        else:
            self._resume(segment.loads_by)
        self.enter_mode(self.random.choice(MODES))

    def _resume(self, way: str) -> None:
        left = self.checkpoints.reference_after(self.segment.number - 1)
        self.reference = Reference.resumed(self.case, left)
        self.net.grown = self.reference.net.grown
        self.copy_requires_grad()
        if way in BY_DCP:  # else it would not load the state of frozen parameters
            for name, param in self.net.named_parameters():
                param.requires_grad_(name in left["planned"])
        self.optimizer = self._built()
        self.checkpoints.load(way, self.checkpoints.path_after(self.segment.number - 1), self)
        self.copy_requires_grad()
        self.compare()

    def _built(self) -> ZeroRedundancyOptimizer:
        """An optimizer with the groups of the reference, given at once or added one by one."""
        draw = self.random
        first = draw.choice([len(self.reference.groups), 2])
        optimizer = ZeroRedundancyOptimizer(
            [group.with_params(self.net) for group in self.reference.groups[:first]],
            self.case.optimizer_class,
            parameters_as_bucket_view=draw.random() < 0.3,
            bucket_mb=draw.choice([None, 0.003, 0.02]),
            master_dtype=self.case.master_dtype,
            check_every=draw.choice([None, 7]),
            **self.case.options,
        )
        for group in self.reference.groups[first:]:
            optimizer.add_param_group(group.with_params(self.net))
        return optimizer

    # ------------------------------------------------------------------ mode

    def leave_mode(self) -> None:
        """Return to drop-in mode without DDP, and drop all gradients."""
        if self.mode.is_attached:
            self.optimizer.detach()
        self.zero_grad()
        self.mode, self.module = Mode(is_attached=False, in_ddp=False), self.net
        self.reference.module = self.reference.net

    def enter_mode(self, mode: Mode) -> None:
        self.mode = mode
        self.module = ddp(self.net) if mode.in_ddp else self.net
        if mode.in_ddp and not mode.is_attached:
            self.reference.module = ddp(self.reference.net)
        if mode.is_attached:
            self.optimizer.attach(self.module, lazy_gather=mode.is_lazy)

    def wrap_again(self) -> None:
        """Make a new DDP: it knows only the parameters that were trained when it was made."""
        mode = self.mode
        self.leave_mode()
        self.enter_mode(mode)

    # ------------------------------------------------------------------ training

    def copy_requires_grad(self) -> None:
        """Freeze the parameters that are frozen in the reference, and no others."""
        for name, param in self.net.named_parameters():
            param.requires_grad_(self.reference.params[name].requires_grad)

    def zero_grad(self, set_to_none: bool = True, of_module: bool = False) -> None:
        (self.module if of_module else self.optimizer).zero_grad(set_to_none)
        self.reference.zero_grad(set_to_none)

    def backward(self, micro: int, synced: bool) -> None:
        batch = Batch.drawn(
            self.segment.seed + 1,
            self.segment.number + 1,
            self.tally.steps + 1,
            micro + 1,
            self.world.rank,
        )
        with contextlib.ExitStack() as contexts:
            if not synced and self.mode.is_attached:
                contexts.enter_context(self.optimizer.no_sync())
            elif not synced and self.mode.in_ddp:
                contexts.enter_context(self.module.no_sync())
                contexts.enter_context(self.reference.module.no_sync())
            self.module(batch.tokens, batch.branches).backward()
            self.reference.module(batch.tokens, batch.branches).backward()
        if synced and self.mode.is_attached:
            self.reference.reduce()
        elif self.mode.is_attached:
            self.reference.accumulate()
        elif synced and not self.mode.in_ddp:
            average_by_hand(self.net)
            average_by_hand(self.reference.net)

    def step(self) -> None:
        self.optimizer.step()
        self.reference.step()
        self.has_unfrozen = False
        self.tally.steps += 1
        self.tally.modes[str(self.mode)] += 1

    # ------------------------------------------------------------------ comparing

    def compare_parameters(self) -> None:
        self.optimizer.wait()
        for name, param in self.net.named_parameters():
            self.require_equal(param, self.reference.params[name], name)
            if param.stride() != self.reference.params[name].stride():
                raise self._difference(f"the strides of {name}")
        self.tally.comparisons += 1

    def compare(self) -> None:
        """Compare parameters and options on all ranks, and the full state on one. If one rank finds
        a difference, all raise."""
        found: list[Difference] = []
        with _collecting(found):
            self.compare_parameters()
            self._compare_options()
        to = self.random.randrange(self.world.size)
        self.optimizer.consolidate_state_dict(to)
        if self.world.rank == to:
            with _collecting(found):
                self._compare_state(self.optimizer.state_dict()["state"])
        anywhere = torch.tensor(len(found))
        dist.all_reduce(anywhere)
        if anywhere:
            raise found[0] if found else Difference("another rank has found one")

    def _compare_options(self) -> None:
        for group, theirs in zip(self.optimizer.param_groups, self.reference.options, strict=True):
            mine = {key: group[key] for key in group.keys() - NOT_OPTIONS}
            plain = {key: theirs[key] for key in theirs.keys() - NOT_OPTIONS}
            if mine != plain:
                raise self._difference(f"options: {mine} and {plain}")

    def _compare_state(self, found: dict[int, dict[str, Any]]) -> None:
        names = [name for group in self.reference.groups for name in group.names]
        masters = self.reference.masters
        for number, name in enumerate(names):
            mine, plain = dict(found.get(number, {})), dict(self.reference.state(name))
            if name in masters and plain:  # a master copy is state of what has been stepped
                plain[MASTER] = masters[name].detach()
            if mine.keys() != plain.keys():
                raise self._difference(f"keys of {name}: {sorted(mine)} and {sorted(plain)}")
            for key, value in plain.items():
                self.require_equal(mine[key], value, f"{key} of {name}")

    def require_equal(self, mine: Any, plain: Any, what: str) -> None:
        if isinstance(mine, torch.Tensor) != isinstance(plain, torch.Tensor):
            raise self._difference(f"{what}: {type(mine)} and {type(plain)}")
        if not isinstance(mine, torch.Tensor):
            if mine != plain:
                raise self._difference(f"{what}: {mine!r} and {plain!r}")
        elif (mine.dtype, mine.shape) != (plain.dtype, plain.shape):
            raise self._difference(
                f"{what}: {mine.dtype} {mine.shape}, {plain.dtype} {plain.shape}"
            )
        elif not have_equal_bits(mine, plain):
            count = count_of_different_elements(mine, plain)
            raise self._difference(f"{what}: {count} of {mine.numel()} elements")

    def _difference(self, what: str) -> Difference:
        return Difference(
            f"{what} differ on rank {self.world.rank}; segment {self.segment.number} "
            f"({self.segment.case}, {self.mode}), step {self.tally.steps}; before it: "
            f"{', '.join(self.log[-12:])}"
        )


@contextlib.contextmanager
def _collecting(found: list[Difference]) -> Iterator[None]:
    try:
        yield
    except Difference as difference:
        found.append(difference)


def run_segment(world: World, segment: Segment) -> Tally:
    """Run one segment on this rank, from its start to the checkpoint for the next one."""
    # Of more than two ranks the last one is alone on a host. Then the sum of a host comes first in
    # any sum, so that the order of additions is that of the reference.
    pretend_hosts(world, *([0] * (world.size - 1) + [1] if world.size > 2 else []))
    with step_timeout() as restart_timeout:
        job = Job(world, segment)
        for _ in range(segment.rounds):
            restart_timeout()
            perform(job)
            train(job)
        restart_timeout()
        job.compare()
        job.zero_grad()
        job.checkpoints.save_for_next_segment(job)
    return job.tally


# ---------------------------------------- operations ----------------------------------------


def perform(job: Job) -> None:
    """Draw an operation, and apply it if it is possible now."""
    name = job.random.choices(list(OPERATIONS), [weight for weight, _ in OPERATIONS.values()])[0]
    job.log.append(name)
    if OPERATIONS[name][1](job):
        job.tally.operations[name] += 1


def nothing(_: Job) -> bool:
    return False


def freeze(job: Job) -> bool:
    trained = [
        n for n, p in job.reference.params.items() if p.requires_grad and n != ALWAYS_TRAINED
    ]
    return _set_trained(job, trained, to=False)


def unfreeze(job: Job) -> bool:
    known = {name for group in job.reference.groups for name in group.names}
    frozen = [n for n, p in job.reference.params.items() if not p.requires_grad and n in known]
    if _set_trained(job, frozen, to=True):
        job.has_unfrozen = True
        return True
    return False


def _set_trained(job: Job, names: list[str], to: bool) -> bool:
    if not names:
        return False
    for name in job.random.sample(names, min(len(names), job.random.choice([1, 1, 2, 4]))):
        job.reference.params[name].requires_grad_(to)
    job.copy_requires_grad()
    # A DDP that averages gradients must be made anew. In attached mode the old one works, too.
    if job.mode.in_ddp and (not job.mode.is_attached or job.random.random() < 0.5):
        job.wrap_again()
    return True


def add_block(job: Job) -> bool:
    """Put a spare block to use, and add its parameters to the optimizer."""
    number = job.net.grown
    if number == SPARES:
        return False
    mode = job.mode
    if mode.in_ddp:
        job.leave_mode()
    job.net.grown = job.reference.net.grown = number + 1
    groups = job.case.groups_of_spare(number)
    names = [name for group in groups for name in group.names]
    for name in names:
        job.reference.params[name].requires_grad_(True)
    job.copy_requires_grad()
    for group in groups:
        job.optimizer.add_param_group(group.with_params(job.net))
        job.reference.add(group)
    if mode.in_ddp:
        job.enter_mode(mode)
    job.checkpoints.forget()
    return True


def change_mode(job: Job) -> bool:
    job.leave_mode()
    job.enter_mode(job.random.choice(MODES))
    return True


def change_options(job: Job) -> bool:
    number = job.random.randrange(len(job.reference.groups))
    key = job.random.choice(["lr", "lr", "weight_decay"])
    factor = job.random.choice([0.7, 0.9, 1.1, 1.2])
    for groups in (job.optimizer.param_groups, job.reference.options):
        groups[number][key] *= factor
    return True


def save(job: Job, way: str) -> bool:
    job.compare()
    job.checkpoints.keep(way, job)
    return True


def load(job: Job) -> bool:
    """Load the kept checkpoint, after more steps."""
    if not job.checkpoints.can_load_kept(job):
        return False
    job.zero_grad()
    job.checkpoints.load_kept(job)
    job.compare()
    return True


def reload_full_state(job: Job) -> bool:
    """Consolidate the full state and load it on every rank, which may not change anything."""
    job.compare()
    held = [None]
    to = job.random.randrange(job.world.size)
    job.optimizer.consolidate_state_dict(to)
    if job.world.rank == to:
        held = [job.optimizer.state_dict()]
    torch.distributed.broadcast_object_list(held, src=to)
    job.optimizer.load_state_dict(held[0])
    job.compare()
    return True


def deep_copy(job: Job) -> bool:
    """Continue with a deep copy of the model and the optimizer."""
    mode = job.mode
    job.leave_mode()
    job.net, job.optimizer = copy.deepcopy((job.net, job.optimizer))
    job.enter_mode(mode)
    return True


def drop_gradients(job: Job) -> bool:
    """Compute gradients, and drop them without a step."""
    job.zero_grad()
    job.backward(micro=9, synced=True)
    set_to_none = job.mode.is_attached or job.random.random() < 0.7
    job.zero_grad(set_to_none, of_module=job.random.random() < 0.5)
    return True


def evaluate(job: Job) -> bool:
    """Compare the losses of a forward without gradients."""
    tokens = torch.arange(14).view(2, 7) * 11
    taken = (True,) * len(job.net.branches)
    with torch.no_grad():
        mine, plain = job.net(tokens, taken), job.reference.net(tokens, taken)
    job.require_equal(mine, plain, "loss")
    return True


def compare_gradients(job: Job) -> bool:
    """Compare the full gradient of one parameter, and the norm of all gradients."""
    job.zero_grad()
    job.backward(micro=8, synced=True)
    name = job.random.choice([n for n, p in job.reference.params.items() if p.requires_grad])
    mine = job.optimizer.full_grad(dict(job.net.named_parameters())[name])
    job.require_equal(mine, job.reference.gradient(name), f"the gradient of {name}")
    _require_close(job, job.optimizer.grad_norm())
    job.zero_grad()
    return True


# Operations with the weight with which they are drawn. They return whether they were possible.
OPERATIONS: dict[str, tuple[int, Callable[[Job], bool]]] = {
    "nothing": (10, nothing),
    "freeze": (4, freeze),
    "unfreeze": (5, unfreeze),
    "add_param_group": (2, add_block),
    "change mode": (4, change_mode),
    "options": (4, change_options),
    **{f"save {way}": (1, functools.partial(save, way=way)) for way in WAYS},
    "load": (3, load),
    "consolidate and load": (2, reload_full_state),
    "deepcopy": (1, deep_copy),
    "drop gradients": (3, drop_gradients),
    "evaluate": (2, evaluate),
    "look at gradients": (2, compare_gradients),
}


# ---------------------------------------- steps ----------------------------------------

ACCUMULATIONS = ("accumulate", "accumulate, averaged")
ZEROINGS = ("to none", "to zero", "by the module", "left")
EVERY_OPERATION = (
    *(name for name in OPERATIONS if name != "nothing"),
    *ACCUMULATIONS,
    "clip",
    *(f"gradients {zeroing}" for zeroing in ZEROINGS),
)


def train(job: Job) -> None:
    """Accumulate one to three backwards, and step."""
    draw = job.random
    backwards = draw.choice([1, 1, 1, 2, 3])
    # The step averages gradients of parameters that were just unfrozen, once: averaging each
    # backward separately would round differently.
    each_is_averaged = draw.random() < 0.4 and not job.has_unfrozen
    for micro in range(backwards):
        job.backward(micro, synced=each_is_averaged or micro == backwards - 1)
    if backwards > 1:
        job.tally.operations[ACCUMULATIONS[each_is_averaged]] += 1
    if draw.random() < 0.3:
        _clip(job, draw.choice([0.05, 0.5, 100.0]))
    job.step()
    if not job.mode.is_lazy or draw.random() < 0.1:  # comparing waits for lazy gathers
        job.compare_parameters()
    zeroing = draw.choice(ZEROINGS)
    job.log.append(f"step, gradients {zeroing}")
    if zeroing != "left":
        job.zero_grad(set_to_none=zeroing != "to zero", of_module=zeroing == "by the module")
    job.tally.operations[f"gradients {zeroing}"] += 1


def _clip(job: Job, most: float) -> None:
    norm = job.optimizer.clip_grad_norm_(most)
    if job.mode.is_attached:
        _require_close(job, norm)
        coefficient = torch.clamp(most / (norm + 1e-6), max=1.0)
        for gradient in job.reference.gradients():
            gradient.mul_(coefficient)
    else:
        names = [name for group in job.reference.groups for name in group.names]
        plain = torch.nn.utils.clip_grad_norm_([job.reference.params[n] for n in names], most)
        job.require_equal(norm, plain, "the norm of the gradients")
    job.tally.operations["clip"] += 1


def _require_close(job: Job, norm: torch.Tensor) -> None:
    plain = torch.nn.utils.get_total_norm(job.reference.gradients()).to(norm.dtype)
    if not torch.allclose(norm, plain, rtol=1e-2 if job.case.master_dtype else 1e-5, atol=1e-7):
        raise Difference(f"the norm of the gradients is {norm}, of the reference's {plain}")
