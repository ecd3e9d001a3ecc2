"""What the state machine asks while Dynamo traces it; each answer is a constant of the graph being traced."""

from __future__ import annotations

import json
import warnings
from contextlib import AbstractContextManager
from typing import Any

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


def tagged(tag: str, phase: str) -> AbstractContextManager[None]:
    """Graph nodes made inside, and the backward nodes of what is called inside, carry ``tag`` and ``phase``."""
    return annotate(_annotation(tag, phase))


@torch_compat.constant_while_tracing
def _annotation(tag: str, phase: str) -> dict[str, Any]:
    return {"fsdp": {**json.loads(tag), "phase": phase}}
