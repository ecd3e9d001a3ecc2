"""Has eager transitions say to a profiler whose collectives they launch, as graphs do (``passes.announce``).

Without a profiler this is a look at a flag.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from . import torch_compat
from .passes import torch_compat as passes_compat
from .passes.announce import PREFIX, announcement
from .passes.graph_view import title

WAIT = f"{PREFIX} wait"


def mark_launch(kind: str, group: str, phase: str | None = None) -> None:
    """Say that the next collective of this thread is that of ``group``, a module's name, empty for the root.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        phase: "forward" or "backward"; default: the one that runs.
    """
    if passes_compat.profiler_runs():
        running = "backward" if torch_compat.in_backward() else "forward"
        text = announcement(phase or running, [(title(kind, group), 1)])
        with passes_compat.profiler_range(text):
            pass


def marked_wait() -> AbstractContextManager[object]:
    """Inside, this thread waits for a collective."""
    return passes_compat.profiler_range(WAIT)
