"""onecopy: one copy of the optimizer state in the whole job, instead of one per process."""

from onecopy.comm.agreement import RanksDisagree
from onecopy.comm.group import broadcast_object as _broadcast_object  # noqa: F401  as in torch
from onecopy.gradients.hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from onecopy.gradients.norms import GradScaler
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.planning.plan import ParamSpec, Plan, make_plan
from onecopy.planning.traits import Kind, is_elementwise
from onecopy.tools.estimate import Estimate, estimate
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
