"""trials/golden.py finds the same hashes again, and notices one changed bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import golden
import harness
import pytest
import torch
from inside import ADD_CONTRIBUTIONS
from torch import nn

FEW = ["drop-in", "lazy"]


def with_a_bit_flipped(
    world: harness.World, topology: str, modes: Sequence[str]
) -> dict[str, golden.Case]:
    """As ``golden.train_all``; the last rank changes the lowest bit of one sum, once."""
    add: Callable[..., None] = getattr(*ADD_CONTRIBUTIONS)
    flipped: list[bool] = []

    def wrong(slot: Any, contributions: Sequence[torch.Tensor]) -> None:
        add(slot, contributions)
        if not flipped and world.rank == world.size - 1 and slot.tensor.dtype == torch.float32:
            slot.tensor.view(torch.int32)[0] ^= 1
            flipped.append(True)

    with mock.patch.object(*ADD_CONTRIBUTIONS, wrong):
        return golden.train_all(world, topology, modes)


def test_results_repeat_and_one_changed_bit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = golden.measure(2, "one host", FEW)
    assert not list(golden.differences(first, golden.measure(2, "one host", FEW)))
    monkeypatch.setattr(golden, "train_all", with_a_bit_flipped)
    lines = list(golden.differences(first, golden.measure(2, "one host", FEW)))
    assert [line.partition(",")[0] for line in lines] == ["lazy"]
    assert "state" in lines[0]


def test_the_file_is_of_these_cases() -> None:
    expected = [golden.name_of(m, *run[:2]) for run in golden.runs() for m in run[2]]
    assert list(json.loads(golden.FILE.read_text())["cases"]) == expected


def cases_of_the_file() -> dict[str, golden.Case]:
    return json.loads(golden.FILE.read_text())["cases"]


def test_the_file_has_the_messages_of_this_code() -> None:
    """Messages depend neither on the CPU nor on the release of torch."""
    mode = "attached bare"
    name = golden.name_of(mode, 3, "c10d")
    found = golden.measure(3, "c10d", [mode])[name]["buckets"]
    assert found == cases_of_the_file()[name]["buckets"], "golden.json is of other code"


@pytest.mark.parametrize("size", [3, 4])
def test_the_file_has_sums_of_the_collectives(size: int) -> None:
    """With three ranks or more gloo's collectives add up in another order than messages."""
    cases = cases_of_the_file()
    by_messages, by_c10d = (
        cases[golden.name_of("attached bare", size, topology)] for topology in ("one host", "c10d")
    )
    assert by_messages["gradients"] != by_c10d["gradients"]


def test_buckets_of_all_ranks_are_merged() -> None:
    of_ranks = [case(buckets={"a": [1, 8]}), case(buckets={"b": [2, 4], "a": [3, 5]})]
    assert golden.merged("x", of_ranks)["buckets"] == {"a": [[1, 8], [3, 5]], "b": [[0, 0], [2, 4]]}


@pytest.mark.slow
def test_variables_of_the_environment_change_nothing() -> None:
    strange = {"ATEN_CPU_CAPABILITY": "default", "ONECOPY_TEST_DEVICE": "cuda"}
    run = subprocess.run(
        [sys.executable, golden.__file__, "--only", "no such case"],
        env={**os.environ, **strange},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "golden: " in run.stdout, run.stderr
    if " avx2 " in Path("/proc/cpuinfo").read_text():
        assert "CPU capability" not in run.stdout


def case(**changes: Any) -> golden.Case:
    buckets = {"gather 0": [[1, 8], [1, 8]], "gather 1": [[1, 4], [1, 4]]}
    return {"gradients": "a", "parameters": "b", "state": "c", "buckets": buckets, **changes}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (case(), []),
        (case(state="d"), ["x: other state"]),
        (
            case(parameters="d", buckets={"gather 0": [[1, 8], [1, 8]], "gather 1": [[2, 4]]}),
            ["x: other parameters; gather 1: ", "[[1, 4], [1, 4]], now [[2, 4]]"],
        ),
        (case(buckets={"gather 0": [[1, 8], [1, 8]]}), ["x: gather 1: ", "now None"]),
    ],
)
def test_a_difference_names_hashes_and_the_first_bucket(
    found: golden.Case, said: list[str]
) -> None:
    lines = list(golden.differences({"x": case()}, {"x": found}))
    assert len(lines) == bool(said)
    assert all(part in lines[0] for part in said)


def test_cases_that_are_missing_or_new_are_differences() -> None:
    assert list(golden.differences({"x": case()}, {"y": case()})) == [
        "x: was not run",
        "y: is not in golden.json",
    ]
    assert not list(golden.differences({"x": case()}, {}, whole=False))


def test_results_of_another_torch_cpu_or_thread_count_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {"torch": torch.__version__, "CPU capability": "AVX2", "threads": 1}
    monkeypatch.setattr(golden, "FILE", tmp_path / "golden.json")
    monkeypatch.setattr(harness, "run_on_ranks", lambda *_: [here])
    for name, value in [("torch", "1.0"), ("CPU capability", "none"), ("threads", 7)]:
        golden.FILE.write_text(golden.as_text({**here, name: value}, "a processor", {}))
        assert golden.run(only="", write=False) == golden.INCOMPARABLE
        said = capsys.readouterr().out
        assert f"{name}: golden.json was written with {value}, here it is {here[name]}" in said


def test_a_run_that_fails_is_no_result_that_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise harness.RankFailure("rank 1: RuntimeError: the package is broken")

    monkeypatch.setattr(golden, "run", fail)
    monkeypatch.setattr(harness, "shutdown", lambda: None)
    assert golden.main([]) == 1
    assert "the package is broken" in capsys.readouterr().out


def test_hashes_tell_values_that_look_alike_apart() -> None:
    def hash_of(value: Any) -> str:
        digest = golden.hashlib.sha256()
        golden.update_hash(digest, value)
        return digest.hexdigest()

    weight = torch.arange(16.0).view(1, 4, 2, 2)
    values = [
        [torch.zeros(2), torch.zeros(1)],
        [torch.zeros(1), torch.zeros(2)],
        [torch.zeros(3)],
        [-torch.zeros(3)],
        [torch.zeros(3, dtype=torch.int32)],
        {"a": 1},
        {"a": 1.0},
        {"a": True},
        {1: "a"},
        weight,
        weight.flatten(),
        nn.Parameter(weight + 1),
    ]
    assert len(set(map(hash_of, values))) == len(values)
    channels_last = weight.to(memory_format=torch.channels_last)
    assert hash_of(channels_last) == hash_of(weight)
