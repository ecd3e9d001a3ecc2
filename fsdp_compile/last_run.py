"""Notes how each sharded module's forward ran last: in which graph, or eagerly, and why."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, NoReturn

import torch

from . import torch_compat
from .torch_compat import GraphBreak

if TYPE_CHECKING:
    from .fsdp_state import FSDPState

NOT_RUN, IN_GRAPH, SPLIT, EAGERLY = "not yet", "in a graph", "in several graphs", "eagerly"

_strict = False


def set_strict(enabled: bool = True) -> None:
    """Whether it is an error, a ``RuntimeError``, if the forward of a sharded module does not run in one graph.

    It names the module and says why: it runs eagerly, or a graph break, with its reason and place, has split it.
    """
    global _strict
    _strict = enabled


class LastRun:
    """What a state remembers of how its module's forward ran last.

    Attributes:
        how: see ``explain.ModuleRun``; graphs write it.
        graph: number of the graph in which it was unsharded, if it ran in any; graphs write it.
    """

    def __init__(self) -> None:
        self.how = NOT_RUN
        self.graph = 0
        self._why = ""
        self._known = (-1, False)

    @property
    def in_graph(self) -> bool:
        """Whether it ran in any."""
        return self.how in (IN_GRAPH, SPLIT)

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
            _refuse(state, f"runs eagerly, which set_strict forbids: {self._why}")

    def note_split(self, state: FSDPState) -> None:
        """A forward has ended in another graph than it began in; traced.

        Raises:
            RuntimeError: after ``set_strict``.
        """
        self.how = SPLIT
        if _strict:
            _refuse_split(state)

    def why(self, state: FSDPState) -> str:
        """Why the forward of ``state``'s module did not run in one graph; or empty."""
        return self._why if self.how == EAGERLY else _why_split(state) if self.how == SPLIT else ""


@torch.compiler.disable
def _refuse_split(state: FSDPState) -> NoReturn:
    _refuse(state, f"is split over several graphs, which set_strict forbids: {_why_split(state)}")


def _refuse(state: FSDPState, reason: str) -> NoReturn:
    raise RuntimeError(f"The forward of {_label(state)} {reason}")


def _label(state: FSDPState) -> str:
    cls = type(state.modules[0]).__name__
    return state.groups[0].label if state.groups else f"a module without parameters of its own, {cls},"


def _why_eager(state: FSDPState) -> str:
    untraced = state.why_untraced
    if untraced:
        return f"{untraced} has no traced form"
    if not _is_called_by_compiled():
        return "no compiled function called it"
    breaks, here = torch_compat.graph_breaks(), {(frame.f_code.co_filename, frame.f_lineno) for frame in _stack()}
    known = [each for each in breaks if (each.file, each.line) in here and not is_of_torch(each.file)]
    return _text(known[-1]) if known else _texts(breaks) or "Dynamo skipped the code that called it"


def _why_split(state: FSDPState) -> str:
    """The graph breaks in its own code and that of its submodules; all that there were, if none was there.

    A break may cause others in the code that calls it; those in ours do not count, but where a module runs eagerly.
    Code that has broken for one module does so for others of its class too.
    """
    known = torch_compat.graph_breaks()
    breaks = [each for each in known if not is_ours(each.file)]
    untraced = [other for other in state.context.states if other.why_untraced]
    if not breaks and untraced:
        return "; ".join(
            f"graph break at {_label(other)}, which runs eagerly: {_why_eager(other)}" for other in untraced
        )
    breaks = breaks or known
    code = [
        part for cls in {type(each) for module in state.modules for each in module.modules()} for part in code_of(cls)
    ]
    inside = [each for each in breaks if any(each.file == file and each.line in lines for file, lines in code)]
    return _texts(inside or breaks) or "a graph break inside its forward"


def code_of(cls: type) -> list[tuple[str, range]]:
    """Files and lines of the methods of a module's class, without those of torch's classes."""
    methods = [method for base in cls.__mro__ for method in vars(base).values() if isinstance(method, FunctionType)]
    spans = []
    for code in [method.__code__ for method in methods if not is_of_torch(method.__code__.co_filename)]:
        lines = [line for *_, line in code.co_lines() if line is not None]
        spans.append((code.co_filename, range(code.co_firstlineno, max(lines) + 1)))
    return spans


def is_of_torch(file: str) -> bool:
    """Whether torch's code is in this file."""
    return file.startswith(os.path.dirname(torch.__file__) + os.sep)  # not torchvision


def is_ours(file: str) -> bool:
    """Whether the runtime's code is in this file; the models that we ship do not count."""
    return os.path.dirname(file) == os.path.dirname(__file__)


def _texts(breaks: list[GraphBreak]) -> str:
    return "; ".join(dict.fromkeys(map(_text, breaks)))


def _text(known: GraphBreak) -> str:
    place = "" if is_of_torch(known.file) else f" at {known.file}:{known.line}"
    return f"graph break{place}: {known.reason}"


def _is_called_by_compiled() -> bool:
    return any(frame.f_code.co_name == torch_compat.COMPILED_FRAME for frame in _stack())


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
