"""onecopy: one copy of the optimizer state in the whole job, instead of one per process."""

from onecopy.agreement import RanksDisagree
from onecopy.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from onecopy.estimating import Estimate, estimate
from onecopy.kinds import Kind, is_elementwise
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.plan import ParamSpec, Plan, make_plan
from onecopy.scaler import GradScaler
from onecopy.transport import broadcast_object as _broadcast_object  # noqa: F401  as in torch
from onecopy.version import __version__

__all__ = [
    "Estimate",
    "GradScaler",
    "Kind",
    "ParamSpec",
    "Plan",
    "RanksDisagree",
    "ZeroRedundancyOptimizer",
    "__version__",
    "estimate",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "is_elementwise",
    "make_plan",
]
