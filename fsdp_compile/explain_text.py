"""An explanation as text, for people: tables in which lines that differ in a number alone are folded into one.

blocks.0               416 MiB  at the start  ...
blocks.1 … blocks.31   416 MiB  in blocks.0 … ...
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields

from .explain import Explanation, GraphRun
from .passes import Report, Summary, Traffic, milliseconds, readable_size
from .passes.summary import ROOT, Group, Move, Part
from .text_table import aligned

FOLDED = 3  # lines at least
WIDTH = 118


def as_text(explanation: Explanation, folds: bool) -> str:
    """The tables; with ``folds``, what is alike in one line."""
    rows = [Row((run.name or ROOT,), (str(run),)) for run in explanation.modules]
    lines = aligned([["module", "ran"], *([fold.names[0], *fold.first.fixed] for fold in _fold(rows, folds))])
    for place in explanation.breaks:
        of = ", ".join(_folded_names(place.modules))
        lines.append(f"graph break in {of}, {place.file}:{place.line}: {place.reason}")
    for position, graph in enumerate(explanation.graphs, 1):
        lines += ["", *_graph(position, graph, folds)]
    return "\n".join(lines)


def _graph(position: int, graph: GraphRun, folds: bool) -> Iterator[str]:
    yield from _wrapped(f"graph {position}, of ", ", ".join(_folded_names(graph.modules)))
    if graph.note:
        yield f"  {graph.note}"
    if graph.summary is not None:
        if not any(part.moves for part in graph.summary.parts):
            yield "  moves nothing"
            return
        yield from _summary(graph.summary, folds)
    yield from _passes(graph.passes)


def _passes(reports: Sequence[Report]) -> Iterator[str]:
    idle = ", ".join(dict.fromkeys(each.name for each in reports if not each.changes))
    if reports:
        yield "  passes" + (f" ({idle} changed nothing)" if idle else "")
    changed = [each for each in reports if each.changes]
    width = max((len(each.name) for each in changed), default=0)
    for each in changed:
        yield from _wrapped(f"    {each.name:{width}}  ", _effect(each))


def _summary(summary: Summary, folds: bool) -> Iterator[str]:
    count = sum(len(group.params) for group in summary.groups)
    yield f"  captured: {_count(len(summary.groups), 'group')}, {_count(count, 'parameter')}"
    rows = [
        Row((group.name,), (str(len(group.params)), _members(group.name, group.params))) for group in summary.groups
    ]
    for fold in _fold(rows, folds):
        size, members = fold.first.fixed
        yield from _wrapped(f"    {fold.names[0]}: {size}: ", members)
    exposed, peak = milliseconds(summary.exposed), readable_size(summary.peak)
    yield f"  simulated on {summary.machine}: {milliseconds(summary.seconds)}, exposed {exposed}, peak {peak}"
    for part in summary.parts:
        yield from _part(part, summary.groups, folds)


def _part(part: Part, groups: Sequence[Group], folds: bool) -> Iterator[str]:
    took, compute = milliseconds(part.seconds), milliseconds(part.compute)
    yield f"  {part.name}: {_traffic(part.traffic)}; {took}, of which compute {compute}"
    whole = {(group.name, group.params) for group in groups}
    for kind in dict.fromkeys(move.kind for move in part.moves):
        folded = list(_fold([_row(move) for move in part.moves if move.kind == kind], folds))
        table = aligned([[kind, "whole", "launched", "waited for", "exposed"], *map(_cells, folded)])
        yield f"    {table[0]}"
        for line, fold in zip(table[1:], folded, strict=True):
            yield f"    {line}"
            move = fold.first.move
            if move is not None and move.params and not (folds and (move.name, move.params) in whole):
                yield from _wrapped(f"        {len(move.params)}: ", _members(move.name, move.params))


def _row(move: Move) -> Row:
    names = (move.name or "of the model", move.launched, move.waited, move.reason)
    return Row(names, (readable_size(move.bytes), _members(move.name, move.params)), move)


def _cells(fold: Fold) -> list[str]:
    name, launched, waited, reason = fold.names
    return [name, fold.first.fixed[0], launched, waited, _exposed(fold) + (f"  {reason}" if reason else "")]


def _exposed(fold: Fold) -> str:
    """The least and the most of the lines."""
    times = [row.move.exposed for row in fold.rows if row.move is not None]
    least, most = milliseconds(min(times)), milliseconds(max(times))
    return "" if not max(times) else least if least == most else f"{least} to {most}"


def _members(name: str, params: Iterable[str]) -> str:
    return " ".join(param.removeprefix(f"{name}.") for param in params)


def _traffic(traffic: Traffic) -> str:
    counts = (("gather", traffic.gathers), ("reduction", traffic.reductions), ("all-reduce", traffic.all_reduces))
    return ", ".join(_count(number, what) for what, number in counts if number) or "nothing is moved"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _effect(report: Report) -> str:
    """What it changed, and how the step goes before and after, if that was measured."""
    rows = zip(fields(report.before), astuple(report.before), astuple(report.after), strict=True)
    steps = [f"{each.name.replace('_', ' ')} {old} -> {new}" for each, old, new in rows if old != new]
    if report.step_before is not None and report.step_after is not None:
        old, new = report.step_before, report.step_after
        steps.append(f"exposed {old.exposed * 1e3:.3f} -> {milliseconds(new.exposed)}")
        steps.append(f"peak {readable_size(old.peak)} -> {readable_size(new.peak)}")
    return _count(report.changes, "change") + (f": {', '.join(steps)}" if steps else "")


def _wrapped(start: str, text: str) -> list[str]:
    indent = " " * (len(start) - len(start.lstrip()) + 4)
    return textwrap.wrap(start + text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


# -- folding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        names: cells in which numbers may count up or down from line to line where these are folded.
        fixed: cells that must be equal.
        move: that it is of, if any.
    """

    names: tuple[str, ...]
    fixed: tuple[str, ...]
    move: Move | None = None


@dataclass(frozen=True)
class Fold:
    """Lines that become one."""

    rows: list[Row]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def names(self) -> list[str]:
        """The cells of the one line: the first cell from where to where, the others of the first line."""
        first, last = self.rows[0], self.rows[-1]
        if len(self.rows) == 1:
            return list(first.names)
        rest = zip(first.names[1:], last.names[1:], strict=True)
        return [f"{first.names[0]} … {last.names[0]}", *(old if old == new else f"{old} …" for old, new in rest)]

    def takes(self, row: Row) -> bool:
        """Whether ``row`` goes on as the lines before: each number stays, or goes one further each time."""
        steps = _steps(self.rows[0], row)
        if steps is None or not any(steps):
            return False
        if len(self.rows) == 1:
            return set(steps) <= {0, 1} or set(steps) <= {0, -1}
        one = _steps(self.rows[0], self.rows[1])
        return one is not None and steps == [len(self.rows) * step for step in one]


def _fold(rows: Sequence[Row], folds: bool = True) -> list[Fold]:
    """In the order of the first line of each; what is too few to be folded stays as it is."""
    found: list[Fold] = []
    for row in rows:
        fold = next((each for each in found if each.takes(row)), None) if folds else None
        if fold is None:
            found.append(Fold([row]))
        else:
            fold.rows.append(row)
    kept = [part for fold in found for part in ([fold] if len(fold.rows) >= FOLDED else map(_alone, fold.rows))]
    place = {id(row): position for position, row in enumerate(rows)}
    return sorted(kept, key=lambda fold: place[id(fold.first)])


def _alone(row: Row) -> Fold:
    return Fold([row])


def _folded_names(names: Iterable[str]) -> list[str]:
    return [fold.names[0] for fold in _fold([Row((name or ROOT,), ()) for name in names])]


def _steps(row: Row, other: Row) -> list[int] | None:
    """How far each number in the names has gone; ``None`` if anything else differs."""
    if row.fixed != other.fixed or _without_numbers(row.names) != _without_numbers(other.names):
        return None
    return [new - old for old, new in zip(_numbers(row.names), _numbers(other.names), strict=True)]


def _without_numbers(names: Iterable[str]) -> list[str]:
    return [re.sub(r"\d+", "#", name) for name in names]


def _numbers(names: Iterable[str]) -> list[int]:
    return [int(number) for name in names for number in re.findall(r"\d+", name)]
