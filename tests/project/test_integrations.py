"""The examples for trainers, with the real trainers, on two processes under torchrun.

Each saves in the middle and at the end. A second run that resumes from the middle must end at the
same bits. Run by `make test-integrations`, in an environment that has the trainers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from test_examples import torchrun
from torch.utils._pytree import tree_flatten_with_path

import onecopy


def needs(package: str) -> Any:
    is_there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_there, reason=f"needs {package}: make test-integrations")


def run(script: str, *arguments: str, cwd: Path) -> str:
    """The standard output. On the standard error there is no warning of ours."""
    done = torchrun(script, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    for ours in (str(Path(onecopy.__file__).parent), "master copies", "toy tensors"):
        assert ours not in done.stderr
    return done.stdout


def assert_same(one: Any, other: Any) -> None:
    leaves, structure = tree_flatten_with_path(one)
    others, other_structure = tree_flatten_with_path(other)
    assert structure == other_structure
    for (path, mine), (_, theirs) in zip(leaves, others, strict=True):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs), path
        else:
            assert mine == theirs, path


def assert_is_of_adamw(state: dict[Any, Any], params: int, steps: int) -> None:
    """The state that the plain class would have written."""
    assert list(state["state"]) == list(range(params))
    for of_param in state["state"].values():
        assert of_param["step"] == steps
        assert of_param["exp_avg"].ndim > 0


@needs("pytorch_lightning")
def test_lightning_resumes_to_the_bit(tmp_path: Path) -> None:
    run("lightning_ddp.py", "one", cwd=tmp_path)
    run("lightning_ddp.py", "two", "--resume", "one/epoch=0.ckpt", cwd=tmp_path)
    one, two = (torch.load(tmp_path / name / "epoch=1.ckpt") for name in ("one", "two"))
    assert one["global_step"] == two["global_step"] == 16
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(one[key], two[key])
    assert_is_of_adamw(one["optimizer_states"][0], params=4, steps=16)
    assert one["optimizer_states"][0]["param_groups"][0]["lr"] == 0.0025


@needs("accelerate")
def test_accelerate_resumes_to_the_bit(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first = run("accelerate_loop.py", "one", cwd=tmp_path)
    second = run("accelerate_loop.py", "two", "--resume", "one/1", cwd=tmp_path)
    assert first.splitlines()[1:] == second.splitlines()
    one, two = tmp_path / "one" / "2", tmp_path / "two" / "2"
    assert_same(load_file(one / "model.safetensors"), load_file(two / "model.safetensors"))
    for name in ("optimizer.bin", "scheduler.bin"):
        assert_same(torch.load(one / name), torch.load(two / name))
    assert_is_of_adamw(torch.load(one / "optimizer.bin"), params=4, steps=16)


@needs("transformers")
def test_the_hugging_face_trainer_resumes_to_the_bit(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first = run("huggingface_trainer.py", "one", cwd=tmp_path)
    second = run("huggingface_trainer.py", "two", "--resume", "one/checkpoint-4", cwd=tmp_path)
    losses = [[line for line in text.splitlines() if "'loss'" in line] for text in (first, second)]
    assert len(losses[0]) == 2
    assert losses[0][1:] == losses[1]
    one, two = (tmp_path / name / "checkpoint-8" for name in ("one", "two"))
    assert_same(load_file(one / "model.safetensors"), load_file(two / "model.safetensors"))
    for name in ("optimizer.pt", "scheduler.pt"):
        assert_same(torch.load(one / name), torch.load(two / name))
    state = torch.load(one / "optimizer.pt")
    assert_is_of_adamw(state, params=28, steps=8)
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
