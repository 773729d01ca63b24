"""The bits of a tensor as one number: every flipped bit shows."""

from __future__ import annotations

import random

import pytest
import torch
from flips import flip

from onecopy.fingerprints import CHUNK, Checksums, checksum, fingerprint

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_any_flipped_bit_changes_fingerprint_and_checksum(dtype: torch.dtype, offset: int) -> None:
    source = random.Random(offset)
    for length in (1, 2, 3, 7, 8, 9, 64, 1000):
        whole = torch.randint(0, 2, (length + offset,)).to(dtype)
        tensor = whole[offset:]
        for of in (fingerprint, checksum):
            before = int(of(tensor))
            assert int(of(tensor.clone())) == before  # wherever in memory it lies
            for _ in range(8):
                changed = whole.clone()[offset:]
                flip(changed, source)
                assert int(of(changed)) != before


def test_a_fingerprint_knows_the_places_of_elements_and_strides_do_not_matter() -> None:
    tensor = torch.randn(40, 50)
    swapped = tensor.clone()
    swapped[3], swapped[7] = tensor[7], tensor[3]
    assert fingerprint(tensor) != fingerprint(swapped)
    shifted = torch.zeros(2 * CHUNK * 2)
    shifted[0] = 1.0
    assert fingerprint(shifted) != fingerprint(shifted.roll(2 * CHUNK))
    assert fingerprint(torch.zeros(0)) == 0 == checksum(torch.zeros(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prepared_checksums_are_those_of_the_tensors_and_see_every_change(
    dtype: torch.dtype,
) -> None:
    source = random.Random(0)
    memory = (torch.rand(200) * 100).to(dtype)
    tensors = [memory[:8], memory[8:31], memory[31:60], memory[60], memory[61], memory[62:62]]
    tensors += [memory[64:94].view(5, 6).t(), memory[100:130].view(5, 6)[:, ::2]]
    prepared = Checksums(tensors)
    for _ in range(30):
        before = prepared.now()
        assert before.tolist() == [int(checksum(tensor)) for tensor in tensors]
        changed = source.choice([i for i, tensor in enumerate(tensors) if tensor.numel()])
        flip(tensors[changed], source)
        assert (prepared.now() != before).nonzero().flatten().tolist() == [changed]
    assert prepared.are_of(tensors)
    assert not prepared.are_of([*tensors[:-1], tensors[-1].clone()])
    tensors[0].data = tensors[0].clone()
    assert not prepared.are_of(tensors)
