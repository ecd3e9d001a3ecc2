"""``fsdp-compile explain``: says what compiling captures, moves and changes, without ranks."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..explain_step import explain_step
from . import without_ranks
from .without_ranks import each_world, factory_of, heading, one_graph, policy_of


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        allow_abbrev=False,
        help="say what compiling captures, what it moves when, and what each pass does, without ranks",
        description="Trace a model without data, run the passes, and print what was captured and what was not, with "
        "file and line of graph breaks, the collectives and when they are launched and waited for, those that are "
        "exposed and why, and what each pass did.",
    )
    parser.set_defaults(check=without_ranks.check, start=start)
    without_ranks.add_arguments(parser)
    add = parser.add_argument
    breaks = argparse.BooleanOptionalAction
    add("--allow-graph-breaks", action=breaks, default=True, help="explain a model of several graphs too (default)")
    add("--json", action="store_true", help="print all that is known as JSON, with each collective and its members")


def start(args: argparse.Namespace) -> int:
    """Explain a step for each number of ranks.

    Raises:
        UsageError: there is a graph break, and none is allowed.
    """
    factory, how = factory_of(args), {"mp_policy": policy_of(args), "reshard_after_forward": args.reshard}
    with one_graph(args):
        steps = [
            explain_step(factory, ranks, args.config, replicas, args.allow_graph_breaks, **how)
            for ranks, replicas in each_world(args, "explaining")
        ]
    if args.json:
        print(json.dumps([step.as_json() for step in steps], indent=1), flush=True)
    else:
        head = f"{heading(args, steps[0].sharding)}, buckets: {args.bucket}"
        print(head, *map(str, steps), sep="\n\n", flush=True)
    return 0
