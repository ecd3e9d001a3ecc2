"""Plans of large models on many GPUs, simulated: step time and peak memory of ours and of others, beside the bounds.

    python benchmarks/simulated_plans.py
    python benchmarks/simulated_plans.py --shapes llama3-8b --tokens 8192 --ranks 64 --json plans.json

One process, no GPU, no data. See README.md for what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

from harness import positive  # noqa: E402
from torch.fx import Graph  # noqa: E402
from torch_compat import join_imaginary_world, overlap_by_torch  # noqa: E402
from traced_llama import traced_stages  # noqa: E402

from fsdp_compile.models import SIZES  # noqa: E402
from fsdp_compile.passes import (  # noqa: E402
    REDUCE,
    Bounds,
    CostModel,
    MemoryProfile,
    PassConfig,
    PassContext,
    bounds,
    copy_graph,
    profile,
    run_parts,
    simulate,
)
from fsdp_compile.passes.fusion import is_fusable  # noqa: E402
from fsdp_compile.passes.graph_view import (  # noqa: E402
    COPIES,
    Collective,
    alias_root,
    data_bytes,
    made_by,
    reductions,
    tag_of,
)
from fsdp_compile.passes.schedule import eager_order  # noqa: E402
from fsdp_compile.passes.simulate import COMPUTE  # noqa: E402

TRACED_WORLD = 64
GROUP = "0"  # name of the process group of all ranks
MILLI, GIBI = 1e3, 2**30
UNLIMITED = 1 << 60  # bytes
OURS, OURS_UNLIMITED, EAGER = "ours", "ours, no memory bound", "FSDP2's eager order"
TIME_GOAL, MEMORY_GOAL = 1.03, 1.06  # of the bound on time: without a memory bound, and at the eager order's peak
OPPONENTS_GOAL = 1.0

Pair = list[Graph]


def main() -> None:
    args = parse_arguments()
    join_imaginary_world(TRACED_WORLD)
    found = []
    for shape in args.shapes:
        for tokens in args.tokens:
            found += compare_plans(shape, tokens, args)
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama3-8b", "llama3-70b"], choices=SIZES, metavar="SHAPE")
    parser.add_argument("--layers", type=positive, help="instead of the shape's own number")
    parser.add_argument(
        "--tokens", nargs="+", type=positive, default=[8192, 16384], help="a rank (default: %(default)s)"
    )
    parser.add_argument("--ranks", nargs="+", type=positive, default=[8, 64, 512], help="default: %(default)s")
    parser.add_argument("--profile", default="h100", help="of the hardware, a name or a file (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers there")
    return parser.parse_args()


# -- plans ------------------------------------------------------------------------------------------------------------


def by_passes(config: PassConfig) -> Callable[[Pair, CostModel], Pair]:
    def plan(graphs: Pair, costs: CostModel) -> Pair:
        run_parts(*graphs, PassContext(config))
        return graphs

    return plan


def by_eager_order(graphs: Pair, costs: CostModel) -> Pair:
    run_parts(*graphs, PassContext(PassConfig(schedule=False)))
    eager_order(graphs)
    return graphs


def by_torch(graphs: Pair, costs: CostModel) -> Pair:
    return [overlap_by_torch(graph, {node: MILLI * costs.seconds(node) for node in graph.nodes}) for graph in graphs]


PLANS: dict[str, Callable[[Pair, CostModel], Pair]] = {
    OURS: by_passes(PassConfig()),
    OURS_UNLIMITED: by_passes(PassConfig(memory_budget=UNLIMITED)),
    EAGER: by_eager_order,
    "one gather per parameter": by_passes(PassConfig(bucket=False, schedule=False)),
    "group buckets, unscheduled": by_passes(PassConfig(schedule=False)),
    "torch's overlap scheduling": by_torch,
}


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One plan on one number of ranks; times in seconds, memory in bytes.

    Attributes:
        bound: on the step's time, for plans in any order; copies around collectives count nothing.
        casts: what it takes at least to read gradients and write them in the dtype of the reduction.
        compute: kernels, with ``copies``, those that transitions launch.
        exposed: how long compute stands still for collectives.
    """

    shape: str
    tokens: int
    ranks: int
    plan: str
    step: float
    bound: float
    casts: float
    compute: float
    copies: float
    exposed: float
    peak: int
    least_peak: int
    collectives: int

    @property
    def ratio(self) -> float:
        return self.step / self.bound

    @property
    def ratio_with_casts(self) -> float:
        return self.step / (self.bound + self.casts)

    def cells(self) -> tuple[str, ...]:
        times = (self.step, self.compute, self.copies, self.exposed)
        step, compute, copies, exposed = (f"{MILLI * each:.1f}" for each in times)
        peak, gap = f"{self.peak / GIBI:.2f}", f"{self.peak / self.least_peak - 1:+.1%}"
        gaps = (f"{self.ratio - 1:+.2%}", f"{self.ratio_with_casts - 1:+.2%}")
        return (self.plan, step, *gaps, compute, copies, exposed, peak, gap, f"{self.collectives}")


HEADING = (
    "plan",
    "step ms",
    "gap",
    "with casts",
    "compute ms",
    "copies ms",
    "exposed ms",
    "peak GiB",
    "gap",
    "collectives",
)


def compare_plans(shape: str, tokens: int, args: argparse.Namespace) -> list[Row]:
    config = replace(SIZES[shape], layers=args.layers or SIZES[shape].layers)
    length = min(tokens, config.max_seq)
    print(f"tracing {shape}, {tokens} tokens ...", file=sys.stderr, flush=True)
    stages = traced_stages(config, TRACED_WORLD, tokens // length, length)
    traced = [stages["forward"], stages["backward"]]
    costs = CostModel(profile(args.profile), {GROUP: TRACED_WORLD})
    plans, missing = make_plans(traced, costs)
    peaks = {name: MemoryProfile.of(graphs).peak for name, graphs in plans.items()}
    casts = sum(map(cast_bytes, reductions(traced[-1]))) / costs.profile.byte_rate
    found = []
    for ranks in args.ranks:
        here = costs.at({GROUP: ranks})
        least, where = bounds(traced, here), (shape, tokens, ranks)
        rows = [evaluated(where, name, graphs, here, least, casts, peaks[name]) for name, graphs in plans.items()]
        print(f"\n{shape}, {tokens} tokens a rank, {ranks} ranks, {args.profile}")
        print("\n".join([*as_table(rows, least), *missing, *verdicts(rows)]), flush=True)
        found += rows
    return found


def make_plans(traced: Sequence[Graph], costs: CostModel) -> tuple[dict[str, Pair], list[str]]:
    """The graphs of each plan; and a line for each that does not run here."""
    plans, missing = {}, []
    for name, plan in PLANS.items():
        try:
            plans[name] = plan([copy_graph(graph) for graph in traced], costs)
        except ImportError as error:
            missing.append(f"{name}: does not run here, {error}")
    return plans, missing


def cast_bytes(reduction: Collective) -> int:
    """Bytes read and written to turn what a matrix product puts out into the reduction's dtype; 0 if it has that."""
    (taken,) = reduction.inputs
    chain = [node for node in made_by(taken, REDUCE) if node.target in COPIES]
    sources = [(cast.all_input_nodes[0], cast) for cast in chain]
    return sum(data_bytes(each.meta["val"]) for pair in sources if not is_fusable(alias_root(pair[0])) for each in pair)


def evaluated(
    where: tuple[str, int, int],
    plan: str,
    graphs: Pair,
    costs: CostModel,
    least: Bounds,
    casts: float,
    peak: int,
) -> Row:
    timeline = simulate(graphs, costs)
    tagged = [node for graph in graphs for node in graph.nodes if tag_of(node) and costs.lane(node) == COMPUTE]
    return Row(
        *(*where, plan, timeline.seconds, least.time_step, casts, timeline.compute_seconds),
        *(sum(map(costs.seconds, tagged)), timeline.exposed_seconds, peak, least.memory, len(timeline.transfers)),
    )


def as_table(rows: Sequence[Row], least: Bounds) -> list[str]:
    bound = ("lower bound", f"{MILLI * least.time_step:.1f}", *[""] * 5, f"{least.memory / GIBI:.2f}", "", "")
    lines = [HEADING, bound, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([f"{name:{widths[0]}}", *map(str.rjust, cells, widths[1:])]) for name, *cells in lines]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """The goals, and whether they are met."""
    by_name = {row.plan: row for row in rows}
    ours, unlimited, eager = (by_name[name] for name in (OURS, OURS_UNLIMITED, EAGER))
    fastest = min((row for row in rows if row not in (ours, unlimited)), key=lambda row: row.step)
    return [
        _verdict("without a memory bound, to the bound", unlimited.ratio, TIME_GOAL),
        _verdict("the same, casts of gradients counted", unlimited.ratio_with_casts, TIME_GOAL),
        _verdict("at the eager order's peak, to the bound", ours.ratio, MEMORY_GOAL),
        _verdict("peak, to the eager order's", ours.peak / eager.peak, OPPONENTS_GOAL),
        _verdict(f"step, to the fastest opponent's ({fastest.plan})", ours.step / fastest.step, OPPONENTS_GOAL),
    ]


def _verdict(what: str, value: float, goal: float) -> str:
    return f"{what}: {value:.4f}, goal {goal:.2f}: {'met' if value <= goal else 'missed'}"


if __name__ == "__main__":
    main()
