"""Attached mode, as the user sees it: ``attach``, ``no_sync``, clipping."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from onecopy.agreement import agree, require_agreement
from onecopy.attachment import Attachment, require_attachable, send_from_first_rank
from onecopy.checks import as_number, check_switches
from onecopy.join import Party, Turn, same_call
from onecopy.lazy import require_hookable
from onecopy.naming import describe_names, names_in
from onecopy.parts import Parts
from onecopy.torch_private import join_config
from onecopy.words import plural, shown

logger = logging.getLogger("onecopy")

# How methods of an attachment are called by the user.
_LOOKS = {
    "clip": "clip_grad_norm_",
    "norm": "grad_norm",
    "full_gradient": "full_grad of parameter ",
    "unscale": "GradScaler.unscale_",
}


class Attaches(Parts):
    """``attach`` and ``detach``, and what can be done with gradients of which a rank has a part."""

    def attach(
        self,
        module: torch.nn.Module,
        *,
        reduce_dtype: torch.dtype | None = None,
        lazy_gather: bool = False,
    ) -> None:
        """Shard the gradients of the module, too: from now on they are averaged over the ranks
        while backward runs, and each rank keeps those of its pieces only. Collective.

        The communication of a step is then that of plain DDP. ``param.grad`` is None after
        backward: use :meth:`clip_grad_norm_`, :meth:`grad_norm`, :meth:`full_grad` and
        ``onecopy.GradScaler``. ``torch.nn.utils.clip_grad_norm_`` would see no gradients.

        Args:
            module: a ``DistributedDataParallel``, whose buckets are then reduced by this
                optimizer, or a bare module with all parameters of this optimizer. Parameters and
                buffers of a bare module are first sent from rank 0 to all others.
            reduce_dtype: what each rank's gradient is rounded to and sent in; by default its own
                dtype. Sums are taken in the wider of it and the dtype in which gradients are held.
            lazy_gather: return from ``step`` while the updated parameters are still on their way.
                Forwards of the module and its parts wait for what they use, and so do
                ``state_dict`` and all methods of this optimizer; call :meth:`wait` before you read
                parameters in any other way.
        """
        self._require_usable()
        self._transport.enter("attaching")

        def prepare() -> list[str]:
            if self._steps_in_backward:
                raise RuntimeError(
                    "attach(...) and overlap_with_ddp=True exclude each other: the one leaves the "
                    "update to step(), the other does it inside backward"
                )
            if self._attachment is not None:
                raise RuntimeError("the optimizer is attached already: call detach() first")
            require_attachable(
                module, self._roster, self._plan, self._transport.user_group, reduce_dtype
            )
            check_switches(lazy_gather=lazy_gather)
            if lazy_gather:
                require_hookable(module)
            self._shards.require_same_form()
            known = names_in(module)
            names = [known.get(entry.param, "") for entry in self._roster.entries]
            kind, number = type(module).__name__, self._company.attachments
            how = f"reduce_dtype={reduce_dtype}, lazy_gather={bool(lazy_gather)}"
            lines = [f"attach({kind}, {how})", f"{plural(number, 'attachment')} before"]
            return [*lines, *self._description(), *describe_names(self._roster, names)]

        agree(self._transport, "attaching", prepare)
        self._company.count_attachment()
        self.wait()
        if not isinstance(module, DistributedDataParallel):
            send_from_first_rank(self._transport, module)
        self._attachment = attachment = Attachment(
            module,
            self._transport,
            self._shards,
            reduce_dtype,
            lazy_gather,
            self._announce_in_join,
            self._is_in_join,
            self._steps,
        )
        # Else hooks would go on taking gradients away from whoever comes next.
        self._last_will = weakref.finalize(self, attachment.detach)
        self._last_will.atexit = False

        def take_memory() -> list[str]:
            attachment.prepare()
            return []

        try:
            agree(self._transport, "taking memory for gradients", take_memory)
        except BaseException:  # on all ranks, if there is too little on one of them
            self.detach()
            with contextlib.suppress(OSError, RuntimeError):  # maybe there is enough without it
                self._shards.settle()
            raise
        logger.info(
            "attached: gradients are sharded during backward and param.grad is None after it; clip "
            "with optimizer.clip_grad_norm_, scale with onecopy.GradScaler"
        )

    def detach(self) -> None:
        """Undo :meth:`attach`. Gradients that were not used are dropped."""
        if self._attachment is None:
            raise RuntimeError("the optimizer is not attached")
        try:
            self._last_will()
        finally:
            self._attachment = None
            self._company.add_to_note("then detached")

    def wait(self) -> None:
        """Until the parameters that the last step updated are here (see ``lazy_gather``)."""
        self._shards.gatherer.wait()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards in this context accumulate the gradients of this rank; the first one after it
        averages them all. As DDP's, but where a parameter has a master copy they are accumulated in
        its dtype, and ``param.grad`` is None."""
        return self._attached("no_sync").feed.no_sync()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip the norm of all gradients, as ``torch.nn.utils.clip_grad_norm_`` does; its value
        before, the same on all ranks. Collective in attached mode, where ``foreach`` chooses
        nothing: gradients are always clipped together."""
        if self._steps_in_backward:
            raise RuntimeError(
                "with overlap_with_ddp=True the update has happened when backward() returns: it is "
                "too late to clip. Leave it out, or use attach(...)"
            )
        max_norm, norm_type = as_number("max_norm", max_norm), as_number("norm_type", norm_type)
        chosen = {} if foreach is None else {"foreach": foreach}
        check_switches(error_if_nonfinite=error_if_nonfinite, **chosen)
        if self._attachment is None:
            return torch.nn.utils.clip_grad_norm_(
                self._roster.params, max_norm, norm_type, error_if_nonfinite, foreach
            )
        norm: torch.Tensor = self._look("clip", max_norm, norm_type, error_if_nonfinite)
        return norm

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients. Collective in attached mode."""
        norm_type = as_number("norm_type", norm_type)
        if self._attachment is None:
            gradients = [p.grad for p in self._roster.params if p.grad is not None]
            return torch.nn.utils.get_total_norm(gradients, norm_type)
        norm: torch.Tensor = self._look("norm", norm_type)
        return norm

    def full_grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """The averaged gradient of a parameter, on all ranks. Collective in attached mode, where
        its dtype is that in which gradients are summed: with master copies, theirs."""
        index = next((i for i, p in enumerate(self._roster.params) if p is param), None)
        if index is None:
            raise ValueError("full_grad(p): p is not a parameter of this optimizer")
        if self._attachment is None:
            return param.grad
        whole: torch.Tensor | None = self._look("full_gradient", index)
        return whole

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        super().zero_grad(set_to_none)
        if self._attachment is not None:
            self._attachment.zero_grad()
        self._shards.forgive_backward()  # what the attachment could not mend

    def _look(self, method: str, *args: Any) -> Any:
        """Call a method of the attachment that looks at gradients, on all ranks: inside ``Join``,
        also on those that have run out of inputs. What was unfrozen is taken in before."""
        attachment = self._attached(method)
        self._require_usable()
        attachment.give_up_raised()
        party = self._announce_in_join(Turn.LOOK)
        attachment.judge()  # a backward that was given up ends here, on all ranks
        call = f"{_LOOKS[method]}{shown(args, longest=200)}"
        self._company.note(f"{call} after {self._steps} steps{self._mode}")
        with self._company.noting_errors():
            if party is None:
                # Owners that clip differently, or send the gradients of different parameters,
                # would go wrong without a sign of it.
                require_agreement(self._transport, call, ())
            self._follow_changes(party)
            if party is not None:
                same_call(self._transport, party, [method, *args])
            return getattr(attachment, method)(*args)

    def _unscale(self, inv_scale: torch.Tensor, allow_fp16: bool) -> torch.Tensor:
        """For the scaler: whether any rank has found an infinity or NaN."""
        found: torch.Tensor = self._look("unscale", float(inv_scale), allow_fp16)
        return found

    def _skip_step(self) -> None:
        """The scaler does not take a step that ranks which have joined wait for."""
        self._announce_in_join(Turn.SKIP)
        self._drop_gradients()

    def _announce_in_join(self, turn: Turn) -> Party | None:
        return self._announce(turn) if self._is_in_join() else None

    def _is_in_join(self) -> bool:
        return bool(join_config(self).enable)

    def before_scaling(self) -> None:
        if self._steps_in_backward:
            raise RuntimeError(
                "with overlap_with_ddp=True the update happens inside backward, with gradients of "
                "the scaled loss: a GradScaler cannot work. Leave it out, or use attach(...)"
            )
        if self._attachment is not None:
            self._attachment.require_our_scaler()
