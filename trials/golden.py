"""Notice one changed bit: hashes and message counts of short training runs, compared with a file.

    make golden                    # compare with trials/golden.json
    make golden ONLY="4 ranks"     # the cases whose name contains this
    make golden-renew              # write trials/golden.json

A case trains a small model for 6 steps in one mode, on one number of ranks, in one topology. It is
described by the sha256 of the parameters, of the consolidated state and of the gradients that the
ranks hold before a step, and by the messages and bytes that each rank sent for each bucket. The
model uses elementwise operations only, so that no matrix library decides about bits (except in
Muon).

The file names the release of torch, the CPU capability and the number of threads that it was
written with; results of others are not comparable. On a machine with AVX2 torch uses AVX2, even if
the machine has more. Workers always use one thread: the number of threads is compared to notice a
change of the harness. Variables ONECOPY_... of the environment are removed at the start.

The exit code is 1 if a case differs or a run fails, and 77 if nothing can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # before torch and tests/support/harness.py read them
    for variable in [name for name in os.environ if name.startswith("ONECOPY_")]:
        del os.environ[variable]
    with contextlib.suppress(OSError):
        if " avx2 " in Path("/proc/cpuinfo").read_text():
            os.environ["ATEN_CPU_CAPABILITY"] = "avx2"

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import harness
import torch
from inside import held_gradients, share_memory_from, share_no_memory
from models import noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer

FILE = Path(__file__).with_suffix(".json")
SIZES = (1, 2, 3, 4)
STEPS = 6
INCOMPARABLE = 77  # an exit code that neither a failure nor a wrong argument has
BUCKET_MB = 0.2
LARGE = (41, 83, 97)  # 6 buckets of float32; not for Muon, which would take most of the time
SHARED_FROM = 8192  # bytes: of the model below, all buckets but the smallest
# The recorded names of phases.
RECORDED = {"reduce_scatter": "reduce", "all_gather": "gather"}
HASHES = ("gradients", "parameters", "state")  # in the order in which a difference spreads


class Mode(NamedTuple):
    """How a case trains."""

    attach: bool = True
    ddp: bool = False
    views: bool = False
    lazy: bool = False
    reduce_dtype: torch.dtype | None = None
    masters: bool = False
    muon: bool = False
    micro_batches: int = 1  # all but the last of a step inside no_sync() ...
    averages_all: bool = False  # ... or none of them
    max_norm: float | None = None


MODES = {
    "drop-in": Mode(attach=False, ddp=True),
    "bucket views": Mode(attach=False, ddp=True, views=True),
    "attached bare": Mode(),
    "attached DDP": Mode(ddp=True),
    "lazy": Mode(lazy=True),
    "bf16 wire": Mode(reduce_dtype=torch.bfloat16),
    "masters": Mode(masters=True),
    "Muon + AdamW": Mode(muon=True),
    "no_sync": Mode(micro_batches=3),
    "averaged twice": Mode(micro_batches=2, averages_all=True),
    "masters no_sync": Mode(masters=True, micro_batches=3),
    "clipping": Mode(max_norm=0.5),
}
TOPOLOGIES = ("one host", "2+2 hosts", "apart", "c10d")
Case = dict[str, Any]  # hashes by name, and "buckets": for each, [messages, bytes] of every rank


def name_of(mode: str, size: int, topology: str) -> str:
    return f"{mode}, {size} {'rank' if size == 1 else 'ranks'}, {topology}"


def runs(only: str = "") -> Iterator[tuple[int, str, list[str]]]:
    """Number of ranks, topology, and the modes to train so."""
    for size in SIZES:
        for topology in TOPOLOGIES:
            if topology != "2+2 hosts" or size == 4:
                modes = [mode for mode in MODES if only in name_of(mode, size, topology)]
                if modes:
                    yield size, topology, modes


# ---------------------------------------- on a rank ----------------------------------------


class Layer(nn.Module):
    """One parameter, and a loss of it and of noise."""

    def __init__(self, number: int, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        weight = noise(*shape, seed=(number,)).to(dtype)
        form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        self.weight = nn.Parameter(weight.to(memory_format=form))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[: self.weight.numel()].view_as(self.weight).to(self.weight.dtype)
        return (self.weight * x - x.square()).square().mean()


class Net(nn.Sequential):
    """One parameter of several buckets, and small ones of several dtypes and layouts."""

    def __init__(self, narrow: bool) -> None:
        usual, wide = (torch.bfloat16, torch.float32) if narrow else (torch.float32, torch.float64)
        super().__init__(
            Layer(1, 37, 23, dtype=usual),
            Layer(2, 41, dtype=usual),
            Layer(3, dtype=usual),
            Layer(4, *LARGE, dtype=usual),
            Layer(5, 6, 5, 3, 3, dtype=usual),
            Layer(6, 53, 29, dtype=usual),
            Layer(7, 33, dtype=wide),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).double() for layer in self]).sum()


def set_topology(world: harness.World, topology: str) -> None:
    """Before the process group has an optimizer."""
    harness.pretend_hosts(world, *{"2+2 hosts": (0, 0, 1, 1)}.get(topology, ()))
    share_memory_from(SHARED_FROM)
    if topology == "apart":
        share_no_memory()
    elif topology == "c10d":
        os.environ["ONECOPY_COMM"] = "c10d"


def build(mode: Mode) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    net = Net(narrow=mode.masters)
    module = DistributedDataParallel(net, gradient_as_bucket_view=mode.views) if mode.ddp else net
    params: Any = net.parameters()
    if mode.muon:
        muon = {"optimizer_class": torch.optim.Muon, "lr": 0.02}
        params = [
            {"params": [param for param in net.parameters() if param.ndim != 2]},
            {"params": [param for param in net.parameters() if param.ndim == 2], **muon},
        ]
    optimizer = ZeroRedundancyOptimizer(
        params,
        torch.optim.AdamW,
        lr=0.01,
        bucket_mb=BUCKET_MB,
        parameters_as_bucket_view=mode.views,
        **({"master_dtype": torch.float32} if mode.masters else {}),
    )
    if mode.attach:
        optimizer.attach(module, lazy_gather=mode.lazy, reduce_dtype=mode.reduce_dtype)
    return module, optimizer


def train(world: harness.World, mode: Mode) -> Case:
    """What this rank has found: its hashes, and (messages, bytes) of every bucket."""
    module, optimizer = build(mode)
    gradients = hashlib.sha256()
    for step in range(STEPS):
        for number in range(mode.micro_batches):
            x = noise(math.prod(LARGE), seed=(world.rank + 1, step + 1, number + 1))
            is_averaged = mode.averages_all or number == mode.micro_batches - 1
            with contextlib.nullcontext() if is_averaged else optimizer.no_sync():
                module(x).backward()
        if mode.max_norm is not None:
            update_hash(gradients, optimizer.clip_grad_norm_(mode.max_norm))
        # Not before every step: looking at gradients waits for all buckets, a step does not.
        if step % 2:
            update_hash(gradients, held_gradients(optimizer))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    sent = {
        f"{RECORDED[each.phase]} {each.bucket}": [each.messages, each.bytes]
        for each in optimizer.comm_stats().buckets
    }
    parameters, state = hashlib.sha256(), hashlib.sha256()
    update_hash(parameters, list(module.parameters()))
    optimizer.consolidate_state_dict()
    if world.rank == 0:
        update_hash(state, optimizer.state_dict())
    if mode.attach:
        optimizer.detach()
    return {
        "gradients": gradients.hexdigest(),
        "parameters": parameters.hexdigest(),
        "state": state.hexdigest(),
        "buckets": sent,
    }


def update_hash(digest: Any, value: Any) -> None:
    """Add a nested value to a hash: types, keys, dtypes, shapes and bytes."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"dict {len(value)} ".encode())
        for key in sorted(value, key=str):
            digest.update(f"{key!r}: ".encode())
            update_hash(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__} {len(value)} ".encode())
        for each in value:
            update_hash(digest, each)
    else:
        digest.update(f"{value!r} ".encode())


def train_all(world: harness.World, topology: str, modes: Sequence[str]) -> dict[str, Case]:
    set_topology(world, topology)
    return {name_of(mode, world.size, topology): train(world, MODES[mode]) for mode in modes}


def environment(_: harness.World) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


# ---------------------------------------- all ranks ----------------------------------------


def measure(size: int, topology: str, modes: Sequence[str]) -> dict[str, Case]:
    of_ranks = harness.run_on_ranks(size, train_all, topology, modes, timeout=600.0)
    return {case: merged(case, [found[case] for found in of_ranks]) for case in of_ranks[0]}


def merged(case: str, of_ranks: Sequence[Case]) -> Case:
    """Ranks hold the same parameters, gradients of their own, and the state is on rank 0."""
    if len({found["parameters"] for found in of_ranks}) > 1:
        raise AssertionError(f"{case}: the ranks have different parameters")
    gradients = "".join(found["gradients"] for found in of_ranks)
    return {
        "gradients": hashlib.sha256(gradients.encode()).hexdigest(),
        "parameters": of_ranks[0]["parameters"],
        "state": of_ranks[0]["state"],
        "buckets": {
            bucket: [found["buckets"].get(bucket, [0, 0]) for found in of_ranks]
            for bucket in dict.fromkeys(each for found in of_ranks for each in found["buckets"])
        },
    }


def difference(expected: Case, found: Case) -> str:
    """Which hashes differ, and the first bucket with other messages; empty if none does."""
    parts = [name for name in HASHES if expected[name] != found[name]]
    said = f"other {', '.join(parts)}" if parts else ""
    before, after = expected["buckets"], found["buckets"]
    for bucket in dict.fromkeys([*before, *after]):
        if before.get(bucket) != after.get(bucket):
            sent = f"{bucket}: [messages, bytes] of each rank {before.get(bucket)}"
            return f"{said}{'; ' * bool(said)}{sent}, now {after.get(bucket)}"
    return said


def differences(
    expected: Mapping[str, Case], found: Mapping[str, Case], whole: bool = True
) -> Iterator[str]:
    """One line for each case. `whole`: what was not found is missing."""
    for case in dict.fromkeys([*expected, *found]):
        if case not in expected:
            yield f"{case}: is not in {FILE.name}"
        elif case in found:
            said = difference(expected[case], found[case])
            if said:
                yield f"{case}: {said}"
        elif whole:
            yield f"{case}: was not run"


def incomparable(expected: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {FILE.name} was written with {expected.get(name)}, here it is {here[name]}"
        for name in here
        if expected.get(name) != here[name]
    ]


def as_text(written: Mapping[str, Any], processor: str, cases: Mapping[str, Case]) -> str:
    """JSON with a line for each case."""
    lines = [f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    head = f' "environment": {json.dumps(written)},\n "processor": {json.dumps(processor)},\n'
    return "{\n" + head + ' "cases": {\n' + ",\n".join(lines) + "\n }\n}\n"


def processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compare hashes of short training runs")
    parser.add_argument("--only", default="", help="the cases whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.write and given.only:
        parser.error(f"--write writes all cases: {FILE.name} is of one commit")
    try:
        return run(given.only, given.write)
    except harness.RankFailure as error:
        print(error)
        return 1
    finally:
        harness.shutdown()


def run(only: str, write: bool) -> int:
    start = time.monotonic()
    here = harness.run_on_ranks(1, environment)[0]
    expected: dict[str, Any] = {} if write else json.loads(FILE.read_text())
    if not write and (reasons := incomparable(expected["environment"], here)):
        print("golden: nothing can be compared")
        print(*reasons, sep="\n")
        return INCOMPARABLE
    found: dict[str, Case] = {}
    for size, topology, modes in runs(only):
        found.update(measure(size, topology, modes))
    seconds = f"{time.monotonic() - start:.0f} s"
    if write:
        FILE.write_text(as_text(here, processor_name(), found))
        print(f"golden: {len(found)} cases written in {seconds}")
        return 0
    lines = list(differences(expected["cases"], found, whole=not only))
    print(*lines, sep="\n", end="\n" if lines else "")
    if lines and expected["processor"] != processor_name():
        print(f"{FILE.name} was written on {expected['processor']}, this is {processor_name()}")
    print(f"golden: {len(found)} cases in {seconds}, {len(lines)} differences")
    return int(bool(lines) or not found)


if __name__ == "__main__":
    sys.exit(main())
