"""What may happen to a job between two steps, and the ways to take a step.

Every operation happens to the job and to its shadow. All ranks draw the same ones.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from harness import World, pretend_hosts
from soak_checkpoints import WAYS
from soak_job import MODES, Difference, Job, Leg, Tally
from soak_net import ALWAYS_TRAINED, SPARES
from watchdog import watchdog


def sail(world: World, leg: Leg) -> Tally:
    """One leg: on every rank, from its start to the checkpoint for the next one."""
    # The last rank is alone on a host, if there are more than two: what a host adds up then comes
    # first in any sum, in the order in which the shadow adds up.
    pretend_hosts(world, *([0] * (world.size - 1) + [1] if world.size > 2 else []))
    with watchdog() as progress:
        job = Job(world, leg)
        for _ in range(leg.rounds):
            progress()
            perform(job)
            train(job)
        progress()
        job.compare()
        job.zero_grad()
        job.keeper.leave(job)
    return job.tally


# ---------------------------------------- operations ----------------------------------------


def perform(job: Job) -> None:
    """Draw an operation, and do it if it is possible now."""
    name = job.random.choices(list(OPERATIONS), [weight for weight, _ in OPERATIONS.values()])[0]
    job.keeper.diary.append(name)
    if OPERATIONS[name][1](job):
        job.tally.operations[name] += 1


def nothing(_: Job) -> bool:
    return False


def freeze(job: Job) -> bool:
    trained = [n for n, p in job.shadow.params.items() if p.requires_grad and n != ALWAYS_TRAINED]
    return _set_trained(job, trained, to=False)


def unfreeze(job: Job) -> bool:
    known = {name for group in job.shadow.groups for name in group.names}
    frozen = [n for n, p in job.shadow.params.items() if not p.requires_grad and n in known]
    if _set_trained(job, frozen, to=True):
        job.has_unfrozen = True
        return True
    return False


def _set_trained(job: Job, names: list[str], to: bool) -> bool:
    if not names:
        return False
    for name in job.random.sample(names, min(len(names), job.random.choice([1, 1, 2, 4]))):
        job.shadow.params[name].requires_grad_(to)
    job.follow_flags()
    # A DDP that averages must be made anew. Where we do that, the old one serves, too.
    if job.mode.in_ddp and (not job.mode.is_attached or job.random.random() < 0.5):
        job.enter_again()
    return True


def grow(job: Job) -> bool:
    """A spare block is put to use, and its parameters are added to the optimizer."""
    number = job.net.grown
    if number == SPARES:
        return False
    mode = job.mode
    if mode.in_ddp:
        job.leave()
    job.net.grown = job.shadow.net.grown = number + 1
    groups = job.case.groups_of_spare(number)
    names = [name for group in groups for name in group.names]
    for name in names:
        job.shadow.params[name].requires_grad_(True)
    job.follow_flags()
    for group in groups:
        job.optimizer.add_param_group(group.on(job.net))
        job.shadow.add(group)
    if mode.in_ddp:
        job.enter(mode)
    job.keeper.forget()
    return True


def change_mode(job: Job) -> bool:
    job.leave()
    job.enter(job.random.choice(MODES))
    return True


def change_options(job: Job) -> bool:
    number = job.random.randrange(len(job.shadow.groups))
    key = job.random.choice(["lr", "lr", "weight_decay"])
    factor = job.random.choice([0.7, 0.9, 1.1, 1.2])
    for groups in (job.optimizer.param_groups, job.shadow.options):
        groups[number][key] *= factor
    return True


def save(job: Job, way: str) -> bool:
    job.compare()
    job.keeper.keep(way, job)
    return True


def go_back(job: Job) -> bool:
    """Load the last checkpoint, after more steps."""
    if not job.keeper.can_go_back(job):
        return False
    job.zero_grad()
    job.keeper.go_back(job)
    job.compare()
    return True


def load_what_is_there(job: Job) -> bool:
    """The full state, gathered and given back to every rank: nothing may change."""
    job.compare()
    held = [None]
    to = job.random.randrange(job.world.size)
    job.optimizer.consolidate_state_dict(to)
    if job.world.rank == to:
        held = [job.optimizer.state_dict()]
    torch.distributed.broadcast_object_list(held, src=to)
    job.optimizer.load_state_dict(held[0])
    job.compare()
    return True


def copy_all(job: Job) -> bool:
    """Go on with a deep copy."""
    mode = job.mode
    job.leave()
    job.net, job.optimizer = copy.deepcopy((job.net, job.optimizer))
    job.enter(mode)
    return True


def drop_gradients(job: Job) -> bool:
    """A backward whose gradients nobody uses."""
    job.zero_grad()
    job.backward(micro=9, synced=True)
    set_to_none = job.mode.is_attached or job.random.random() < 0.7
    job.zero_grad(set_to_none, of_module=job.random.random() < 0.5)
    return True


def evaluate(job: Job) -> bool:
    """A forward without gradients sees the parameters of now."""
    tokens = torch.arange(14).view(2, 7) * 11
    taken = (True,) * len(job.net.branches)
    with torch.no_grad():
        mine, plain = job.net(tokens, taken), job.shadow.net(tokens, taken)
    job.require_equal(mine, plain, "loss")
    return True


def look_at_gradients(job: Job) -> bool:
    """The full gradient of a parameter, and the norm of all."""
    job.zero_grad()
    job.backward(micro=8, synced=True)
    name = job.random.choice([n for n, p in job.shadow.params.items() if p.requires_grad])
    mine = job.optimizer.full_grad(dict(job.net.named_parameters())[name])
    job.require_equal(mine, job.shadow.gradient(name), f"the gradient of {name}")
    _require_close(job, job.optimizer.grad_norm())
    job.zero_grad()
    return True


# With how often they are drawn; whether they were possible is what they return.
OPERATIONS: dict[str, tuple[int, Callable[[Job], bool]]] = {
    "nothing": (10, nothing),
    "freeze": (4, freeze),
    "unfreeze": (5, unfreeze),
    "add_param_group": (2, grow),
    "change mode": (4, change_mode),
    "options": (4, change_options),
    **{f"save {way}": (1, functools.partial(save, way=way)) for way in WAYS},
    "load": (3, go_back),
    "consolidate and load": (2, load_what_is_there),
    "deepcopy": (1, copy_all),
    "drop gradients": (3, drop_gradients),
    "evaluate": (2, evaluate),
    "look at gradients": (2, look_at_gradients),
}


# ---------------------------------------- steps ----------------------------------------

ACCUMULATIONS = ("accumulate", "accumulate, averaged")
ZEROINGS = ("to none", "to zero", "by the module", "left")
EVERY_OPERATION = (
    *(name for name in OPERATIONS if name != "nothing"),
    *ACCUMULATIONS,
    "clip",
    *(f"gradients {zeroing}" for zeroing in ZEROINGS),
)


def train(job: Job) -> None:
    """Some backwards and a step."""
    draw = job.random
    backwards = draw.choice([1, 1, 1, 2, 3])
    # Gradients of what was just unfrozen are averaged once, by the step: averaging them in several
    # parts would round differently.
    each_is_averaged = draw.random() < 0.4 and not job.has_unfrozen
    for micro in range(backwards):
        job.backward(micro, synced=each_is_averaged or micro == backwards - 1)
    if backwards > 1:
        job.tally.operations[ACCUMULATIONS[each_is_averaged]] += 1
    if draw.random() < 0.3:
        _clip(job, draw.choice([0.05, 0.5, 100.0]))
    job.step()
    if not job.mode.is_lazy or draw.random() < 0.1:  # it would no longer overlap anything
        job.compare_parameters()
    zeroing = draw.choice(ZEROINGS)
    job.keeper.diary.append(f"step, gradients {zeroing}")
    if zeroing != "left":
        job.zero_grad(set_to_none=zeroing != "to zero", of_module=zeroing == "by the module")
    job.tally.operations[f"gradients {zeroing}"] += 1


def _clip(job: Job, most: float) -> None:
    norm = job.optimizer.clip_grad_norm_(most)
    if job.mode.is_attached:
        _require_close(job, norm)
        coefficient = torch.clamp(most / (norm + 1e-6), max=1.0)
        for gradient in job.shadow.gradients():
            gradient.mul_(coefficient)
    else:
        names = [name for group in job.shadow.groups for name in group.names]
        plain = torch.nn.utils.clip_grad_norm_([job.shadow.params[n] for n in names], most)
        job.require_equal(norm, plain, "the norm of the gradients")
    job.tally.operations["clip"] += 1


def _require_close(job: Job, norm: torch.Tensor) -> None:
    plain = torch.nn.utils.get_total_norm(job.shadow.gradients()).to(norm.dtype)
    if not torch.allclose(norm, plain, rtol=1e-2 if job.case.master_dtype else 1e-5, atol=1e-7):
        raise Difference(f"the norm of the gradients is {norm}, and of the shadow's {plain}")
