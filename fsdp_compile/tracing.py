"""What the state machine asks while Dynamo traces it; each answer is a constant of the graph being traced."""

from __future__ import annotations

import json
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx.traceback import annotate

from . import backend, torch_compat

_warned: set[str] = set()


@torch_compat.constant_while_tracing
def trace_token() -> str:
    """Names the graph being traced: equal tokens mean the same graph. Empty outside of tracing."""
    return torch_compat.current_frame_id()


@torch_compat.constant_while_tracing
def frees_are_restored() -> bool:
    """Whether the compiler that gets this graph runs the pass that gathers freed parameters again in the backward."""
    compiler_fn = torch_compat.current_compiler_fn()
    backend.install_into(compiler_fn)
    return backend.passes_will_run(compiler_fn)


@torch_compat.constant_while_tracing
def warn_once(message: str) -> None:
    """Warn with ``message``, once in the life of the process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


def tagged(recipe: str, phase: str) -> AbstractContextManager[None]:
    """Graph nodes made inside, and the backward nodes of calls inside, carry the recipe's tag and ``phase``."""
    return annotate(_annotation(recipe, phase))


@torch_compat.constant_while_tracing
def _annotation(recipe: str, phase: str) -> dict[str, Any]:
    return {"fsdp": {**json.loads(recipe)["tag"], "phase": phase}}


def write_recipe(**parts: Any) -> str:
    """All that a graph needs to know to unshard one parameter and to reduce its gradient, as one text.

    As one text, because Dynamo then guards one string for each parameter; the numbers themselves would be guarded one
    by one, and become symbolic as soon as two modules of one class differ in them.
    """
    return json.dumps(parts, default=lambda dtype: str(dtype))


@torch_compat.constant_while_tracing
def read_recipe(recipe: str, part: str) -> tuple[Any, ...]:
    """One part of a recipe, a list of constants, with its dtypes as dtypes."""
    values = json.loads(recipe)[part]
    is_dtype = [isinstance(value, str) and value.startswith("torch.") for value in values]
    return tuple(
        getattr(torch, value.removeprefix("torch.")) if dtype else value
        for value, dtype in zip(values, is_dtype, strict=True)
    )
