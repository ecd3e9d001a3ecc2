"""Eager training: ``fsdp_compile.fully_shard`` against ``torch.distributed.fsdp.fully_shard``, in one run on two ranks.

    python benchmarks/eager_vs_torch.py                 all comparisons; the last needs root
    python benchmarks/eager_vs_torch.py hooks --rounds 20 --json hooks.json

See README.md for what is measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two ranks share the cores
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

from comparison import Comparison, compare  # noqa: E402
from harness import Measured, on_ranks, positive, report  # noqa: E402
from measurements import hooks_rank, hooks_without_transport_rank, link_rank, memory_rank, step_rank  # noqa: E402
from rate_limited_link import check_possible  # noqa: E402

RANKS = 2
MILLI, MEGA = 1e3, 1e-6


def main() -> None:
    args = parse_arguments()
    chosen = list(COMPARISONS) if args.what == "all" else [args.what]

    def measure() -> dict[str, Measured]:
        if "link" in chosen:
            check_possible()
        return {name: COMPARISONS[name](args) for name in chosen}

    report(measure, args, ("ours", "torch"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=[*COMPARISONS, "all"])
    parser.add_argument("--steps", type=positive, default=3, help="timed steps a block (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=10, help="blocks of each contestant (default: %(default)s)")
    parser.add_argument("--memory-rounds", type=positive, default=3, help="the same for memory (default: %(default)s)")
    parser.add_argument("--modules", type=positive, default=200, help="of the hooks' model (default: %(default)s)")
    parser.add_argument("--mixed-precision", action="store_true", help="step, memory: bf16 compute, float32 reduction")
    parser.add_argument("--batch", type=positive, default=4, help="link: sequences a rank (default: %(default)s)")
    parser.add_argument("--seq", type=positive, default=256, help="link: tokens a sequence (default: %(default)s)")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="link: default is what takes as long as the compute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers there")
    return parser.parse_args()


# -- the comparisons --------------------------------------------------------------------------------------------------


def hooks(args: argparse.Namespace) -> Measured:
    numbers = on_ranks(hooks_rank, RANKS, args)
    without_transport = on_ranks(hooks_without_transport_rank, 1, args)
    samples, bare = numbers["samples"], without_transport["samples"]
    rows = [
        compare("hooks: CPU time", "ms", MILLI, over_plain(samples, "ours"), over_plain(samples, "torch"), goal=0.9),
        compare("hooks: the same without transport", "ms", MILLI, over_plain(bare, "ours"), over_plain(bare, "torch")),
        between(samples, "hooks: CPU time of forward and backward", "thread"),
        between(samples, "hooks: the same with the transport's threads", "process"),
        between(samples, "hooks: wall time of forward and backward", "wall"),
    ]
    return rows, {"gloo": numbers, "without transport": without_transport}


def step(args: argparse.Namespace) -> Measured:
    numbers = on_ranks(step_rank, RANKS, args)
    rows = [
        between(numbers["samples"], "step: wall time", "wall", goal=1.0),
        between(numbers["samples"], "step: CPU time of all threads", "process"),
    ]
    return rows, numbers


def memory(args: argparse.Namespace) -> Measured:
    numbers = on_ranks(memory_rank, RANKS, args)
    ours, torch = numbers["samples"]["ours"], numbers["samples"]["torch"]
    rows = [
        compare("memory: peak of a step", "MB", MEGA, ours["peak"], torch["peak"], goal=1.0),
        compare("memory: between steps", "MB", MEGA, ours["before"], torch["before"]),
    ]
    return rows, numbers


def link(args: argparse.Namespace) -> Measured:
    numbers = on_ranks(link_rank, RANKS, args)
    samples, rate = numbers["samples"], numbers["rate"]
    bytes_sent = {name: of["sent"] for name, of in samples.items()}
    rows = [
        between(samples, "link: step", "wall", goal=0.6),
        between(samples, "link: step, torch asynchronous and listed", "wall", theirs="torch_listed"),
        between(samples, "link: step, ours listed", "wall", ours="ours_listed"),
        compare("link: sent a step and rank", "MB", MEGA, bytes_sent["ours"], bytes_sent["torch"]),
        compare("link: the same, torch listed", "MB", MEGA, bytes_sent["ours"], bytes_sent["torch_listed"]),
    ]
    compute, communication = MILLI * median(samples["plain"]["wall"]), MILLI * bytes_sent["torch"][0] / rate
    print(f"link: {rate * 8e-6:.0f} Mbit/s; compute {compute:.0f} ms a step, communication {communication:.0f} ms")
    return rows, numbers


COMPARISONS: dict[str, Callable[[argparse.Namespace], Measured]] = {
    "hooks": hooks,
    "step": step,
    "memory": memory,
    "link": link,
}


def between(
    samples: dict[str, Any],
    quantity: str,
    clock: str,
    *,
    ours: str = "ours",
    theirs: str = "torch",
    goal: float | None = None,
) -> Comparison:
    return compare(quantity, "ms", MILLI, samples[ours][clock], samples[theirs][clock], goal)


def over_plain(samples: dict[str, Any], name: str) -> list[float]:
    """What the step costs the main thread more than it costs without sharding."""
    return [a - b for a, b in zip(samples[name]["thread"], samples["plain"]["thread"], strict=True)]


if __name__ == "__main__":
    main()
