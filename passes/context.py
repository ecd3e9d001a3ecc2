"""What a pass is told, and what it reports."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, fields
from functools import cache
from pathlib import Path

from torch.fx import Graph

from .graph_view import all_reduces, frees, gathers, reductions

Observer = Callable[[str, Graph], None]


@dataclass(frozen=True)
class PassConfig:
    """The choices a user has. Part of the key of compile caches.

    Attributes:
        bucket: move each group's parameters in one collective; otherwise each parameter travels alone.
        schedule: launch gathers ahead of their use, and let reductions run on; otherwise wait for each at once.
        memory_budget: peak of live bytes, as ``memory`` counts them, that ``schedule`` may fill; ``None`` for the peak
            of FSDP2's eager order.
    """

    bucket: bool = True
    schedule: bool = True
    memory_budget: int | None = None

    def digest(self) -> bytes:
        """Hash of the choices and of the source of all passes: another source means another result."""
        return hashlib.sha256(repr(astuple(self)).encode() + source_digest(Path(__file__).parent)).digest()


@cache
def source_digest(directory: Path) -> bytes:
    """Hash of the Python files in ``directory``, for keys of compile caches."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


@dataclass(frozen=True)
class Traffic:
    """The collectives of a graph. Bytes are those of this rank's inputs, padding included."""

    gathers: int
    gather_bytes: int
    reductions: int
    reduction_bytes: int
    all_reduces: int
    all_reduce_bytes: int
    frees: int

    @classmethod
    def of(cls, graph: Graph) -> Traffic:
        """Count what is in ``graph``."""
        gathered, reduced, all_reduced = (list(kind(graph)) for kind in (gathers, reductions, all_reduces))
        return cls(
            *(len(gathered), sum(each.input_bytes for each in gathered)),
            *(len(reduced), sum(each.input_bytes for each in reduced)),
            *(len(all_reduced), sum(each.input_bytes for each in all_reduced)),
            len(frees(graph)),
        )


@dataclass(frozen=True)
class Report:
    """What one pass did to one graph. ``changes`` is 0 if it left the graph as it was."""

    name: str
    changes: int
    before: Traffic
    after: Traffic

    def __str__(self) -> str:
        steps = (
            f"{what} {old} -> {new}"
            for what, old, new in zip(
                (each.name.replace("_", " ") for each in fields(self.before)),
                astuple(self.before),
                astuple(self.after),
                strict=True,
            )
            if old or new
        )
        return f"{self.name}: {self.changes} changes; {', '.join(steps)}"


@dataclass
class PassContext:
    """What the passes of one pipeline share.

    Attributes:
        config: the user's choices.
        observer: called with a stage's name ("joint before", "forward after", ...) and its graph, which it must not
            change.
        reports: one for each pass run, in order.
    """

    config: PassConfig = field(default_factory=PassConfig)
    observer: Observer | None = None
    reports: list[Report] = field(default_factory=list)

    def observe(self, stage: str, graph: Graph) -> None:
        """Show ``graph`` to the observer."""
        if self.observer is not None:
            self.observer(stage, graph)
