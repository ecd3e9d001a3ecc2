"""How good a plan is: what it takes in the simulation, beside what no plan can beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph

from .bounds import Bounds, bounds
from .costs import CheapestCosts
from .memory import MemoryProfile
from .simulate import Timeline, simulate

MOST_EXPOSED = 5  # collectives that are listed


@dataclass(frozen=True)
class Result:
    """A simulated plan. Its text is a table of what it takes, the bounds, and the gaps between them."""

    timeline: Timeline
    memory: MemoryProfile
    bounds: Bounds

    @property
    def live_over_time(self) -> list[tuple[float, int]]:
        """Seconds since the step's start at which each node's turn on the compute stream is, and bytes live then."""
        return list(zip(self.timeline.begins, self.memory.live, strict=True))

    def __str__(self) -> str:
        return "\n".join([*self._table(), "", *self._communication(), "", *self._peak()]) + "\n"

    def _table(self) -> list[str]:
        least = {"forward": self.bounds.time_forward, "backward": self.bounds.time_backward}
        times = [(phase.name, phase.seconds, least[phase.name]) for phase in self.timeline.phases]
        if len(times) > 1:
            times.append(("step", self.timeline.seconds, self.bounds.time_step))
        rows = [(name, milliseconds(took), milliseconds(least), _gap(took, least)) for name, took, least in times]
        took, needed = self.memory.peak, self.bounds.memory
        rows.append(("peak memory", readable_size(took), readable_size(needed), _gap(took, needed)))
        heading = ("", "result", "bound", "gap")
        return [f"{name:12}{took:>14}{least:>14}{gap:>10}".rstrip() for name, took, least, gap in (heading, *rows)]

    def _communication(self) -> list[str]:
        timeline = self.timeline
        busy = ", ".join(f"{lane} {milliseconds(seconds)}" for lane, seconds in timeline.lane_seconds.items())
        lines = [f"busy: compute {milliseconds(timeline.compute_seconds)}" + (f", {busy}" if busy else "")]
        exposed = sorted((each for each in timeline.transfers if each.exposed), key=lambda each: -each.exposed)
        lines.append(f"exposed: {milliseconds(timeline.exposed_seconds)} in {len(exposed)} collectives")
        lines += [f"  {milliseconds(each.exposed)}  {each.title}: {each.reason}" for each in exposed[:MOST_EXPOSED]]
        return lines

    def _peak(self) -> list[str]:
        parts = self.memory.composition(self.memory.peak_position)
        return [
            f"peak at {self.memory.at_peak}:",
            *(f"  {readable_size(size):>14}  {category}" for category, size in parts.items() if size),
        ]


def evaluate(graphs: Sequence[Graph], costs: CheapestCosts, at_least: Bounds | None = None) -> Result:
    """Simulate a forward and its backward, or one graph.

    Args:
        graphs: as they are to run.
        costs: of their nodes.
        at_least: the bounds of the same graphs before their collectives were merged; by default those of ``graphs``,
            which hold only for plans that merge no less.

    Raises:
        ValueError: the backward does not belong to the forward.
    """
    return Result(simulate(graphs, costs), MemoryProfile.of(graphs), at_least or bounds(graphs, costs))


def milliseconds(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds * 1e3:.3f} ms"


def readable_size(size: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _gap(took: float, least: float) -> str:
    return f"{took / least - 1:+.1%}" if least else "-"
