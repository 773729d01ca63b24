"""The MODEL of a command: a preset, a factory in a module, or a Hugging Face configuration.

Nothing of it is given memory, if it can be helped: modules are built on the meta device.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.presets import PRESETS

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


def find_object(text: str, what: str) -> Any:
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
    factory = find_object(text, "factory")
    if not callable(factory):
        return factory
    try:
        return _on_meta(factory)
    except Exception as error:
        raise Failure(f"{text}() raised {_in_one_line(error)}") from error


def _on_meta(factory: Callable[[], Any]) -> Any:
    try:
        with torch.device("meta"):
            return factory()
    except Exception:  # it computes with values while it is built: then it needs memory
        return factory()


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
    named = _named_parameters(model)
    matrices = [(name, param) for name, param in named if _is_inner_matrix(name, param)]
    rest = [(name, param) for name, param in named if not _is_inner_matrix(name, param)]
    if not matrices or not rest:
        whom = second if not matrices else first
        raise Failure(f"all parameters would go to one class: say --optimizer {whom}")
    return [{"params": matrices, "optimizer_class": of_matrices}, {"params": rest}], of_the_rest


def _optimizer_class(text: str) -> type[Optimizer]:
    if ":" in text:
        found = find_object(text, "Class")
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


def _named_parameters(model: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(model, torch.nn.Module):
        return list(model.named_parameters())
    if isinstance(model, Mapping):
        return [(name, _stand_in(shape)) for name, shape in model.items()]
    raise Failure("two classes are shared out by name: the factory must return a module or shapes")


def _stand_in(shape: Any) -> torch.Tensor:
    return torch.nn.Parameter(torch.empty(tuple(shape), device="meta"))


def _is_inner_matrix(name: str, param: torch.Tensor) -> bool:
    return param.ndim == 2 and not _ENDS_OF_A_NETWORK.search(name)


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
