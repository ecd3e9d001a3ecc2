"""Plans as a table for people: a column for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .passes import readable_size
from .passes.graph_view import kind_of, whole_bytes
from .planning import Plan
from .text_table import aligned


def as_table(plans: Sequence[Plan]) -> str:
    """What each plan of one model takes, beside what no plan can beat."""
    categories = [name for name in plans[0].composition if any(plan.composition[name] for plan in plans)]
    rows: list[tuple[str, Callable[[Plan], str]]] = [
        ("ranks", lambda plan: f"{plan.world_size:,}"),
        ("replicas", lambda plan: str(plan.replicas)),
        ("step", lambda plan: _ms(plan.result.timeline.seconds)),
        ("  no plan below", lambda plan: _ms(plan.result.bounds.time_step)),
        ("compute", lambda plan: _ms(plan.result.timeline.compute_seconds)),
        ("communication", lambda plan: _ms(sum(plan.result.timeline.lane_seconds.values()))),
        ("  exposed", lambda plan: _ms(plan.result.timeline.exposed_seconds)),
        ("  no plan below", lambda plan: _ms(plan.least_exposed)),
        ("peak memory", lambda plan: readable_size(plan.peak)),
        ("  no plan below", lambda plan: readable_size(plan.least_peak)),
        *((f"  {name}", lambda plan, name=name: readable_size(plan.composition[name])) for name in categories),  # type: ignore[misc]
        ("gathers", lambda plan: " + ".join(str(each.gathers) for each in plan.traffic)),
        ("reductions", lambda plan: str(sum(each.reductions + each.all_reduces for each in plan.traffic))),
        ("gathered", lambda plan: readable_size(_moved(plan, gathers=True))),
        ("reduced", lambda plan: readable_size(_moved(plan, gathers=False))),
    ]
    cells = [
        [name, *map(cell, plans)]
        for name, cell in rows
        if name != "replicas" or any(plan.replicas > 1 for plan in plans)
    ]
    return "\n".join([f"sharded: {plans[0].sharding}", "", *aligned(cells, numbers=True)]) + "\n"


def _moved(plan: Plan, gathers: bool) -> int:
    """Bytes of what a step gathers, or reduces: of the whole, which each rank gets or gives."""
    starts = [transfer.start for transfer in plan.result.timeline.transfers]
    return sum(whole_bytes(start) for start in starts if (kind_of(start) == "all_gather") is gathers)


def shortfall(plan: Plan, memory: int) -> str:
    """A line about a plan that does not fit: what it needs, and what most of that is."""
    needed, there = readable_size(plan.peak), readable_size(memory)
    name, size = max(plan.composition.items(), key=lambda part: part[1])
    return f"{plan.world_size} ranks do not fit: {needed} of {there}; most of it: {name}, {readable_size(size)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
