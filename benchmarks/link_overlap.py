"""How much communication a step hides behind compute, on a link of a chosen rate between two ranks; needs root.

    python benchmarks/link_overlap.py times --communication 1 --pairs 2
    python benchmarks/link_overlap.py memory
    python benchmarks/link_overlap.py prediction --json prediction.json

See README.md for what is measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: each rank has one core
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

from comparison import Comparison, compare  # noqa: E402
from harness import Measured, Numbers, on_ranks, positive, report  # noqa: E402
from overlap_contestants import COMPILED, OPPONENTS  # noqa: E402
from overlap_measurements import Load, memory_rank, prediction_rank, times_rank  # noqa: E402
from rate_limited_link import check_possible  # noqa: E402

RANKS = 2
MILLI, MEGA = 1e3, 1e-6
BASE = "torch"
AUTO_GOALS = {0.25: 0.76, 1.0: 0.54, 4.0: 0.73}  # to the base, by communication to compute
BOUND_GOAL = 1.05
MEMORY_GOAL = 1.25  # in the step, to the base
SENT_GOAL = 1.005  # to the base: the same data; acknowledgements differ a little
CLOSE = 0.15  # a prediction is to be off by no more
PREDICTED = (
    (Load(8, 384, 0.010, 0.25), "module"),
    (Load(8, 384, 0.010, 1.0), "module"),
    (Load(8, 384, 0.010, 1.0), "auto"),
    (Load(8, 384, 0.010, 1.0), "none"),
    (Load(8, 384, 0.010, 2.0), "2MB"),
    (Load(8, 384, 0.010, 4.0), "module"),
    (Load(8, 384, 0.010, 4.0), "auto"),
    (Load(4, 512, 0.020, 0.5), "module"),
    (Load(4, 512, 0.020, 2.0), "auto"),
    (Load(12, 256, 0.006, 1.0), "1MB"),
)


def main() -> None:
    args = parse_arguments()

    def measure() -> dict[str, Measured]:
        check_possible()
        return {args.what: MEASUREMENTS[args.what](args)}

    report(measure, args, ("this", "other"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument(
        "--communication",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="how long the link takes, as a multiple of compute",
    )
    parser.add_argument("--layers", type=positive, default=8, help="default: %(default)s")
    parser.add_argument("--width", type=positive, default=384, help="of a layer's two matrices (default: %(default)s)")
    parser.add_argument("--layer-ms", type=float, default=10.0, help="of a layer's forward (default: %(default)s)")
    parser.add_argument("--pairs", type=positive, default=1, help="times: of processes (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=2, help="timed steps a block (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="blocks of each contestant (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers there")
    return parser.parse_args()


# -- the measurements -------------------------------------------------------------------------------------------------


def times(args: argparse.Namespace) -> Measured:
    pairs = [on_ranks(times_rank, RANKS, args) for _ in range(args.pairs)]
    walls = {name: _joined(pairs, name, "wall") for name in pairs[0]["samples"]}
    best = min(OPPONENTS, key=lambda name: median(walls[name]))
    goal = AUTO_GOALS.get(args.communication)
    bounds = [pair["predicted"]["auto"]["bound"] for pair in pairs for _ in range(args.rounds)]
    rows = [
        *(_step(f"{name} to {BASE}", walls[name], walls[BASE], goal if name == "auto" else None) for name in walls),
        *(_step(f"{name} to {best}", walls[name], walls[best], 1.0) for name in COMPILED),
        *(_step(f"{name} to the bound", walls[name], bounds, BOUND_GOAL) for name in COMPILED),
        *(_sent(pairs, name) for name in walls if name != BASE),
    ]
    for pair in pairs:
        print(_of_pair(pair, best))
    return rows, {"pairs": pairs}


def memory(args: argparse.Namespace) -> Measured:
    numbers = on_ranks(memory_rank, RANKS, args)
    samples = numbers["samples"]
    rows = [
        compare(f"{what}: {name} to {BASE}", "MB", MEGA, samples[name][what], samples[BASE][what], goal)
        for what, goal in (("at rest", 1.0), ("in the step", MEMORY_GOAL))
        for name in samples
    ]
    return rows, numbers


def prediction(args: argparse.Namespace) -> Measured:
    args.predicted = PREDICTED
    numbers = on_ranks(prediction_rank, RANKS, args)
    rows = [
        compare(_described(found), "ms", MILLI, [found["step"]] * args.rounds, found["measured"])
        for found in numbers["found"]
    ]
    off = max(abs(row.ratio - 1) for row in rows)
    print(f"predicted to measured: off by {off:.0%} at most, goal {CLOSE:.0%}")
    return rows, numbers


MEASUREMENTS = {"times": times, "memory": memory, "prediction": prediction}


# -- rows -------------------------------------------------------------------------------------------------------------


def _joined(pairs: Sequence[Numbers], name: str, clock: str) -> list[float]:
    return [sample for pair in pairs for sample in pair["samples"][name][clock]]


def _step(quantity: str, ours: Sequence[float], other: Sequence[float], goal: float | None) -> Comparison:
    return compare(quantity, "ms", MILLI, ours, other, goal)


def _sent(pairs: Sequence[Numbers], name: str) -> Comparison:
    ours, base = (_joined(pairs, each, "sent") for each in (name, BASE))
    return compare(f"sent: {name} to {BASE}", "MB", MEGA, ours, base, SENT_GOAL if name in COMPILED else None)


def _of_pair(pair: Numbers, best: str) -> str:
    walls = {name: median(samples["wall"]) for name, samples in pair["samples"].items()}
    ratios = ", ".join(f"{name} to {best} {walls[name] / walls[best]:.3f}" for name in COMPILED)
    steps = ", ".join(f"{name} {MILLI * of['step']:.0f} ms" for name, of in pair["predicted"].items())
    return f"pair: {ratios}; predicted {steps}"


def _described(found: Numbers) -> str:
    model = f"{found['layers']} layers of {found['width']} and {MILLI * found['layer_seconds']:.0f} ms"
    return f"{model}, {MEGA * found['rate']:.0f} MB/s, {found['bucket']}"


if __name__ == "__main__":
    main()
