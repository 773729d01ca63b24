"""The parameters of well-known models: names and shapes, in the order of ``model.parameters()``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # by name, in order


def gpt2() -> Shapes:
    """GPT-2 with 124 million parameters; the output layer is tied to the token embedding."""
    return _gpt2(layers=12, d=768)


def gpt2_xl() -> Shapes:
    return _gpt2(layers=48, d=1600)


def llama_3_2_1b() -> Shapes:
    return _llama(layers=16, d=2048, keys=512, hidden=8192, tied=True)


def llama_3_8b() -> Shapes:
    return _llama(layers=32, d=4096, keys=1024, hidden=14336)


def llama_3_70b() -> Shapes:
    return _llama(layers=80, d=8192, keys=1024, hidden=28672)


def llama_3_405b() -> Shapes:
    return _llama(layers=126, d=16384, keys=1024, hidden=53248)


def resnet_50() -> Shapes:
    shapes = _convolution("conv1", "bn1", (64, 3, 7, 7))
    inputs = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        outputs = 4 * width
        for block in range(blocks):
            at = f"layer{stage}.{block}."
            shapes |= _convolution(f"{at}conv1", f"{at}bn1", (width, inputs, 1, 1))
            shapes |= _convolution(f"{at}conv2", f"{at}bn2", (width, width, 3, 3))
            shapes |= _convolution(f"{at}conv3", f"{at}bn3", (outputs, width, 1, 1))
            if block == 0:
                down = f"{at}downsample."
                shapes |= _convolution(f"{down}0", f"{down}1", (outputs, inputs, 1, 1))
            inputs = outputs
    return {**shapes, "fc.weight": (1000, inputs), "fc.bias": (1000,)}


PRESETS: dict[str, Callable[[], Shapes]] = {
    "gpt2": gpt2,
    "gpt2-xl": gpt2_xl,
    "llama-3.2-1b": llama_3_2_1b,
    "llama-3-8b": llama_3_8b,
    "llama-3-70b": llama_3_70b,
    "llama-3-405b": llama_3_405b,
    "resnet-50": resnet_50,
}


def numels(shapes: Shapes) -> list[int]:
    return [math.prod(shape) for shape in shapes.values()]


def _gpt2(layers: int, d: int) -> Shapes:
    layer = {
        "ln_1.weight": (d,),
        "ln_1.bias": (d,),
        "attn.c_attn.weight": (d, 3 * d),
        "attn.c_attn.bias": (3 * d,),
        "attn.c_proj.weight": (d, d),
        "attn.c_proj.bias": (d,),
        "ln_2.weight": (d,),
        "ln_2.bias": (d,),
        "mlp.c_fc.weight": (d, 4 * d),
        "mlp.c_fc.bias": (4 * d,),
        "mlp.c_proj.weight": (4 * d, d),
        "mlp.c_proj.bias": (d,),
    }
    return {
        "wte.weight": (50257, d),
        "wpe.weight": (1024, d),
        **_repeated("h", range(layers), layer),
        "ln_f.weight": (d,),
        "ln_f.bias": (d,),
    }


def _llama(layers: int, d: int, keys: int, hidden: int, tied: bool = False) -> Shapes:
    vocabulary = 128256
    layer = {
        "self_attn.q_proj.weight": (d, d),
        "self_attn.k_proj.weight": (keys, d),
        "self_attn.v_proj.weight": (keys, d),
        "self_attn.o_proj.weight": (d, d),
        "mlp.gate_proj.weight": (hidden, d),
        "mlp.up_proj.weight": (hidden, d),
        "mlp.down_proj.weight": (d, hidden),
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
    }
    return {
        "model.embed_tokens.weight": (vocabulary, d),
        **_repeated("model.layers", range(layers), layer),
        "model.norm.weight": (d,),
        **({} if tied else {"lm_head.weight": (vocabulary, d)}),
    }


def _repeated(prefix: str, numbers: Iterable[int], layer: Shapes) -> dict[str, Shape]:
    return {f"{prefix}.{n}.{name}": shape for n in numbers for name, shape in layer.items()}


def _convolution(weight: str, norm: str, shape: Shape) -> dict[str, Shape]:
    """A convolution without bias, and its batch normalisation."""
    width = (shape[0],)
    return {f"{weight}.weight": shape, f"{norm}.weight": width, f"{norm}.bias": width}
