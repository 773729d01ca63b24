"""Lightning: the optimizer is made in `configure_optimizers`; the rest is as ever.

torchrun --standalone --nproc-per-node 2 examples/lightning_ddp.py checkpoints
torchrun --standalone --nproc-per-node 2 examples/lightning_ddp.py again \
    --resume checkpoints/epoch=0.ckpt
"""

from __future__ import annotations

import argparse
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from onecopy import ZeroRedundancyOptimizer


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, targets = batch
        return (self.net(inputs) - targets).square().mean()

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where to save, after each epoch")
    parser.add_argument("--resume", metavar="CHECKPOINT")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        gradient_clip_val=1.0,  # Lightning clips `param.grad` itself: the optimizer is not attached
        callbacks=[ModelCheckpoint(arguments.folder, "{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=16), ckpt_path=arguments.resume)


if __name__ == "__main__":
    main()
