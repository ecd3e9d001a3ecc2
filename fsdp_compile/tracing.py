"""What the state machine asks while Dynamo traces it; each answer is a constant of the graph being traced."""

from __future__ import annotations

import json
import warnings
from contextlib import AbstractContextManager
from typing import Any

from torch.fx.traceback import annotate

from . import backend, compiled_graphs, torch_compat

_warned: set[str] = set()


@torch_compat.constant_while_tracing
def trace_token() -> str:
    """Names the graph being traced: equal tokens mean the same graph. Empty outside of tracing."""
    return torch_compat.current_frame_id()


@torch_compat.constant_while_tracing
def frees_are_restored() -> bool:
    """Whether the compiler that gets this graph runs the pass that gathers freed parameters again in the backward."""
    return backend.passes_will_run(torch_compat.current_compiler_fn())


@torch_compat.constant_while_tracing
def install_passes() -> None:
    """Have the compiler that gets this graph run the passes, if it can."""
    backend.install_into(torch_compat.current_compiler_fn())


@torch_compat.constant_while_tracing
def graph_number() -> int:
    """The number of the graph being traced, by which ``compiled_graphs`` knows it."""
    number = compiled_graphs.number_of_trace()
    graph = compiled_graphs.known(number)
    assert graph is not None
    graph.runs_passes = backend.passes_will_run(torch_compat.current_compiler_fn())
    return number


@torch_compat.constant_while_tracing
def warn_once(message: str) -> None:
    """Warn with ``message``, once in the life of the process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


@torch_compat.constant_while_tracing
def guarded_settings() -> tuple[Any, ...]:
    """The ``settings()`` of the object whose method calls this; the graph serves only as long as they are the same."""
    torch_compat.traced_self().follow_replacements()
    return tuple(torch_compat.guard_self(lambda traced: traced.settings()))


@torch_compat.constant_while_tracing
def own_settings() -> tuple[Any, ...]:
    """The same without a guard, where one has been set already."""
    return tuple(torch_compat.traced_self().settings())


@torch_compat.constant_while_tracing
def own_tags() -> list[str]:
    """The tags of the traced group whose method calls this.

    Without a guard: names do not matter to what is computed, so a graph may serve other groups that are equal. Groups
    are numbered by appearance in the graph, so that it does not matter what a process has built before.
    """
    traced = torch_compat.traced_self()
    return traced.tags(torch_compat.number_in_trace(traced))


def write_tag(**parts: Any) -> str:
    """What the graph nodes of one parameter carry, see ``passes.graph_view``, as text."""
    return json.dumps(parts)


@torch_compat.constant_while_tracing
def numbered(tag: str, number: int) -> str:
    """The tag of one of several tensors that are gathered for one parameter."""
    parts = json.loads(tag)
    return json.dumps({**parts, "params": [f"{name}:{number}" for name in parts["params"]]})


def tagged(tag: str, phase: str, **more: Any) -> AbstractContextManager[None]:
    """Graph nodes made inside, and the backward nodes of calls inside, carry ``tag``, ``phase`` and ``more``."""
    return annotate(_annotation(tag, phase, more))


@torch_compat.constant_while_tracing
def _annotation(tag: str, phase: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"fsdp": {**json.loads(tag), "phase": phase, **more}}
