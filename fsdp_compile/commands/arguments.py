"""What arguments of commands may be, and what they name."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ..factory import Factory
from ..local_ranks import UsageError


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return parse


def at_least_each(least: int) -> Callable[[str], list[int]]:
    return lambda text: [at_least(least)(part) for part in text.split(",")]


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number, 0 or more, not {text}")
    return value


def reshard(text: str) -> bool | int:
    named = {"true": True, "false": False}
    if text.lower() in named:
        return named[text.lower()]
    ranks = at_least(1)(text)
    return False if ranks == 1 else ranks  # to one rank: not at all


def mesh_shapes(text: str) -> list[tuple[int, int]]:
    """Shapes of meshes: replicas, and shards in each."""
    shapes = [tuple(map(at_least(1), part.split("x"))) for part in text.split(",")]
    if any(len(shape) != 2 for shape in shapes):
        raise argparse.ArgumentTypeError(f"must be replicas and shards like 4x8, not {text!r}")
    return shapes  # type: ignore[return-value]


def check_writable(path: Path) -> None:
    """Find whether a file can be written, before there is anything to write.

    Raises:
        UsageError: it cannot.
    """
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise UsageError(f"cannot write to {path}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write to directory {path.parent}")


def load_factory(spec: str) -> Factory:
    """The callable that ``MODULE:FACTORY`` names; MODULE is a module's name or the path of a file.

    Raises:
        UsageError: there is no such module, file or attribute, it cannot be imported, or it is not callable.
    """
    module_name, _, attribute = spec.rpartition(":")
    if not module_name or not attribute:
        raise UsageError(f"expected MODULE:FACTORY, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the console script, unlike `python -m`, does not look here by itself
    path = Path(module_name) if module_name.endswith(".py") else None
    if path and not path.is_file():
        raise UsageError(f"no such file: {path}")
    try:
        module = _import_file(path) if path else importlib.import_module(module_name)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"cannot import {module_name}: {type(error).__name__}: {reason}") from error
    try:
        factory = operator.attrgetter(attribute)(module)
    except AttributeError:
        raise UsageError(f"{module_name} has no attribute {attribute!r}") from None
    if not callable(factory):
        raise UsageError(f"{spec} is not callable but of type {type(factory).__name__}")
    return factory


def _import_file(path: Path) -> ModuleType:
    name = f"_parity_{path.stem}"  # a name that hides no other module
    if name in sys.modules:
        return sys.modules[name]
    sys.path.insert(0, str(path.resolve().parent))  # as for `python FILE`: what lies beside it can be imported
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
