"""A plan as a trace for a viewer: Perfetto, or Chrome's ``about:tracing``.

One process for each number of ranks; in it a track of compute with the moments at which it stands still, one for each
process group, and the memory over time. The format is the Trace Event Format's JSON (Google), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .passes.costs import COMPUTE
from .passes.graph_view import WAIT
from .passes.simulate import Timeline
from .planning import Plan

MICRO = 1e6

Event = dict[str, Any]


def write_trace(plans: Sequence[Plan], path: Path) -> None:
    """Write the plans side by side.

    Raises:
        OSError: the file cannot be written.
    """
    events = [event for plan in plans for event in trace_events(plan)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def trace_events(plan: Plan) -> Iterator[Event]:
    """Those of one plan."""
    process = plan.world_size
    timeline = plan.result.timeline
    tracks = {lane: number for number, lane in enumerate([COMPUTE, *sorted(timeline.lane_seconds)])}
    yield _name("process_name", process, 0, f"{process} ranks")
    for lane, track in tracks.items():
        yield _name("thread_name", process, track, lane)
    for name, begin, end, more in _compute(timeline):
        yield _bar(name, process, tracks[COMPUTE], begin, end, more)
    for each in timeline.transfers:
        params = list(each.tag.params) if each.tag else []
        more = {
            "bytes": each.bytes,
            "parameters": params,
            "exposed us": each.exposed * MICRO,
            "exposed as": each.reason,
        }
        yield _bar(each.title, process, tracks[each.lane], each.begin, each.end, more)
    for begin, live in plan.result.live_over_time:
        yield {"ph": "C", "name": "memory", "pid": process, "ts": begin * MICRO, "args": {"bytes": live}}


def _compute(timeline: Timeline) -> Iterator[tuple[str, float, float, Event]]:
    """What the compute stream does, and when it stands still."""
    waited = {transfer.waited: transfer for transfer in timeline.transfers if transfer.exposed}
    for node, begin, end in zip(timeline.nodes, timeline.begins, timeline.ends, strict=True):
        if end > begin and node.target is not WAIT:
            yield node.name, begin, end, {"operator": str(node.target)}
        elif end > begin and begin in waited:
            yield f"stands still for {waited[begin].title}", begin, end, {"exposed as": waited[begin].reason}


def _bar(name: str, process: int, track: int, begin: float, end: float, more: Event) -> Event:
    times = {"ts": begin * MICRO, "dur": (end - begin) * MICRO}
    return {"ph": "X", "name": name, "pid": process, "tid": track, **times, "args": more}


def _name(kind: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}
