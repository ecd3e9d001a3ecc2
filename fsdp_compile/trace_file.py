"""A plan as a trace for a viewer: Perfetto, or Chrome's ``about:tracing``.

One process for each plan; in it a track of compute with the moments at which it stands still, one for each
process group, and the memory over time. The format is the Trace Event Format's JSON (Google), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .passes.costs import COMPUTE
from .passes.simulate import Event
from .planning import Plan

MICRO = 1e6

Entry = dict[str, Any]  # of the file


def write_trace(plans: Sequence[Plan], path: Path) -> None:
    """Write the plans side by side.

    Raises:
        OSError: the file cannot be written.
    """
    entries = [entry for process, plan in enumerate(plans) for entry in trace_of(plan, process)]
    path.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}) + "\n")


def trace_of(plan: Plan, process: int) -> Iterator[Entry]:
    """The entries of one plan, as those of a process with that number."""
    timeline = plan.result.timeline
    tracks = {lane: number for number, lane in enumerate([COMPUTE, *sorted(timeline.lane_seconds)])}
    yield _name("process_name", process, 0, _title(plan), ranks=plan.world_size)
    for lane, track in tracks.items():
        yield _name("thread_name", process, track, lane)
    for event in timeline.events():
        more = _of_collective(event) if event.phase else {}
        yield _bar(event.name, process, tracks[event.lane], event.begin, event.end, more)
    for each in timeline.transfers:
        if each.exposed and each.waited is not None:
            yield _bar(f"stands still for {each.title}", process, 0, each.waited, each.waited + each.exposed, {})
    for begin, live in plan.result.live_over_time:
        yield {"ph": "C", "name": "memory", "pid": process, "ts": begin * MICRO, "args": {"bytes": live}}


def _title(plan: Plan) -> str:
    replicas = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
    return f"{plan.world_size} ranks{replicas}"


def _of_collective(event: Event) -> Entry:
    exposed = {"exposed us": event.exposed * MICRO, "exposed as": event.reason}
    return {"phase": event.phase, "bytes": event.bytes, "parameters": event.params, **exposed}


def _bar(name: str, process: int, track: int, begin: float, end: float, more: Entry) -> Entry:
    times = {"ts": begin * MICRO, "dur": (end - begin) * MICRO}
    return {"ph": "X", "name": name, "pid": process, "tid": track, **times, "args": more}


def _name(kind: str, process: int, track: int, name: str, **more: int) -> Entry:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name, **more}}
