"""One rank of a job that is to be killed: `examples/elastic.py`, which announces where it is.

    torchrun ... chaos_worker.py JOB train LAUNCH     somebody is killed as JOB/orders.json says
    torchrun ... chaos_worker.py JOB replay ORDERS    from kept checkpoints again, undisturbed

Each start of the processes is a *life*, named by launch and restart ("0.2"). Every rank writes what
it did to JOB/lives/LIFE-RANK.jsonl: its pid, where it resumed, every loss to the bit, every save
that returned. The checkpoint from which a life resumes is kept in JOB/kept/LIFE.

`chaos.py` gives the orders, and reads all this.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import pkgutil
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from chaos_plan import OWNERS, SITES, WAYS, Site
from chaos_ways import elastic, take
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel as DDP

import onecopy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from inside import share_memory_from

RANK = int(os.environ["RANK"])
GROUP_TIMEOUT = timedelta(minutes=15)  # nobody may need it: the trial's own limit is shorter
MANY_BUCKETS = 0.008  # MiB: about ten


def bare(net: nn.Module) -> nn.Module:
    return net


def in_bfloat16(net: nn.Module) -> nn.Module:
    net.register_forward_pre_hook(lambda _, inputs: tuple(each.bfloat16() for each in inputs))
    return net.bfloat16()


MODES: dict[str, dict[str, Any]] = {
    "drop-in": {"wrap": DDP},
    "attached": {"wrap": bare, "attach": True},
    "attached DDP": {"wrap": DDP, "attach": True},
    "lazy": {"wrap": bare, "attach": True},
    "masters": {"wrap": in_bfloat16, "attach": True},
}


class Gradients:
    """Has a call for each gradient that arrives."""

    @staticmethod
    def arrive(_: Tensor) -> None: ...


owners: dict[str, Any] = {
    **{name: pkgutil.resolve_name(path) for name, path in OWNERS.items()},
    "Gradients": Gradients,
}


class Diary:
    """What this rank did, in a file that survives it."""

    def __init__(self, job: Path, life: str) -> None:
        self.path = job / "lives" / f"{life}-{RANK}.jsonl"
        self._file = self.path.open("a", buffering=1)

    def write(self, **what: Any) -> None:
        self._file.write(json.dumps({"time": time.time(), **what}) + "\n")


class Executioner:
    """Kills the rank that the order names, when the announcing rank is where the order says: see
    `chaos_plan.py`. An order that cannot be carried out before the training ends is dropped, and
    missed by who gave it."""

    def __init__(self, order: dict[str, Any] | None, diary: Diary, victim_diary: Path) -> None:
        self._order = order
        self._diary = diary
        self._victim_diary = victim_diary
        self._visits: Counter[str] = Counter()
        self._inside: Counter[str] = Counter()
        self._calls = 0
        self._step_began = time.monotonic()
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()  # the timer has a thread of its own

    def begin_step(self) -> None:
        """What has no end of its own goes on for as long as the training does: with lazy gathers,
        a bucket may arrive in the next forward."""
        last, self._step_began = self._step_began, time.monotonic()
        for phase in ("any", "gather", "lending"):
            self._visits[phase] += 1
            self._inside[phase] = 1
        if self._is_due("any") and not self._timer and self._order:
            delay = self._order["delay"] * (self._step_began - last)
            self._timer = threading.Timer(delay, self._kill)
            self._timer.start()

    @contextlib.contextmanager
    def visiting(self, phase: str) -> Iterator[None]:
        self._visits[phase] += 1
        self._inside[phase] += 1
        try:
            yield
        finally:
            self._inside[phase] -= 1

    def at(self, phase: str, site: str) -> None:
        if self._order and self._order["site"] == site and self._is_due(phase):
            self._calls += 1
            if self._calls == self._order["call"]:
                self._kill()

    def finish(self) -> None:
        """Nobody is killed any more: that would be survived by everybody."""
        with self._lock:
            self._order = None
        if self._timer:
            self._timer.cancel()

    def _is_due(self, phase: str) -> bool:
        order = self._order
        is_meant = order is not None and order["phase"] == phase and self._inside[phase] > 0
        return is_meant and self._visits[phase] >= self._order["visit"]

    def _kill(self) -> None:
        with self._lock:
            order, self._order = self._order, None
            if order is None:
                return
            victim = json.loads(self._victim_diary.read_text().split("\n", 1)[0])
            self._diary.write(
                killed=order["victim"],
                phase=order["phase"],
                where=order["site"],
                begun=self._visits["any"],
            )
            if order.get("with_agent"):  # as if its machine were gone
                os.kill(victim["agent"], signal.SIGKILL)
            os.kill(victim["pid"], signal.SIGKILL)


def announce(executioner: Executioner, diary: Diary, kept: Path, way: str) -> None:
    """Put the announcements around what is to be announced."""
    phase_of_saves, phase_of_loads = WAYS[way]
    announce_sites(dict.fromkeys(SITES), executioner.at)
    visiting = executioner.visiting
    _visited(torch.Tensor, "backward", lambda: visiting("backward"))
    _visited(onecopy.ZeroRedundancyOptimizer, "step", lambda: visiting("step"))
    _around(elastic, "my_samples", executioner.begin_step, _nothing)
    save, resume = elastic.save, elastic.resume

    def saved(directory: Path, step: int, *args: Any) -> None:
        diary.write(saving=step)
        with visiting(phase_of_saves):
            save(directory, step, *args)
        diary.write(saved=step)

    def resumed(directory: Path, *args: Any) -> int:
        found = elastic.complete(directory)
        if RANK == 0 and found:  # files of a checkpoint never change, so links will do
            shutil.copytree(found[-1], kept / found[-1].name, copy_function=os.link)
        with visiting(phase_of_loads) if found else contextlib.nullcontext():
            step = resume(directory, *args)
        diary.write(resumed=step)
        return step

    elastic.save, elastic.resume = saved, resumed


def announce_sites(sites: Iterable[Site], at: Callable[[str, str], None]) -> None:
    """Have each of them told by its phase and its name, whenever it is met in whatever phase."""
    for site in sites:
        owner, _, name = site.function.partition(".")
        if owner in owners:
            tell = functools.partial(at, site.phase, str(site))
            before, after = (tell, _nothing) if site.when == "before" else (_nothing, tell)
            _around(owners[owner], name, before, after)


def _nothing() -> None: ...


def _around(owner: Any, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after()
        return result

    setattr(owner, name, called)


def _visited(owner: Any, name: str, visit: Callable[[], Any]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with visit():
            return function(*args, **kwargs)

    setattr(owner, name, called)


def build_with(lazy: bool, **options: Any) -> None:
    """Let the example build its optimizer so, and announce its gradients."""

    def built(params: Any, *args: Any, **kwargs: Any) -> Any:
        params = list(params)
        for param in params:
            param.register_post_accumulate_grad_hook(Gradients.arrive)
        optimizer = onecopy.ZeroRedundancyOptimizer(params, *args, **kwargs, **options)
        if lazy:
            optimizer.attach = functools.partial(optimizer.attach, lazy_gather=True)
        return optimizer

    elastic.ZeroRedundancyOptimizer = built


def masters_of(mode: str) -> dict[str, Any]:
    return {"master_dtype": torch.float32} if mode == "masters" else {}


def run_train(job: Path, launch: str) -> None:
    orders = json.loads((job / "orders.json").read_text())
    life = f"{launch}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    diary = Diary(job, life)
    diary.write(pid=os.getpid(), agent=os.getppid(), ranks=int(os.environ["WORLD_SIZE"]))
    order = orders["kills"].get(life)
    mine = order if order and order["announcer"] == RANK else None
    victim = diary.path.with_name(f"{life}-{order['victim']}.jsonl") if order else Path()
    executioner = Executioner(mine, diary, victim)
    take(orders["way"])
    announce(executioner, diary, job / "kept" / life, orders["way"])
    mode = orders["mode"]
    build_with(lazy=mode == "lazy", bucket_mb=MANY_BUCKETS, **masters_of(mode))
    if orders["lends"]:
        share_memory_from(1)
    else:
        os.environ["ONECOPY_SHARED_MEMORY"] = "0"
    elastic.report = lambda step, loss: diary.write(step=step, loss=loss.item().hex())
    try:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        diary.write(joined=True)
        steps, save_every = orders["steps"], orders["save_every"]
        elastic.train(job / "checkpoints", steps, save_every, **MODES[mode])
        executioner.finish()
        dist.barrier()  # else a victim might have left already
        dist.destroy_process_group()
        diary.write(done=True)
    except (Exception, CheckpointException):  # DCP's is no Exception
        diary.write(error=traceback.format_exc())
        raise


def run_replay(job: Path, orders: str) -> None:
    """Train from each of the checkpoints in turn, and write down the losses. All in one bucket,
    which is sent and awaited at once: that changes no bit."""
    of_job = json.loads((job / "orders.json").read_text())
    mode = of_job["mode"]
    take(of_job["way"])
    build_with(lazy=False, **masters_of(mode))
    os.environ["ONECOPY_SHARED_MEMORY"] = "0"
    elastic.save = lambda *_: None
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    for replay in json.loads((job / orders).read_text()):
        diary = Diary(job, replay["name"])
        elastic.report = lambda step, loss, to=diary: to.write(step=step, loss=loss.item().hex())
        elastic.train(job / replay["start"], replay["until"], replay["until"], **MODES[mode])
        diary.write(done=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    {"train": run_train, "replay": run_replay}[sys.argv[2]](Path(sys.argv[1]), sys.argv[3])
