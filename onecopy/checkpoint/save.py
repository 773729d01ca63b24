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
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onecopy.checkpoint.files import DataFileWriter, progress
from onecopy.checkpoint.metadata import (
    MARK,
    Stored,
    digest,
    only_writer,
    parse_metadata,
    read_metadata,
    require_name,
    sync_directory,
    write_metadata,
)
from onecopy.checkpoint.safe_pickle import DamagedCheckpoint
from onecopy.checkpoint.state import (
    BY_INDEX,
    StateShard,
    StateView,
    Steps,
    collect,
    collect_groups,
    describe_names,
    dotted,
)
from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup
from onecopy.version import __version__

PREFIX = "optim"
_SUFFIX = ".distcp"  # of DCP's data files, and ours
_OUR_FILES = re.compile(r"__\d+_[0-9a-f]{12}\.distcp")  # also of saves that were never completed


def save_checkpoint(
    rank_group: RankGroup, make_view: Callable[[], StateView], directory: Path, flatten: bool
) -> None:
    """Write the state that the view shows. Collective."""
    with contextlib.ExitStack() as held:
        prepared: list[Any] = []
        older: set[str] = set()  # data files of the checkpoint before, on rank 0

        def prepare() -> list[str]:
            view = make_view()
            prepared.extend((view, collect(view)))
            require_name(directory)
            if rank_group.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(only_writer(directory))
                older.update(_replaceable_files(directory, view.names))
            return [
                f"to {directory}",
                f"flattened: {flatten}",
                f"plan {view.params.plan.digest}",
                *describe_names(view.params.registry, view.names),
            ]

        same_outcome(rank_group, "saving a checkpoint", prepare)
        view, shards = prepared
        _save(rank_group, view, shards, directory, older, flatten)


def _save(
    rank_group: RankGroup,
    view: StateView,
    shards: Sequence[StateShard],
    directory: Path,
    older: set[str],
    flatten: bool,
) -> None:
    made = uuid.uuid4().hex[:12].encode() if rank_group.rank == 0 else None
    token = rank_group.broadcast_bytes(made, source=0).decode()
    exchange = rank_group.monitor.exchange(token, f"saving to {directory}")
    mine = f"__{rank_group.rank}_{token}{_SUFFIX}"

    def write() -> tuple[list[Stored], list[str]]:
        """This rank's file: the entries in it, and the parameters without state."""
        directory.mkdir(parents=True, exist_ok=True)  # a network file system may be slow to show it
        written: list[Stored] = []
        total = sum(shard.nbytes for shard in shards if shard.is_writer)
        with (
            progress(f"saving to {directory.name}", total, rank_group.rank == 0) as add,
            DataFileWriter(directory, mine) as writer,
        ):
            for path, shard in _paths_in_file(view, shards, flatten):
                for stored in _append(writer, path, shard):
                    written.append(stored)
                    add(stored.place.length)
                    exchange.beat()
        sync_directory(directory)
        inner = view.params.inner
        new = (owned for owned in inner.shards if not inner.state.get(owned.tensor))
        return written, list({view.names[owned.shard.param] for owned in new})

    cause: Exception | None = None

    def complete(reports: list[Any]) -> tuple[list[str], str | None]:
        """What is left of the checkpoint before, and what went wrong once the new one was there."""
        nonlocal cause
        written = [Stored.from_json(*stored) for entries, _ in reports for stored in entries]
        _require_visible(directory, written)
        without_state = sorted({name for _, names in reports for name in names})
        found = {path.name for path in directory.iterdir() if _OUR_FILES.fullmatch(path.name)}
        left = sorted((older | found) - {stored.place.file for stored in written})
        name = f"__{rank_group.world_size}_{token}{_SUFFIX}"
        try:
            with DataFileWriter(directory, name) as writer:
                place = writer.append(_mark(view, without_state, written))
            write_metadata(directory, [*written, Stored(f"{PREFIX}.{MARK}", (PREFIX, MARK), place)])
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
        replaced, trouble = same_outcome(exchange, exchange.doing, write, complete)
    except Exception:
        # After silence nobody knows whether rank 0 has completed the checkpoint: what it may name
        # stays, and is removed by the next save if it does not.
        if exchange.is_decided and _is_there(directory, token) is False:
            with contextlib.suppress(OSError):
                (directory / mine).unlink()
        raise
    for file in replaced[rank_group.rank :: rank_group.world_size]:
        # Never anything else, nor outside, whatever a metadata file may say.
        if Path(file).name == file and file.endswith(_SUFFIX):
            with contextlib.suppress(OSError):
                (directory / file).unlink()
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


def _append(writer: DataFileWriter, path: Steps, shard: StateShard) -> Iterator[Stored]:
    key = dotted(path)
    if not shard.is_tensor:
        yield Stored(key, path, writer.append(shard.data))
        return
    dtype = str(shard.data.dtype).removeprefix("torch.")
    for chunk, data in shard.chunks():
        place = writer.append(data)
        yield Stored(key, path, place, dtype, shard.shape, chunk.offsets, chunk.sizes)


def _mark(
    view: StateView, without_state: Sequence[str], written: Sequence[Stored]
) -> Mapping[str, Any]:
    """Says in the file what cannot be seen from its keys."""
    classes: dict[str, list[str]] = {}
    for index, name in enumerate(view.names):
        classes.setdefault(view.policy(index).class_name, []).append(name)
    return {
        "version": __version__,
        "names": "positions" if view.names[0].startswith(BY_INDEX) else "names",
        "classes": classes,
        "groups": [view.names_in(number) for number in range(len(view.groups))],
        "frozen": [name for i, name in enumerate(view.names) if i not in view.params.plan.params],
        "not_begun": without_state,
        "digest": digest(written),
    }


# -------------------------------------------------------------------------- the directory


def _replaceable_files(directory: Path, names: Sequence[str]) -> set[str]:
    """The data files of the checkpoint that is there. Refuse to replace one that holds anything but
    earlier state of these parameters."""
    try:
        entries = parse_metadata(read_metadata(directory))
    except FileNotFoundError:
        return set()
    other = [key for key in entries if not key.startswith(f"{PREFIX}.")]
    if other:
        raise ValueError(
            f"{directory} is a checkpoint that holds something else than save() writes "
            f"({other[0]}, ...), which would be lost: save to another directory, or save all "
            "of it with dcp.save and optimizer.sharded()"
        )
    known = [key for key in entries if key.startswith(f"{PREFIX}.state.")]
    ours = tuple(f"{PREFIX}.state.{name}." for name in (*names, BY_INDEX.rstrip(".")))
    named = not any(name.startswith(BY_INDEX) for name in names)
    if known and named and not any(key.startswith(ours) for key in known):
        raise ValueError(
            f"{directory} holds the state of another optimizer ({known[0]}, ...), which would "
            "be lost: save to another directory, or save both with dcp.save and "
            "optimizer.sharded()"
        )
    return {stored.place.file for entry in entries.values() for stored in entry}


def _is_there(directory: Path, token: str) -> bool | None:
    """Whether the checkpoint in the directory is the one of this token; None if nobody knows."""
    try:
        return token.encode() in read_metadata(directory)
    except FileNotFoundError:
        return False
    except (OSError, DamagedCheckpoint):
        return None


def _require_visible(directory: Path, written: Sequence[Stored]) -> None:
    """Refuse to name files that this rank cannot see."""
    # Of each file the last entry ends last.
    for file, end in {s.place.file: s.place.offset + s.place.length for s in written}.items():
        path = directory / file
        if not path.exists() or path.stat().st_size < end:
            raise OSError(
                f"{path} was written by rank {file.split('_')[2]} and cannot be seen by rank 0: "
                "the directory must be on a file system that all ranks share"
            )
