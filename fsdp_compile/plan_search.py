"""Looks for the settings with which a step is fastest and fits: buckets, what is resharded, and replicas (HSDP).

All of them are planned, as there are few. Those that fit come before those that do not, then the faster; among equally
fast ones, to a thousandth, the smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .factory import Factory
from .passes import PassConfig, profile, readable_size
from .planning import Plan, make_plans

SAME = 1e-3  # steps that differ by less are equally fast: the cost model is no better than that


@dataclass(frozen=True)
class Setting:
    """What can be chosen.

    Attributes:
        reshard: ``reshard_after_forward`` of ``fully_shard``.
        bucket: as of ``PassConfig``.
        replicas: that hold the same shards.
    """

    reshard: bool | int | None
    bucket: str | int
    replicas: int

    def __str__(self) -> str:
        reshard = "" if self.reshard is None else f" --reshard {str(self.reshard).lower()}"
        replicas = "" if self.replicas == 1 else f" --replicas {self.replicas}"
        return f"--bucket {self.bucket}{reshard}{replicas}"


Found = tuple[Setting, Plan]


def settings(world_size: int, hardware: str) -> list[Setting]:
    """All that are tried: replicas too where shards within a node do without the links between nodes."""
    in_node = profile(hardware).ranks_in_node
    replicas = [1] if world_size <= in_node or world_size % in_node or in_node == 1 else [1, world_size // in_node]
    return [Setting(*each) for each in product((None, False), ("module", "auto"), replicas)]


def plans(
    factory: Factory, world_size: int, config: PassConfig, tried: Sequence[Setting], **how: Any
) -> Iterator[Found]:
    """The plan of each setting; those that differ in buckets only share a trace. As ``planning.make_plans``."""
    alike: dict[tuple[bool | int | None, int], list[Setting]] = {}
    for each in tried:
        alike.setdefault((each.reshard, each.replicas), []).append(each)
    for (reshard, replicas), some in alike.items():
        configs = [replace(config, bucket=each.bucket) for each in some]
        made = make_plans(factory, world_size, configs, replicas, reshard_after_forward=reshard, **how)
        yield from zip(some, made, strict=True)


def ranked(found: Sequence[Found], memory: int | None) -> list[Found]:
    """The best first."""
    fastest = min(plan.result.timeline.seconds for _, plan in found)

    def rank(each: Found) -> tuple[bool, int, int]:
        plan = each[1]
        return (
            memory is not None and plan.peak > memory,
            round((plan.result.timeline.seconds / fastest - 1) / SAME),
            plan.peak,
        )

    return sorted(found, key=rank)


def as_advice(found: Sequence[Found], memory: int | None) -> str:
    """A line for each setting, the best first, and why it is before the next."""
    best = ranked(found, memory)
    width = max(len(str(setting)) for setting, _ in best)
    lines = [f"{best[0][1].world_size:,} ranks, the best first:"]
    for setting, plan in best:
        timeline = plan.result.timeline
        fits = "" if memory is None or plan.peak <= memory else "  does not fit"
        times = f"{timeline.seconds * 1e3:10,.1f} ms, exposed {timeline.exposed_seconds * 1e3:8,.1f} ms"
        lines.append(f"  {setting!s:{width}}  {times}, peak {readable_size(plan.peak)}{fits}")
    return "\n".join([*lines, _why(best[0], best[1], memory)]) + "\n"


def _why(best: Found, next_best: Found, memory: int | None) -> str:
    (setting, plan), (other, behind) = best, next_best
    if memory is not None and plan.peak > memory:
        return f"nothing fits: the best needs {readable_size(plan.peak)} of {readable_size(memory)}"
    if memory is not None and behind.peak > memory:
        return f"take {setting}: nothing else fits"
    slower = behind.result.timeline.seconds / plan.result.timeline.seconds - 1
    if slower > SAME or behind.peak < plan.peak:
        exposed = (behind.result.timeline.exposed_seconds - plan.result.timeline.exposed_seconds) * 1e3
        return f"take {setting}: {other} takes {slower:.1%} longer, with {exposed:+,.1f} ms exposed"
    return f"take {setting}: {other} is as fast, and takes {readable_size(behind.peak - plan.peak)} more"
