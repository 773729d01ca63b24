"""The examples run as the README says, under torchrun, on two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# For processes of their own: the warning of gradients that were not averaged is an error.
NO_FALSE_ALARM = {"PYTHONWARNINGS": "error:the gradient of"}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def torchrun(
    script: str, *arguments: str, cwd: Path, ranks: int = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", str(ranks), str(EXAMPLES / script), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", **NO_FALSE_ALARM, **environment},
        check=False,
    )


def test_the_minimal_example_trains_saves_and_resumes(tmp_path: Path) -> None:
    first = torchrun("minimal.py", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert re.search(r"^step 100: loss \d+\.\d+, saved minimal\.pt$", first.stdout, re.M)
    second = torchrun("minimal.py", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert re.search(r"^step 200: loss \d+\.\d+, saved minimal\.pt$", second.stdout, re.M)
    assert [path.name for path in tmp_path.iterdir()] == ["minimal.pt"]

    losses = [float(re.findall(r"loss (\d+\.\d+)", run.stdout)[0]) for run in (first, second)]
    assert losses[1] < losses[0]
    saved = torch.load(tmp_path / "minimal.pt", weights_only=True)
    assert saved["step"] == 200
    steps = {int(state["step"]) for state in saved["optimizer"]["state"].values()}
    assert steps == {200}  # the state went on, it did not start again
    shapes = [value.shape for value in saved["model"].values()]
    moments = [state["exp_avg"].shape for state in saved["optimizer"]["state"].values()]
    assert moments == shapes


def losses_by_step(printed: str) -> dict[str, str]:
    return dict(re.findall(r"^step (\d+): loss (\d+\.\d+)$", printed, re.M))


def test_the_elastic_example_resumes_from_the_last_complete_checkpoint_on_fewer_ranks(
    tmp_path: Path,
) -> None:
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = torchrun("elastic.py", cwd=tmp_path, **own_store)
    assert first.returncode == 0, first.stderr
    losses = losses_by_step(first.stdout)
    assert list(losses) == [str(step) for step in range(10, 101, 10)]
    saved = tmp_path / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000090", "step-00000100"]

    undisturbed = torch.load(saved / "step-00000100" / "model.pt", weights_only=True)
    # As if it had been killed in its last save.
    (saved / "step-00000100").rename(saved / "saving")
    (saved / "saving" / "optim" / ".metadata").unlink()
    second = torchrun("elastic.py", cwd=tmp_path, ranks=1, **own_store)
    assert second.returncode == 0, second.stderr
    assert list(losses_by_step(second.stdout)) == ["100"]
    resumed = torch.load(saved / "step-00000100" / "model.pt", weights_only=True)
    torch.testing.assert_close(resumed, undisturbed)
    start = torch.load(saved / "step-00000090" / "model.pt", weights_only=True)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(resumed, start)
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000090", "step-00000100"]


def test_the_elastic_example_says_which_variable_it_needs(tmp_path: Path) -> None:
    run = torchrun("elastic.py", cwd=tmp_path, ranks=1)
    assert run.returncode != 0
    assert "expected TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in run.stderr


def test_the_demo_ends_at_equal_losses_and_with_a_page(tmp_path: Path) -> None:
    run = torchrun("demo.py", "--rounds", "2", "--steps", "1", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^(.+?)\s+(\d+\.\d{9})\s+(\d+\.\d+) MB", run.stdout, re.M)
    assert [name for name, _, _ in rows] == [
        "DDP + AdamW",
        "torch's ZeroRedundancyOptimizer",
        "onecopy",
        "onecopy, attached (no DDP)",
    ]
    assert len({loss for _, loss, _ in rows}) == 1
    whole, _, ours, attached = (float(megabytes) for _, _, megabytes in rows)
    assert ours == attached == pytest.approx(whole / 2, rel=0.01)
    assert "differ" not in run.stdout

    page = Path("demo-report") / "report.html"
    assert run.stdout.splitlines()[-1] == str(page)
    assert [path.name for path in tmp_path.iterdir()] == ["demo-report"]
    assert {path.name for path in (tmp_path / "demo-report").iterdir()} == {
        "rank-0.json",
        "rank-1.json",
        "report.html",
    }
    html = (tmp_path / page).read_text()
    assert "Steps 3 to 5 on 2 ranks" in html
    assert "gather 1 under way, hidden" in html


def test_the_demo_says_how_it_is_started(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    assert "expected to be started by torchrun" in run.stderr
