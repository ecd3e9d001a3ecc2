"""Remembers of the graphs that were compiled last what the passes made of them; ``explain`` reads it.

A graph is numbered while Dynamo traces it, and writes its number into the states of the modules that run in it: a
number tells the graphs of a process apart, whatever has been reset or compiled again in between. What is kept of one is
text and numbers, of so many graphs at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.fx import Graph

from . import torch_compat
from .passes import Observer, Report, Summary, merged, summarize

KEPT = 128

_known: dict[int, CompiledGraph] = {}


@dataclass
class CompiledGraph:
    """What is known of one graph of Dynamo's: of its forward and backward, or of an inference.

    Attributes:
        runs_passes: whether its backend does.
        passes: what each did, of all graphs together, in order. Empty if none ran, as when a cache had the result.
        summary: of what they made; ``None`` if none ran, or it could not be simulated.
        not_simulated: why not; or empty.
    """

    runs_passes: bool = False
    passes: list[Report] = field(default_factory=list)
    summary: Summary | None = None
    not_simulated: str = ""

    def note_passes(self, reports: Iterable[Report]) -> None:
        """Passes have run; one that runs once more without changes is not noted again."""
        known = {report.name for report in self.passes}
        self.passes += [each for each in merged(reports) if each.changes or each.name not in known]

    def observer(self, hardware: str | None) -> Observer:
        """Sums up what the passes show it when they are done."""
        parts: dict[str, Graph] = {}

        def see(stage: str, graph: Graph) -> None:
            part, when = stage.split()
            if when == "after" and part != "joint":
                parts[part] = graph
                if part != "forward":
                    self._sum_up(parts, hardware)

        return see

    def _sum_up(self, parts: dict[str, Graph], hardware: str | None) -> None:
        try:
            self.summary = summarize(parts, hardware)
        except Exception as error:  # a compile must not fail for what is there to be read, if anybody asks
            self.not_simulated = f"{type(error).__name__}: {error}"


def number_of_trace() -> int:
    """The number of the graph that Dynamo is tracing, which is known from now on."""
    number = torch_compat.number_of_graph()
    if number not in _known:
        _known[number] = CompiledGraph()
        for oldest in list(_known)[:-KEPT]:
            del _known[oldest]
    return number


def of_trace() -> CompiledGraph | None:
    """The graph that Dynamo is tracing, or has just given to its backend; ``None`` if it is in no module's state."""
    return _known.get(torch_compat.number_of_graph_if_any())


def known(number: int) -> CompiledGraph | None:
    """The graph of this number; ``None`` if too many have been compiled since."""
    return _known.get(number)
