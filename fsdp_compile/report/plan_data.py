"""What the page of a report reads: plans as JSON. Times are microseconds since the step's start, sizes are of one rank.

A plan may have tens of thousands of nodes; a page must stay small and quick:

- compute between two launches or waits of collectives is one span, which counts its kernels and names the longest;
- memory is shown at ``MOMENTS`` moments: the step is cut into as many equal parts, and each shows its fullest moment,
  so the peak is always among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

from ..passes import Timeline
from ..passes.costs import COMPUTE
from ..passes.graph_view import WAIT, kind_of
from ..passes.simulate import Transfer
from ..planning import OPTIMIZER, Plan

MOMENTS = 600
LONGEST = 3  # kernels of a span that are named

Data = dict[str, Any]  # JSON


def page_data(plans: Sequence[tuple[object, Plan]], memory: int | None) -> Data:
    """All of the page; arguments as of ``write_report``."""
    return {"memory": memory, "plans": [_plan(str(name), plan) for name, plan in plans]}


def _plan(name: str, plan: Plan) -> Data:
    timeline = plan.result.timeline
    return {
        "name": f"{plan.world_size:,} ranks" + (f", {name}" if name else ""),
        "ranks": plan.world_size,
        "replicas": plan.replicas,
        "sharding": plan.sharding,
        "step": _micro(timeline.seconds),
        "leastStep": _micro(plan.result.bounds.time_step),
        "computing": _micro(timeline.compute_seconds),
        "communicating": _micro(sum(timeline.lane_seconds.values())),
        "exposed": _micro(timeline.exposed_seconds),
        "leastExposed": _micro(plan.least_exposed),
        "peak": plan.peak,
        "leastPeak": plan.least_peak,
        "composition": plan.composition,
        "peakAt": _micro(timeline.begins[plan.result.memory.peak_position]),
        "peakNode": plan.result.memory.at_peak.name,
        "phases": [{"name": phase.name, "begin": _micro(phase.begin)} for phase in timeline.phases],
        "lanes": [COMPUTE, *sorted(timeline.lane_seconds)],
        "compute": list(_spans(timeline)),
        "collectives": list(map(_collective, timeline.transfers)),
        "live": _live(plan),
    }


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _spans(timeline: Timeline) -> Iterator[Data]:
    """Compute without a launch or a wait in between."""
    launches = {transfer.start for transfer in timeline.transfers}
    borders = accumulate(node in launches or node.target is WAIT or node.op == "output" for node in timeline.nodes)
    for _, stretch in groupby(zip(borders, timeline.nodes, timeline.begins, timeline.ends, strict=True), itemgetter(0)):
        kernels = [(node, begin, end) for _, node, begin, end in stretch if end > begin and node.target is not WAIT]
        if kernels:
            longest = sorted(kernels, key=lambda each: each[1] - each[2])[:LONGEST]
            yield {
                "begin": _micro(kernels[0][1]),
                "end": _micro(kernels[-1][2]),
                "kernels": len(kernels),
                "longest": [[node.name, _micro(end - begin)] for node, begin, end in longest],
            }


def _collective(transfer: Transfer) -> Data:
    return {
        "title": transfer.title,
        "kind": kind_of(transfer.start),
        "lane": transfer.lane,
        "phase": transfer.phase.name,
        "params": transfer.tag.params if transfer.tag else [],
        "bytes": transfer.bytes,
        "launched": _micro(transfer.launched),
        "begin": _micro(transfer.begin),
        "end": _micro(transfer.end),
        "waited": None if transfer.waited is None else _micro(transfer.waited),
        "exposed": _micro(transfer.exposed),
        "reason": transfer.reason,
    }


def _live(plan: Plan) -> Data:
    """Bytes of each category over time."""
    timeline, memory = plan.result.timeline, plan.result.memory
    part = (timeline.seconds or 1.0) / MOMENTS
    positions = range(len(memory.nodes))
    shown = [
        max(alike, key=lambda position: memory.live[position])
        for _, alike in groupby(positions, lambda position: int(timeline.begins[position] / part))
    ]
    held = {category: [live[position] for position in shown] for category, live in memory.live_of.items()}
    return {
        "times": [_micro(timeline.begins[position]) for position in shown],
        "bytes": {**held, OPTIMIZER: [plan.optimizer_bytes] * len(shown)},
    }
