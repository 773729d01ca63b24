"""State as bytes and back: nothing lost, nothing doubled, nothing pickled."""

from __future__ import annotations

import bisect
import collections
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import inside
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import MIN_MESSAGE_BYTES, SHORTEST_MESSAGE, pack, unpack
from trees import DTYPES, STATES, same

from onecopy.comm.transfer import (
    PACKED_BYTES,
    RANGE_BYTES,
    Form,
    NotPlain,
    decode,
    encode,
    receive_tensors,
    send_tensors,
    split_into_messages,
)

BUSY = [HealthCheck.too_slow]  # a busy machine is no fault of a test
# ------------------------------------------------------------------ encode and decode


@given(STATES)
@settings(deadline=None, max_examples=100, suppress_health_check=BUSY)
def test_any_plain_state_comes_back_as_it_was(state: Any) -> None:
    tensors: list[torch.Tensor] = []
    travelled = json.loads(json.dumps(encode(state, tensors)))
    assert same(decode(travelled, tensors), state)


def test_tensors_are_taken_out_in_order() -> None:
    a, b, c = torch.zeros(1), torch.ones(2), torch.ones(())
    tensors = [a]
    encoded = encode({"x": [b, 3, (c, b)]}, tensors)
    assert [t is u for t, u in zip(tensors, [a, b, c, b], strict=True)] == [True] * 4
    assert "tensor" not in json.dumps(encoded).replace('"tensor"', "")
    back = decode(encoded, tensors)
    assert back["x"][0] is b
    assert back["x"][2][0] is c


def test_keys_of_a_dict_keep_their_type_and_their_order() -> None:
    state = {"b": 1, 2: "two", "2": "other", "a": None, -5: 0}
    back = decode(json.loads(json.dumps(encode(state, []))), [])
    assert list(back.items()) == list(state.items())


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"bytes", 1j, object(), lambda: 0, torch.float32, {"deep": [({3},)]}, range(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_written_plainly_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(NotPlain, match=r"value of type \w+"):
        encode({"state": value}, [])


@pytest.mark.parametrize("key", [1.5, (1, 2), None], ids=str)
def test_a_dict_with_odd_keys_is_refused(key: Any) -> None:
    with pytest.raises(NotPlain, match="keys"):
        encode({"table": {key: 1}}, [])
    assert issubclass(NotPlain, TypeError)


def test_relatives_of_plain_containers_become_plain() -> None:
    state = {"a": collections.OrderedDict(x=1), "b": torch.Size([2, 3])}
    assert decode(encode(state, []), []) == {"a": {"x": 1}, "b": (2, 3)}


# ------------------------------------------------------------------ forms


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_form_travels_as_json_and_makes_the_same_tensor(dtype: torch.dtype) -> None:
    for tensor in (
        torch.empty(2, 3, 4, 5, dtype=dtype),
        torch.empty(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
        torch.empty(4, 3, dtype=dtype).t(),
        torch.empty((), dtype=dtype),
        torch.empty(0, 3, dtype=dtype),
    ):
        form = Form.from_json(*json.loads(json.dumps(Form.of(tensor))))
        assert form == Form.of(tensor)
        assert hash(form) == hash(Form.of(tensor))
        assert form.numel == tensor.numel()
        made = form.empty()
        assert (made.dtype, made.shape, made.stride()) == (dtype, tensor.shape, tensor.stride())


@pytest.mark.parametrize("word", ["tensor", "load", "no_such_dtype"])
def test_a_word_that_names_no_dtype_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Form(word, (1,), (1,)).empty()


# ------------------------------------------------------------------ messages


SIZES = st.lists(
    st.integers(0, 100)
    | st.integers(MIN_MESSAGE_BYTES - 2, MIN_MESSAGE_BYTES + 2)
    | st.sampled_from([RANGE_BYTES - 1, RANGE_BYTES, RANGE_BYTES + 1, 3 * RANGE_BYTES + 5]),
    max_size=200,
)


def flats_of(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Tensors of so many bytes, side by side, without memory."""
    return list(torch.empty(sum(sizes), dtype=torch.uint8, device="meta").split(list(sizes)))


@given(SIZES)
@settings(deadline=None, max_examples=100, suppress_health_check=BUSY)
def test_messages_hold_every_byte_exactly_once_and_keep_to_their_limits(sizes: list[int]) -> None:
    covered: dict[int, list[int]] = {}  # the edges of what a message holds of a tensor
    starts = [0, *itertools.accumulate(sizes)][:-1]
    for message in split_into_messages(flats_of(sizes)):
        assert message
        assert all(view.numel() > 0 for view in message)
        total = sum(view.numel() for view in message)
        positions = [bisect.bisect(starts, view.storage_offset()) - 1 for view in message]
        if len(message) > 1:
            assert total <= PACKED_BYTES
            assert all(sizes[position] < MIN_MESSAGE_BYTES for position in positions)
        assert total <= RANGE_BYTES
        for position, view in zip(positions, message, strict=True):
            start = view.storage_offset() - starts[position]
            covered.setdefault(position, []).extend([start, start + view.numel()])
    for position, size in enumerate(sizes):
        edges = covered.get(position, [])
        assert [0, *edges, size][::2] == [0, *edges, size][1::2]  # gapless, in order


def test_small_tensors_travel_together() -> None:
    assert len(list(split_into_messages(flats_of([4] * 10_000)))) == 1
    assert len(list(split_into_messages(flats_of([MIN_MESSAGE_BYTES - 1] * 65)))) == 2
    assert list(split_into_messages([])) == list(split_into_messages(flats_of([0, 0]))) == []


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)), max_size=8),
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60, suppress_health_check=BUSY)
def test_packing_and_unpacking_keeps_every_bit_of_every_dtype(
    forms: list[tuple[torch.dtype, int]], seed: int
) -> None:
    tensors = [random_bits(dtype, numel, seed) for dtype, numel in forms]
    rooms = [torch.zeros_like(tensor) for tensor in tensors]
    messages = map(split_into_messages, (tensors, rooms))
    for message, room in zip(*messages, strict=True):
        buffer = torch.empty(sum(view.numel() for view in message), dtype=torch.uint8)
        pack(message, buffer)
        unpack(room, buffer)
    assert all(map(same_bits, tensors, rooms))


def test_ranges_of_tensors_are_packed_one_after_the_other() -> None:
    tensors = [torch.arange(4, dtype=torch.int16), torch.arange(10, 20, dtype=torch.uint8)]
    rooms = [torch.zeros_like(tensor) for tensor in tensors]

    def ranges(flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        first, second = (flat.view(torch.uint8) for flat in flats)
        return [first[2:6], second[7:9], first[6:8]]

    buffer = torch.full((9,), 99, dtype=torch.uint8)
    pack(ranges(tensors), buffer[:8])
    assert buffer.tolist() == [1, 0, 2, 0, 17, 18, 3, 0, 99]
    unpack(ranges(rooms), buffer[:8])
    assert rooms[0].tolist() == [0, 1, 2, 3]
    assert rooms[1].tolist() == [0] * 7 + [17, 18, 0]


def random_bits(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, high, (numel * size,), dtype=torch.uint8, generator=source)
    return bits.view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ------------------------------------------------------------------ on a wire in memory


HOME = 99  # the rank that all tensors are sent to


@dataclass
class Post:
    """A transport that keeps messages by sender and tag, and counts what is under way."""

    rank: int
    messages: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    control_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sent_from: list[int] = field(default_factory=list)

    def send(self, message: torch.Tensor, to: int, tag: int) -> Arrived:
        assert to == HOME
        assert (self.rank, tag) not in self.messages
        assert message.dtype == torch.uint8
        # The wire reads the message only when it is waited for: reusing it sooner would show.
        self.messages[self.rank, tag] = message
        self.sent_from.append(message.data_ptr())
        return Arrived(lambda: self.messages.update({(self.rank, tag): message.clone()}))

    def receive(self, room: torch.Tensor, source: int, tag: int) -> Arrived:
        message = self.messages.pop((source, tag))
        assert message.shape == room.shape
        return Arrived(lambda: room.copy_(message))


@dataclass
class Arrived:
    action: Any

    def wait(self) -> None:
        self.action()
        self.action = lambda: None


def through_the_post(
    tensors: dict[int, Sequence[torch.Tensor]],
) -> tuple[dict[int, list[torch.Tensor]], Post]:
    post = Post(rank=-1)
    for rank, of_rank in tensors.items():
        post.rank = rank
        send_tensors(post, of_rank, to=HOME)  # type: ignore[arg-type]
    rooms = {rank: [torch.zeros_like(t) for t in of_rank] for rank, of_rank in tensors.items()}
    receive_tensors(post, rooms)  # type: ignore[arg-type]
    assert not post.messages
    return rooms, post


def test_tensors_of_several_ranks_arrive_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small limits give every rank many messages of both sorts, also in an unequal number.
    monkeypatch.setattr(*inside.PACKED_BYTES, 64)
    monkeypatch.setattr(*inside.RANGE_BYTES, 100)
    monkeypatch.setattr(*SHORTEST_MESSAGE, 48)
    tensors = {
        rank: [
            random_bits(dtype, numel * (rank + 1), seed=rank)
            for dtype in DTYPES
            for numel in (1, 0, 5, 37)
        ]
        for rank in range(3)
    }
    tensors[7] = []
    rooms, post = through_the_post(tensors)
    for rank, of_rank in tensors.items():
        assert all(map(same_bits, of_rank, rooms[rank]))
    assert any(tensors[0][3].data_ptr() == address for address in post.sent_from)  # no copy


def test_no_tensors_are_sent_as_no_message() -> None:
    rooms, post = through_the_post({0: [], 1: [torch.empty(0)]})
    assert rooms[0] == []
    assert post.sent_from == []


def test_work_of_ones_own_is_done_once_while_messages_are_on_their_way() -> None:
    post = Post(rank=0)
    sent = [torch.arange(5.0), torch.arange(70_000.0)]
    send_tensors(post, sent, to=HOME)  # type: ignore[arg-type]
    rooms = {0: [torch.zeros_like(t) for t in sent]}
    seen = []
    receive_tensors(post, rooms, lambda: seen.append(len(post.messages)))  # type: ignore[arg-type]
    assert seen == [1]  # one of the two messages has been asked for
    assert all(map(same_bits, sent, rooms[0]))
