"""Shapes of the parameters of well-known models, in the order of ``model.parameters()``."""

from __future__ import annotations

import math
from collections.abc import Callable

Shapes = list[tuple[int, ...]]


def gpt2_124m() -> Shapes:
    """GPT-2 124M; the output layer is tied to the token embedding."""
    d = 768
    layer: Shapes = [
        *((d,), (d,)),
        *((d, 3 * d), (3 * d,), (d, d), (d,)),
        *((d,), (d,)),
        *((d, 4 * d), (4 * d,), (4 * d, d), (d,)),
    ]
    return [(50257, d), (1024, d), *layer * 12, (d,), (d,)]


def llama_3_2_1b() -> Shapes:
    return _llama(layers=16, d=2048, keys=512, hidden=8192, tied=True)


def llama_3_8b() -> Shapes:
    return _llama(layers=32, d=4096, keys=1024, hidden=14336)


def llama_3_70b() -> Shapes:
    return _llama(layers=80, d=8192, keys=1024, hidden=28672)


def llama_3_405b() -> Shapes:
    return _llama(layers=126, d=16384, keys=1024, hidden=53248)


def _llama(layers: int, d: int, keys: int, hidden: int, tied: bool = False) -> Shapes:
    vocabulary = 128256
    attention: Shapes = [(d, d), (keys, d), (keys, d), (d, d)]
    feed_forward: Shapes = [(hidden, d), (hidden, d), (d, hidden)]
    layer: Shapes = [*attention, *feed_forward, (d,), (d,)]
    head: Shapes = [] if tied else [(vocabulary, d)]
    return [(vocabulary, d), *layer * layers, (d,), *head]


def resnet_50() -> Shapes:
    shapes: Shapes = _convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        outputs = 4 * width
        for block in range(blocks):
            shapes += _convolution(inputs, width, 1)
            shapes += _convolution(width, width, 3)
            shapes += _convolution(width, outputs, 1)
            if block == 0:
                shapes += _convolution(inputs, outputs, 1)
            inputs = outputs
    return [*shapes, (1000, inputs), (1000,)]


def _convolution(inputs: int, outputs: int, size: int) -> Shapes:
    """A convolution without bias, and its batch normalisation."""
    return [(outputs, inputs, size, size), (outputs,), (outputs,)]


# The models of the published comparison.
MODELS: dict[str, Callable[[], Shapes]] = {
    "GPT-2 124M": gpt2_124m,
    "Llama-3-8B": llama_3_8b,
    "Llama-3.2-1B": llama_3_2_1b,
    "ResNet-50": resnet_50,
}


def numels(shapes: Shapes) -> list[int]:
    return [math.prod(shape) for shape in shapes]
