"""``fsdp-compile plan``: says how a step will go on ranks that need not exist."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import plan_search
from ..local_ranks import UsageError
from ..passes.context import parse_bytes
from ..plan_remedy import remedy
from ..plan_search import Found, Setting
from ..plan_table import as_table, shortfall
from ..planning import make_plan
from ..report import write_report
from ..trace_file import write_trace
from . import without_ranks
from .arguments import check_writable
from .without_ranks import each_world, factory_of, heading, one_graph, policy_of


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="say how a step will go on ranks that need not exist",
        description="Trace a model without data, run the passes, and print for each number of ranks the simulated time "
        "of a step, what communication is exposed, and what fills the memory, beside what no plan can beat. Needs no "
        "GPU and no memory for the model.",
    )
    parser.set_defaults(check=check, start=start)
    without_ranks.add_arguments(parser)
    add = parser.add_argument
    add("--memory", metavar="SIZE", help="that a device has, like 80GiB; more is called too much")
    add("--search", action="store_true", help="try buckets, resharding and replicas, and say which to take")
    add("--trace", metavar="FILE", type=Path, help="also write a trace for Perfetto or about:tracing, .json")
    add("--html", metavar="FILE", type=Path, help="also write a page to look at: timeline, memory, buckets, comparison")


def check(args: argparse.Namespace) -> None:
    """Find what is wrong before anything is traced.

    Raises:
        UsageError: as ``without_ranks.check``; no such size; a file that cannot be written; what excludes each other.
    """
    try:
        args.memory = None if args.memory is None else parse_bytes(args.memory)
    except ValueError as error:
        raise UsageError(str(error)) from None
    chosen = args.mesh or args.replicas > 1 or args.reshard is not None or args.bucket != "module"
    if args.search and (args.trace or chosen):
        raise UsageError("--search chooses --bucket, --reshard and replicas itself, and writes no --trace")
    files = [file for file in (args.trace, args.html) if file is not None]
    if len(set(files)) < len(files):
        raise UsageError(f"--trace and --html cannot both be written to {files[0]}")
    for file in files:
        check_writable(file)
    without_ranks.check(args)


def start(args: argparse.Namespace) -> int:
    """Plan for each number of ranks, or search for each, and print what comes out; 1 if for some nothing fits.

    Raises:
        UsageError: the model cannot be planned.
    """
    with one_graph(args):
        return _search(args) if args.search else _plan(args)


def _search(args: argparse.Namespace) -> int:
    fits = True
    all_found: list[Found] = []
    for ranks, _ in args.worlds:
        tried = plan_search.settings(ranks, args.hardware)
        planned = plan_search.plans(factory_of(args), ranks, args.config, tried, mp_policy=policy_of(args))
        found = [*tqdm(planned, desc=f"{ranks} ranks", total=len(tried), unit="plan", disable=None, leave=False)]
        print(plan_search.as_advice(found, args.memory), flush=True)
        fits &= args.memory is None or any(plan.peak <= args.memory for _, plan in found)
        all_found += found
    _write_report(args, all_found)
    return 0 if fits else 1


def _plan(args: argparse.Namespace) -> int:
    factory, policy = factory_of(args), policy_of(args)
    plans = [
        make_plan(factory, ranks, args.config, replicas, mp_policy=policy, reshard_after_forward=args.reshard)
        for ranks, replicas in each_world(args, "planning")
    ]
    print(f"{heading(args, plans[0].sharding)}, buckets: {args.bucket}")
    print(as_table(plans), end="", flush=True)
    if args.trace is not None:
        write_trace(plans, args.trace)
    _write_report(args, [(Setting(args.reshard, args.bucket, plan.replicas), plan) for plan in plans])
    too_large = [plan for plan in plans if args.memory is not None and plan.peak > args.memory]
    for plan in too_large:
        print("", shortfall(plan, args.memory), sep="\n", flush=True)
        setting = Setting(args.reshard, args.bucket, plan.replicas)
        print(remedy(factory, plan, setting, args.config, args.memory, mp_policy=policy), flush=True)
    return 1 if too_large else 0


def _write_report(args: argparse.Namespace, found: list[Found]) -> None:
    if args.html is not None:
        write_report(found, args.html, heading(args, found[0][1].sharding), args.memory)
