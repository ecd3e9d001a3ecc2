"""What the state machine asks while Dynamo traces it; each answer is a constant of the graph being traced."""

from __future__ import annotations

import warnings

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
