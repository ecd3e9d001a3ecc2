"""Compares a simulated trace with a measured one: how far off is each collective, and the step?

Collectives are matched by phase, kind and group; where there are several alike in a step, by order. Of the measured
steps those count that have just the simulated collectives, each time the median over them. A measured transfer also
contains what a rank waits for another that has not launched it yet; the simulation knows no such waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .measured_trace import MICRO, Collective, Entry, Step, Trace, TraceError, read_entries, steps

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
        rows: one for each collective, in simulated order.
        predicted_step, measured_step: seconds of forward and backward.
        matched, measured: steps that count, and all measured steps.
        missing, unexpected: collectives, by phase and title, that the last measured step lacks or has beside the
            simulated ones; both empty unless no step counts.
    """

    rows: list[Row]
    predicted_step: float
    measured_step: float
    matched: int
    measured: int
    missing: Counter[tuple[str, str]]
    unexpected: Counter[tuple[str, str]]

    @property
    def same_model(self) -> bool:
        """Whether some measured step has just the simulated collectives."""
        return self.matched > 0


def compare(simulated: Path, measured: Path) -> Comparison:
    """Compare the trace of ``fsdp-compile plan --trace`` with that of ``torch.profiler``.

    Raises:
        TraceError: a file is not what it should be, or nothing was simulated for the number of ranks that ran.
    """
    trace = Trace(measured)
    predicted = read_simulated(simulated, trace.world_size)
    found = steps(trace)
    wanted = Counter((each.phase, each.title) for each in predicted.collectives)
    good = [step for step in found if _contents(step) == wanted]
    last = _contents(found[-1]) if not good else wanted
    return Comparison(
        _rows(predicted, good),
        predicted.seconds,
        median(step.seconds for step in good or found[-1:]),
        len(good),
        len(found),
        wanted - last,
        last - wanted,
    )


def read_simulated(path: Path, ranks: int | None) -> Simulated:
    """The simulated step for a number of ranks; ``None``: of the only number that there is.

    Raises:
        TraceError: the file is no trace by ``fsdp-compile plan``, or has no such number of ranks.
    """
    _, entries = read_entries(path)
    worlds = {entry["pid"]: entry["args"]["ranks"] for entry in entries if "ranks" in entry.get("args", {})}
    if not worlds:
        raise TraceError(f"{path} is no trace that fsdp-compile plan --trace wrote: it says of no number of ranks")
    chosen = [process for process, there in worlds.items() if ranks in (None, there)]
    if len(chosen) != 1:
        known = ", ".join(map(str, worlds.values()))
        raise TraceError(f"{path} is for {known} ranks, but the measured trace is of {ranks or 'unknown'} ranks")
    try:
        bars = [entry for entry in entries if entry.get("ph") == "X" and entry["pid"] == chosen[0]]
        launched = sorted((entry for entry in bars if "phase" in entry.get("args", {})), key=lambda entry: entry["ts"])
        end = max(entry["ts"] + entry["dur"] for entry in bars)
        return Simulated(end * MICRO, [_predicted(entry) for entry in launched])
    except (KeyError, TypeError) as error:
        raise TraceError(f"{path} is no trace: a bar in it is not complete ({error!r})") from error


def _predicted(entry: Entry) -> Predicted:
    args = entry["args"]
    return Predicted(args["phase"], entry["name"], entry["dur"] * MICRO, args["exposed us"] * MICRO)


def _contents(step: Step) -> Counter[tuple[str, str]]:
    return Counter((each.phase, each.title) for each in step.collectives)


def _rows(predicted: Simulated, good: list[Step]) -> list[Row]:
    found: defaultdict[Key, list[Collective]] = defaultdict(list)
    for step in good:
        for key, each in zip(_keys(step.collectives), step.collectives, strict=True):
            found[key].append(each)
    rows = []
    for key, simulated in zip(_keys(predicted.collectives), predicted.collectives, strict=True):
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
    if not comparison.same_model:
        return _difference(comparison)
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
    widths = [max(len(line[column]) for line in [header, *body]) for column in range(len(header))]
    lines = [f"ms; median of {comparison.matched} measured steps; error: how much too long (+) or short (-) predicted"]
    for name, *cells in [header, *body]:
        rest = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *rest]).rstrip())
    return "\n".join([*lines, *_notes(comparison, len(comparison.rows) - len(shown))]) + "\n"


def _cells(predicted: float, measured: float | None) -> list[str]:
    if measured is None:
        return [_ms(predicted), "not seen", ""]
    error = f"{100 * (predicted / measured - 1):+.0f} %" if measured else ""
    return [_ms(predicted), _ms(measured), error]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _notes(comparison: Comparison, not_seen: int) -> Iterable[str]:
    if not_seen:
        yield (
            f"NOT SEEN: {not_seen} collectives have no transfer in the measured trace, and are not in the sums; on "
            "GPUs the profiler needs ProfilerActivity.CUDA"
        )
    other = comparison.measured - comparison.matched
    if other:
        yield f"LEFT OUT: {other} measured steps with other collectives than the simulated ones"


def _difference(comparison: Comparison) -> str:
    lines = ["NOT COMPARED: none of the measured steps has the simulated collectives; the last one"]
    for what, some in (("lacks", comparison.missing), ("has beside them", comparison.unexpected)):
        lines += [f"  {what}: {count} x {phase} {title}" for (phase, title), count in some.items()]
    lines.append("Are they of the same model, sharded alike, with the same configuration of the passes?")
    return "\n".join(lines) + "\n"
