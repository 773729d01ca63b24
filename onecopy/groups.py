"""Process groups: the user's, checked, and one of our own beside it.

Collectives run on a group of our own, so that nothing on the user's group can interleave with them.
There is one for each group of the user's, however many optimizers share it, and it goes with it.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onecopy.notes import store_of
from onecopy.waiting import (
    ask,
    keep_for_ever,
    let_threads_settle,
    let_waiters_finish,
    marking_interruptions,
)


class WrongProcessGroup(TypeError, AttributeError):
    """``process_group`` is no process group.

    A TypeError by its nature; also an AttributeError because that is what torch's class raises.
    """


def checked_group(process_group: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "no process group is initialised: call torch.distributed.init_process_group(...) "
            "before building the optimizer"
        )
    if process_group is None:
        return dist.group.WORLD
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of process_group: build the optimizer "
            "only on the ranks of the group"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise WrongProcessGroup(
            f"process_group must be a torch.distributed.ProcessGroup or None, "
            f"got {type(process_group).__name__}"
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not a member of process_group")
    return process_group


# One private group per group of the user's, however many optimizers share it.
_private_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def private_group(user_group: Any, greatest: Callable[[int], int]) -> Any:
    """Ours, of the same ranks. Collective: ``greatest`` tells the greatest number of all ranks."""
    if dist.get_world_size(user_group) == 1:
        return user_group
    group = _private_groups.get(user_group)
    if group is None:
        ranks = dist.get_process_group_ranks(user_group)
        options: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        everybody = user_group is dist.group.WORLD
        config = dist.get_backend_config(user_group)
        kinds = {entry.partition(":")[2] for entry in config.split(",")}
        if everybody:
            _meet(user_group)  # those of a subgroup meet when they choose its name
        with contextlib.nullcontext() if everybody else _under_a_new_name(greatest):
            group = dist.new_group(
                ranks,
                timeout=timeout(user_group),
                backend=kinds.pop() if len(kinds) == 1 else config,
                use_local_synchronization=not everybody,
                group_desc="onecopy",
                **options,
            )
        _private_groups[user_group] = group
        weakref.finalize(user_group, _destroy, weakref.ref(group)).atexit = False
    return group


def _meet(group: Any) -> None:
    """Until all members are here, or a signal handler raises.

    Why: to make a group waits for them, too, but in a way that no signal ends. It is done through
    the store, since what the user does in the group is not ours to mix with. Keys stay: if somebody
    gives up and makes the group anew in the same store, then only the making itself waits.
    """
    store, rank = store_of(group), dist.get_rank(group)
    patience = (timeout(group) or DEFAULT_PATIENCE).total_seconds()
    until = time.monotonic() + patience
    keys = [f"onecopy/meeting/{member}" for member in range(dist.get_world_size(group))]
    ask(store, lambda: store.set(keys[rank], ""), patience)
    nap = _SHORTEST_NAP
    while not ask(store, lambda: store.check(keys), patience):
        if time.monotonic() > until:
            raise RuntimeError("not all ranks have come to make a process group")
        with marking_interruptions():
            time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)


DEFAULT_PATIENCE = timedelta(minutes=30)
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.1  # seconds
_FINISHING = 5.0  # seconds, at most, that an ending process gives what others count on


@atexit.register
def _part_with_all() -> None:
    """What is under way in them when the process ends may never end."""
    for group in list(_private_groups.values()):
        keep_for_ever(group)
    let_waiters_finish(_FINISHING)
    let_threads_settle()


def _destroy(reference: weakref.ref[Any]) -> None:
    """The user has destroyed a group: ours goes with it."""
    group = reference()
    if group is not None and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


_counts_used = [0]  # numbers of groups under which private groups were named


@contextlib.contextmanager
def _under_a_new_name(greatest: Callable[[int], int]) -> Iterator[None]:
    """Let the group that is made in this context have the same name on all members, and a new one.

    Why: only the members of a subgroup are here, so its private group is made without the others,
    and torch names such a group by its ranks and by the number of groups that the process has. A
    member that is in fewer groups would look for its peers under another name, until the timeout;
    and after groups were destroyed, a name would come up again.
    """
    names: Any = dist.distributed_c10d._world.pg_names
    count = _counts_used[0] = greatest(max(len(names), _counts_used[0] + 1))
    fillers = {object(): f"onecopy {number}" for number in range(count - len(names))}
    names.update(fillers)
    try:
        yield
    finally:
        for filler in fillers:
            del names[filler]


def timeout(group: Any) -> timedelta | None:
    """The group's own timeout; None, torch's default, where the backend does not tell."""
    device = torch.device(next(iter(backends(group))))
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def backends(group: Any) -> dict[str, str]:
    """Backend by device type, for example {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return dict(entry.split(":", 1) for entry in config.split(","))
