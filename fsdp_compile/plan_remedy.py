"""Which setting would make a plan fit: what takes less memory on as many ranks, or else more ranks.

Whatever is named has been planned too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .factory import Factory
from .passes import PassConfig, readable_size
from .passes.memory import INPUTS
from .plan_search import Setting, plans
from .planning import OPTIMIZER, Plan

MOST_RANKS = 2**16


def remedy(factory: Factory, plan: Plan, setting: Setting, config: PassConfig, memory: int, **how: Any) -> str:
    """A line that says what would fit, or that nothing did that was tried.

    Args:
        plan: one that does not fit, made with ``setting`` and the other arguments, which are those of ``make_plan``.
        memory: bytes that a device has.
    """
    for ranks, other in _others(plan, setting, memory):
        ((_, tried),) = plans(factory, ranks, config, [other], **how)
        if tried.peak <= memory:
            return f"  would fit: --world-size {ranks} {other}, with {readable_size(tried.peak)}"
    return "  nothing tried fits: give a rank less data, or checkpoint activations"


def _others(plan: Plan, setting: Setting, memory: int) -> Iterator[tuple[int, Setting]]:
    """What may take less, the least change first."""
    unreplicated = replace(setting, bucket="module", replicas=1)
    for other in dict.fromkeys([unreplicated, replace(unreplicated, reshard=True)]):
        if other != setting:
            yield plan.world_size, other
    for ranks in _more_ranks(plan, memory):
        yield ranks, setting


def _more_ranks(plan: Plan, memory: int) -> Iterator[int]:
    """About so many as make shards small enough, by doublings; none if all else is too much."""
    sharded = plan.composition[INPUTS] + plan.composition[OPTIMIZER]
    room = memory - (plan.peak - sharded)
    if room > 0:
        doublings = math.ceil(math.log2(sharded / room))
        # Gradients shrink too, and other things do not: one more, or one less, may be right.
        for ranks in (plan.world_size * 2 ** (doublings + more) for more in (-1, 0, 1)):
            if plan.world_size < ranks <= MOST_RANKS:
                yield ranks
