"""One rank of a job: `examples/elastic.py`, with hooks at the points at which a rank is killed.

    torchrun ... chaos_worker.py JOB train LAUNCH     train; JOB/orders.json says who is killed when
    torchrun ... chaos_worker.py JOB replay ORDERS    train again from kept checkpoints

Each start of the processes is an attempt, named by launch and restart ("0.2"). Every rank writes to
JOB/attempts/ATTEMPT-RANK.jsonl: its pid, the step at which it resumed, every loss to the bit, every
save that returned. The checkpoint from which an attempt resumes is kept in JOB/kept/ATTEMPT.

chaos.py writes the orders, starts torchrun, and reads these files.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import json
import os
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import elastic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from chaos_plan import KILL_POINTS, WAYS, Gradients, KillPoint
from inside import share_memory_from
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel as DDP

import onecopy

RANK = int(os.environ["RANK"])
GROUP_TIMEOUT = timedelta(minutes=15)  # longer than chaos.py waits: a job that needs it hangs
MANY_BUCKETS = 0.008  # MiB: about ten


# ------------------------------------ saving and loading ------------------------------------

# Acts on the directory of a checkpoint, on all ranks. When `write` returns on rank 0, all of the
# checkpoint is on the disk; examples/elastic.py then renames the directory.
Act = Callable[[Path, nn.Module, onecopy.ZeroRedundancyOptimizer], None]


def write_full(saving: Path, net: nn.Module, optimizer: onecopy.ZeroRedundancyOptimizer) -> None:
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saving.mkdir(parents=True, exist_ok=True)
        with open(saving / "full.pt", "wb") as file:
            torch.save({"model": net.state_dict(), "optim": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())


def read_full(path: Path, net: nn.Module, optimizer: onecopy.ZeroRedundancyOptimizer) -> None:
    found = torch.load(path / "full.pt", weights_only=True)
    net.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optim"])


def write_by_dcp(saving: Path, net: nn.Module, optimizer: onecopy.ZeroRedundancyOptimizer) -> None:
    dcp.save({"model": net.state_dict(), "optim": optimizer.sharded(net)}, checkpoint_id=saving)


def read_by_dcp(path: Path, net: nn.Module, optimizer: onecopy.ZeroRedundancyOptimizer) -> None:
    dcp.load({"model": net.state_dict(), "optim": optimizer.sharded(net)}, checkpoint_id=path)


SAVE_AND_LOAD: dict[str, tuple[Act, Act]] = {
    "own": (elastic.write, elastic.read),
    "full": (write_full, read_full),
    "dcp": (write_by_dcp, read_by_dcp),
}


# ---------------------------------------- modes ----------------------------------------


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


# ---------------------------------------- kills ----------------------------------------


class RankLog:
    """Writes what this rank does to a file, which is complete when the rank is killed."""

    def __init__(self, job: Path, attempt: str) -> None:
        self.path = job / "attempts" / f"{attempt}-{RANK}.jsonl"
        self._file = self.path.open("a", buffering=1)

    def write(self, **what: Any) -> None:
        self._file.write(json.dumps({"time": time.time(), **what}) + "\n")


class Killer:
    """Kills the victim of an order when this rank, the announcer, reaches the point of the order
    (see chaos_plan.py). An order whose point is not reached before the training ends is dropped;
    chaos.py counts that as a failure."""

    def __init__(self, order: dict[str, Any] | None, log: RankLog, victim_log: Path) -> None:
        self._order = order
        self._log = log
        self._victim_log = victim_log
        self._visits: Counter[str] = Counter()
        self._inside: Counter[str] = Counter()
        self._calls = 0
        self._step_began = time.monotonic()
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()  # the timer has a thread of its own

    def begin_step(self) -> None:
        """Phases without an end of their own last as long as the training: with lazy gathers, a
        bucket may arrive in the next forward."""
        last, self._step_began = self._step_began, time.monotonic()
        for phase in ("any", "gather", "sharing"):
            self._visits[phase] += 1
            self._inside[phase] = 1
        if self._is_due("any") and not self._timer and self._order:
            delay = self._order["delay"] * (self._step_began - last)
            self._timer = threading.Timer(delay, self._kill)
            self._timer.start()

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        self._visits[phase] += 1
        self._inside[phase] += 1
        try:
            yield
        finally:
            self._inside[phase] -= 1

    def at(self, phase: str, point: str) -> None:
        if self._order and self._order["point"] == point and self._is_due(phase):
            self._calls += 1
            if self._calls == self._order["call"]:
                self._kill()

    def finish(self) -> None:
        """Kill nobody after the training: the job would not notice."""
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
            victim = json.loads(self._victim_log.read_text().split("\n", 1)[0])
            self._log.write(
                killed=order["victim"],
                phase=order["phase"],
                where=order["point"],
                begun=self._visits["any"],
            )
            if order.get("with_agent"):  # as if its machine were gone
                os.kill(victim["agent"], signal.SIGKILL)
            os.kill(victim["pid"], signal.SIGKILL)


def install_hooks(killer: Killer, log: RankLog, kept: Path, way: str) -> None:
    """Wrap the functions of all points and the phases, and the save and resume of the example."""
    phase_of_saves, phase_of_loads = WAYS[way]
    hook_kill_points(dict.fromkeys(KILL_POINTS), killer.at)
    in_phase = killer.in_phase
    _visited(torch.Tensor, "backward", lambda: in_phase("backward"))
    _visited(onecopy.ZeroRedundancyOptimizer, "step", lambda: in_phase("step"))
    _around(elastic, "my_samples", killer.begin_step, _nothing)
    save, resume = elastic.save, elastic.resume

    def saved(directory: Path, step: int, *args: Any) -> None:
        log.write(saving=step)
        with in_phase(phase_of_saves):
            save(directory, step, *args)
        log.write(saved=step)

    def resumed(directory: Path, *args: Any) -> int:
        found = elastic.complete(directory)
        if RANK == 0 and found:  # files of a checkpoint never change, so links will do
            shutil.copytree(found[-1], kept / found[-1].name, copy_function=os.link)
        with in_phase(phase_of_loads) if found else contextlib.nullcontext():
            step = resume(directory, *args)
        log.write(resumed=step)
        return step

    elastic.save, elastic.resume = saved, resumed


def hook_kill_points(points: Iterable[KillPoint], at: Callable[[str, str], None]) -> None:
    """Call `at(phase, name)` whenever a point is reached, in whatever phase."""
    for point in points:
        if point.phase != "any":  # which a timer ends
            tell = functools.partial(at, point.phase, str(point))
            before, after = (tell, _nothing) if point.when == "before" else (_nothing, tell)
            _around(*owner_of(point), before, after)


def owner_of(point: KillPoint) -> tuple[Any, str]:
    """The module or class of a point's function, and the name of the function in it."""
    module, _, function = point.path.partition(":")
    *classes, name = function.split(".")
    return functools.reduce(getattr, classes, importlib.import_module(module)), name


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
    """Let the example build its optimizer with these options, and call `Gradients.arrive`."""

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
    attempt = f"{launch}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    log = RankLog(job, attempt)
    log.write(pid=os.getpid(), agent=os.getppid(), ranks=int(os.environ["WORLD_SIZE"]))
    order = orders["kills"].get(attempt)
    mine = order if order and order["announcer"] == RANK else None
    victim = log.path.with_name(f"{attempt}-{order['victim']}.jsonl") if order else Path()
    killer = Killer(mine, log, victim)
    elastic.write, elastic.read = SAVE_AND_LOAD[orders["way"]]
    install_hooks(killer, log, job / "kept" / attempt, orders["way"])
    mode = orders["mode"]
    build_with(lazy=mode == "lazy", bucket_mb=MANY_BUCKETS, **masters_of(mode))
    if orders["shares_memory"]:
        share_memory_from(1)
    else:
        os.environ["ONECOPY_SHARED_MEMORY"] = "0"
    elastic.report = lambda step, loss: log.write(step=step, loss=loss.item().hex())
    try:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        log.write(joined=True)
        steps, save_every = orders["steps"], orders["save_every"]
        elastic.train(job / "checkpoints", steps, save_every, **MODES[mode])
        killer.finish()
        dist.barrier()  # else a victim might already have ended
        dist.destroy_process_group()
        log.write(done=True)
    except (Exception, CheckpointException):  # DCP's is no Exception
        log.write(error=traceback.format_exc())
        raise


def run_replay(job: Path, orders: str) -> None:
    """Train from each of the checkpoints in turn, and write the losses. With one bucket, which is
    sent and awaited at once: that changes no bit."""
    of_job = json.loads((job / "orders.json").read_text())
    mode = of_job["mode"]
    elastic.write, elastic.read = SAVE_AND_LOAD[of_job["way"]]
    build_with(lazy=False, **masters_of(mode))
    os.environ["ONECOPY_SHARED_MEMORY"] = "0"
    elastic.save = lambda *_: None
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    for replay in json.loads((job / orders).read_text()):
        log = RankLog(job, replay["name"])
        elastic.report = lambda step, loss, to=log: to.write(step=step, loss=loss.item().hex())
        elastic.train(job / replay["start"], replay["until"], replay["until"], **MODES[mode])
        log.write(done=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    {"train": run_train, "replay": run_replay}[sys.argv[2]](Path(sys.argv[1]), sys.argv[3])
