"""Accelerate: `prepare`, `clip_grad_norm_`, `save_state` and `load_state` as ever.

torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py checkpoints
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py again --resume checkpoints/1
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onecopy


class ZeroRedundancyOptimizer(onecopy.ZeroRedundancyOptimizer):
    """`save_state` asks every process for the state, and writes that of the main process."""

    def state_dict(self) -> dict[str, Any]:
        self.consolidate_state_dict(to=0)
        return super().state_dict() if self.rank == 0 else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where to save, after each epoch")
    parser.add_argument("--resume", metavar="CHECKPOINT")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    inputs = torch.randn(256, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(accelerator.device)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=64)
    # The state is on the device of the parameters: Accelerate need not read it to move it.
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler, device_placement=[True, False, True, None]
    )

    start = 0
    if arguments.resume:
        accelerator.load_state(arguments.resume)
        start = int(arguments.resume.rstrip("/").rpartition("/")[2])
    for epoch in range(start, arguments.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)  # drop-in: gradients are there
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(f"{arguments.folder}/{epoch + 1}")
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
