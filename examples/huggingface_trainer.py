"""Hugging Face Trainer: it builds the optimizer, clips, saves and resumes as ever.

torchrun --standalone --nproc-per-node 2 examples/huggingface_trainer.py checkpoints
torchrun --standalone --nproc-per-node 2 examples/huggingface_trainer.py again \
    --resume checkpoints/checkpoint-4
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from text import draw_batch, standard_library
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
    set_seed,
)

from onecopy import ZeroRedundancyOptimizer


class Consolidate(TrainerCallback):
    """The main process alone will ask for the state: gather it there while all of them are here."""

    def on_step_end(
        self, _args: Any, _state: Any, control: TrainerControl, *, optimizer: Any, **_: Any
    ) -> None:
        if control.should_save:
            optimizer.optimizer.consolidate_state_dict(to=0)  # within Accelerate's wrapper

    on_epoch_end = on_step_end  # where `save_strategy="epoch"` decides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where to save, every four steps")
    parser.add_argument("--resume", metavar="CHECKPOINT")
    arguments = parser.parse_args()

    set_seed(0)
    tokens, _ = draw_batch(standard_library(10_000), 64, 32, torch.Generator().manual_seed(0))
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    vocabulary = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
    settings = TrainingArguments(
        output_dir=arguments.folder,
        max_steps=8,
        save_steps=4,
        logging_steps=4,
        per_device_train_batch_size=4,
        weight_decay=0.1,
        max_grad_norm=1.0,  # the Trainer clips `param.grad` itself: the optimizer is not attached
        ddp_find_unused_parameters=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(**shape, **vocabulary)),
        args=settings,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizer_cls_and_kwargs=(
            ZeroRedundancyOptimizer,
            {"optimizer_class": torch.optim.AdamW, "lr": 1e-3},
        ),
        callbacks=[Consolidate()],
    )
    trainer.train(resume_from_checkpoint=arguments.resume)


if __name__ == "__main__":
    main()
