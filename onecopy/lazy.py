"""Gathers that overlap the next forward: awaited by the modules that use the parameters.

Every module with parameters of its own waits, before its forward, for the buckets that they are in.
Some parameters are used by other modules than their own (MultiheadAttention uses those of its
``out_proj``, whose forward is never called): the parameters of a module that was not called in the
first forward are awaited before the forward of every module around it, and so are those of modules
that are compiled. Outside of training everything is awaited at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onecopy.gatherer import Gatherer
from onecopy.plan import Plan
from onecopy.torch_private import disable_dynamo, is_compiled


class LazyWaits:
    """Hooks on a module and all modules in it."""

    def __init__(self, module: torch.nn.Module, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._own: dict[torch.nn.Module, set[int]] = {}  # of each module's own parameters
        self._buckets: dict[torch.nn.Module, list[int]] = {}  # that it waits for
        self._fired: set[torch.nn.Module] = set()  # in the first forward, uncompiled
        # The others, for ever. A dict, because torch 2.6 cannot trace a look into a set.
        self._not_fired: dict[torch.nn.Module, None] = {}
        self._knows = False  # which modules' forwards are called
        self._waits = True
        self._root_has_waited = False  # for its buckets, since the last step
        self._root = module
        self._handles: list[Any] = [
            module.register_forward_hook(self._after_all, always_call=True),
        ]
        register: Any
        for each in module.modules():
            self._handles.append(each.register_forward_pre_hook(self._before, prepend=True))
            for register in (
                each.register_state_dict_pre_hook,
                each.register_load_state_dict_pre_hook,
            ):
                self._handles.append(register(self._before_state_dict))

    def follow(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """Learn which module needs which buckets."""
        of_param: dict[torch.Tensor, list[int]] = {}
        for bucket in range(len(plan.buckets)):
            for segment in plan.segments(bucket):
                of_param.setdefault(params[segment.param], []).append(bucket)
        self._own = {
            module: {b for p in module.parameters(recurse=False) for b in of_param.get(p, ())}
            for module in self._root.modules()
        }
        self._knows = False
        self._fired = set()
        self._root_has_waited = False

    def stepped(self) -> None:
        """Gathers are under way again."""
        self._root_has_waited = False

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        # A wait inside compiled code breaks its graph. So the root waits for modules that are
        # compiled, unless one was called uncompiled before: the root then leaves it to the module.
        if not self._waits or (
            torch.compiler.is_compiling()
            and self._root_has_waited
            and module is not self._root
            and (not self._knows or module in self._not_fired)
        ):
            return
        self._await(module)

    # Not traced, so that ``_fired`` has uncompiled modules only: since torch 2.15 dynamo carries
    # out what a traced hook adds to a set, and before it does not.
    @disable_dynamo
    def _await(self, module: torch.nn.Module) -> None:
        if not self._knows:
            self._fired.add(module)
        trains = self._knows and module.training and torch.is_grad_enabled()
        self._gatherer.wait(self._buckets.get(module) if trains else None)
        if module is self._root:
            self._root_has_waited = True

    @disable_dynamo
    def _after_all(self, *_: Any) -> None:
        if not self._knows:
            # A module that was not called once may be compiled: it never waits for itself.
            self._not_fired |= dict.fromkeys(self._own.keys() - self._fired)
            self._buckets = {
                module: sorted(
                    self._own[module].union(
                        *(self._own[m] for m in module.modules() if m in self._not_fired)
                    )
                )
                for module in self._own
            }
            self._knows = True

    def _before_state_dict(self, *_: Any) -> None:
        self._gatherer.wait()

    def __deepcopy__(self, _: Any) -> LazyWaits:
        """A copied module has copies of the hooks: its parameters are all there."""
        self._gatherer.wait()
        return _NoWaits()

    def __reduce__(self) -> Any:
        self._gatherer.wait()
        return _NoWaits, ()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._gatherer.wait()


class _NoWaits(LazyWaits):
    """Of a module that nobody gathers for."""

    def __init__(self) -> None:
        self._gatherer = _Nothing()
        self._waits = False
        self._knows = True


class _Nothing(Gatherer):
    """Has everything."""

    def __init__(self) -> None:
        self._launched = {}


def require_hookable(module: torch.nn.Module) -> None:
    for each in module.modules():
        if is_compiled(each):
            raise ValueError(
                "lazy_gather=True needs hooks, which compiled modules may ignore: leave it out, or "
                "attach before torch.compile(...)"
            )
