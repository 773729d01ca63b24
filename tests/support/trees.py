"""Nested containers of tensors and plain values, as states are."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**30, 10**300)
    | st.floats()
    | st.text(st.characters(), max_size=5)
)
TENSORS = st.builds(torch.full, st.just((2,)), st.integers(0, 9), dtype=st.sampled_from(DTYPES[:4]))
STATES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal, of equal types all the way down; NaN equals NaN, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or a.hex() == b.hex()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)
