"""Train so that the job may be killed at any moment: it goes on from the last complete checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py

When a process dies, torchrun ends the others and starts all of them again, at most three times.
(Without that variable they get the store of the dead ones, find the old addresses in it, and fail
or hang while they connect.) Start it again yourself with any other number of processes: a
checkpoint does not depend on it, and here the data does not either, because a sample belongs to a
step and not to a rank.

    checkpoints/step-00000010/model.pt   the parameters, from rank 0
                             /optim      the optimizer's state, from all ranks
               /saving                   becomes step-00000020 once all of it is there
               /removing                 older ones, on their way out
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from onecopy import ZeroRedundancyOptimizer

BATCH = 48  # samples a step, over all ranks


def train(
    directory: Path,
    steps: int,
    save_every: int,
    wrap: Callable[[nn.Module], nn.Module] = DDP,
    attach: bool = False,  # needed if `wrap` leaves the gradients as they are
) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 1)
    net = nn.Sequential(*layers)
    model = wrap(net)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    if attach:
        optimizer.attach(model)

    for step in range(resume(directory, net, optimizer) + 1, steps + 1):
        inputs, targets = my_samples(step)
        error = (model(inputs) - targets).square().sum()
        loss = error * dist.get_world_size() / BATCH  # averaged over the ranks: the batch's loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step, loss)
        if step % save_every == 0 or step == steps:
            save(directory, step, net, optimizer)


def my_samples(step: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch. Whatever is random follows from the step, so that there is no
    state of a random generator or a data loader to save."""
    batch = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
    mine = batch[dist.get_rank() :: dist.get_world_size()]
    return mine, mine.sum(1, keepdim=True).sin()


def report(step: int, loss: Tensor) -> None:
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)


def save(directory: Path, step: int, net: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    saving, removing = directory / "saving", directory / "removing"
    write(saving, net, optimizer)
    if dist.get_rank() == 0:
        sync(saving)
        saving.rename(directory / f"step-{step:08}")
        sync(directory)
        removing.mkdir(exist_ok=True)
        for old in complete(directory)[:-2]:
            old.rename(removing / old.name)  # in an instant, so that none is ever listed in part
        shutil.rmtree(removing)


def write(saving: Path, net: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    if dist.get_rank() == 0:
        saving.mkdir(parents=True, exist_ok=True)
        with open(saving / "model.pt", "wb") as file:
            torch.save(net.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
    optimizer.save(saving / "optim", net)  # returns when all ranks' shares are on the disk


def sync(directory: Path) -> None:
    """The names in it are on the disk, as the files are."""
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints, the last one last."""
    return sorted(directory.glob("step-*"))


def resume(directory: Path, net: nn.Module, optimizer: ZeroRedundancyOptimizer) -> int:
    """Load the last complete checkpoint, if there is one; the step at which it was saved."""
    step = torch.zeros((), dtype=torch.int64)
    if dist.get_rank() == 0 and (found := complete(directory)):
        step.fill_(int(found[-1].name.removeprefix("step-")))
    dist.broadcast(step, 0)  # rank 0 says which, for all
    if step:
        read(directory / f"step-{step:08}", net, optimizer)
    return int(step)


def read(path: Path, net: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    net.load_state_dict(torch.load(path / "model.pt", weights_only=True))
    optimizer.load(path / "optim", net)


if __name__ == "__main__":
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        sys.exit("expected TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which no restart works")
    # A process that dies is noticed at once. If its whole machine is lost, the others may wait as
    # long as is said here: longer than the slowest step, and no more.
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    train(Path("checkpoints"), steps=100, save_every=10)
    dist.destroy_process_group()
