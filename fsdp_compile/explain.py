"""Says how each sharded module's last forward ran: in a compiled graph, or eagerly and why.

>>> print(fsdp_compile.explain(model))
module    ran
(root)    in several graphs: a graph break inside its forward
blocks.0  in a graph
blocks.1  eagerly: set_all_reduce_hook has no traced form
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from . import torch_compat

if TYPE_CHECKING:
    from .fsdp_state import FSDPState

NOT_RUN, IN_GRAPH, SPLIT, EAGERLY = "not yet", "in a graph", "in several graphs", "eagerly"

_strict = False


def set_strict(enabled: bool = True) -> None:
    """Whether a sharded module whose forward runs eagerly, though all should be compiled, raises ``RuntimeError``."""
    global _strict
    _strict = enabled


@dataclass(frozen=True)
class ModuleRun:
    """How one module's last forward ran.

    Attributes:
        name: of the module, from the root; empty for the root.
        how: ``"in a graph"``; ``"in several graphs"``, between which a graph break has split it, so that its parameters
            were kept until the backward; ``"eagerly"``; or ``"not yet"``.
        why: why not in one graph; or empty.
    """

    name: str
    how: str
    why: str

    def __str__(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


@dataclass(frozen=True)
class Explanation:
    """Of each sharded module, the root first, how its last forward ran; prints as a table."""

    modules: tuple[ModuleRun, ...]

    @property
    def eager(self) -> tuple[ModuleRun, ...]:
        """Those that did not run in one graph."""
        return tuple(run for run in self.modules if run.how in (EAGERLY, SPLIT))

    def __str__(self) -> str:
        names = ["module", *(run.name or "(root)" for run in self.modules)]
        width = max(map(len, names)) + 2
        return "\n".join(f"{n:<{width}}{text}" for n, text in zip(names, ["ran", *self.modules], strict=True))


def explain(model: nn.Module) -> Explanation:
    """How the last forward of each sharded module in ``model`` ran.

    Raises:
        ValueError: ``model`` has no sharded module.
    """
    from .fsdp_module import states_under

    runs = tuple(state.last_run.of(state) for state in states_under(model.modules()))
    if not runs:
        raise ValueError(f"{type(model).__name__} has no module under fully_shard")
    return Explanation(runs)


class LastRun:
    """What a state remembers of how its module's forward ran last.

    Attributes:
        how: see ``ModuleRun``; graphs write it.
    """

    def __init__(self) -> None:
        self.how = NOT_RUN
        self._why = ""
        self._known = (-1, False)

    def note_eager(self, state: FSDPState) -> None:
        """An eager forward begins; finds out why, unless that is known.

        Raises:
            RuntimeError: after ``set_strict``.
        """
        breaks = torch_compat.graph_break_count()
        known = breaks, breaks > 0 and _is_called_by_compiled()
        if self.how != EAGERLY or self._known != known:
            self.how, self._known, self._why = EAGERLY, known, _why_eager(state)
        if _strict:
            label = state.groups[0].label if state.groups else "a module without parameters of its own"
            raise RuntimeError(f"The forward of {label} runs eagerly, which set_strict forbids: {self._why}")

    def of(self, state: FSDPState) -> ModuleRun:
        """The report of ``state``'s module."""
        why = self._why if self.how == EAGERLY else _why_split(state) if self.how == SPLIT else ""
        return ModuleRun(state.name, self.how, why)


def _why_eager(state: FSDPState) -> str:
    untraced = state.why_untraced
    if untraced:
        return f"{untraced} has no traced form"
    if not _is_called_by_compiled():
        return "no compiled function called it"
    breaks, here = torch_compat.graph_breaks(), {(frame.f_code.co_filename, frame.f_lineno) for frame in _stack()}
    known = [known for known in breaks if known[1:] in here and not _is_of_torch(known[1])]
    return _text(known[-1]) if known else _texts(breaks) or "Dynamo skipped the code that called it"


def _why_split(state: FSDPState) -> str:
    """The graph breaks in its own code and that of its submodules; all that there were, if none was there."""
    breaks = torch_compat.graph_breaks()
    classes = {type(each) for module in state.modules for each in module.modules()}
    code = [part for cls in classes for part in _code(cls)]
    inside = [(why, file, line) for why, file, line in breaks if any(file == f and line in lines for f, lines in code)]
    return _texts(inside or breaks) or "a graph break inside its forward"


def _code(cls: type) -> list[tuple[str, range]]:
    """Files and lines of the methods of a module's class, without those of torch's classes."""
    methods = [method for base in cls.__mro__ for method in vars(base).values() if isinstance(method, FunctionType)]
    spans = []
    for code in [method.__code__ for method in methods if not _is_of_torch(method.__code__.co_filename)]:
        lines = [line for *_, line in code.co_lines() if line is not None]
        spans.append((code.co_filename, range(code.co_firstlineno, max(lines) + 1)))
    return spans


def _is_of_torch(file: str) -> bool:
    return file.startswith(os.path.dirname(torch.__file__))


def _texts(breaks: list[tuple[str, str, int]]) -> str:
    return "; ".join(dict.fromkeys(map(_text, breaks)))


def _text(known: tuple[str, str, int]) -> str:
    reason, file, line = known
    return f"graph break: {reason}" if _is_of_torch(file) else f"graph break at {file}:{line}: {reason}"


def _is_called_by_compiled() -> bool:
    return any(frame.f_code.co_name == "compile_wrapper" for frame in _stack())  # what `torch.compile` returns


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
