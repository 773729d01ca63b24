"""Process groups: the user's, checked, and one of our own beside it.

Collectives run on a group of our own, so that nothing on the user's group can interleave with them.
There is one for each group of the user's, however many optimizers share it, and it goes with it.
"""

from __future__ import annotations

import atexit
import hashlib
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onecopy.comm.waiting import (
    ask_store,
    let_tasks_finish,
    let_threads_settle,
    marking_interruptions,
    never_destroy,
)
from onecopy.torch_private import (
    destroy_process_group,
    make_process_group,
    process_group_timeout,
    store_of,
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
        config = dist.get_backend_config(user_group)
        kinds = {entry.partition(":")[2] for entry in config.split(",")}
        group = make_process_group(
            _new_name(user_group, greatest),
            dist.get_process_group_ranks(user_group),
            kinds.pop() if len(kinds) == 1 else config,
            timeout(user_group),
        )
        _private_groups[user_group] = group
        weakref.finalize(user_group, _destroy, weakref.ref(group)).atexit = False
    return group


def _new_name(user_group: Any, greatest: Callable[[int], int]) -> str:
    """The name of a private group: the same on all members, and never used before. Collective.

    Why never before: a group finds its members by keys in the store, and those of a group that was
    destroyed stay there. Why the ranks are part of the name: groups that overlap may have the same
    number. All ranks make the private group of the default group, so their count of those is the
    same without being asked for.
    """
    if user_group is dist.group.WORLD:
        _await_members(user_group)
        number = _worlds_used[user_group] = _worlds_used.get(user_group, 0) + 1
        return f"onecopy_world_{number}"
    number = _numbers_used[0] = greatest(_numbers_used[0] + 1)
    ranks = ",".join(map(str, dist.get_process_group_ranks(user_group)))
    digest = hashlib.sha256(ranks.encode()).hexdigest()[:16]
    return f"onecopy_{number}_{digest}"


_numbers_used = [0]  # the last number of a private group of a subgroup
_worlds_used: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _await_members(group: Any) -> None:
    """Until all members are here, or a signal handler raises.

    Why: to make a group waits for them, too, but in a way that no signal ends. It is done through
    the store, since what the user does in the group is not ours to mix with. Keys stay: if somebody
    gives up and makes the group anew in the same store, then only the making itself waits.
    """
    store, rank = store_of(group), dist.get_rank(group)
    patience = (timeout(group) or DEFAULT_PATIENCE).total_seconds()
    until = time.monotonic() + patience
    keys = [f"onecopy/meeting/{member}" for member in range(dist.get_world_size(group))]
    ask_store(store, lambda: store.set(keys[rank], ""), patience)
    nap = _SHORTEST_NAP
    while not ask_store(store, lambda: store.check(keys), patience):
        if time.monotonic() > until:
            raise RuntimeError("not all ranks have come to make a process group")
        with marking_interruptions():
            time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)


DEFAULT_PATIENCE = timedelta(minutes=30)
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.1  # seconds
_FINISHING = 5.0  # seconds, at most, that an ending process gives what others count on


@atexit.register
def _abandon_groups() -> None:
    """What is under way in them when the process ends may never end."""
    for group in list(_private_groups.values()):
        never_destroy(group)
    let_tasks_finish(_FINISHING)
    let_threads_settle()


def _destroy(reference: weakref.ref[Any]) -> None:
    """The user has destroyed a group: ours goes with it."""
    group = reference()
    if group is not None:
        destroy_process_group(group)


def timeout(group: Any) -> timedelta | None:
    """The group's own timeout; None, torch's default, where the backend does not tell."""
    return process_group_timeout(group, torch.device(next(iter(backends(group)))))


def backends(group: Any) -> dict[str, str]:
    """Backend by device type, for example {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return dict(entry.split(":", 1) for entry in config.split(","))
