"""Where may a tensor be cut without changing a bit of its update? Measured on this machine.

Every elementwise class of torch.optim steps a tensor in one piece, and the same tensor in pieces
cut at multiples of a unit. Shown is the smallest unit that gave the same bits at all tried places.
A vectorised loop and its scalar tail may round differently; then only a multiple of the vector
length will do. `onecopy.plan` cuts at multiples of the units in the last two lines.

One thread by default, as torchrun sets it. Several threads share a long tensor at places of their
own choice, which depend on its length: in 16 bits no cut is then sure to keep the bits, as indeed
the unsharded update changes them with the number of threads (`--threads 2`).

    make bench-cuts
"""

from __future__ import annotations

import argparse
import platform
import warnings
from collections.abc import Iterator

import torch

from onecopy import is_elementwise
from onecopy.plan import ParamSpec

UNITS = (1, 2, 4, 8, 16, 32, 64)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
IMPLEMENTATIONS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
SIZES = (999, 70_001)  # the longer one would be shared among threads
STEPS = 4
OPTIONS = {  # those that bring every term of the update into play
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.01},
    "Rprop": {},
}


def elementwise_classes() -> list[type[torch.optim.Optimizer]]:
    exported = (getattr(torch.optim, name) for name in sorted(torch.optim.__all__))
    classes = [cls for cls in exported if isinstance(cls, type)]
    left_out = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    return [cls for cls in classes if cls not in left_out and is_elementwise(cls)]


def bits_after(
    cls: type[torch.optim.Optimizer],
    options: dict[str, object],
    values: torch.Tensor,
    grads: torch.Tensor,
    cuts: list[int],
) -> torch.Tensor:
    """The values after a few steps on pieces that end at ``cuts`` and at the end."""
    whole = values.clone()
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    pieces = [torch.nn.Parameter(piece) for piece in whole.split(lengths)]
    optimizer = cls(pieces, lr=0.01, **options)
    for grad in grads:
        for piece, part in zip(pieces, grad.split(lengths), strict=True):
            piece.grad = part
        optimizer.step()
    return whole.view(BITS[whole.itemsize])  # bits, because NaN is not equal to itself


def places(unit: int, size: int) -> Iterator[list[int]]:
    """Ways to cut: near the start, near the end, everywhere, and into thirds."""
    last = (size - 1) // unit * unit
    yield [unit]
    yield [last]
    yield [unit * n for n in (1, 3, 6, 7, 11) if unit * n < size]
    yield [size // 3 // unit * unit or unit, max(2 * size // 3 // unit, 2) * unit]


def smallest_unit(
    cls: type[torch.optim.Optimizer], options: dict[str, object], dtype: torch.dtype, trials: int
) -> int | None:
    unit = 0
    for trial in range(trials):
        source = torch.Generator().manual_seed(trial)
        for size in SIZES:
            values = torch.randn(size, generator=source).to(dtype)
            grads = torch.randn(STEPS, size, generator=source).to(dtype)
            expected = bits_after(cls, options, values, grads, [])
            while unit < len(UNITS) and not all(
                torch.equal(bits_after(cls, options, values, grads, cuts), expected)
                for cuts in places(UNITS[unit], size)
            ):
                unit += 1
    return UNITS[unit] if unit < len(UNITS) else None


def row(cls: type[torch.optim.Optimizer], implementation: str, trials: int) -> list[str] | None:
    options = {
        **OPTIONS.get(cls.__name__, {"weight_decay": 0.01}),
        **IMPLEMENTATIONS[implementation],
    }
    cells = []
    for dtype in DTYPES:
        try:
            unit = smallest_unit(cls, options, dtype, trials)
        except (TypeError, RuntimeError):  # the class has no such implementation, or not on CPUs
            return None
        cells.append("none" if unit is None else str(unit))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=3, help="random tensors per cell")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    capability = torch.backends.cpu.get_cpu_capability()
    print(
        f"torch {torch.__version__}, {platform.machine()}, {capability}, {given.threads} thread(s)"
    )
    print("smallest unit, in elements, that gives the bits of the uncut tensor\n")
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    print(f"{'':22}" + "".join(f"{name:>10}" for name in names))
    for cls in elementwise_classes():
        for implementation in IMPLEMENTATIONS:
            cells = row(cls, implementation, given.trials)
            if cells is not None:
                title = f"{cls.__name__} {implementation}"
                print(f"{title:22}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    print()
    for fused in (False, True):
        units = [
            ParamSpec(0, 1, name, dtype.itemsize, fused=fused).unit
            for name, dtype in zip(names, DTYPES, strict=True)
        ]
        title = "the plan, fused" if fused else "the plan"
        print(f"{title:22}" + "".join(f"{unit:>10}" for unit in units))


if __name__ == "__main__":
    main()
