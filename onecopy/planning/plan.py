"""Who owns what: a pure function of shapes, dtypes, kinds and the number of ranks.

- A *stream* holds the parameters of one kind, dtype, device and unit, laid end to end. The last
  parameter comes first, because backward produces its gradient first.
- A *bucket* is a run of a stream, of about 25 MB: what one collective moves.
- A *slot* is the part of a bucket that one rank owns.
- A *segment* is the part of a parameter in a bucket; a *shard* is the part of one in a slot.

Parameters a, b and c of 10, 5 and 6 elements, three ranks, and buckets of 48 bytes:

>>> specs = [ParamSpec(index, numel, "float32", 4) for index, numel in enumerate([10, 5, 6])]
>>> plan = make_plan(specs, world_size=3, bucket_mb=48 / 2**20)
>>> def draw(letter):
...     shards = [[s for rank in range(3) for s in plan.shards_in(b, rank)] for b in (0, 1)]
...     return " | ".join("".join(letter(s) * s.numel for s in bucket) for bucket in shards)
>>> print("stream", draw(lambda shard: "abc"[shard.param]))
stream ccccccbbbbba | aaaaaaaaa
>>> print("slots ", draw(lambda shard: str(shard.rank)))
slots  000011112222 | 000111222

So b has one segment and two shards: one on rank 1 and one on rank 2.

Elementwise streams are cut anywhere, so slots are equal. Only the last bucket of a stream has a
remainder: its extra elements go one each to the ranks with the smallest load so far. Whole streams
give each tensor to one owner, by longest-processing-time packing over all of them.

A plan stores buckets and arithmetic, never a list of all shards: planning 405 billion parameters
for 16,384 ranks takes O(parameters + buckets). Read `Plan`, then `Plan.extended`.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from onecopy.planning.text import shown
from onecopy.planning.traits import Kind

_MOST_MIB = 2**40  # an exbibyte

# Elements that are never separated. Why: a vectorised loop and its scalar tail may round
# differently, so a cut changes bits unless it lies a multiple of the vector length away from the
# parameter's first element. Measured over torch's elementwise classes: 16-bit results depend on
# the cut, and so do 32-bit and 64-bit results of the fused implementations; all others do not.
UNIT_OF_NARROW_DTYPES = 64
UNIT_OF_FUSED = 16


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What planning needs to know of a parameter."""

    index: int  # the caller's number of it
    numel: int
    dtype: str
    itemsize: int  # bytes of an element
    device: str = "cpu"  # the same on every rank: see ParamRegistry
    kind: Kind = Kind.ELEMENTWISE
    cost: int | None = None  # work of updating it whole; by default its number of elements
    fused: bool = False  # updated by a fused implementation

    def __post_init__(self) -> None:
        if self.numel < 0 or self.itemsize < 1 or (self.cost or 0) < 0:
            raise ValueError(f"expected sizes that are not negative, got {self}")
        if self.kind is Kind.GLOBAL:
            raise ValueError(f"a parameter of a global optimizer cannot be planned: {self}")

    @property
    def unit(self) -> int:
        """Elements that must stay together, counted from the first one."""
        if self.itemsize < 4:
            return UNIT_OF_NARROW_DTYPES
        return UNIT_OF_FUSED if self.fused else 1


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a parameter in one bucket, whoever owns it."""

    param: int
    start: int  # elements of the parameter, in storage order
    stop: int
    offset: int  # of `start` within the bucket

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard(Segment):
    """The part of a parameter that one rank owns in one bucket."""

    bucket: int
    rank: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Parameters of one kind, dtype, device and unit, laid end to end in reverse order."""

    kind: Kind
    dtype: str
    itemsize: int
    device: str
    unit: int  # elements that are never separated
    params: tuple[int, ...]
    numels: tuple[int, ...]
    starts: tuple[int, ...]  # offsets of the parameters, multiples of `unit`
    stop: int  # end of the last parameter, rounded up to `unit`
    owners: tuple[int, ...] = ()  # whole streams only: the rank of each parameter ...
    costs: tuple[int, ...] = ()  # ... and the work of updating it

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(position in `params`, start, stop) of the part of each parameter in [start, stop)."""
        i = max(bisect.bisect_right(self.starts, start) - 1, 0)
        while i < len(self.params) and self.starts[i] < stop:
            first = max(start - self.starts[i], 0)
            last = min(stop - self.starts[i], self.numels[i])
            if first < last or self.numels[i] == 0:
                yield i, first, last
            i += 1


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run [start, stop) of a stream: what one collective moves."""

    stream: int
    start: int
    stop: int
    extra: tuple[int, ...] = ()  # elementwise: ranks whose slot is one unit longer, ascending

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """Every planned element has exactly one owner. Equal inputs give equal plans on all ranks."""

    world_size: int
    bucket_bytes: int
    streams: tuple[Stream, ...] = ()
    buckets: tuple[Bucket, ...] = ()

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.bucket_bytes < 1:
            raise ValueError(
                f"expected at least one rank and one byte per bucket, got "
                f"world_size={self.world_size}, bucket_bytes={self.bucket_bytes}"
            )
        params = [param for stream in self.streams for param in stream.params]
        if len(set(params)) != len(params):
            raise ValueError("a parameter was planned twice")
        covered = [0] * len(self.streams)
        for bucket in sorted(self.buckets, key=lambda b: (b.stream, b.start)):
            if bucket.start != covered[bucket.stream] or bucket.stop < bucket.start:
                raise ValueError(f"{bucket} does not continue its stream")
            covered[bucket.stream] = bucket.stop
        if covered != [stream.stop for stream in self.streams]:
            raise ValueError("the buckets do not cover their streams")

    @cached_property
    def params(self) -> frozenset[int]:
        return frozenset(param for stream in self.streams for param in stream.params)

    def slot(self, bucket: int, rank: int) -> tuple[int, int]:
        """[start, stop) of a rank's slot within an elementwise bucket."""
        b = self.buckets[bucket]
        unit = self.streams[b.stream].unit
        each = b.numel // unit // self.world_size
        start = rank * each + bisect.bisect_left(b.extra, rank)
        stop = (rank + 1) * each + bisect.bisect_right(b.extra, rank)
        return start * unit, stop * unit

    def rank_at(self, bucket: int, offset: int) -> int:
        """The owner of the element at an offset of a bucket."""
        b = self.buckets[bucket]
        stream = self.streams[b.stream]
        if stream.kind is Kind.WHOLE:
            return stream.owners[bisect.bisect_right(stream.starts, b.start + offset) - 1]
        if not b.extra:
            return offset // (b.numel // self.world_size)
        ranks = range(self.world_size)
        return bisect.bisect_right(ranks, offset, key=lambda r: self.slot(bucket, r)[0]) - 1

    def owners(self, bucket: int, segment: Segment) -> tuple[int, int]:
        """The first and the last rank that own some of a segment."""
        last = segment.offset + max(segment.numel, 1) - 1
        return self.rank_at(bucket, segment.offset), self.rank_at(bucket, last)

    def range_of(self, bucket: int, rank: int) -> tuple[int, int]:
        """[start, stop) of what a rank owns in a bucket of any kind: always one run."""
        if self.streams[self.buckets[bucket].stream].kind is Kind.ELEMENTWISE:
            return self.slot(bucket, rank)
        return self.owned_ranges(bucket).get(rank, (0, 0))

    def owned_ranges(self, bucket: int) -> dict[int, tuple[int, int]]:
        """What the owners have in a bucket of whole tensors: one run each."""
        found: dict[int, tuple[int, int]] = {}
        for segment in self.segments(bucket):
            if segment.numel:
                owner, start = self.rank_at(bucket, segment.offset), segment.offset
                found[owner] = found.get(owner, (start, 0))[0], start + segment.numel
        return found

    def has_equal_slots(self, bucket: int) -> bool:
        """Whether a collective of equal sizes can move the bucket."""
        b = self.buckets[bucket]
        return self.streams[b.stream].kind is Kind.ELEMENTWISE and not b.extra

    def segments(self, bucket: int) -> Iterator[Segment]:
        """The contents of a bucket, in order."""
        b = self.buckets[bucket]
        stream = self.streams[b.stream]
        for i, first, last in stream.between(b.start, b.stop):
            yield Segment(stream.params[i], first, last, stream.starts[i] + first - b.start)

    def shards(self, rank: int) -> Iterator[Shard]:
        """Everything that a rank owns, bucket by bucket."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"expected a rank from 0 to {self.world_size - 1}, got {rank}")
        return itertools.chain.from_iterable(
            self.shards_in(bucket, rank) for bucket in range(len(self.buckets))
        )

    pieces = shards  # the name in release 0.1

    def shards_in(self, bucket: int, rank: int) -> Iterator[Shard]:
        b = self.buckets[bucket]
        stream = self.streams[b.stream]
        if stream.kind is Kind.WHOLE:
            start, stop = b.start, b.stop
        else:
            first, last = self.slot(bucket, rank)
            start, stop = b.start + first, b.start + last
            if start == stop:
                return
        for i, first, last in stream.between(start, stop):
            if stream.kind is Kind.ELEMENTWISE or stream.owners[i] == rank:
                offset = stream.starts[i] + first - b.start
                yield Shard(stream.params[i], first, last, offset, bucket, rank)

    @cached_property
    def cut_params(self) -> frozenset[int]:
        """The parameters that have more than one shard."""
        cut, seen = set(), set()
        for number in range(len(self.buckets)):
            for segment in self.segments(number):
                first, last = self.owners(number, segment)
                if segment.param in seen or first != last:
                    cut.add(segment.param)
                seen.add(segment.param)
        return frozenset(cut)

    def load(self, rank: int, kind: Kind | None = None) -> int:
        """Elements that a rank owns, of one kind or of both."""
        return sum(
            shard.numel
            for shard in self.shards(rank)
            if kind in (None, self.streams[self.buckets[shard.bucket].stream].kind)
        )

    @cached_property
    def digest(self) -> str:
        """A fingerprint that is the same in every process, unlike ``hash()``."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def extended(self, specs: Iterable[ParamSpec]) -> Plan:
        """A plan for these parameters too, in which every existing shard stays where it is."""
        together: dict[tuple[Kind, str, int, str, int], list[ParamSpec]] = {}
        for spec in sorted(specs, key=lambda s: s.index, reverse=True):
            # An empty tensor cannot be cut; one owner gives it the state and the keys it would have
            # unsharded.
            kind = spec.kind if spec.numel else Kind.WHOLE
            unit = 1 if kind is Kind.WHOLE else spec.unit
            key = (kind, spec.dtype, spec.itemsize, spec.device, unit)
            together.setdefault(key, []).append(spec)

        owners = _owners(
            self, [s for key, of in together.items() if key[0] is Kind.WHOLE for s in of]
        )
        # The new streams, each with the ends of its buckets.
        laid_out = [
            _whole_stream(of, owners, self.bucket_bytes)
            if key[0] is Kind.WHOLE
            else _elementwise_stream(of, self)
            for key, of in together.items()
        ]
        streams = [*self.streams, *(stream for stream, _ in laid_out)]
        extras = _deal_remainders(self, streams[len(self.streams) :])
        new_buckets = [
            Bucket(number, start, stop, extras.get(number, ()) if stop == stream.stop else ())
            for number, (stream, ends) in enumerate(laid_out, len(self.streams))
            for start, stop in itertools.pairwise([0, *ends])
        ]

        def earliest_param(bucket: Bucket) -> int:
            stream = streams[bucket.stream]
            first = bisect.bisect_right(stream.starts, bucket.start) - 1
            return min(stream.params[first : bisect.bisect_left(stream.starts, bucket.stop)])

        # A bucket is complete when its earliest parameter has its gradient, and backward produces
        # gradients from the last parameter to the first.
        new_buckets.sort(key=earliest_param, reverse=True)
        return Plan(
            self.world_size, self.bucket_bytes, tuple(streams), (*self.buckets, *new_buckets)
        )


def make_plan(specs: Iterable[ParamSpec], world_size: int, bucket_mb: float = 25) -> Plan:
    """Plan the ownership of parameters over ``world_size`` ranks.

    >>> plan = make_plan([ParamSpec(0, 10, "float32", 4), ParamSpec(1, 5, "float32", 4)], 2)
    >>> [(p.param, p.start, p.stop) for p in plan.shards(0)]
    [(1, 0, 5), (0, 0, 3)]
    """
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)):
        raise TypeError(f"bucket_mb must be a number of MiB, got {shown(bucket_mb)}")
    if not 0 < bucket_mb <= _MOST_MIB:
        raise ValueError(
            "bucket_mb must be a positive number of MiB, and no more than any machine has: got "
            f"{shown(bucket_mb)}"
        )
    return Plan(world_size, max(1, int(bucket_mb * 2**20))).extended(specs)


def default_bucket_mb(numbytes: int) -> float:
    """The bucket size for parameters of so many bytes.

    25 MiB fills any link. A small model gets at least 32 buckets: then the first and the last one,
    which overlap with nothing, are a small part of it, and so is staging memory. Below 1 MiB the
    cost of more messages is larger than that gain.
    """
    # In sixteenths of a MiB, rounded up: rounded down, a tiny bucket would be left over.
    sixteenths = -(-numbytes // (32 * 2**16))
    return min(25.0, max(1.0, sixteenths / 16))


def _deal_remainders(plan: Plan, streams: Sequence[Stream]) -> dict[int, tuple[int, ...]]:
    """The ranks whose slot in the last bucket of a stream is one unit longer, by the number that
    the stream gets in the plan.

    Streams are dealt in the order of their first parameter. The extra units of a stream go to the
    ranks with the smallest load, the lowest first. While all units are of one size, that is a
    cyclic run of ranks: it starts at rank 0, and the next where the last one ended. With units of
    several sizes a cyclic run would give the large units to the same ranks again and again.
    """
    loads = [0] * plan.world_size  # elements in remainders, padding included
    for bucket in plan.buckets:
        for rank in bucket.extra:
            loads[rank] += plan.streams[bucket.stream].unit
    extras = {}
    numbered = enumerate(streams, len(plan.streams))
    for number, stream in sorted(numbered, key=lambda pair: min(pair[1].params)):
        if stream.kind is Kind.ELEMENTWISE:
            rest = stream.stop // stream.unit % plan.world_size
            chosen = heapq.nsmallest(rest, range(plan.world_size), key=lambda r: (loads[r], r))
            for rank in chosen:
                loads[rank] += stream.unit
            extras[number] = tuple(sorted(chosen))
    return extras


def _elementwise_stream(specs: Sequence[ParamSpec], plan: Plan) -> tuple[Stream, list[int]]:
    stream = _lay_out(specs, Kind.ELEMENTWISE, specs[0].unit)
    if plan.world_size == 1:  # only an uncut parameter is itself the shard
        return stream, [stream.stop]
    row = plan.world_size * stream.unit  # one unit for every rank
    length = max(1, plan.bucket_bytes // (row * stream.itemsize)) * row
    return stream, [*range(length, stream.stop, length), stream.stop]


def _whole_stream(
    specs: Sequence[ParamSpec], owners: Mapping[int, int], limit: int
) -> tuple[Stream, list[int]]:
    """A bucket has at most ``limit`` bytes, or one tensor that is larger. Within it the tensors of
    one owner are adjacent, so that one message can hold them, and those without elements, which
    have a place all the same, come last, so that the owners' ranges have no gaps."""
    runs: list[list[ParamSpec]] = []
    size = 0
    for spec in specs:
        size += spec.numel * spec.itemsize
        if not runs or size > limit:
            runs.append([])
            size = spec.numel * spec.itemsize
        runs[-1].append(spec)
    ordered = [
        spec for run in runs for spec in sorted(run, key=lambda s: (not s.numel, owners[s.index]))
    ]
    stream = replace(
        _lay_out(ordered, Kind.WHOLE, 1),
        owners=tuple(owners[spec.index] for spec in ordered),
        costs=tuple(_cost(spec) for spec in ordered),
    )
    edges = (*stream.starts, stream.stop)
    return stream, [edges[end] for end in accumulate(map(len, runs))]


def _lay_out(specs: Sequence[ParamSpec], kind: Kind, unit: int) -> Stream:
    # An empty tensor is laid out as one element, so that it lies in exactly one bucket.
    lengths = [max(1, -(-spec.numel // unit)) * unit for spec in specs]
    starts = tuple(accumulate(lengths, initial=0))
    return Stream(
        kind=kind,
        dtype=specs[0].dtype,
        itemsize=specs[0].itemsize,
        device=specs[0].device,
        unit=unit,
        params=tuple(spec.index for spec in specs),
        numels=tuple(spec.numel for spec in specs),
        starts=starts[:-1],
        stop=starts[-1],
    )


def _owners(plan: Plan, specs: Sequence[ParamSpec]) -> dict[int, int]:
    """Longest processing time first: the costliest tensor left goes to the least busy rank."""
    busy = [0] * plan.world_size
    for stream in plan.streams:
        for owner, cost in zip(stream.owners, stream.costs, strict=True):
            busy[owner] += cost
    heap = [(load, rank) for rank, load in enumerate(busy)]
    heapq.heapify(heap)
    owners = {}
    for spec in sorted(specs, key=lambda s: (-_cost(s), s.index)):
        load, rank = heapq.heappop(heap)
        owners[spec.index] = rank
        heapq.heappush(heap, (load + _cost(spec), rank))
    return owners


def _cost(spec: ParamSpec) -> int:
    return spec.numel if spec.cost is None else spec.cost
