"""Compares a simulated trace with a measured one: how far off is each collective, and the step?

Collectives are matched by phase, kind and group; where there are several alike in a step, by order. Of the measured
steps those count that have just the simulated collectives, or, if none has, those that are like the last one; each time
is the median over them. A measured transfer also contains what a rank waits for another that has not launched it yet;
the simulation knows no such waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .measured_trace import MICRO, Collective, Entry, Step, Trace, TraceError, read_entries, steps
from .text_table import aligned

Key = tuple[str, str, int]  # phase, title, and which of those alike in a step


@dataclass(frozen=True)
class Predicted:
    """A simulated collective. Seconds."""

    phase: str
    title: str
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Simulated:
    """A simulated step: its seconds, and its collectives by launch."""

    seconds: float
    collectives: list[Predicted]


@dataclass(frozen=True)
class Row:
    """One collective. Seconds; ``None`` where the measured trace does not show the transfer."""

    predicted: Predicted
    seconds: float | None
    exposed: float | None


@dataclass(frozen=True)
class Comparison:
    """What was predicted, beside what was measured.

    Attributes:
        rows: one for each collective that is in both, in simulated order.
        predicted_step, measured_step: seconds of forward and backward.
        counted, measured: steps that count, and all measured steps.
        missing, unexpected: collectives, by phase and title, that these steps lack, or have beside the simulated ones.
    """

    rows: list[Row]
    predicted_step: float
    measured_step: float
    counted: int
    measured: int
    missing: Counter[tuple[str, str]]
    unexpected: Counter[tuple[str, str]]

    @property
    def same_model(self) -> bool:
        """Whether the measured steps have just the simulated collectives."""
        return not self.missing and not self.unexpected


def compare(simulated: Path, measured: Path) -> Comparison:
    """Compare the trace of ``fsdp-compile plan --trace`` with that of ``torch.profiler``.

    Raises:
        TraceError: a file is not what it should be, or nothing was simulated for the number of ranks that ran.
    """
    trace = Trace(measured)
    found = steps(trace)
    predicted = read_simulated(simulated, trace.world_size)
    wanted = Counter((each.phase, each.title) for each in predicted.collectives)
    contents = [_contents(step) for step in found]
    chosen = wanted if wanted in contents else contents[-1]
    counted = [step for step, content in zip(found, contents, strict=True) if content == chosen]
    return Comparison(
        _rows(predicted, counted),
        predicted.seconds,
        median(step.seconds for step in counted),
        len(counted),
        len(found),
        wanted - chosen,
        chosen - wanted,
    )


def read_simulated(path: Path, ranks: int | None) -> Simulated:
    """The simulated step for a number of ranks; ``None``: of the only number that there is.

    Raises:
        TraceError: the file is no trace by ``fsdp-compile plan``, or has no such number of ranks.
    """
    _, entries = read_entries(path)
    worlds = {entry.get("pid"): entry["args"]["ranks"] for entry in entries if "ranks" in (entry.get("args") or {})}
    if not worlds:
        raise TraceError(f"{path} is no trace that fsdp-compile plan --trace wrote: it says of no number of ranks")
    if ranks is None and len(worlds) == 1:
        ranks = next(iter(worlds.values()))
    chosen = [process for process, there in worlds.items() if there == ranks]
    if len(chosen) > 1:
        raise TraceError(f"{path} has several plans for the same number of ranks; write a trace with one")
    if not chosen:
        known = ", ".join(map(str, worlds.values()))
        raise TraceError(f"{path} is for {known} ranks, but the measured trace is of {ranks or 'unknown'} ranks")
    try:
        bars = [entry for entry in entries if entry.get("ph") == "X" and entry["pid"] == chosen[0]]
        collectives = [entry for entry in bars if "phase" in (entry.get("args") or {})]
        launched = sorted(collectives, key=lambda entry: entry["ts"])
        end = max(entry["ts"] + entry["dur"] for entry in bars)
        return Simulated(end * MICRO, [_predicted(entry) for entry in launched])
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is no trace: a bar in it is not complete ({error!r})") from error


def _predicted(entry: Entry) -> Predicted:
    args = entry["args"]
    return Predicted(args["phase"], entry["name"], entry["dur"] * MICRO, args["exposed us"] * MICRO)


def _contents(step: Step) -> Counter[tuple[str, str]]:
    return Counter((each.phase, each.title) for each in step.collectives)


def _rows(predicted: Simulated, counted: list[Step]) -> list[Row]:
    found: defaultdict[Key, list[Collective]] = defaultdict(list)
    for step in counted:
        for key, each in zip(_keys(step.collectives), step.collectives, strict=True):
            found[key].append(each)
    rows = []
    for key, simulated in zip(_keys(predicted.collectives), predicted.collectives, strict=True):
        if key not in found:
            continue
        seen = [each for each in found[key] if each.moves]
        seconds = median(each.seconds for each in seen) if seen else None
        rows.append(Row(simulated, seconds, median(each.exposed for each in seen) if seen else None))
    return rows


def _keys(collectives: Iterable[Predicted | Collective]) -> list[Key]:
    seen: Counter[tuple[str, str]] = Counter()
    keys = []
    for each in collectives:
        keys.append((each.phase, each.title, seen[each.phase, each.title]))
        seen[each.phase, each.title] += 1
    return keys


# -- for people -------------------------------------------------------------------------------------------------------


def as_table(comparison: Comparison) -> str:
    """The comparison as text: milliseconds, and how much longer (+) or shorter (-) than measured was predicted."""
    shown = [row for row in comparison.rows if row.seconds is not None]
    header = ["", "predicted", "measured", "error", "exposed: predicted", "measured"]
    body = [
        [f"{row.predicted.phase}  {row.predicted.title}", *_cells(row.predicted.seconds, row.seconds)]
        + _cells(row.predicted.exposed, row.exposed)[:2]
        for row in comparison.rows
    ]
    sums = [sum(row.predicted.seconds for row in shown), sum(row.seconds or 0.0 for row in shown)]
    exposed = [sum(row.predicted.exposed for row in shown), sum(row.exposed or 0.0 for row in shown)]
    body.append(["all collectives", *_cells(*sums), *_cells(*exposed)[:2]])
    body.append(["step", *_cells(comparison.predicted_step, comparison.measured_step), "", ""])
    said = f"ms; median of {comparison.counted} measured steps; error: how much too long (+) or short (-) predicted"
    lines = [said, *aligned([header, *body], numbers=True)]
    return "\n".join([*lines, *_notes(comparison, len(comparison.rows) - len(shown))]) + "\n"


def _cells(predicted: float, measured: float | None) -> list[str]:
    if measured is None:
        return [_ms(predicted), "not seen", ""]
    error = f"{100 * (predicted / measured - 1):+.0f} %" if measured else ""
    return [_ms(predicted), _ms(measured), error]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _notes(comparison: Comparison, not_seen: int) -> Iterator[str]:
    if not_seen:
        yield f"NOT SEEN: {not_seen} collectives have no transfer in the measured trace and are not in the sums;"
        yield "  on GPUs the profiler needs ProfilerActivity.CUDA"
    if comparison.counted < comparison.measured:
        yield f"LEFT OUT: {comparison.measured - comparison.counted} measured steps with other collectives"
    if not comparison.same_model:
        yield "NOT THE SAME: the collectives of the two differ; is it the same model, sharded and configured alike?"
    for where, some in (("simulated", comparison.missing), ("measured", comparison.unexpected)):
        for (phase, title), count in some.items():
            yield f"  only {where}: {phase}  {title}" + (f", {count} times" if count > 1 else "")
