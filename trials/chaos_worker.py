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
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import onecopy
from onecopy import exchange, gatherer, loading, reader, saving, writer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import elastic

RANK = int(os.environ["RANK"])
GROUP_TIMEOUT = timedelta(minutes=15)  # nobody may need it: the trial's own limit is shorter

MODES: dict[str, dict[str, Any]] = {
    "drop-in": {"wrap": DDP},
    "attached DDP": {"wrap": DDP, "attach": True},
    "attached": {"wrap": lambda net: net, "attach": True},
}


class Site(NamedTuple):
    """A moment inside a phase: just before or after a call."""

    owner: Any
    name: str
    when: str
    only_rank_0: bool = False

    def __str__(self) -> str:
        return f"{self.when} {self.owner.__name__.rpartition('.')[2]}.{self.name}"


class Gradients:
    """Has a call for each gradient that arrives."""

    @staticmethod
    def arrive(_: Tensor) -> None: ...


SITES: dict[str, list[Site]] = {
    "backward": [Site(Gradients, "arrive", "after")],
    "step": [Site(torch.optim.AdamW, "step", "before"), Site(torch.optim.AdamW, "step", "after")],
    "gather": [
        Site(gatherer.Gatherer, "start", "before"),
        Site(gatherer.Gatherer, "start", "after"),
        Site(gatherer.Gatherer, "wait", "before"),
    ],
    "save": [
        Site(torch, "save", "before"),
        Site(writer.Writer, "append", "after"),
        Site(os, "fsync", "before"),
        Site(exchange.Exchange, "report", "before"),
        Site(exchange.Exchange, "answer", "before"),
        Site(saving, "write_metadata", "before", only_rank_0=True),
        Site(saving, "write_metadata", "after", only_rank_0=True),
        Site(Path, "rename", "before", only_rank_0=True),
        Site(Path, "rename", "after", only_rank_0=True),
        Site(os, "rmdir", "before", only_rank_0=True),
    ],
    "load": [
        Site(torch, "load", "before"),
        Site(torch, "load", "after"),
        Site(reader.Reader, "fill", "after"),
        Site(exchange.Exchange, "report", "before"),
        Site(exchange.Exchange, "answer", "before"),
        Site(loading, "load_into", "before"),
        Site(loading, "load_into", "after"),
    ],
    "any": [],  # some time after a step began
}


class Diary:
    """What this rank did, in a file that survives it."""

    def __init__(self, job: Path, life: str) -> None:
        self.path = job / "lives" / f"{life}-{RANK}.jsonl"
        self._file = self.path.open("a", buffering=1)

    def write(self, **what: Any) -> None:
        self._file.write(json.dumps({"time": time.time(), **what}) + "\n")


class Executioner:
    """Kills the rank that the order names, when the announcing rank is where the order says.

    An order: the `visit`-th time in `phase`, at one of its sites, or at the end of the visit if
    that is not met; for the phase "any", `delay` seconds after the visit began.
    """

    def __init__(self, order: dict[str, Any] | None, diary: Diary, victim_diary: Path) -> None:
        self._order = order
        self._site = str(_chosen_site(order)) if order else ""
        self._diary = diary
        self._victim_diary = victim_diary
        self._visits: Counter[str] = Counter()
        self._inside = ""
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def visiting(self, *phases: str) -> Iterator[None]:
        for phase in phases:
            self._visits[phase] += 1
            if self._order and phase == self._order["phase"]:
                self._inside = phase if self._visits[phase] == self._order["visit"] else ""
        if self._inside == "any" and not self._timer:
            self._timer = threading.Timer(self._order["delay"], self._kill, ["some time later"])
            self._timer.start()
        yield
        if self._inside in phases and self._inside != "any":
            self._kill("at its end")
        self._inside = ""

    def at(self, phase: str, site: str) -> None:
        if phase == self._inside and site == self._site:
            self._kill(site)

    def finish(self) -> None:
        """The job is at its end: whoever is still alive has escaped until now."""
        if self._timer:
            self._timer.join()
        if self._order:
            self._order["phase"] = "end"
            self._kill("when the training was over")

    def _kill(self, where: str) -> None:
        order, self._order, self._inside = self._order, None, ""
        assert order is not None
        victim = json.loads(self._victim_diary.read_text().split("\n", 1)[0])
        begun = self._visits["any"]
        self._diary.write(killed=order["victim"], phase=order["phase"], where=where, begun=begun)
        if order.get("with_agent"):  # as if its machine were gone
            os.kill(victim["agent"], signal.SIGKILL)
        os.kill(victim["pid"], signal.SIGKILL)


def _chosen_site(order: dict[str, Any]) -> Site | None:
    """The order has a number from 0 to 1, which chooses among the sites that this rank comes to."""
    sites = [site for site in SITES[order["phase"]] if RANK == 0 or not site.only_rank_0]
    return sites[int(order["site"] * len(sites))] if sites else None


def announce(executioner: Executioner, diary: Diary, kept: Path) -> None:
    """Put the announcements around what is to be announced."""
    for phase, sites in SITES.items():
        for site in sites:
            _around(site, functools.partial(executioner.at, phase, str(site)))
    visiting = executioner.visiting
    _visited(torch.Tensor, "backward", lambda: visiting("backward"))
    _visited(onecopy.ZeroRedundancyOptimizer, "step", lambda: visiting("step", "gather"))
    _visited(elastic, "my_samples", lambda: visiting("any"))
    build, save, resume = elastic.ZeroRedundancyOptimizer, elastic.save, elastic.resume

    def built(params: Any, *args: Any, **kwargs: Any) -> Any:
        params = list(params)
        for param in params:
            param.register_post_accumulate_grad_hook(Gradients.arrive)
        return build(params, *args, **kwargs)

    def saved(directory: Path, step: int, *args: Any) -> None:
        diary.write(saving=step)
        with visiting("save"):
            save(directory, step, *args)
        diary.write(saved=step)

    def resumed(directory: Path, *args: Any) -> int:
        found = elastic.complete(directory)
        if RANK == 0 and found:  # files of a checkpoint never change, so links will do
            shutil.copytree(found[-1], kept / found[-1].name, copy_function=os.link)
        with visiting("load") if found else contextlib.nullcontext():
            step = resume(directory, *args)
        diary.write(resumed=step)
        return step

    elastic.ZeroRedundancyOptimizer, elastic.save, elastic.resume = built, saved, resumed


def _around(site: Site, tell: Callable[[], None]) -> None:
    function = getattr(site.owner, site.name)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if site.when == "before":
            tell()
        result = function(*args, **kwargs)
        if site.when == "after":
            tell()
        return result

    setattr(site.owner, site.name, called)


def _visited(owner: Any, name: str, visit: Callable[[], Any]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with visit():
            return function(*args, **kwargs)

    setattr(owner, name, called)


def run_train(job: Path, launch: str) -> None:
    orders = json.loads((job / "orders.json").read_text())
    life = f"{launch}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    diary = Diary(job, life)
    diary.write(pid=os.getpid(), agent=os.getppid(), ranks=int(os.environ["WORLD_SIZE"]))
    order = orders["kills"].get(life)
    mine = order if order and order["announcer"] == RANK else None
    victim = diary.path.with_name(f"{life}-{order['victim']}.jsonl") if order else Path()
    executioner = Executioner(mine, diary, victim)
    announce(executioner, diary, job / "kept" / life)
    elastic.report = lambda step, loss: diary.write(step=step, loss=loss.item().hex())
    try:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        diary.write(joined=True)
        options = MODES[orders["mode"]]
        elastic.train(job / "checkpoints", orders["steps"], orders["save_every"], **options)
        executioner.finish()
        dist.barrier()  # else a victim might have left already
        dist.destroy_process_group()
        diary.write(done=True)
    except Exception:
        diary.write(error=traceback.format_exc())
        raise


def run_replay(job: Path, orders: str) -> None:
    """Train from each of the checkpoints in turn, and write down the losses."""
    mode = MODES[json.loads((job / "orders.json").read_text())["mode"]]
    elastic.save = lambda *_: None
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    for replay in json.loads((job / orders).read_text()):
        diary = Diary(job, replay["name"])
        elastic.report = lambda step, loss, to=diary: to.write(step=step, loss=loss.item().hex())
        elastic.train(job / replay["start"], replay["until"], replay["until"], **mode)
        diary.write(done=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    {"train": run_train, "replay": run_replay}[sys.argv[2]](Path(sys.argv[1]), sys.argv[3])
