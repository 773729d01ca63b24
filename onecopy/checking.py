"""Whether all is well: what the ranks are doing compared, and what they hold."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from onecopy.agreement import RanksDisagree, agree, require_agreement
from onecopy.buffers import in_layout_of, is_dense
from onecopy.fingerprints import ODD, fingerprint
from onecopy.join import Party
from onecopy.parts import Parts
from onecopy.replicas import Evidence, require_equal
from onecopy.sentry import Sentry, counters
from onecopy.torch_private import join_config
from onecopy.words import plural


class Checks(Parts):
    """``assert_replicas_equal``, ``check_every`` and ``ONECOPY_CHECK=step``."""

    _check_every: int | None
    _check_steps: bool
    _sentry: Sentry | None
    _compared: int
    _has_compared_gradients: bool

    def _watch_with(self, check_every: int | None) -> None:
        self._check_every = check_every
        self._check_steps = False
        self._compared = 0  # before which step, last
        self._has_compared_gradients = False
        # Whether it is a number is checked later, on all ranks together.
        self._sentry = Sentry() if isinstance(check_every, int) and check_every else None

    def assert_replicas_equal(self) -> None:
        """Compare what all ranks hold: the parameters, bit for bit, and the numbers in the state,
        as ``step``, of parameters that are cut; with ``check_every``, also the state with what it
        was after the last step. Collective. Raises ``RuntimeError`` on all ranks, naming the
        first parameter with which something is wrong, and the ranks."""
        self._require_usable()
        self._transport.enter("comparing replicas")
        self.wait()
        params = self._roster.params
        if self._sentry is not None:
            self._sentry.inspect_now()
        if params:
            prints = torch.stack([fingerprint(param).cpu() for param in params])
            self._require_equal(prints)

    def _require_equal(self, fingerprints: torch.Tensor, since: str = "") -> None:
        names = self._roster.names
        suspicions = self._sentry.suspicions(len(names)) if self._sentry else [""] * len(names)
        said = counters(self._local, len(names))
        require_equal(self._transport, Evidence(names, fingerprints, said, suspicions, since))

    # ------------------------------------------------------------------ check_every

    def _look_for_damage(self) -> None:
        """A step begins, and nothing has been changed yet. Mostly each bucket is looked at when
        its turn comes."""
        sentry = self._sentry
        if sentry is None:
            return
        sentry.begin(self._steps, self._local, self._plan, self._roster.params)
        compares = self._steps % (self._check_every or 1) == 0
        masters_will_follow = self._local.masters.are_behind()
        if compares or masters_will_follow:
            sentry.look_at_all()
        if masters_will_follow:
            sentry.unseal()
        if compares and self._compared < self._steps:  # not again if the step is called again
            self._company.add_to_note("comparing replicas")
            require_agreement(self._transport, "comparing the ranks", self._description())
            try:
                self._require_equal(*sentry.history())
            except RuntimeError:
                sentry.begin_history(is_all_well=False)
                raise
            sentry.begin_history(is_all_well=True)
            self._compared = self._steps

    def _finish_looking(self) -> None:
        """A step has failed in the middle."""
        if self._sentry is not None:
            # Memory that cannot be read has failed before: that is what the user has to know.
            with contextlib.suppress(Exception):
                self._sentry.finish()
            self._sentry.unseal()

    def _require_unharmed_state(self) -> None:
        """Before it is written down: else what has flipped would come back with every restart.
        Collective, with ``check_every``."""
        sentry = self._sentry
        if sentry is None:
            return

        def prepare() -> list[str]:
            names = self._roster.names
            sentry.inspect_now()
            for name, said in zip(names, sentry.suspicions(len(names)), strict=True):
                if said:
                    raise RuntimeError(
                        f"the state of {name} has changed although no step was taken: {said}. It "
                        "is not saved: go back to an earlier checkpoint. If your code writes into "
                        "the state, or to load over it, say so: optimizer.state = optimizer.state"
                    )
            return []

        agree(self._transport, "looking at the state before it is saved", prepare)

    def _state_has_changed(self) -> None:
        if self._sentry is not None:
            self._sentry.unseal()

    # ------------------------------------------------------------------ ONECOPY_CHECK=step

    @property
    def _mode(self) -> str:
        if self._attachment is None:
            return ""
        return f", attached, after {plural(self._attachment.reducer.backwards, 'backward')}"

    def _compare_step(self, closure: Any, kwargs: Mapping[str, Any], party: Party | None) -> None:
        """Whatever the ranks must have alike now."""
        lines = self._description()
        if party is None:  # a rank that has joined borrows its gradients
            lines += [
                f"step with {'a' if closure is not None else 'no'} closure, keywords {[*kwargs]}",
                *self._roster.readiness(with_gradients=self._attachment is None),
            ]
        require_agreement(self._transport, f"comparing step {self._steps}", lines)

    # ------------------------------------------------------------------ were they averaged?

    def _compare_gradients(self) -> None:
        """In drop-in mode: warn if the gradients differ between the ranks, with
        ``ONECOPY_CHECK=step`` raise. Collective, in the first step that has gradients, or in all.

        Why a warning: torch's class accepts such training.
        """
        if (
            (self._has_compared_gradients and not self._check_steps)
            or self.world_size == 1
            or self._attachment is not None
            or self._steps_in_backward
            or join_config(self).enable  # a rank that has joined has none
        ):
            return
        views, have_values = self._views_of_gradients()
        lines = [f"{name}: {view}" for name, view in zip(self._roster.names, views, strict=True)]
        try:
            require_agreement(self._transport, f"comparing gradients in step {self._steps}", lines)
        except RanksDisagree as difference:
            if difference.line is None:  # they do not even do the same
                raise
            error = self._not_averaged(difference, difference.line)
            if self._check_steps:
                raise error from None
            self._has_compared_gradients = True
            warnings.warn(str(error), stacklevel=_level_of_user())
        if have_values:  # gradients that are zero everywhere say nothing
            self._has_compared_gradients = True

    def _not_averaged(self, difference: RanksDisagree, index: int) -> RanksDisagree:
        views = "\n".join(difference.message.split("\n")[1:-1])
        name = self._shards.name_in_module(index)
        return RanksDisagree(
            f"the gradient of {name} is not the same on all ranks, so it was not averaged:\n"
            f"{views}\nWithout attach(...), step() expects gradients that were averaged over the "
            "ranks. Wrap the module, DistributedDataParallel(model), call that, and do the last "
            "backward before step() outside of no_sync(); or call optimizer.attach(model)"
        )

    @torch.no_grad()
    def _views_of_gradients(self) -> tuple[list[str], bool]:
        """The gradient of each parameter in words, and whether any of them is not zero."""
        said, pairs = [], []
        for param in self._roster.params:
            text, parts = _gradient_of(param)
            said.append(text)
            if parts:
                values, *others = parts
                total = fingerprint(values)
                for other in others:
                    total = total * ODD + fingerprint(other)
                pairs.append(torch.stack([total, values.bool().any().to(total)]))
        # Together, so that an accelerator is waited for once.
        device = pairs[0].device if pairs else None
        numbers = torch.stack([pair.to(device) for pair in pairs]).tolist() if pairs else []
        left = iter(numbers)
        views = [f"{t}{next(left)[0] % (1 << 64):x}" if t.endswith(" ") else t for t in said]
        return views, any(has_values for _, has_values in numbers)


def _gradient_of(param: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    """A gradient in words, and the tensors to take a fingerprint of, values first."""
    grad = param.grad
    if grad is None:
        return "no gradient", []
    if grad.layout is torch.strided:
        laid_out = in_layout_of(param, grad) if is_dense(param) else grad.contiguous()
        return "a gradient, fingerprint ", [laid_out]
    if grad.layout is torch.sparse_coo:
        rows = grad.coalesce()
        return "a sparse gradient, fingerprint ", [
            rows.values().contiguous(),
            rows.indices().contiguous(),
        ]
    return f"a gradient in {grad.layout}", []


def _level_of_user() -> int:
    """The ``stacklevel`` with which the caller's warning names the line of the user that led to
    it: a step may be called through profiler hooks, schedulers and scalers of torch."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and _is_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("onecopy", "torch")
