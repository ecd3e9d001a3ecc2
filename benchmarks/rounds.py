"""Interleaved timing: blocks of steps of each contestant in turn, many times over, so that all see the same machine."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import fmean

import torch.distributed as dist
from contestants import Contestant

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "thread": time.thread_time,  # of the thread that runs forward and backward: on a CPU both run on the caller's
    "process": time.process_time,  # also of the threads of the transport
}
WARM_UP = 2  # steps; the first makes buffers and optimizer state

Samples = dict[str, dict[str, list[float]]]  # contestant, clock: seconds a step, one sample a round


def run_rounds(contestants: dict[str, Contestant], rounds: int, steps: int, timed_update: bool) -> Samples:
    """Time ``rounds`` blocks of ``steps`` steps of each contestant.

    Args:
        timed_update: whether a step's time includes the optimizer's part, which no ``fully_shard`` runs.

    Returns:
        Means over ranks.
    """
    for contestant in contestants.values():
        run_block(contestant, WARM_UP, timed_update)
    gc.collect()
    gc.freeze()  # what a step allocates is still collected, but no step pays for walking through all of torch
    samples: Samples = {name: {clock: [] for clock in CLOCKS} for name in contestants}
    order = list(contestants)
    for _ in range(rounds):
        for name in order:
            for clock, seconds in run_block(contestants[name], steps, timed_update).items():
                samples[name][clock].append(seconds)
        order.reverse()  # a drift of the machine favours none
    return over_ranks(samples)


def run_block(contestant: Contestant, steps: int, timed_update: bool) -> dict[str, float]:
    """Seconds a step on each clock; one step more runs first, for another contestant's data is in the caches."""
    dist.barrier()
    total = dict.fromkeys(CLOCKS, 0.0)
    for step in range(steps + 1):
        batch = contestant.batch()
        start = read_clocks()
        contestant.forward_and_backward(batch)
        end = read_clocks()
        contestant.update()
        if timed_update:
            end = read_clocks()
        if step:
            total = {clock: total[clock] + end[clock] - start[clock] for clock in CLOCKS}
    return {clock: seconds / steps for clock, seconds in total.items()}


def read_clocks() -> dict[str, float]:
    return {name: read() for name, read in CLOCKS.items()}


def over_ranks(samples: Samples) -> Samples:
    """Means over ranks of each sample."""
    gathered: list[Samples] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, samples)
    return {
        name: {clock: [fmean(each) for each in zip(*(of[name][clock] for of in gathered), strict=True)] for clock in by}
        for name, by in samples.items()
    }
