"""Reads a trace of a real run: which collectives each step had, of which groups, and how long they took.

    profiler's file ─ Trace ─ named_launches: marks, launches ─ transfers: what each moved, when ─ steps

A trace by ``torch.profiler`` shows operators, and what the transport does for them elsewhere: on gloo as bars of its
threads, on NCCL as kernels. Nothing in it says whose parameters are moved, but for our marks: right before it launches
collectives, a graph (``passes.announce``) or an eager transition (``profiler_marks``) names them in order. So the n-th
launch of a thread after a mark is the n-th of its names.

    marks       forward: a; b                    backward: b
    operators        launch  launch   wait  wait      launch        wait  wait
    transport          ├── a ──┤├── b ──┤               ├─── b ───┤

Times in the file are microseconds, here seconds on the clock of the trace.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .passes.announce import PREFIX
from .profiler_marks import WAIT

MICRO = 1e-6
MARK = re.compile(rf"{PREFIX} (forward|backward): (.+)")
PART = re.compile(r"(.+?)(?: x (\d+))?")
OPERATOR = re.compile(r"fsdp_passes::gather|_c10d_functional(?:_autograd)?::(?!wait_tensor|_wrap)\w+|c10d::\w+")
WAITS = ("_c10d_functional::wait_tensor", WAIT)
BACKWARD = "autograd::engine::evaluate_function"  # how autograd calls each of its nodes

NAMED = PREFIX  # category of the bars that ``name_groups`` adds

# What a collective may be launched as: to reduce and scatter, gloo reduces everywhere.
LAUNCHED_AS = {"reduce_scatter": ("reduce_scatter", "all_reduce")}

Entry = dict[str, Any]  # of the file
Span = tuple[float, float]  # begin and end in seconds


class TraceError(ValueError):
    """The file is no trace, or not one of the kind that is needed; the message says why, in one line."""


@dataclass(frozen=True)
class Bar:
    """Something that took time, of one thread of the host or one stream of a device."""

    name: str
    category: str
    lane: tuple[Any, Any]  # process and thread, as the file numbers them
    begin: float
    end: float
    external: int | None  # an operator's number; of what a device does, that of the operator that started it


@dataclass
class Collective:
    """One planned collective in one step.

    Attributes:
        phase: "forward" or "backward".
        title: its kind and group, like "all_gather [blocks.0]".
        launches: the operators that launch it, at least one; on gloo there may be several.
        moves: what the transport does for them; empty if that is not in the trace.
        exposed: seconds of these in which compute stood still.
    """

    phase: str
    title: str
    launches: list[Bar]
    moves: list[Bar]
    exposed: float = 0.0

    @property
    def seconds(self) -> float:
        """In which it was under way."""
        return _length(_union(_spans(self.moves)))


@dataclass(frozen=True)
class Step:
    """A forward and its backward: when it began and ended, and its collectives by launch."""

    begin: float
    end: float
    collectives: list[Collective]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


# -- the file ---------------------------------------------------------------------------------------------------------


def read_entries(path: Path) -> tuple[Entry, list[Entry]]:
    """The file, and the list of entries in it; a name that ends in ".gz" says that it is compressed.

    Raises:
        TraceError: it cannot be read, or is no trace.
    """
    try:
        data = path.read_bytes()
        read = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TraceError(f"cannot read {path}: {reason}") from error
    entries = read.get("traceEvents") if isinstance(read, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TraceError(f"{path} is no trace: it has no list of traceEvents")
    return read, entries


class Trace:
    """The bars of a measured trace, without what ``name_groups`` has added.

    Raises:
        TraceError: the file cannot be read, or is no trace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file, entries = read_entries(path)
        self.entries = [entry for entry in entries if entry.get("cat") != NAMED]
        try:
            bars = [_bar(entry) for entry in self.entries if entry.get("ph") == "X"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path} is no trace: a bar in it is not complete ({error!r})") from error
        self.bars = sorted(bars, key=lambda bar: (bar.begin, -bar.end))  # what encloses others comes first
        on_device = [bar for bar in self.bars if bar.category == "kernel"]
        self.compute_kernels = [bar for bar in on_device if "nccl" not in bar.name.lower()]
        self.transport_kernels = [bar for bar in on_device if "nccl" in bar.name.lower()]

    @property
    def world_size(self) -> int | None:
        """Ranks that ran; ``None`` if the trace does not say."""
        said = self.file.get("distributedInfo")
        world = said.get("world_size") if isinstance(said, dict) else None
        return world if isinstance(world, int) else None

    @cached_property
    def operators_by_thread(self) -> dict[tuple[Any, Any], list[Bar]]:
        """Operators, and marks, of each thread of the host, by begin."""
        found: defaultdict[tuple[Any, Any], list[Bar]] = defaultdict(list)
        for bar in self.bars:
            if bar.category in ("cpu_op", "user_annotation"):
                found[bar.lane].append(bar)
        return found

    def inside(self, outer: Bar) -> list[Bar]:
        """The operator ``outer`` and those that it calls."""
        thread = self.operators_by_thread[outer.lane]
        first = bisect_left(thread, outer.begin, key=lambda bar: bar.begin)
        last = bisect_right(thread, outer.end, key=lambda bar: bar.begin)
        return [bar for bar in thread[first:last] if bar.end <= outer.end]


def _bar(entry: Entry) -> Bar:
    begin = float(entry["ts"]) * MICRO
    external = entry.get("args", {}).get("External id")
    lane = (entry["pid"], entry["tid"])
    return Bar(entry["name"], entry.get("cat", ""), lane, begin, begin + float(entry["dur"]) * MICRO, external)


# -- collectives ------------------------------------------------------------------------------------------------------


def steps(trace: Trace) -> list[Step]:
    """The steps of a trace that have a forward and a backward, in order.

    Raises:
        TraceError: there are none.
    """
    found: list[list[Collective]] = [[]]
    for each in collectives(trace):
        if each.phase == "forward" and found[-1] and found[-1][-1].phase == "backward":
            found.append([])
        found[-1].append(each)
    ends = [some[0].launches[0].begin for some in found[1:]] + [float("inf")]
    both = {"forward", "backward"}
    made = [
        _step(trace, some, end) for some, end in zip(found, ends, strict=True) if {each.phase for each in some} == both
    ]
    if not made:
        raise TraceError(
            f"{trace.path} has no step: it needs a forward and a backward of a model that fsdp_compile shards, by "
            "torch.profiler with ProfilerActivity.CPU"
        )
    return made


def _step(trace: Trace, some: list[Collective], until: float) -> Step:
    """From its first launch until its backward is done, on the host and on the device."""
    begin = some[0].launches[0].begin
    operators = [bar for bar in trace.bars if begin <= bar.begin < until and bar.category == "cpu_op"]
    backward = [bar for bar in operators if bar.name.startswith(BACKWARD)]
    ours = [bar for each in some for bar in (*each.launches, *each.moves)]
    waits = [bar for bar in trace.bars if begin <= bar.begin < until and bar.name in WAITS]
    end = max(bar.end for bar in (*backward, *ours, *waits))
    started = {bar.external for bar in operators if bar.end <= end}
    kernels = [bar.end for bar in (*trace.compute_kernels, *trace.transport_kernels) if bar.external in started]
    return Step(begin, max([end, *kernels]), some)


def collectives(trace: Trace) -> list[Collective]:
    """All collectives that marks name, by launch."""
    named, foreign = _named_launches(trace)
    launches = [launch for each in named for launch in each.launches]
    moves = _moves(trace, sorted([*launches, *foreign], key=lambda bar: bar.begin))
    standing = _union(_spans(bar for bar in trace.bars if bar.name in WAITS))
    computing = _union(_spans(trace.compute_kernels))
    for each in named:
        each.moves = [move for launch in each.launches for move in moves[launch]]
        moving = _union(_spans(each.moves))
        on_device = any(move.category == "kernel" for move in each.moves)
        hidden = _common(moving, computing) if on_device else _length(moving) - _common(moving, standing)
        each.exposed = _length(moving) - hidden
    return sorted(named, key=lambda each: each.launches[0].begin)


def _named_launches(trace: Trace) -> tuple[list[Collective], list[Bar]]:
    """Collectives with their launches, and launches that no mark names."""
    named: list[Collective] = []
    foreign: list[Bar] = []
    for thread in trace.operators_by_thread.values():
        expected: deque[tuple[str, str, int]] = deque()  # phase and title, and where in `named` it is or will be
        end = 0.0  # of the launch that comes before: operators inside of it launch the same
        for bar in thread:
            mark = MARK.fullmatch(bar.name)
            if mark:
                expected = deque(_expected(*mark.groups()))
            elif bar.begin >= end and bar.category == "cpu_op" and OPERATOR.fullmatch(bar.name):
                end = bar.end
                if not (expected and _may_be(bar, expected[0][1])):
                    foreign.append(bar)
                    continue
                phase, title, part = expected.popleft()
                if part:
                    named[-1].launches.append(bar)
                else:
                    named.append(Collective(phase, title, [bar], []))
    return named, foreign


def _expected(phase: str, listed: str) -> Iterator[tuple[str, str, int]]:
    """Phase, title and number of the part, of each launch that a mark announces."""
    for text in listed.split("; "):
        matched = PART.fullmatch(text)
        assert matched is not None
        for part in range(int(matched[2] or 1)):
            yield phase, matched[1], part


def _may_be(launch: Bar, title: str) -> bool:
    kind = title.split(" ")[0]
    return _kind(launch.name) in LAUNCHED_AS.get(kind, (kind,))


def _kind(name: str) -> str:
    """Of a collective, by the name of its operator or of a transport's bar; else the name."""
    name = name.lower().replace("_", "")
    known = [
        *(("reducescatter", "reduce_scatter"), ("gather", "all_gather")),
        *(("allreduce", "all_reduce"), ("alltoall", "all_to_all")),
    ]
    return next((kind for part, kind in known if part in name), name.rpartition(":")[2])


# -- transport --------------------------------------------------------------------------------------------------------


def _moves(trace: Trace, launches: Sequence[Bar]) -> dict[Bar, list[Bar]]:
    """What the transport does for each launch: kernels, else a bar of gloo's threads."""
    kernels: defaultdict[int | None, list[Bar]] = defaultdict(list)
    for bar in trace.transport_kernels:
        kernels[bar.external].append(bar)
    by_gloo = [bar for bar in trace.bars if bar.name.startswith("gloo:") and bar.category == "user_annotation"]
    waiting: defaultdict[str, deque[Bar]] = defaultdict(deque)
    for bar in by_gloo:
        waiting[_by_gloo(_kind(bar.name))].append(bar)
    moves: dict[Bar, list[Bar]] = {}
    for launch in launches:
        numbers = {bar.external for bar in trace.inside(launch)} - {None}
        moves[launch] = [bar for number in sorted(numbers) for bar in kernels[number]]  # type: ignore[type-var]
        queue = waiting[_by_gloo(_kind(launch.name))]
        while queue and queue[0].begin < launch.begin:
            queue.popleft()  # launched before the trace began
        if not moves[launch] and queue:
            moves[launch] = [queue.popleft()]  # gloo starts collectives in the order of their launches
    return moves


def _by_gloo(kind: str) -> str:
    return "all_reduce" if kind == "reduce_scatter" else kind


# -- spans ------------------------------------------------------------------------------------------------------------


def _spans(bars: Iterable[Bar]) -> list[Span]:
    return [(bar.begin, bar.end) for bar in bars]


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not overlap, by begin."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _common(some: Sequence[Span], others: Sequence[Span]) -> float:
    """Seconds that lie in both; each is a union."""
    total = 0.0
    for begin, end in some:
        first = bisect_left(others, begin, key=lambda span: span[1])
        for other_begin, other_end in others[first:]:
            if other_begin >= end:
                break
            total += min(end, other_end) - max(begin, other_begin)
    return total
