"""The command line: what it prints, what it refuses and how, and that it runs as a command."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World, distributed
from models import Mlp
from torch import nn

from onecopy import ZeroRedundancyOptimizer, estimate
from onecopy.planning.text import in_bytes, plural
from onecopy.tools.cli import main
from onecopy.tools.models import PRESETS

ROOT = Path(__file__).parents[2]


def tiny() -> nn.Module:
    """A factory for the command line."""
    return Mlp()


def reads_values() -> nn.Module:
    """It cannot be built without memory."""
    model = Mlp()
    float(model.first.weight.detach().sum())
    return model


def broken() -> nn.Module:
    raise RuntimeError("no such layer\nand a second line")


class OnlyCuda(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        raise RuntimeError("this class needs CUDA")


shapes = {"weight": (30, 7), "bias": (7,)}
TINY = f"{__name__}:tiny"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The output of a command that succeeds."""
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "\x1b" not in captured.out  # no colours
    return captured.out


# ------------------------------------------------------------------ estimate


def test_estimate_prints_what_estimate_returns(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--dtype", "bf16", "--master", "fp32", "--attached", "--under-ddp")
    text = run(capsys, "estimate", "gpt2", "--world", "1", "8", *options)
    found = [
        estimate(
            PRESETS["gpt2"](),
            torch.optim.AdamW,
            world,
            dtype=torch.bfloat16,
            master_dtype=torch.float32,
            attached=True,
            under_ddp=True,
        )
        for world in (1, 8)
    ]
    lines = {line.split("  ")[1]: line for line in text.splitlines() if line.startswith("  ")}
    assert text.startswith(
        "gpt2: 124,439,808 parameters in 148 tensors (bfloat16), AdamW on float32"
    )
    for name, values in (
        ("total", [each.fullest.total for each in found]),
        ("state: exp_avg", [each.fullest.state["exp_avg"] for each in found]),
        ("master copies", [each.fullest.master_copies for each in found]),
        ("DDP's buckets", [each.fullest.ddp_buckets for each in found]),
    ):
        assert (
            lines[name].removeprefix(f"  {name}").split() == " ".join(map(in_bytes, values)).split()
        )
    for peer in ("DDP", "torch's class", "ZeRO-2", "ZeRO-3", "onecopy"):
        assert text.count(f"  {peer} ") >= 2
    assert "alpha-beta" not in text


def test_estimate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(
        capsys, *("estimate", TINY, "--world", "2", "4", "--json"),
        *("--bandwidth", "8Gbit/s", "--latency", "10us"),
    )  # fmt: skip
    two, four = json.loads(text)
    assert (two["world_size"], four["world_size"]) == (2, 4)
    assert two["memory"]["state/exp_avg"] == 328 * 4 // 2
    assert two["memory"]["total"] == sum(v for k, v in two["memory"].items() if k != "total")
    assert two["wire"] == {"all-reduce": 328 * 4, "all-gather": 328 * 4 // 2}
    assert two["seconds"] == pytest.approx(1.5 * 328 * 4 / 1e9 + 3 * 10e-6)
    assert set(two["peers"]) == {"DDP", "torch's class", "ZeRO-2", "ZeRO-3"}
    # Parameters are gathered in the forward and again in the backward.
    assert two["peers"]["ZeRO-3"]["wire"] == {
        "reduce-scatter": 328 * 4 // 2,
        "all-gather": 2 * 328 * 4 // 2,
    }


def test_the_time_says_that_it_is_that_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "estimate", TINY, "--bandwidth", "50GB", "--latency", "5us")
    assert "its time at 50.0 GB/s and 5.0 us" in text
    assert "alpha-beta model" in text


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_two_classes_share_the_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "estimate", "gpt2", "--world", "8", "--optimizer", "muon+adamw")
    assert "Muon and AdamW" in text
    assert "state: momentum_buffer" in text
    assert "state: exp_avg_sq" in text
    assert "torch's class can run one optimizer class only" in " ".join(text.split())
    (found,) = json.loads(
        run(capsys, "estimate", "gpt2", "--world", "1", "--optimizer", "muon+adamw", "--json")
    )
    matrices = 12 * (12 * 768 * 768)
    assert found["memory"]["state/momentum_buffer"] == matrices * 4
    assert found["memory"]["state/exp_avg"] == (124_439_808 - matrices) * 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--optimizer", "SGD"], {}),
        (["--optimizer", "sgd", "--option", "momentum=0.9"], {"momentum_buffer": 328 * 4}),
        (["--optimizer", "torch.optim:SGD", "--option", "momentum=0.9"], {"momentum_buffer": 1312}),
        (["--optimizer", "adagrad"], {"sum": 328 * 4, "step": 4 * 6}),
    ],
)
def test_optimizers_and_their_options(
    capsys: pytest.CaptureFixture[str], options: list[str], expected: dict[str, int]
) -> None:
    (found,) = json.loads(run(capsys, "estimate", TINY, "--world", "1", "--json", *options))
    state = {k[6:]: v for k, v in found["memory"].items() if k.startswith("state/")}
    assert state == expected


@pytest.mark.parametrize("name", ["tiny", "reads_values", "shapes"])
def test_models_of_the_user(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert "AdamW, drop-in" in run(capsys, "estimate", f"{__name__}:{name}", "--world", "2")


# ------------------------------------------------------------------ Hugging Face


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "tiny", "architectures": ["TinyForTests"]}))
    return file


def pretended_transformers(building: Any) -> types.ModuleType:
    module: Any = types.ModuleType("transformers")
    module.AutoConfig = types.SimpleNamespace(from_pretrained=lambda path, **_: path)
    module.TinyForTests = building
    return module


def test_a_hugging_face_model_is_built_without_memory(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def building(_: Any) -> nn.Module:
        built.append(nn.Linear(100, 10))
        return built[-1]

    monkeypatch.setitem(sys.modules, "transformers", pretended_transformers(building))
    for model in (config, config.parent):
        assert "1,010 parameters" in run(capsys, "estimate", str(model), "--world", "2")
    assert all(model.weight.is_meta for model in built)


def test_without_transformers_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["estimate", str(config)]) == 1
    assert "pip install transformers" in capsys.readouterr().err


def test_a_model_that_transformers_refuses(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def building(_: Any) -> nn.Module:
        raise KeyError("hidden_size")

    monkeypatch.setitem(sys.modules, "transformers", pretended_transformers(building))
    assert main(["plan", str(config), "--world", "2"]) == 1
    assert "transformers cannot build" in capsys.readouterr().err


# ------------------------------------------------------------------ plan


def test_plan_prints_who_owns_what(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "plan", "gpt2", "--world", "8")
    assert "32 buckets" in text
    assert "1.000 (torch's class: 2.481)" in text
    assert "... and 132 more: --all" in text
    (wte,) = [line for line in text.splitlines() if line.startswith("wte.weight")]
    assert wte.split()[-2:] == ["all", "10"]
    everything = run(capsys, "plan", "gpt2", "--world", "8", "--all")
    assert sum(line.startswith("h.") for line in everything.splitlines()) == 144
    assert "more: --all" not in everything


def test_plan_as_json_says_who_owns_every_element(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "plan", TINY, "--world", "3", "--json", "--bucket-mb", "0.0005"))
    params = {param["number"]: param for param in found["parameters"]}
    assert [param["name"] for param in params.values()] == [n for n, _ in Mlp().named_parameters()]
    assert sum(param["elements"] for param in params.values()) == found["trained_elements"] == 328
    plan = estimate(Mlp(), torch.optim.AdamW, 3, bucket_mb=0.0005).plan
    owners: dict[int, set[int]] = {index: set() for index in params}
    buckets: dict[int, set[int]] = {index: set() for index in params}
    elements, shards = [0] * 3, [0] * 3
    for rank in range(3):
        for shard in plan.shards(rank):
            owners[shard.param].add(rank)
            buckets[shard.param].add(shard.bucket)
            elements[rank] += shard.numel
            shards[rank] += 1
    assert max(map(len, buckets.values())) > 1
    for index, param in params.items():
        listed = [rank for a, b in param["owners"] for rank in range(a, b + 1)]
        assert (set(listed), len(listed)) == (owners[index], len(owners[index]))
        assert param["buckets"] == len(buckets[index])
    rows = [(row["elements"], row["shards"], *row["ranks"]) for row in found["ranks"]]
    of_ranks = [row[:2] for row in rows for _ in range(row[2], row[3] + 1)]
    assert of_ranks == list(zip(elements, shards, strict=True))


def test_a_huge_plan_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "plan", "llama-3-405b", "--world", "16384", "--json", "--bucket-mb", "400")
    found = json.loads(text)
    assert len(text) < 10_000_000
    ranks = sum(last - first + 1 for first, last in (row["ranks"] for row in found["ranks"]))
    assert ranks == 16384


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "COMMAND"),
        (["fly"], 2, "invalid choice: 'fly'"),
        (["estimate"], 2, "MODEL"),
        (["estimate", "gpt5"], 2, "unknown model 'gpt5': give a preset (gpt2, "),
        (["estimate", "gpt2", "--world", "0"], 2, "a positive number of ranks, got '0'"),
        (["estimate", "gpt2", "--world", "two"], 2, "a positive number of ranks, got 'two'"),
        (["estimate", "gpt2", "--dtype", "int3"], 2, "expected one of fp64, fp32"),
        (["estimate", "gpt2", "--master", "bf16"], 2, "--master must be fp32 or fp64"),
        (["estimate", "gpt2", "--bandwidth", "50"], 2, "such as 400Gbit/s or 50GB/s, got '50'"),
        (["estimate", "gpt2", "--bandwidth", "1..5GB"], 2, "got '1..5GB'"),
        (["estimate", "gpt2", "--latency", "5us"], 2, "--latency needs --bandwidth"),
        (["estimate", "gpt2", "--lazy-gather"], 2, "--lazy-gather needs --attached"),
        (["estimate", "gpt2", "--no-sync"], 2, "--no-sync needs --attached"),
        (["estimate", "gpt2", "--bucket-mb", "0"], 2, "--bucket-mb must be positive"),
        (["estimate", "gpt2", "--option", "momentum"], 2, "KEY=VALUE, e.g. momentum=0.9"),
        (["estimate", "gpt2", "--option", "speed=9"], 1, "speed"),
        (["estimate", "gpt2", "--option", "lr=abc"], 1, "trying gpt2 with adamw and its options"),
        (["estimate", "gpt2", "--optimizer", f"{__name__}:OnlyCuda"], 1, "needs CUDA"),
        (["estimate", "gpt2", "--optimizer", "adamm"], 2, "unknown optimizer 'adamm'"),
        (["estimate", "gpt2", "--optimizer", "lbfgs"], 1, "LBFGS cannot be sharded"),
        (["estimate", "gpt2", "--optimizer", "math:tau"], 1, "is not a torch.optim.Optimizer"),
        (["estimate", ":tiny"], 2, "expected package.module:factory, got ':tiny'"),
        (["estimate", "nowhere.at.all:f"], 1, "nowhere.at.all:f cannot be imported"),
        (["estimate", f"{__name__}:nothing"], 1, "has no attribute 'nothing'"),
        (["estimate", f"{__name__}:broken"], 1, "raised RuntimeError: no such layer"),
        (["estimate", "math:tau"], 1, "should be an iterable of Tensors"),
        (["estimate", "none.json"], 1, "none.json cannot be read"),
        (["plan", "gpt2"], 2, "--world"),
        (["plan", "gpt2", "--world", "2", "--json", "--html", "x"], 2, "choose one"),
        (["plan", "gpt2", "--world", "2", "--html", "/none/such/x.html"], 1, "No such file"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, message: str
) -> None:
    try:
        found = main(argv)
    except SystemExit as exit_:  # argparse leaves by itself
        found = int(exit_.code or 0)
    captured = capsys.readouterr()
    assert (found, captured.out) == (code, "")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("onecopy")


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_file_that_is_no_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["estimate", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["--help"], ["estimate", "--help"], ["plan", "--help"], ["report", "--help"]]
)
def test_help_has_examples(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "examples:\n  onecopy " in text
    assert max(map(len, text.splitlines())) <= 100


# ------------------------------------------------------------------ as a command


def test_it_runs_as_a_module_and_survives_a_pipe_that_closes() -> None:
    # Torch 2.6 leaves a temporary directory to be removed when the process ends.
    options = "-W error -W 'ignore:Implicitly cleaning up:ResourceWarning'"
    command = f"{sys.executable} {options} -m onecopy plan gpt2 --world 2 --all | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.startswith("gpt2: 124,439,808 parameters")
    assert done.stderr == ""


def test_the_command_is_declared() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\nonecopy = "onecopy.tools.cli:main"\n' in declared


# ------------------------------------------------------------------ words and the log


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9499, "9.50 kB"), (999_960, "1.00 MB"),
     (12_345_678, "12.3 MB"), (10**21, "1000 EB")],
)  # fmt: skip
def test_bytes_in_words(count: int, text: str) -> None:
    assert in_bytes(count) == text


@distributed(1, 2)
def test_the_log_says_in_one_line_what_was_planned(world: World) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onecopy")
    logger.addHandler(handler)
    try:
        ZeroRedundancyOptimizer(Mlp().parameters(), torch.optim.SGD, lr=0.1)
        assert lines == []  # silent unless asked
        logger.setLevel(logging.INFO)
        ZeroRedundancyOptimizer(Mlp().parameters(), torch.optim.SGD, lr=0.1)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    most = math.ceil(328 / world.size)
    expected = (
        f"planned 6 parameters, 328 elements, for SGD on {plural(world.size, 'rank')} in 1 "
        f"bucket: at most {most} elements on a rank, 1.000 times an even share"
    )
    assert lines == ([expected] if world.rank == 0 else [])
