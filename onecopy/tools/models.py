"""The MODEL and the ``--optimizer`` of a command.

Presets are names with shapes. Modules are built on the meta device, so that they take no memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

Shape = tuple[int, ...]
Shapes = dict[str, Shape]  # by name, in order


def _gpt2(layers: int, d: int) -> Shapes:
    weights = {
        "ln_1": (d,),
        "attn.c_attn": (d, 3 * d),
        "attn.c_proj": (d, d),
        "ln_2": (d,),
        "mlp.c_fc": (d, 4 * d),
        "mlp.c_proj": (4 * d, d),
    }
    shapes: Shapes = {"wte.weight": (50257, d), "wpe.weight": (1024, d)}
    for n in range(layers):
        for name, shape in weights.items():
            shapes |= _with_bias(f"h.{n}.{name}", shape)
    return shapes | _with_bias("ln_f", (d,))


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
        **{f"model.layers.{n}.{name}": size for n in range(layers) for name, size in layer.items()},
        "model.norm.weight": (d,),
        **({} if tied else {"lm_head.weight": (vocabulary, d)}),
    }


def _resnet_50() -> Shapes:
    convolutions = {"conv1": (64, 3, 7, 7)}
    inputs = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            convolutions[f"{at}.conv1"] = (width, inputs, 1, 1)
            convolutions[f"{at}.conv2"] = (width, width, 3, 3)
            convolutions[f"{at}.conv3"] = (4 * width, width, 1, 1)
            if block == 0:
                convolutions[f"{at}.downsample.0"] = (4 * width, inputs, 1, 1)
            inputs = 4 * width
    shapes: Shapes = {}
    for name, shape in convolutions.items():  # without bias, and their batch normalisations
        norm = name.replace("conv", "bn").replace("downsample.0", "downsample.1")
        shapes |= {f"{name}.weight": shape, **_with_bias(norm, shape[:1])}
    return {**shapes, "fc.weight": (1000, inputs), "fc.bias": (1000,)}


def _with_bias(name: str, weight: Shape) -> Shapes:
    return {f"{name}.weight": weight, f"{name}.bias": weight[-1:]}


# GPT-2 and Llama 3.2 1B: the output layer is tied to the token embedding.
PRESETS: dict[str, Callable[[], Shapes]] = {
    "gpt2": partial(_gpt2, layers=12, d=768),
    "gpt2-xl": partial(_gpt2, layers=48, d=1600),
    "llama-3.2-1b": partial(_llama, layers=16, d=2048, keys=512, hidden=8192, tied=True),
    "llama-3-8b": partial(_llama, layers=32, d=4096, keys=1024, hidden=14336),
    "llama-3-70b": partial(_llama, layers=80, d=8192, keys=1024, hidden=28672),
    "llama-3-405b": partial(_llama, layers=126, d=16384, keys=1024, hidden=53248),
    "resnet-50": _resnet_50,
}

# Names of matrices that Muon and its like are not meant for: inputs and outputs of the network.
_ENDS_OF_A_NETWORK = re.compile(r"embed|wte|wpe|(^|[._])(lm_)?head([._]|$)", re.IGNORECASE)


class BadArgument(Exception):
    """The command cannot be understood; the text says how it could be."""


class Failure(Exception):
    """The command was understood and cannot be done; the text says what would help."""


def load_model(text: str) -> Any:
    """What ``estimate`` accepts: a module, or names with shapes."""
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]()
    if text.endswith(".json") or Path(text).is_dir():
        return _from_config(Path(text))
    if ":" in text:
        return _from_factory(text)
    raise BadArgument(
        f"unknown model {text!r}: give a preset ({', '.join(PRESETS)}), package.module:factory, or "
        "the config.json of a Hugging Face model"
    )


def _find_object(text: str, what: str) -> Any:
    """``package.module:name``, looked for in the current directory, too."""
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise BadArgument(f"expected package.module:{what}, got {text!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise Failure(f"{text} cannot be imported: {error}") from error
    except Exception as error:  # the user's module may raise anything
        raise Failure(f"importing {module_name} raised {_in_one_line(error)}") from error
    return found


def _from_factory(text: str) -> Any:
    factory = _find_object(text, "factory")
    if not callable(factory):
        return factory
    try:
        with contextlib.suppress(Exception), torch.device("meta"):
            return factory()
        return factory()  # it computes with values while it is built: then it needs memory
    except Exception as error:
        raise Failure(f"{text}() raised {_in_one_line(error)}") from error


def _from_config(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise Failure(f"{file} cannot be read: {_in_one_line(error)}") from error
    if not isinstance(config, Mapping) or "model_type" not in config:
        raise Failure(f'{file} is not the configuration of a model: it has no "model_type"')
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise Failure(
            f"{file} needs the transformers package to be understood: pip install transformers"
        ) from error
    try:
        found = transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
        named = (config.get("architectures") or [None])[0]
        cls = getattr(transformers, str(named), None)
        with torch.device("meta"):
            return cls(found) if cls else transformers.AutoModel.from_config(found)
    except Exception as error:
        raise Failure(f"transformers cannot build {file}: {_in_one_line(error)}") from error


# -------------------------------------------------------------------------- optimizers


def load_optimizer(text: str, model: Any) -> tuple[Any, type[Optimizer]]:
    """What to optimize, and the class. ``muon+adamw``: matrices by the first, all else by the
    second, among it the embeddings and the output layer."""
    first, plus, second = text.partition("+")
    if not plus:
        return model, _optimizer_class(first)
    of_matrices, of_the_rest = _optimizer_class(first), _optimizer_class(second)
    if isinstance(model, torch.nn.Module):
        named = list(model.named_parameters())
    elif isinstance(model, Mapping):
        with torch.device("meta"):
            named = [(n, torch.nn.Parameter(torch.empty(tuple(s)))) for n, s in model.items()]
    else:
        raise Failure(
            "two classes are shared out by name: the factory must return a module or shapes"
        )
    matrices: list[tuple[str, torch.Tensor]] = []
    rest: list[tuple[str, torch.Tensor]] = []
    for name, param in named:
        is_inner_matrix = param.ndim == 2 and not _ENDS_OF_A_NETWORK.search(name)
        (matrices if is_inner_matrix else rest).append((name, param))
    if not matrices or not rest:
        whom = second if not matrices else first
        raise Failure(f"all parameters would go to one class: say --optimizer {whom}")
    return [{"params": matrices, "optimizer_class": of_matrices}, {"params": rest}], of_the_rest


def _optimizer_class(text: str) -> type[Optimizer]:
    if ":" in text:
        found = _find_object(text, "Class")
        if not (isinstance(found, type) and issubclass(found, Optimizer)):
            raise Failure(f"{text} is not a torch.optim.Optimizer")
        return found
    classes = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    if text.lower() not in classes:
        raise BadArgument(
            f"unknown optimizer {text!r}: give one of {', '.join(sorted(classes))}, "
            "package.module:Class, or two of them as muon+adamw"
        )
    return classes[text.lower()]


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
