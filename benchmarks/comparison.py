"""Two contestants' samples to one line of the table: medians, their ratio and how sure it is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RESAMPLES = 2000


@dataclass
class Comparison:
    """A line of the table.

    Attributes:
        ratio: of the medians, ours to torch's.
        low, high: bounds that hold 95% of the ratios of rounds drawn again with replacement.
        goal: what the ratio should be at most, if there is such a goal.
    """

    quantity: str
    unit: str
    ours: float
    torch: float
    ratio: float
    low: float
    high: float
    goal: float | None

    @property
    def met(self) -> str:
        """``open``: the interval contains the goal."""
        if self.goal is None:
            return ""
        return "yes" if self.high <= self.goal else "no" if self.low > self.goal else "open"

    def cells(self) -> tuple[str, ...]:
        return (
            f"{self.quantity}, {self.unit}",
            f"{self.ours:.1f}",
            f"{self.torch:.1f}",
            f"{self.ratio:.3f}",
            f"{self.low:.3f} - {self.high:.3f}",
            "" if self.goal is None else f"{self.goal:.2f}",
            self.met,
        )


def compare(
    quantity: str, unit: str, scale: float, ours: Sequence[float], torch: Sequence[float], goal: float | None = None
) -> Comparison:
    """Compare samples that were taken in pairs, one of each a round.

    Args:
        scale: from samples to ``unit``.
    """
    rounds = range(len(ours))
    generator = random.Random(0)
    ratios = sorted(
        _ratio([ours[i] for i in drawn], [torch[i] for i in drawn])
        for drawn in (generator.choices(rounds, k=len(ours)) for _ in range(RESAMPLES))
    )
    low, high = ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES)]
    ratio = _ratio(ours, torch)
    return Comparison(quantity, unit, scale * median(ours), scale * median(torch), ratio, low, high, goal)


def _ratio(ours: Sequence[float], torch: Sequence[float]) -> float:
    return median(ours) / median(torch)


def as_table(comparisons: Sequence[Comparison], ours: str = "ours", theirs: str = "torch") -> str:
    header = ("quantity", ours, theirs, "ratio", "95% interval", "goal", "met")
    rows = [header, *(each.cells() for each in comparisons)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in cells).rstrip()
        for cells in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
    )
