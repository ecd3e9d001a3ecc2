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
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

from harness import positive  # noqa: E402
from torch.fx import Graph  # noqa: E402
from torch_compat import overlap_by_torch  # noqa: E402
from traced_llama import traced_stages  # noqa: E402

from fsdp_compile.models import SIZES  # noqa: E402
from fsdp_compile.passes import (  # noqa: E402
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
from fsdp_compile.passes.graph_view import gathers, process_group_of, tag_of  # noqa: E402
from fsdp_compile.passes.schedule import eager_order  # noqa: E402
from fsdp_compile.passes.simulate import COMPUTE  # noqa: E402
from fsdp_compile.torch_compat import imaginary_world  # noqa: E402

MILLI, GIBI = 1e3, 2**30
UNLIMITED = 1 << 60  # bytes
AUTO, AUTO_UNLIMITED, MODULE, EAGER = "auto", "auto, no memory bound", "module", "FSDP2's eager order"
OURS = (AUTO, AUTO_UNLIMITED, MODULE)
TIME_GOAL, MEMORY_GOAL = 1.03, 1.06  # of the bound on time: without a memory bound, and at the eager order's peak
OPPONENTS_GOAL = 1.0
COLLECTIVES_GOAL = 2  # for each group, in the forward or in the backward

Pair = list[Graph]


def main() -> None:
    args = parse_arguments()
    found = []
    for shape in args.shapes:
        for tokens in args.tokens:
            for ranks in args.ranks:
                found += compare_plans(shape, tokens, ranks, args)
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


Planner = Callable[[Pair, CostModel, str], None]


def by_passes(config: PassConfig) -> Planner:
    def plan(graphs: Pair, costs: CostModel, hardware: str) -> None:
        run_parts(*graphs, PassContext(replace(config, hardware=hardware)))

    return plan


def by_eager_order(graphs: Pair, costs: CostModel, hardware: str) -> None:
    run_parts(*graphs, PassContext(PassConfig(schedule=False)))
    eager_order(graphs)


def by_torch(graphs: Pair, costs: CostModel, hardware: str) -> None:
    graphs[:] = [
        overlap_by_torch(graph, {node: MILLI * costs.seconds(node) for node in graph.nodes}) for graph in graphs
    ]


PLANS: dict[str, Planner] = {
    AUTO: by_passes(PassConfig(bucket="auto")),
    AUTO_UNLIMITED: by_passes(PassConfig(bucket="auto", memory_budget=UNLIMITED)),
    MODULE: by_passes(PassConfig()),
    EAGER: by_eager_order,
    "one gather per parameter": by_passes(PassConfig(bucket="none", schedule=False)),
    "group buckets, unscheduled": by_passes(PassConfig(schedule=False)),
    "torch's overlap scheduling": by_torch,
}


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One plan on one number of ranks; times in seconds, memory in bytes.

    Attributes:
        bound: on the step's time, for plans in any order.
        compute: kernels, with ``copies``, those that transitions launch.
        exposed: how long compute stands still for collectives.
        groups: of parameters.
        collectives: in the forward and in the backward.
    """

    shape: str
    tokens: int
    ranks: int
    plan: str
    step: float
    bound: float
    compute: float
    copies: float
    exposed: float
    peak: int
    least_peak: int
    groups: int
    collectives: tuple[int, int]

    @property
    def ratio(self) -> float:
        return self.step / self.bound

    def cells(self) -> tuple[str, ...]:
        step, *times = (f"{MILLI * each:.1f}" for each in (self.step, self.compute, self.copies, self.exposed))
        peak, gap = f"{self.peak / GIBI:.2f}", f"{self.peak / self.least_peak - 1:+.1%}"
        launched = " + ".join(map(str, self.collectives))
        return (self.plan, step, f"{self.ratio - 1:+.2%}", *times, peak, gap, launched)


HEADING = (
    "plan",
    "step ms",
    "gap",
    "compute ms",
    "copies ms",
    "exposed ms",
    "peak GiB",
    "gap",
    "collectives",
)


def compare_plans(shape: str, tokens: int, ranks: int, args: argparse.Namespace) -> list[Row]:
    config = replace(SIZES[shape], layers=args.layers or SIZES[shape].layers)
    length = min(tokens, config.max_seq)
    print(f"tracing {shape}, {tokens} tokens, {ranks} ranks ...", file=sys.stderr, flush=True)
    with imaginary_world(ranks):
        stages = traced_stages(config, ranks, tokens // length, length)
        traced = [stages["forward"], stages["backward"]]
        group = process_group_of(next(gathers(traced[0])).start)
        costs = CostModel(profile(args.profile), {group: ranks})
        plans, missing = make_plans(traced, costs, args.profile)
    least = bounds(traced, costs)
    rows = [evaluated((shape, tokens, ranks), name, graphs, costs, least) for name, graphs in plans.items()]
    print(f"\n{shape}, {tokens} tokens a rank, {ranks} ranks, {args.profile}")
    print("\n".join([*as_table(rows, least), *missing, *verdicts(rows)]), flush=True)
    return rows


def make_plans(traced: Sequence[Graph], costs: CostModel, hardware: str) -> tuple[dict[str, Pair], list[str]]:
    """The graphs of each plan; and a line for each that does not run here."""
    plans, missing = {}, []
    for name, plan in PLANS.items():
        graphs = [copy_graph(graph) for graph in traced]
        try:
            plan(graphs, costs, hardware)
            plans[name] = graphs
        except ImportError as error:
            missing.append(f"{name}: does not run here, {error}")
    return plans, missing


def evaluated(where: tuple[str, int, int], plan: str, graphs: Pair, costs: CostModel, least: Bounds) -> Row:
    timeline = simulate(graphs, costs)
    tagged = [node for graph in graphs for node in graph.nodes if tag_of(node) and costs.lane(node) == COMPUTE]
    launched = [sum(transfer.phase is phase for transfer in timeline.transfers) for phase in timeline.phases]
    groups = {group for transfer in timeline.transfers if transfer.tag for group, _ in transfer.tag.parameters}
    return Row(
        *(*where, plan, timeline.seconds, least.time_step, timeline.compute_seconds),
        *(sum(map(costs.seconds, tagged)), timeline.exposed_seconds, MemoryProfile.of(graphs).peak, least.memory),
        *(len(groups), (launched[0], launched[1])),
    )


def as_table(rows: Sequence[Row], least: Bounds) -> list[str]:
    bound = ("lower bound", f"{MILLI * least.time_step:.1f}", *[""] * 4, f"{least.memory / GIBI:.2f}", "", "")
    lines = [HEADING, bound, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([f"{name:{widths[0]}}", *map(str.rjust, cells, widths[1:])]) for name, *cells in lines]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """The goals, and whether they are met."""
    by_name = {row.plan: row for row in rows}
    auto, unlimited, module, eager = (by_name[name] for name in (*OURS, EAGER))
    opponents = [row for row in rows if row.plan not in OURS]
    fastest = min(opponents, key=lambda row: row.step)
    no_worse = partial(_verdict, goal=OPPONENTS_GOAL)
    return [
        _verdict("auto without a memory bound, to the bound", unlimited.ratio, TIME_GOAL),
        _verdict("auto at the eager order's peak, to the bound", auto.ratio, MEMORY_GOAL),
        *(no_worse(f"peak of {row.plan}, to the eager order's", row.peak / eager.peak) for row in (auto, module)),
        no_worse("step of auto, to module's", auto.step / module.step),
        *(
            no_worse(f"step of {row.plan}, to the fastest opponent's ({fastest.plan})", row.step / fastest.step)
            for row in (auto, module)
        ),
        _verdict("collectives of module, for each group", max(module.collectives) / module.groups, COLLECTIVES_GOAL),
    ]


def _verdict(what: str, value: float, goal: float) -> str:
    return f"{what}: {value:.4f}, goal {goal:.2f}: {'met' if value <= goal else 'missed'}"


if __name__ == "__main__":
    main()
