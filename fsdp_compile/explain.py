"""Says how each sharded module's last forward ran: in a compiled graph, or eagerly and why.

    >>> print(fsdp_compile.explain(model))
    module    ran
    (root)    in several graphs: a graph break inside its forward
    blocks.0  in a graph
    blocks.1  eagerly: set_all_reduce_hook has no traced form
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        self._breaks_known = -1

    def note_eager(self, state: FSDPState) -> None:
        """An eager forward begins; finds out why, unless that is known.

        Raises:
            RuntimeError: after ``set_strict``.
        """
        known = torch_compat.graph_break_count()
        if self.how != EAGERLY or self._breaks_known != known:
            self.how, self._breaks_known, self._why = EAGERLY, known, _why_eager(state)
        if _strict:
            label = state.groups[0].label if state.groups else "a module without parameters of its own"
            raise RuntimeError(f"The forward of {label} runs eagerly, which set_strict forbids: {self._why}")

    def of(self, state: FSDPState) -> ModuleRun:
        """The report of ``state``'s module."""
        why = self._why if self.how == EAGERLY else "a graph break inside its forward" if self.how == SPLIT else ""
        return ModuleRun(state.name, self.how, why)


def _why_eager(state: FSDPState) -> str:
    untraced = state.why_untraced
    if untraced:
        return f"{untraced} has no traced form"
    here = _lines_of_stack()
    for reason, file, line in reversed(torch_compat.graph_breaks()):
        if (file, line) in here:
            return f"graph break at {file}:{line}: {reason}"
    return "no compiled function called it"


def _lines_of_stack() -> set[tuple[str, int]]:
    lines: set[tuple[str, int]] = set()
    frame: Any = sys._getframe()
    while frame is not None:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return lines
