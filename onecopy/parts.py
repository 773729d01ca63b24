"""What the parts of ``ZeroRedundancyOptimizer`` know of the whole.

The class is put together from parts, each a file: its state and checkpoints (``keeping.py``), its
attached mode (``attaching.py``), parameters that come later (``growing.py``), uneven inputs
(``joining.py``), checks (``checking.py``), reports (``reporting.py``), and the optimizer itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from onecopy.attachment import Attachment
from onecopy.company import Company
from onecopy.condition import Condition, State
from onecopy.full_state import FullState
from onecopy.intake import GroupPolicy
from onecopy.join import Party, Turn
from onecopy.local import LocalOptimizer
from onecopy.plan import Plan
from onecopy.policies import Policies
from onecopy.roster import Roster
from onecopy.shards import Shards
from onecopy.torch_private import AskedByGradScaler
from onecopy.transport import Transport


class Parts(AskedByGradScaler, Optimizer, Joinable):
    """Attributes and methods that more than one part uses."""

    process_group: Any
    rank: int
    world_size: int
    _transport: Transport
    _shards: Shards
    _policies: Policies
    _full_state: FullState
    _attachment: Attachment | None
    _condition: Condition
    _steps: int
    _loaded: list[str]  # what was loaded, in lines, until all ranks are known to have the same
    _steps_in_backward: bool  # overlap_with_ddp

    @property
    def _company(self) -> Company:
        return self._transport.company

    @property
    def _local(self) -> LocalOptimizer:
        return self._shards.local

    @property
    def _roster(self) -> Roster:
        return self._shards.roster

    @property
    def _plan(self) -> Plan:
        return self._shards.plan

    @property
    def _all_params(self) -> list[torch.Tensor]:
        return self._roster.params

    def _attached(self, method: str) -> Attachment:
        if self._attachment is None:
            raise RuntimeError(f"{method}() is for attached mode: call attach(module) first")
        return self._attachment

    def _drop_gradients(self) -> None:
        """Those of which this rank holds a part; others are the user's."""
        if self._attachment is not None:
            self._attachment.drop()

    def _require_usable(self) -> None:
        """Raise if nothing good can come of going on, with the reason and the way back."""
        self._condition.require_whole()
        self._company.require_working()

    def _bring_level(self) -> None:
        """Before state is loaded: do what is left of a step that failed, since other ranks may be
        further. Its gradients are dropped."""
        if self._condition.state is State.TORN and self._company.refusal is None:
            self._shards.bring_level()
            self.wait()
            self._drop_gradients()

    def _policies_with(self, options: Sequence[Mapping[str, Any]]) -> list[GroupPolicy]:
        return self._policies.with_options(self._roster.policies, self.param_groups, options)

    def _description(self) -> list[str]:
        """What all ranks must hold alike."""
        raise NotImplementedError

    @property
    def _mode(self) -> str:
        """What tells this rank's step from that of a rank that did something else before."""
        raise NotImplementedError

    def _require_unharmed_state(self) -> None:
        """Before it is written down. Collective."""
        raise NotImplementedError

    def _state_has_changed(self) -> None:
        """As it should, between two steps."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until the parameters that the last step updated are here."""
        raise NotImplementedError

    def _announce(self, turn: Turn) -> Party | None:
        """Tell joined ranks, if there may be any, what comes."""
        raise NotImplementedError

    def _follow_changes(self, party: Party | None = None) -> None:
        """What happened to the parameters since the last step: unfrozen, or given new memory."""
        raise NotImplementedError

    def _step(self, closure: Any, kwargs: Mapping[str, Any], party: Party | None) -> Any:
        """Update the parameters, on all ranks."""
        raise NotImplementedError
