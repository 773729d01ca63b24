"""Gradients to their owners while backward runs: one engine, whatever feeds it.

::

    grad of p --arrived--> (all of a bucket there) --> staging, times 1/W --> owners --> my slot

A bucket leaves as soon as the gradients of all its parameters are there, in the background
(``flights.py``) and in the order of the plan, which is that in which backward produces them. What
leaves depends on the plan only: a parameter without gradient counts as zeros. Which parameters had
one anywhere is compared when backward ends, by one small all-reduce (``verdict.py``), and looked at
when the gradients are wanted; a parameter that had none on any rank has none, as unsharded.

Autograd runs one thread per device, so gradients arrive in several threads. A lock guards what
has arrived. A thread claims the next bucket before it launches it, and no other thread launches
one until that launch is over: buckets leave once, in the order of the plan. During backward a
thread launches only buckets of the device whose gradient it delivers: the streams of its other
devices do not wait for the gradients there. The end of backward launches the rest. If one thread
raises, ``backward()`` returns while others may still run: ``give_up`` first closes the phase, so
that no thread claims a bucket any more, and waits until no launch is under way.

A gradient that comes after its bucket has left (a weight that is used in two parts of a
checkpointed model) goes into a second round, which all ranks take if one needs it.

A backward inside ``no_sync()`` sends nothing: its gradients stay in ``param.grad`` of this rank. If
a parameter has a master copy, they are accumulated in the dtype of that copy instead, because a sum
of many 16-bit numbers loses digits. The next backward that is averaged adds them to its own.

Every backward that has begun is finished on every rank. One that raised is finished with zeros when
the rank gives it up, and marked as given up: then all ranks drop the gradients, and are level.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from onecopy.agreement import RanksDisagree, name_ranks, require_agreement
from onecopy.flights import Flights
from onecopy.pieces import gradient_held_in
from onecopy.plan import Plan
from onecopy.roadway import Roadway, forms_of
from onecopy.transfers import Lendable
from onecopy.transport import Transport, do_nothing
from onecopy.verdict import Verdict
from onecopy.words import plural


class GradientsDropped(RuntimeError):
    """A backward that raised on some rank was given up, on all ranks."""


@dataclass(slots=True)
class _Phase:
    """One backward: what has arrived, and how far the buckets have come."""

    missing: list[int]  # how many gradients each bucket waits for
    expected: dict[int, tuple[int, ...]]  # the buckets that wait for each that has not arrived
    keeps_back: bool = False  # no bucket leaves before backward has ended
    taken: set[int] = field(default_factory=set)  # whose gradients came from ``param.grad``
    held: dict[int, torch.Tensor] = field(default_factory=dict)
    origin: int = 0  # ``Flights.left`` when the first bucket had not left: see ``_next``
    launcher: int | None = None  # the thread that launches the next bucket
    is_closed: bool = False  # no thread may launch a bucket any more: it is given up


class Reducer:
    """Sums the gradients of the planned parameters over the ranks, each rank its own slots."""

    def __init__(
        self,
        transport: Transport,
        reduce_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
    ) -> None:
        """Gradients travel in ``reduce_dtype``, and are summed for a master of ``master_dtype``."""
        self._transport = transport
        self._dtypes = reduce_dtype, master_dtype
        # Gradients of backwards inside no_sync(), by parameter, in the dtype of the master copy.
        self._accumulated: dict[int, torch.Tensor] = {}
        self.roadway = Roadway(Plan(transport.world_size, 1))  # which nothing takes yet
        self._flights = Flights(transport)
        self._phase: _Phase | None = None
        self._lock = threading.Lock()  # of the phase
        self._launched = threading.Condition(self._lock)  # a launch is over
        self._verdict: Verdict | None = None
        self._late: dict[int, torch.Tensor] = {}
        self._present: set[int] = set()
        self.when_dropped: Callable[[], None] = do_nothing  # because a backward was given up
        self.backwards = 0  # since the gradients were used up or dropped
        self.share = 1 / transport.world_size  # what a rank's gradient counts in the average

    def prepare(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """Follow a plan. What is held stays, if the plan only grew. If there is too little memory,
        the one before goes on."""
        before, forms = self.roadway, forms_of(params)
        if plan is before.plan and forms == before.forms:  # no more than addresses have changed
            return
        are_others = forms[: len(before.forms)] != before.forms
        if are_others and self.holds_anything:
            raise RuntimeError(
                "the parameters have been converted since the last backward: call zero_grad() and "
                "compute the gradients again"
            )
        kept = before.lanes
        if are_others or plan.buckets[: len(kept)] != before.plan.buckets:
            self._drop_averaged()  # what is accumulated depends on no plan
            kept = ()
        self.roadway = Roadway.build(plan, params, self._transport, self._dtypes, kept)

    def lendable(self, bucket: int, dtype: torch.dtype) -> Lendable | None:
        """The memory through which the gradients of a bucket leave, for the gatherer."""
        return self.roadway.lendable(bucket, dtype)

    @torch.no_grad()
    def make_free(self, bucket: int) -> None:
        """Add up whatever leaves through the memory of this bucket: what this rank itself
        contributes is in it until then."""
        self._flights.make_free(self.roadway.lanes[bucket])

    # ------------------------------------------------------------------ backward

    @property
    def is_active(self) -> bool:
        """Whether a backward is under way."""
        return self._phase is not None

    @property
    def keeps_back(self) -> bool:
        """Whether in the backward that is under way no bucket leaves before its end."""
        return self._phase is not None and self._phase.keeps_back

    @property
    def accumulates(self) -> bool:
        """Whether there may be parameters for which ``accumulate`` does something."""
        return self._dtypes[1] is not None

    @torch.no_grad()
    def accumulate(self, index: int, param: torch.Tensor) -> None:
        """The gradient of a backward inside ``no_sync()`` is in ``param.grad``. If the parameter
        has a master copy, add it to what is accumulated in the dtype of that copy."""
        grad, dtype = param.grad, gradient_held_in(param, self._dtypes[1])
        if grad is None or grad.dtype.itemsize >= dtype.itemsize:
            return
        if grad.layout is not torch.strided:
            return  # the next averaged backward refuses it
        before = self._accumulated.get(index)
        if before is None:
            self._accumulated[index] = grad.to(dtype)
        else:
            self._accumulated[index] = before.to(grad.device).add_(grad)
        param.grad = None

    @property
    def accumulated_bytes(self) -> int:
        """Memory of what was accumulated inside ``no_sync()``, beside ``param.grad``."""
        return sum(grad.nbytes for grad in self._accumulated.values())

    def not_reduced(self) -> list[int]:
        """The planned parameters that have a gradient of this rank alone."""
        found = self.roadway.not_reduced()
        if not self._accumulated:  # nearly always
            return found
        accumulated = self._accumulated.keys() & self.roadway.lanes_of.keys()
        return sorted(accumulated.union(found))

    def catch_up(self, first: int) -> None:
        """Reduce the buckets from ``first`` on, which are new, from ``param.grad``."""
        self.begin()
        assert self._phase is not None
        self._phase.origin -= first
        self.backwards -= 1  # no backward of the user's
        self.end()

    def begin(self, keeps_back: bool = False) -> None:
        """A backward has begun, on all ranks; ``keeps_back``: no bucket leaves before its end."""
        self.judge()
        self.backwards += 1
        lanes, lanes_of = self.roadway.lanes, self.roadway.lanes_of
        missing, expected = [len(lane.params) for lane in lanes], dict(lanes_of)
        trainable = list(map(attrgetter("requires_grad"), self.roadway.params))
        if not all(trainable):
            for index in [index for index in lanes_of if not trainable[index]]:
                for number in lanes_of[index]:
                    missing[number] -= 1
                # No bucket waits for it; a DDP that was made when it was trained still delivers it.
                expected[index] = ()
        self._phase = _Phase(missing, expected, keeps_back, origin=self._flights.left)

    def arrived(self, index: int, grad: torch.Tensor | None = None) -> None:
        """The gradient of a parameter is there: given, or in ``param.grad``.

        To be called for thousands of parameters in every backward.
        """
        phase = self._phase
        assert phase is not None
        # Nobody expects what comes a second time, nor what was unfrozen and is not planned yet,
        # which stays in ``param.grad``: see ``catch_up``.
        completes = False
        with self._lock:
            numbers = phase.expected.pop(index, None)
            if numbers is None:
                return
            if grad is not None:
                phase.held[index] = grad
            missing = phase.missing
            for number in numbers:
                left = missing[number] = missing[number] - 1
                if not left:
                    completes = True
        if completes and not phase.keeps_back:
            self._depart_all(phase, self.roadway.params[index].device)

    def _next(self, phase: _Phase) -> int:
        """The first bucket that has not left. Why counted by ``Flights``, in the same step in which
        a bucket leaves: an interrupt before or after a launch must not change what is next."""
        return self._flights.left - phase.origin

    def _depart_all(self, phase: _Phase, device: torch.device | None = None) -> None:
        """Let the next buckets leave; ``device``: as long as they are complete and of this device.

        Returns if another thread launches a bucket: that one goes on with the next.
        """
        while True:
            try:
                number = self._claim(phase, device)
                if number is None:
                    return
                self._depart(phase, number)
            finally:
                self._release(phase)

    def _claim(self, phase: _Phase, device: torch.device | None) -> int | None:
        """The next bucket, for this thread to launch, if there is one and nobody else launches."""
        with self._lock:
            number = self._next(phase)
            if phase.is_closed or phase.launcher is not None or number == len(phase.missing):
                return None
            if device is not None and (
                phase.missing[number] or self.roadway.lanes[number].wire.device != device
            ):
                return None
            phase.launcher = threading.get_ident()
            return number

    def _release(self, phase: _Phase) -> None:
        """This thread launches nothing now."""
        with self._launched:
            if phase.launcher == threading.get_ident():
                phase.launcher = None
                self._launched.notify_all()

    def _close(self, phase: _Phase) -> None:
        """Let no thread launch a bucket any more, and wait until no other one does."""
        me, company = threading.get_ident(), self._transport.company
        patience = company.patience()
        with self._launched:
            phase.is_closed = True
            # Its own claim is of a launch that was interrupted.
            is_over = self._launched.wait_for(lambda: phase.launcher in (None, me), patience)
        if not is_over:
            with company.or_give_up("waiting for a thread that sends gradients"):
                raise RuntimeError(
                    "the last backward raised, and one of its threads has not finished sending a "
                    f"bucket of gradients after {patience:g} s, the timeout of the process group. "
                    "The other ranks wait for this one: start the job again from a checkpoint"
                )

    @torch.no_grad()
    def end(self, present: set[int] | None = None) -> None:
        """Backward has ended, on all ranks. ``present``: the parameters that had a gradient, if
        the feed knows better than we do."""
        if self._phase is None:
            self.begin()
        phase = self._phase
        assert phase is not None
        self._depart_all(phase)
        if self._next(phase) != len(phase.missing):  # autograd has ended its other threads
            raise RuntimeError(f"at the end of backward, bucket {self._next(phase)} has not left")
        lanes_of = self.roadway.lanes_of
        if present is None:
            self._late = self._leftovers()
            present = lanes_of.keys() - phase.expected.keys() | self._late.keys()
        present = present | phase.taken
        self._phase = None
        self._say(present, {number for index in self._late for number in lanes_of[index]})

    def _say(self, present: Collection[int], late: Collection[int], gives_up: bool = False) -> None:
        """Tell the ranks how backward has ended on this one."""
        self._verdict = Verdict.ask(
            self._transport,
            params=len(self.roadway.params),
            buckets=len(self.roadway.lanes),
            backwards=self.backwards,
            present=present,
            late=late,
            gives_up=gives_up,
        )

    @torch.no_grad()
    def give_up(self) -> None:
        """Finish a backward that has raised, with zeros: the other ranks wait for the buckets."""
        phase = self._phase
        assert phase is not None
        self._close(phase)
        phase.held.clear()
        for lane in self.roadway.lanes[self._next(phase) :]:
            self._flights.launch(lane, {}, self.share)
        self._phase, self._late = None, {}
        self._say((), (), gives_up=True)
        for index in self.roadway.not_reduced():
            self.roadway.params[index].grad = None
        self._accumulated.clear()

    def _leftovers(self) -> dict[int, torch.Tensor]:
        """Gradients that came when their bucket had left."""
        return self._take(self.not_reduced())

    def _take(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """What is in ``param.grad`` of these parameters or was accumulated, and no longer there."""
        params = self.roadway.params
        if self._accumulated:
            indices = list(indices)
        found = {i: grad for i in indices if (grad := params[i].grad) is not None}
        found = self.roadway.laid_out(found)
        for index in found:
            params[index].grad = None
        if self._accumulated:
            found.update(self._with_accumulated(indices, found))
        return found

    def _with_accumulated(
        self, indices: Iterable[int], gradients: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """What was accumulated for these parameters, and the gradients of this backward."""
        found = {}
        for index in [index for index in indices if index in self._accumulated]:
            total, grad = self._accumulated.pop(index), gradients.get(index)
            if grad is not None:
                total = total.to(grad.device).add_(grad)
            found[index] = total
        return self.roadway.laid_out(found)

    @torch.no_grad()
    def _depart(self, phase: _Phase, number: int) -> None:
        """Let a bucket leave. Other threads may add to the phase meanwhile, but not what this
        bucket needs: each operation on a dict or a set is one step of the interpreter."""
        held, lanes_of = phase.held, self.roadway.lanes_of
        lane = self.roadway.lanes[number]
        taken = self._take(index for index in lane.params if index not in held)
        if self._accumulated:
            taken.update(self._with_accumulated(lane.params, held))
        held.update(taken)
        phase.taken.update(taken)
        for index in taken:
            phase.expected.pop(index, None)
        self._flights.launch(lane, held, self.share)
        for index in lane.params:
            if lanes_of[index][-1] <= lane.bucket:
                held.pop(index, None)  # the last bucket that needs it has it

    # ------------------------------------------------------------------ afterwards

    @torch.no_grad()
    def settle(self) -> None:
        """Wait until everything that has left is here."""
        self._flights.land_all()
        self.judge()

    @torch.no_grad()
    def judge(self) -> None:
        """Learn what the ranks have said at the end of the last backward, and do what follows. That
        may be a second round: to be called on all ranks."""
        if self._verdict is None:
            return
        said = self._verdict.read()
        if said.gave_up:
            self.drop()
            raise GradientsDropped(
                f"the last backward has not come to its end, because it raised on "
                f"{name_ranks(said.gave_up)}, and its gradients were dropped on all ranks: call "
                "zero_grad() and go on with the next batch"
            )
        self._verdict = None
        if not said.equally_often:
            held = f"with {plural(self.backwards, 'backward')} since the last step or zero_grad()"
            try:
                require_agreement(self._transport, "reducing gradients", [held])
            except RanksDisagree:
                self.drop()  # on all ranks: nobody may step with a part of them
                raise
        self._present |= said.present
        again = said.again
        late, self._late = self._late, {}
        for number in again:
            self._flights.launch(self.roadway.lanes[number], late, self.share)
        if again:
            self._flights.land_all()

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients of this rank's pieces, in the order of the plan, after ``settle``."""
        return [grad for lane in self.roadway.lanes for grad in self.gradients_in(lane.bucket)]

    @torch.no_grad()
    def gradients_in(self, bucket: int) -> list[torch.Tensor | None]:
        """The same for one bucket, after ``judge``: the others may still be on their way."""
        self._flights.land_bucket(bucket)
        present = self._present
        return [view if index in present else None for index, view in self.roadway.views[bucket]]

    @property
    def present(self) -> Collection[int]:
        """The parameters that have a gradient, after ``settle``. The same on all ranks."""
        return self._present

    @property
    def holds_anything(self) -> bool:
        """Whether there are gradients that no step has used. The same on all ranks."""
        held = any(lane.holds for lane in self.roadway.lanes)
        return held or bool(self._phase or self._flights or self._verdict or self._present)

    @torch.no_grad()
    def drop(self) -> None:
        """Forget all gradients, also those of a backward that was never finished."""
        self._drop_averaged()
        self._accumulated.clear()

    def _drop_averaged(self) -> None:
        gave_up: list[int] = []
        if self._transport.company.refusal is None:
            if self._phase is not None:
                self.give_up()
            self._flights.turn_away()
            if self._verdict is not None:
                gave_up = self._verdict.read().gave_up
        self._flights.forget()  # without a group nothing will arrive
        self._phase, self._verdict, self._late = None, None, {}
        self.clear()
        if gave_up:
            self.when_dropped()

    @torch.no_grad()
    def clear(self) -> None:
        """The gradients are used up."""
        assert self._verdict is None
        # A step waits for what it uses only: buckets in which this rank owns nothing are left.
        self._flights.land_all()
        self._present = set()
        self.backwards = 0
        for lane in self.roadway.lanes:
            lane.holds = False
