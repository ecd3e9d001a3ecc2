"""CPU time of our passes on Llamas of more and more layers: does it grow with the size of the graphs, or faster?

    python benchmarks/pass_times.py
    python benchmarks/pass_times.py --layers 8 32 --profile 20
    python benchmarks/pass_times.py --bucket auto

One process, no data. See README.md for what is measured.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import os
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch  # noqa: E402
from harness import positive  # noqa: E402
from torch.fx import Graph  # noqa: E402
from traced_llama import traced_stages  # noqa: E402

from fsdp_compile.models import LlamaConfig  # noqa: E402
from fsdp_compile.passes import PassConfig, PassContext, copy_graph, run_joint, run_parts  # noqa: E402
from fsdp_compile.torch_compat import join_imaginary_world  # noqa: E402

WORLD, LENGTH = 64, 8
GROWTH_GOAL, SECONDS_GOAL = 1.15, 20.0
STAGES = ("joint", "forward and backward")


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    join_imaginary_world(WORLD)
    config = PassConfig(bucket=args.bucket, hardware="h100")
    found = {}
    for layers in sorted(args.layers):
        print(f"tracing {layers} layers ...", file=sys.stderr, flush=True)
        traced = traced_stages(tiny(layers), WORLD, 1, LENGTH)
        found[layers] = measure(traced, args.rounds, config)
        print(row(layers, traced, found[layers]), flush=True)
        if args.profile:
            print_profile(traced, args.profile, config)
    print("\n".join(verdicts(found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=positive, default=[8, 32, 126], help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=3, help="the least counts (default: %(default)s)")
    parser.add_argument("--bucket", default="module", help="of the passes' configuration (default: %(default)s)")
    parser.add_argument("--profile", type=positive, metavar="N", help="also print the N functions that take longest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers there")
    return parser.parse_args()


def tiny(layers: int) -> LlamaConfig:
    return LlamaConfig(dim=16, layers=layers, heads=2, kv_heads=1, ffn_dim=32, vocab=32)


def measure(traced: dict[str, Graph], rounds: int, config: PassConfig) -> dict[str, float]:
    """Seconds of CPU time by stage; the least of the rounds, as others on the machine only add to it."""
    samples = [[seconds(run) for run in runs(traced, config)] for _ in range(rounds)]
    return dict(zip(STAGES, map(min, zip(*samples, strict=True)), strict=True))


def runs(traced: dict[str, Graph], config: PassConfig) -> list[Callable[[], None]]:
    """The passes of each stage, on copies."""
    joint, *parts = (copy_graph(traced[name]) for name in ("joint", "forward", "backward"))
    return [lambda: run_joint(joint, PassContext(config)), lambda: run_parts(*parts, PassContext(config))]


def seconds(run: Callable[[], None]) -> float:
    gc.collect()
    gc.disable()  # as our backends do while they compile
    start = time.process_time()
    run()
    found = time.process_time() - start
    gc.enable()
    return found


def row(layers: int, traced: dict[str, Graph], of: dict[str, float]) -> str:
    nodes = sum(len(traced[name].nodes) for name in ("forward", "backward"))
    times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in of.items())
    return f"{layers} layers, {nodes} nodes: {times}, together {sum(of.values()):.2f} s"


def verdicts(found: dict[int, dict[str, float]]) -> list[str]:
    most = max(found)
    lines = []
    if len(found) > 1:
        less = sorted(found)[-2]
        growth = exponent({layers: sum(found[layers].values()) for layers in (less, most)})
        met = "met" if growth <= GROWTH_GOAL else "missed"
        lines.append(f"growth from {less} to {most} layers: exponent {growth:.2f}, goal {GROWTH_GOAL}: {met}")
    total = sum(found[most].values())
    met = "met" if total <= SECONDS_GOAL else "missed"
    return [*lines, f"{most} layers: {total:.1f} s, goal {SECONDS_GOAL:.0f} s: {met}"]


def exponent(seconds: dict[int, float]) -> float:
    """Of the power of the number of layers that the times follow; between two numbers of layers."""
    (few, before), (many, after) = sorted(seconds.items())
    return math.log(after / before) / math.log(many / few)


def print_profile(traced: dict[str, Graph], lines: int, config: PassConfig) -> None:
    profiler = cProfile.Profile()
    for run in runs(traced, config):
        profiler.runcall(run)
    pstats.Stats(profiler).strip_dirs().sort_stats("cumulative").print_stats(lines)


if __name__ == "__main__":
    main()
