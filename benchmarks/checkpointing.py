"""Activation checkpointing and sharding together: live bytes and all-gathers of a step, compiled against eager.

    python benchmarks/checkpointing.py
    python benchmarks/checkpointing.py --layers 8 --json checkpointing.json

A Llama on two gloo ranks, each block sharded. See README.md for what is measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two ranks share the cores
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
from comparison import Comparison, compare  # noqa: E402
from contestants import Contestant, Task, llama_task  # noqa: E402
from harness import Measured, finish, join, on_ranks, positive, report  # noqa: E402
from live_bytes import live_bytes  # noqa: E402
from rounds import WARM_UP, Samples, over_ranks  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402

from fsdp_compile import fully_shard  # noqa: E402
from fsdp_compile.models import LlamaConfig  # noqa: E402

RANKS, STEPS = 2, 4
MEGA = 1e-6
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
GATHERS = ("c10d::_allgather_base_", "c10d::allgather_into_tensor_coalesced_")


def main() -> None:
    args = parse_arguments()
    report(lambda: {"checkpointing": measure(args)}, args, ("compiled", "eager"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, default=4, help="default: %(default)s")
    parser.add_argument("--batch", type=positive, default=4, help="sequences a rank (default: %(default)s)")
    parser.add_argument("--seq", type=positive, default=256, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=1, help="of all (default: %(default)s)")
    parser.add_argument("--backend", default="fsdp_eager", help="of torch.compile (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers there")
    return parser.parse_args()


# -- where the checkpoints are ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Runs ``inner`` under activation checkpointing; ``policy`` says what is saved all the same."""

    def __init__(self, inner: nn.Module, policy: Callable[..., CheckpointPolicy] | None = None) -> None:
        super().__init__()
        self.inner = inner
        selective = partial(create_selective_checkpoint_contexts, policy)
        self._contexts = {} if policy is None else {"context_fn": selective}

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **self._contexts)


def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


PLACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": fully_shard,
    "fully_shard(checkpoint)": lambda block: fully_shard(Checkpointed(block)),
    "checkpoint(fully_shard)": lambda block: Checkpointed(fully_shard(block)),
    "fully_shard(selective)": lambda block: fully_shard(Checkpointed(block, save_matmuls)),
    "selective(fully_shard)": lambda block: Checkpointed(fully_shard(block), save_matmuls),
}


def make(task: Task, place: str, backend: str | None) -> Contestant:
    model = task.make_model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = PLACES[place](block)
    contestant = Contestant(task, fully_shard(model))
    if backend:
        contestant.model = torch.compile(contestant.model, backend=backend, fullgraph=True)  # type: ignore[assignment]
    return contestant


# -- in a rank --------------------------------------------------------------------------------------------------------


def checkpointing_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    """Each contestant is made anew in each round, so that no other is in memory."""
    join(rank, world, directory)
    config = LlamaConfig(dim=256, layers=args.layers, heads=4, kv_heads=4, ffn_dim=704)
    task = llama_task(config, args.batch, args.seq)
    samples: Samples = {}
    contestants: dict[str, Contestant] = {}
    for _ in range(args.rounds):
        for place in PLACES:
            for executor in ("eager", "compiled"):
                name = f"{place}, {executor}"
                contestants[name], found = measure_step(task, place, args.backend if executor == "compiled" else None)
                of = samples.setdefault(name, {quantity: [] for quantity in found})
                for quantity, value in found.items():
                    of[quantity].append(value)
    finish(contestants, {"samples": over_ranks(samples)}, directory)


def measure_step(task: Task, place: str, backend: str | None) -> tuple[Contestant, dict[str, float]]:
    torch.compiler.reset()
    made: list[Contestant] = []

    def prepare() -> Callable[[], None]:
        made.append(make(task, place, backend))
        for _ in range(WARM_UP):
            run_step(made[0])
        return lambda: run_step(made[0])

    steps = live_bytes(prepare, STEPS)
    if not steps:
        raise RuntimeError(f"{place}: each of {STEPS} steps left memory behind, or the profiler missed frees")
    needed = median(step.peak - step.before for step in steps)
    return made[0], {"bytes": needed, "gathers": gathers_of(lambda: run_step(made[0]))}


def run_step(contestant: Contestant) -> None:
    contestant.forward_and_backward(contestant.batch())
    contestant.update()


def gathers_of(step: Callable[[], None]) -> int:
    """How many all-gathers a step launches; a coalesced one counts once."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return sum(event.count for event in profiler.key_averages() if event.key in GATHERS)


# -- the table --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> Measured:
    numbers = on_ranks(checkpointing_rank, RANKS, args)
    samples = numbers["samples"]
    rows: list[Comparison] = []
    for quantity, unit, scale in (("bytes", "MB", MEGA), ("gathers", "a step", 1)):
        for place in PLACES:
            compiled, eager = (samples[f"{place}, {executor}"][quantity] for executor in ("compiled", "eager"))
            rows.append(compare(f"{quantity}: {place}", unit, scale, compiled, eager, goal=1.0))
    return rows, numbers


if __name__ == "__main__":
    main()
