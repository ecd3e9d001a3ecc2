"""What each rank does for each of the four comparisons; rank 0 writes the numbers to a file."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from contestants import (
    LINK_LLAMA,
    MAKERS,
    STEP_LLAMA,
    Contestant,
    Task,
    llama_task,
    stack_task,
)
from harness import finish, join, write
from live_bytes import LiveBytes, live_bytes
from rate_limited_link import bytes_sent, join_link, limit_rate
from rounds import WARM_UP, Samples, over_ranks, run_block, run_rounds

from fsdp_compile.torch_compat import join_imaginary_world

MEMORY_STEPS = 6


def hooks_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    """Times of forward and backward of a model of many tiny modules; the optimizer runs, untimed."""
    join(rank, world, directory)
    contestants = _make(stack_task(args.modules), "plain", "ours", "torch")
    samples = run_rounds(contestants, args.rounds, args.steps, timed_update=False)
    finish(contestants, {"samples": samples}, directory)


def hooks_without_transport_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    """The same in one process, as rank 0 of two, with collectives that do nothing."""
    torch.set_num_threads(1)
    join_imaginary_world(2)
    contestants = _make(stack_task(args.modules), "plain", "ours", "torch")
    samples = run_rounds(contestants, args.rounds, args.steps, timed_update=False)
    write({"samples": samples}, directory)


def step_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    """Times of whole steps of a Llama over the loopback device."""
    join(rank, world, directory)
    contestants = _make(_llama(args), "ours", "torch")
    samples = run_rounds(contestants, args.rounds, args.steps, timed_update=True)
    finish(contestants, {"samples": samples}, directory)


def memory_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    """Peak live bytes of a step; each contestant is made anew in each round, so that no other is in memory."""
    join(rank, world, directory)
    samples: Samples = {name: {"peak": [], "before": []} for name in ("ours", "torch")}
    for _ in range(args.memory_rounds):
        for name, of in samples.items():
            found = live_bytes_of(partial(MAKERS[name], _llama(args)))
            of["peak"].append(median(step.peak for step in found))
            of["before"].append(median(step.before for step in found))
    samples = over_ranks(samples)
    if rank == 0:
        write({"samples": samples}, directory)


def link_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    """Times of whole steps over a link that needs about as long for a step's bytes as the cores for its compute."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    join_link(rank, Path(directory))
    join(rank, world, directory, device=None)
    contestants = _make(llama_task(LINK_LLAMA, args.batch, args.seq), *MAKERS)
    run_block(contestants["plain"], WARM_UP, timed_update=True)
    compute = _compute_time(contestants["plain"], args.steps)
    for each in contestants.values():
        bytes_of_a_step(each)  # the first makes connections and buffers
    sent = {name: bytes_of_a_step(each) for name, each in contestants.items()}
    rate = args.rate * 1e6 / 8 if args.rate else from_rank_0(sent["torch"] / compute)
    limit_rate(rate)
    samples = run_rounds(contestants, args.rounds, args.steps, timed_update=True)
    for name, of in samples.items():
        of["sent"] = [float(sent[name])]
    finish(contestants, {"samples": samples, "rate": rate, "compute": compute}, directory)


# -- parts ------------------------------------------------------------------------------------------------------------


def _llama(args: argparse.Namespace) -> Task:
    return llama_task(STEP_LLAMA, batch=2, seq=128, mixed_precision=args.mixed_precision)


def _make(task: Task, *names: str) -> dict[str, Contestant]:
    return {name: MAKERS[name](task) for name in names}


def live_bytes_of(make: Callable[[], Contestant]) -> list[LiveBytes]:
    """Of the steps of a new contestant that were measured whole, on this rank."""

    def prepare() -> Any:
        contestant = make()

        def step() -> None:
            contestant.forward_and_backward(contestant.batch())
            contestant.update()

        for _ in range(WARM_UP):
            step()
        return step

    gc.collect()  # or what other contestants left would be freed while this one is watched
    dist.barrier()
    found = live_bytes(prepare, MEMORY_STEPS)
    if not found:
        raise RuntimeError(f"each of {MEMORY_STEPS} steps left memory behind, or the profiler missed frees")
    return found


def _compute_time(plain: Contestant, steps: int) -> float:
    """Seconds a step without communication, were nothing else to run on this core."""
    return min(run_block(plain, steps, timed_update=True)["process"] for _ in range(3))


def bytes_of_a_step(contestant: Contestant) -> int:
    dist.barrier()
    start = bytes_sent()
    contestant.forward_and_backward(contestant.batch())
    contestant.update()
    return bytes_sent() - start


def from_rank_0(value: float) -> float:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
