"""The leaves of states, by which checkpoints name them, and states made of leaves again."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from trees import STATES, same

from onecopy.checkpoint.state import leaves_of, rebuild

BUSY = [HealthCheck.too_slow]  # a busy machine is no fault of a test


def test_leaves_have_the_names_that_torchs_checkpoints_give_them() -> None:
    a, b = torch.zeros(1), torch.ones(2)
    state = {
        "step": 3,
        7: a,
        "betas": (0.9, 0.99),
        "history": [b, None, (a, 1)],
        "sizes": [1, 2],
        "nested": [[1, 2], {"x": None}],
        "pair": ({"key": b}, "text"),
        "tuples": [(1, 2), ({"no": "tensor"}, 3)],
        "nothing": {},
        "none_of_them": [],
    }
    assert leaves_of(state, "the state") == {
        ("step",): 3,
        ("7",): a,
        ("betas",): (0.9, 0.99),
        ("history", 0): b,
        ("history", 1): None,
        ("history", 2, 0): a,
        ("history", 2, 1): 1,
        ("sizes",): [1, 2],
        ("nested", 0): [1, 2],
        ("nested", 1, "x"): None,
        ("pair", 0, "key"): b,
        ("pair", 1): "text",
        ("tuples",): [(1, 2), ({"no": "tensor"}, 3)],
        ("none_of_them",): [],
    }
    assert leaves_of(a, "the state") == {(): a}


def tensors_in_order(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree
    is_container = isinstance(tree, (dict, list, tuple))
    return [t for item in items for t in tensors_in_order(item)] if is_container else []


@given(STATES)
@settings(deadline=None, max_examples=100, suppress_health_check=BUSY)
def test_every_tensor_is_a_leaf_of_its_own(state: Any) -> None:
    tensors = tensors_in_order(state)
    leaves = leaves_of(state, "the state").values()
    of_leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert sum(len(tensors_in_order(leaf)) for leaf in leaves) == len(of_leaves)
    keys_are_distinct = len(of_leaves) == len(tensors)  # 1 and "1" are one name in a checkpoint
    assert not keys_are_distinct or all(a is b for a, b in zip(of_leaves, tensors, strict=True))
    assert len(of_leaves) <= len(tensors)


@given(STATES)
@settings(deadline=None, max_examples=100, suppress_health_check=BUSY)
def test_a_state_is_made_again_from_its_leaves(state: Any) -> None:
    assert same(rebuild(state, {}), state)
    leaves = leaves_of(state, "the state")
    others = {path: torch.zeros(()) for path in leaves}
    assert list(leaves_of(rebuild(state, others), "the state")) == list(leaves)


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"bytes", 1j, object(), lambda: 0, torch.float32, {"deep": [({3},)]}, range(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_a_checkpoint_cannot_carry_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match=r"the state of w holds a value of type \w+, which"):
        leaves_of({"state": value}, "the state of w")


@pytest.mark.parametrize("key", [1.5, (1, 2), None], ids=str)
def test_a_dict_with_odd_keys_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match="keys other than str and int"):
        leaves_of({"table": {key: 1}}, "the state of w")


def test_relatives_of_plain_containers_become_plain() -> None:
    state = {"a": collections.OrderedDict(x=1), "b": torch.Size([2, 3])}
    assert type(rebuild(state, {})["a"]) is dict
    assert type(leaves_of(state, "the state")["b",]) is tuple
