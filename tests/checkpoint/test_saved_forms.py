"""Checkpoints in every form, written once and kept beside `forms.py`, load to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from fixtures.checkpoints.forms import FORMS, HERE, loaded, unpack
from harness import World, distributed

SAVED = json.loads((HERE / "forms.json").read_text())


def test_every_form_is_there() -> None:
    assert SAVED.keys() == FORMS.keys()
    digests = {saved["digest"] for saved in SAVED.values()}
    assert len(digests) == 6, "different optimizers have different state"


@distributed(1, 2, 3)
@pytest.mark.parametrize("name", FORMS)
def test_a_saved_checkpoint_loads_to_the_same_bits(world: World, name: str, tmp_path: Path) -> None:
    saved = SAVED[name]
    if world.rank == 0:
        unpack(saved["files"], tmp_path)
    dist.barrier()
    found = loaded(FORMS[name], tmp_path)
    if world.rank == 0:
        assert found == {"report": saved["report"], "digest": saved["digest"]}
