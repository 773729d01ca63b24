"""``optimizer.save(path)``: a sharded checkpoint in one call, whole or not at all.

::

    all ranks     agree that they save the same
    each rank     writes its chunks to a new file                 (nobody waits in a collective)
    rank 0        writes .metadata, which names those files, in one instant
    all ranks     remove the files of the checkpoint before

Until that instant the directory holds the previous checkpoint, and after it the new one: a process
that is killed at any moment leaves one of the two.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onecopy.checkpoint.files import DataFileWriter, Progress
from onecopy.checkpoint.metadata import (
    Place,
    TensorEntry,
    Written,
    only_writer,
    parse_metadata,
    read_metadata,
    sync_directory,
    write_metadata,
)
from onecopy.checkpoint.safe_pickle import DamagedCheckpoint
from onecopy.checkpoint.state import (
    BY_INDEX,
    StateShard,
    StateView,
    collect,
    collect_groups,
    describe_names,
    dotted,
)
from onecopy.checkpoint.state import Path as Steps
from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup
from onecopy.planning.traits import class_name
from onecopy.version import __version__

PREFIX = "optim"
MARK = "onecopy"
_SUFFIX = ".distcp"  # of DCP's data files, and ours
_OUR_FILES = re.compile(r"__\d+_[0-9a-f]{12}\.distcp")


def save_checkpoint(
    rank_group: RankGroup, make_view: Callable[[], StateView], directory: Path, flatten: bool
) -> None:
    """Write the state that the view shows. Collective."""
    with contextlib.ExitStack() as held:
        view: StateView | None = None
        shards: list[StateShard] = []

        def prepare() -> list[str]:
            nonlocal view
            view = make_view()
            shards.extend(collect(view))
            require_name(directory)
            if rank_group.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(only_writer(directory))
                _require_replaceable(directory, view.names)
            return [
                f"to {directory}",
                f"flattened: {flatten}",
                f"plan {view.plan.digest}",
                *describe_names(view.registry, view.names),
            ]

        same_outcome(rank_group, "saving a checkpoint", prepare)
        assert view is not None
        token = rank_group.broadcast_bytes(
            uuid.uuid4().hex[:12].encode() if rank_group.rank == 0 else None, source=0
        ).decode()
        _save(rank_group, view, shards, directory, token, flatten)


def require_name(directory: Path) -> None:
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise ValueError(f"the path {str(directory)!r} is not valid text: choose another") from None


def _save(
    rank_group: RankGroup,
    view: StateView,
    shards: Sequence[StateShard],
    directory: Path,
    token: str,
    flatten: bool,
) -> None:
    exchange = rank_group.monitor.exchange(token, f"saving to {directory}")
    mine = f"__{rank_group.rank}_{token}.distcp"

    def write() -> tuple[list[Written], list[str]]:
        """This rank's file: the entries in it, and the parameters without state."""
        directory.mkdir(parents=True, exist_ok=True)  # a network file system may be slow to show it
        written: list[Written] = []
        total = sum(shard.nbytes for shard in shards if shard.is_writer)
        with (
            Progress(f"saving to {directory.name}", total, rank_group.rank == 0) as bar,
            DataFileWriter(directory, mine) as writer,
        ):
            for path, shard in _paths_in_file(view, shards, flatten):
                for entry in _append(writer, path, shard):
                    written.append(entry)
                    bar.add(entry.place.length)
                    exchange.beat()
        sync_directory(directory)
        new = (owned for owned in view.local.shards if not view.local.state.get(owned.tensor))
        return written, list({view.names[owned.shard.param] for owned in new})

    cause: Exception | None = None

    def complete(reports: list[Any]) -> tuple[list[str], str | None]:
        """What is left of the checkpoint before, and what went wrong once the new one was there."""
        nonlocal cause
        written = [_from_json(entry) for entries, _ in reports for entry in entries]
        _require_visible(directory, written)
        without_state = sorted({name for _, names in reports for name in names})
        older = _files_of(directory)
        left = sorted(older - {entry.place.file for entry in written})
        name = f"__{rank_group.world_size}_{token}.distcp"
        try:
            with DataFileWriter(directory, name) as writer:
                place = writer.append(_mark(view, without_state, written))
            written.append(Written(f"{PREFIX}.{MARK}", (PREFIX, MARK), place))
            write_metadata(directory, written)
            return left, None
        except Exception as error:
            is_there = _is_there(directory, token)
            if is_there is False:
                (directory / name).unlink(missing_ok=True)
            if not is_there:
                raise
            sync_directory(directory)
            # A file system may say of a rename that it failed, and have done it: that is as good.
            # Anything else was raised by a handler of a signal, for somebody to hear.
            if isinstance(error, OSError) and error.errno is not None:
                return left, None
            cause = error
            return left, f"{type(error).__name__}: {error}"

    try:
        older, trouble = same_outcome(exchange, exchange.doing, write, complete)
    except Exception:
        # After silence nobody knows whether rank 0 has completed the checkpoint: what it may name
        # stays, and is removed by the next save if it does not.
        if exchange.is_decided and _is_there(directory, token) is False:
            with contextlib.suppress(OSError):
                (directory / mine).unlink()
        raise
    _remove(directory, older[rank_group.rank :: rank_group.world_size])
    if trouble is not None:
        raise RuntimeError(
            f"{directory} holds the new checkpoint, and it is complete; but while rank 0 finished "
            f"saving, something was raised there: {trouble}"
        ) from cause


def _paths_in_file(
    view: StateView, shards: Sequence[StateShard], flatten: bool
) -> Iterator[tuple[Steps, StateShard]]:
    """What this rank writes, and its path in the checkpoint: parameter by parameter, and all parts
    of a tensor together."""
    by_leaf: dict[tuple[int, Steps], list[StateShard]] = {}
    for shard in shards:
        by_leaf.setdefault((shard.param, shard.path), []).append(shard)
    for (index, path), parts in by_leaf.items():
        name, (key, *rest) = view.names[index], path
        start = (f"state.{name}.{key}",) if flatten else ("state", name, key)
        yield from (((PREFIX, *start, *rest), part) for part in parts if part.is_writer)
    for number, group in enumerate(collect_groups(view) if view.rank == 0 else ()):
        if not flatten:
            yield from (((PREFIX, "param_groups", number, *leaf.path), leaf) for leaf in group)
            continue
        for name in view.names_in(number):
            for leaf in group:
                key, *rest = leaf.path
                if key != "params":
                    yield (PREFIX, f"param_groups.{name}.{key}", *rest), leaf


def _append(writer: DataFileWriter, path: Steps, shard: StateShard) -> Iterator[Written]:
    key = dotted(path)
    if not shard.is_tensor:
        yield Written(key, path, writer.append(shard.data))
        return
    dtype = str(shard.data.dtype).removeprefix("torch.")
    for chunk, data in shard.chunks():
        place = writer.append(data)
        yield Written(key, path, place, dtype, shard.shape, chunk.offsets, chunk.sizes)


def _mark(view: StateView, without_state: list[str], written: list[Written]) -> dict[str, Any]:
    """Says in the file what cannot be seen from its keys."""
    return {
        "version": __version__,
        "names": "positions" if view.names[0].startswith(BY_INDEX) else "names",
        "classes": classes_of(view),
        "groups": [view.names_in(number) for number in range(len(view.groups))],
        "frozen": [view.names[index] for index in view.registry.unplanned(view.plan)],
        "not_begun": without_state,
        "digest": digest((e.path, e.place, e.dtype, e.shape, e.offsets, e.sizes) for e in written),
    }


def classes_of(view: StateView) -> dict[str, list[str]]:
    """The names of the parameters that each optimizer class has."""
    found: dict[str, list[str]] = {}
    for name, entry in zip(view.names, view.registry.entries, strict=True):
        cls = view.registry.policies[entry.group].optimizer_class
        found.setdefault(class_name(cls), []).append(name)
    return found


def digest(entries: Iterable[tuple[Any, ...]]) -> str:
    """A fingerprint of what the metadata says: (path, place, dtype, shape, offsets, sizes)."""
    lines = sorted(json.dumps(entry) for entry in entries)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _from_json(entry: list[Any]) -> Written:
    key, path, place, dtype, shape, offsets, sizes = entry
    return Written(
        key, tuple(path), Place(*place), dtype, tuple(shape), tuple(offsets), tuple(sizes)
    )


# -------------------------------------------------------------------------- the directory


def _require_replaceable(directory: Path, names: Sequence[str]) -> None:
    """Refuse to replace a checkpoint that holds anything but earlier state of these parameters."""
    with contextlib.suppress(FileNotFoundError):
        keys = parse_metadata(read_metadata(directory)).entries
        other = [key for key in keys if not key.startswith(f"{PREFIX}.")]
        if other:
            raise ValueError(
                f"{directory} is a checkpoint that holds something else than save() writes "
                f"({other[0]}, ...), which would be lost: save to another directory, or save all "
                "of it with dcp.save and optimizer.sharded()"
            )
        known = [key for key in keys if key.startswith(f"{PREFIX}.state.")]
        ours = tuple(f"{PREFIX}.state.{name}." for name in (*names, BY_INDEX.rstrip(".")))
        named = not any(name.startswith(BY_INDEX) for name in names)
        if known and named and not any(key.startswith(ours) for key in known):
            raise ValueError(
                f"{directory} holds the state of another optimizer ({known[0]}, ...), which would "
                "be lost: save to another directory, or save both with dcp.save and "
                "optimizer.sharded()"
            )


def _is_there(directory: Path, token: str) -> bool | None:
    """Whether the checkpoint in the directory is the one of this token; None if nobody knows."""
    try:
        return token.encode() in read_metadata(directory)
    except FileNotFoundError:
        return False
    except (OSError, DamagedCheckpoint):
        return None


def _require_visible(directory: Path, written: list[Written]) -> None:
    """Refuse to name files that this rank cannot see."""
    ends: dict[str, int] = {}
    for entry in written:
        end = entry.place.offset + entry.place.length
        ends[entry.place.file] = max(end, ends.get(entry.place.file, 0))
    for file, end in ends.items():
        path = directory / file
        if not path.exists() or path.stat().st_size < end:
            raise OSError(
                f"{path} was written by rank {file.split('_')[2]} and cannot be seen by rank 0: "
                "the directory must be on a file system that all ranks share"
            )


def _files_of(directory: Path) -> set[str]:
    """The data files of the checkpoint that is there, and of saves that were never completed."""
    found = {path.name for path in directory.iterdir() if _OUR_FILES.fullmatch(path.name)}
    with contextlib.suppress(FileNotFoundError):
        for entry in parse_metadata(read_metadata(directory)).entries.values():
            parts = entry.chunks if isinstance(entry, TensorEntry) else (entry,)
            found |= {part.place.file for part in parts}
    return found


def _remove(directory: Path, files: Sequence[str]) -> None:
    for file in files:
        # Never anything else, nor outside, whatever a metadata file may say.
        if Path(file).name == file and file.endswith(_SUFFIX):
            with contextlib.suppress(OSError):
                (directory / file).unlink()
