"""Races between threads and ranks: random delays in every method of the package change no bit.

    make races                           # 200 seeded runs on 2, 3 and 4 ranks
    make races RUNS=1000 SEED=5

A run trains a small model in one configuration: attached to DDP or to the bare module, drop-in, or
stepping inside backward; with lazy gathers, small buckets, accumulation, clipping, or a checkpoint
that is written in the background. Ranks of one host read all parts in each other's memory, the
larger parts, or none. The result is compared, bit for bit, with the same training without delays,
without shared memory, and without the overlap that is optional.

The exit code is 1 if anything differed, hung or raised. The last line says how to repeat the run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import os
import pkgutil
import random
import secrets
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from inside import share_memory_from
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from trial_common import JOB_TIMEOUTS, count_failures, have_equal_bits, step_timeout

import onecopy
from onecopy import ZeroRedundancyOptimizer, hook_with_zero_step

SIZES = (2, 3, 4)  # numbers of ranks
BATCH = 20  # runs in one set of processes
STEPS = 3  # of a run

# ---------------------------------------- delays ----------------------------------------


# What makes a module one that communicates, between ranks or threads.
COMMUNICATION = ("torch.distributed", "threading", "ctypes")


def communicating_classes() -> list[type]:
    """Every class of the modules of the package that communicate, and of those that use one of
    them: collectives, buckets, gradients, shared memory, hooks of autograd, DDP and modules."""
    package = f"{onecopy.__name__}."
    names = [info.name for info in pkgutil.walk_packages(onecopy.__path__, package)]
    modules = [importlib.import_module(name) for name in names if not name.endswith(".__main__")]

    def uses(module: types.ModuleType) -> set[str]:
        """The modules of which, or of whose functions and classes, it has imported names."""
        values = vars(module).values()
        sources = (
            v.__name__ if inspect.ismodule(v) else getattr(v, "__module__", "") for v in values
        )
        return set(map(str, sources)) - {module.__name__}

    used = {module.__name__: uses(module) for module in modules}
    communicating = {name for name in used if not used[name].isdisjoint(COMMUNICATION)}
    return [
        member
        for module in modules
        if module.__name__ in communicating or not used[module.__name__].isdisjoint(communicating)
        for member in vars(module).values()
        if inspect.isclass(member) and member.__module__ == module.__name__
    ]


DELAYED = communicating_classes()
LONGEST = 0.003  # seconds: many times what a collective of the small models takes
PROBABILITY = 0.08  # that a call sleeps before it runs, and that it sleeps after
SWITCH_INTERVAL = 5e-6  # seconds between switches of threads, a thousandth of the usual


class Delays(contextlib.ExitStack):
    """While it is entered, every method of the classes in DELAYED may sleep before and after it
    runs, in this process. The seed and the rank decide when and for how long.

    Enter it before the optimizer is built: hooks are bound when they are registered."""

    def __init__(self, seed: int, rank: int, longest: float = LONGEST) -> None:
        super().__init__()
        self._random = random.Random(f"{seed} {rank}")
        self._longest = longest
        self.count = 0  # of sleeps

    def __enter__(self) -> Delays:
        super().__enter__()
        for cls in DELAYED:
            for name, member in list(vars(cls).items()):
                delayed = None if name.startswith("__") else self._delayed_member(member)
                if delayed is not None:
                    self.enter_context(mock.patch.object(cls, name, delayed))
        self.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL)
        return self

    def sleep(self, *_: Any) -> None:
        """Sleep with the probability above. Takes any arguments, so that it can be a hook."""
        if self._random.random() < PROBABILITY:
            self.count += 1
            time.sleep(self._random.random() * self._longest)

    def _delayed_member(self, member: Any) -> Any:
        """A method with delays; None for what is not a method."""
        if isinstance(member, classmethod):
            return classmethod(self._delayed(member.__func__))
        if not inspect.isfunction(member):
            return None
        inner = inspect.unwrap(member)
        is_manager = inner is not member and inspect.isgeneratorfunction(inner)
        return self._delayed_manager(member) if is_manager else self._delayed(member)

    def _delayed_manager(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """For a function decorated with ``contextlib.contextmanager``."""

        @contextlib.contextmanager
        def delayed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self.sleep()
            with function(*args, **kwargs) as value:
                self.sleep()
                yield value
                self.sleep()
            self.sleep()

        return delayed

    def _delayed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # DDP looks at the annotations of its hook
        def delayed(*args: Any, **kwargs: Any) -> Any:
            self.sleep()
            try:
                return function(*args, **kwargs)
            finally:
                self.sleep()

        return delayed


# ---------------------------------------- configurations ----------------------------------------

MODES = ("bare", "ddp", "drop-in", "step in backward")
# Ranks of one host read parts of at least so many bytes in each other's memory: all parts; larger
# ones, so that buckets which are read and buckets which are sent share memory; none.
SHARED_FROM = (1, 64, sys.maxsize)


@dataclass(frozen=True)
class Config:
    """How a run trains."""

    mode: str
    optimizer: str  # see `build_optimizer`
    lazy: bool = False  # the forward that uses a parameter waits for its all-gather
    small_buckets: bool = False
    flat: bool = False  # parameters are views of buckets
    accumulates: bool = False
    clips: bool = False
    saves: bool = False  # a checkpoint is written in the background
    shared_from: int = sys.maxsize  # bytes

    @property
    def baseline(self) -> Config:
        """Without the options that must not change a bit. (A norm depends on where tensors are
        cut.)"""
        small = self.small_buckets and self.clips
        return replace(
            self, lazy=False, small_buckets=small, flat=False, saves=False, shared_from=sys.maxsize
        )

    @property
    def is_attached(self) -> bool:
        return self.mode in ("bare", "ddp")


def configs() -> Iterator[Config]:
    """All of them, shuffled: any few that follow one another differ in everything."""
    optimizers = ["AdamW", "masters", "SGD"] + ["mixture"] * hasattr(torch.optim, "Muon")
    flags = itertools.product([True, False], repeat=3)
    found = []
    for mode, optimizer, (lazy, small, flat) in itertools.product(MODES, optimizers, flags):
        draw = random.Random(f"{mode} {optimizer} {lazy} {small} {flat}")
        if lazy and mode not in ("bare", "ddp"):
            continue
        accumulates, clips = (draw.random() < 0.5 and mode != "step in backward" for _ in range(2))
        saves = draw.random() < 0.4
        found.append(Config(mode, optimizer, lazy, small, flat, accumulates, clips, saves))
    random.Random(0).shuffle(found)
    return iter(found)


def batches(seed: int, runs: int) -> list[tuple[int, list[tuple[int, Config]]]]:
    """Numbers of ranks, and the seeds and configurations that run on so many ranks."""
    every = list(configs())
    todo = []
    for number in range(seed, seed + runs):
        shared_from = random.Random(f"lent {number}").choice(SHARED_FROM)
        todo.append((number, replace(every[number % len(every)], shared_from=shared_from)))
    size = min(BATCH, max(1, -(-runs // len(SIZES))))  # a few runs, too, use all numbers of ranks
    parts = [todo[start : start + size] for start in range(0, runs, size)]
    return [(SIZES[number % len(SIZES)], part) for number, part in enumerate(parts)]


# ---------------------------------------- a run ----------------------------------------


class BranchedModel(nn.Module):
    """Even ranks compute the left branch first, odd ranks the right one, so that gradients come in
    different orders. Only the last rank uses the layer `rare`."""

    def __init__(self, rank: int, is_last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.is_last = rank, is_last
        self.trunk = nn.Linear(11, 33)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(33, 19), nn.Tanh(), nn.Linear(19, 3)) for _ in range(2)
        )
        self.rare = nn.Linear(33, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.trunk(x.to(self.trunk.weight.dtype)))
        order = self.branches if self.rank % 2 == 0 else reversed(self.branches)
        loss = torch.cat([branch(x) for branch in order]).float().square().mean()
        return loss + self.rare(x).float().square().mean() if self.is_last else loss


def build_optimizer(model: nn.Module, config: Config) -> ZeroRedundancyOptimizer:
    classes: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "masters": (torch.optim.AdamW, {"lr": 0.01, "master_dtype": torch.float32}),
    }
    cls, options = classes.get(config.optimizer, (torch.optim.AdamW, {"lr": 0.01}))
    params: Any = model.parameters()
    if config.optimizer == "mixture":
        muon = {"optimizer_class": torch.optim.Muon, "lr": 0.02}
        params = [
            {"params": [p for p in model.parameters() if p.ndim != 2]},
            {"params": [p for p in model.parameters() if p.ndim == 2], **muon},
        ]
    return ZeroRedundancyOptimizer(
        params,
        cls,
        parameters_as_bucket_view=config.flat,
        overlap_with_ddp=config.mode == "step in backward",
        bucket_mb=5e-4 if config.small_buckets else None,
        **options,
    )


class Run:
    """The training of one configuration on this rank, with delays or without."""

    def __init__(
        self, config: Config, delays: Delays | None, directory: Path, checkpoint_group: Any
    ) -> None:
        share_memory_from(config.shared_from)
        self.config, self.directory = config, directory
        self.checkpoint_group = checkpoint_group
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = self._model()
        self.is_delayed = delays is not None
        if delays is not None:  # forwards and gradients, too, take different times on every rank
            for module in self.model.modules():
                module.register_forward_pre_hook(delays.sleep)
            for param in self.model.parameters():
                param.register_hook(delays.sleep)
        self.module: nn.Module = self.model
        if config.mode != "bare":
            self.module = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.optimizer = build_optimizer(self.model, config)
        if config.is_attached:
            self.optimizer.attach(self.module, lazy_gather=config.lazy)
        elif config.mode == "step in backward":
            hook = hook_with_zero_step(allreduce_hook, self.module, self.optimizer)
            self.module.register_comm_hook(None, hook)
        self.norms: list[torch.Tensor] = []

    def _model(self) -> BranchedModel:
        model = BranchedModel(self.rank, is_last=self.rank == self.world - 1)
        return model.bfloat16() if self.config.optimizer == "masters" else model

    def result(self) -> dict[str, Any]:
        """Train. Return parameters, state and norms, and the state after two steps: as it was read
        from the checkpoint with delays, as it was without them."""
        found: dict[str, Any] = {"norms": self.norms}
        saving = None
        for step in range(STEPS):
            self._step(step)
            if step == 1 and not self.is_delayed:
                found["saved"] = self._full_state()
            elif step == 1 and self.config.saves:
                form = {"optim": self.optimizer.sharded(self.model)}
                group = {"process_group": self.checkpoint_group}
                saving = dcp.async_save(form, checkpoint_id=self.directory, **group)
        self.optimizer.wait()
        found["parameters"] = copy.deepcopy(self.model.state_dict())
        found["state"] = self._full_state()
        if saving is not None:
            saving.result()
            found["saved"] = self._state_read_back()
        if self.config.is_attached:
            self.optimizer.detach()
        return found

    def _step(self, step: int) -> None:
        config = self.config
        if config.accumulates:
            no_sync = self.optimizer if config.is_attached else self.module
            with no_sync.no_sync():
                self._backward(step, 0)
        self._backward(step, 1)
        if config.clips:
            self.norms.append(self.optimizer.clip_grad_norm_(0.5))
        self.optimizer.step()  # does nothing in mode "step in backward"
        self.optimizer.zero_grad()

    def _backward(self, *seeds: int) -> None:
        seed = sum(s * 101**i for i, s in enumerate((self.rank, *seeds)))
        batch = torch.randn(6, 11, generator=torch.Generator().manual_seed(seed))
        self.module(batch).backward()

    def _full_state(self) -> dict[str, Any]:
        to = self.world - 1
        self.optimizer.consolidate_state_dict(to)
        return self.optimizer.state_dict()["state"] if self.rank == to else {}

    def _state_read_back(self) -> dict[str, Any]:
        """The full state of a new optimizer that has loaded the checkpoint."""
        kept, model = self.optimizer, self._model()
        self.optimizer = build_optimizer(model, self.config)
        self.optimizer.load(self.directory, model)
        found, self.optimizer = self._full_state(), kept
        return found


def first_difference(found: Any, expected: Any, path: str = "") -> str | None:
    """Where two results differ, bit for bit; None if they do not."""
    if type(found) is not type(expected):
        return f"{path}: {type(found)} and {type(expected)}"
    if isinstance(expected, torch.Tensor):
        return None if have_equal_bits(found, expected) else path
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return f"{path}: {sorted(found)} and {sorted(expected)}"
        pairs = ((f"{path}[{key!r}]", found[key], expected[key]) for key in expected)
    elif isinstance(expected, list):
        if len(found) != len(expected):
            return path
        pairs = (
            (f"{path}[{i}]", f, e) for i, (f, e) in enumerate(zip(found, expected, strict=True))
        )
    else:
        return None if found == expected else path
    return next((d for name, f, e in pairs if (d := first_difference(f, e, name))), None)


class Difference(AssertionError):
    """A run with delays has another result than its baseline."""


def compare_runs(world: harness.World, runs: Sequence[tuple[int, Config]], directory: Path) -> int:
    """Run each configuration with delays, compare it with its baseline, and return how often this
    rank slept."""
    # Four ranks are on two hosts, the last one alone: then the sum of a host comes first in any
    # sum, so that the order of additions is that of ranks which are all on different hosts.
    harness.pretend_hosts(world, *{4: (0, 0, 0, 1)}.get(world.size, ()))
    expected: dict[Config, Any] = {}
    checkpoint_group = dist.new_group()  # async_save communicates from a thread
    sleeps = 0
    ignored: list[str] = []  # errors in finalizers, which nobody can catch

    def ignore(error: Any) -> None:
        ignored.append(f"{error.exc_value!r} in {error.object!r}")

    for seed, config in runs:
        path, baseline = directory / str(seed), config.baseline
        if baseline not in expected:
            with step_timeout():
                expected[baseline] = Run(baseline, None, path, checkpoint_group).result()
        recording = mock.patch.object(sys, "unraisablehook", ignore)
        with step_timeout(), recording, Delays(seed, world.rank) as delays:
            found = Run(config, delays, path, checkpoint_group).result()
        sleeps += delays.count
        different = first_difference(found, {key: expected[baseline][key] for key in found})
        if different is not None:
            what = f"run {seed}, {config}, rank {world.rank} of {world.size}"
            raise Difference(f"{different} differs: {what}")
        if ignored:
            raise RuntimeError(f"run {seed}, {config}: {ignored}")
        dist.barrier()
    return sleeps


def main() -> int:
    parser = argparse.ArgumentParser(description="seeded runs with random delays")
    parser.add_argument("--runs", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, help="of the first run (a new one)")
    given = parser.parse_args()
    # Why: DDP warns on each rank where no parameter happens to be unused.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    print(f"races: seed {seed}, {given.runs} runs", flush=True)
    start, done, sleeps, failure = time.monotonic(), 0, 0, ""
    shared: Counter[int] = Counter()
    with tempfile.TemporaryDirectory(prefix="onecopy-races-") as directory:
        for size, runs in batches(seed, given.runs):
            if sys.stderr.isatty():
                text = f"\r\x1b[2K{done} of {given.runs} runs, now on {size} ranks"
                print(text, end="", file=sys.stderr, flush=True)
            try:
                counts = harness.run_on_ranks(
                    size, compare_runs, runs, Path(directory), **JOB_TIMEOUTS
                )
            except harness.RankFailure as error:
                failure = str(error)
                break
            done, sleeps = done + len(runs), sleeps + sum(counts)
            shared.update(config.shared_from for _, config in runs)
    harness.shutdown()
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    if failure:
        print(failure)
    print(
        f"races: {(time.monotonic() - start) / 60:.1f} minutes, {done} runs on "
        f"{', '.join(map(str, SIZES))} ranks ({shared[SHARED_FROM[0]]} share everything, "
        f"{shared[SHARED_FROM[1]]} the larger parts, {shared[SHARED_FROM[2]]} nothing), "
        f"{sleeps} delays: {count_failures(failure)}"
    )
    if failure:
        print(f"to repeat it: {sys.executable} {sys.argv[0]} --seed {seed} --runs {given.runs}")
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
