"""``fsdp-compile compare``: says how far a simulated step is from a measured one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import trace_compare
from ..local_ranks import UsageError
from ..measured_trace import TraceError


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        allow_abbrev=False,
        help="say how far a simulated step is from a measured one",
        description="Compare a trace that plan --trace wrote with one that torch.profiler exported on a rank, and "
        "print the error of the prediction for each collective and for the step. Exits with 1 if their collectives "
        "differ.",
    )
    parser.set_defaults(check=lambda args: None, start=start)
    parser.add_argument("simulated", metavar="SIMULATED", type=Path, help="written by plan --trace")
    parser.add_argument("measured", metavar="MEASURED", type=Path, help="of torch.profiler, .json or .json.gz")


def start(args: argparse.Namespace) -> int:
    """Compare, and print; 1 if the two are not of the same collectives.

    Raises:
        UsageError: a file is not what it should be.
    """
    try:
        comparison = trace_compare.compare(args.simulated, args.measured)
    except TraceError as error:
        raise UsageError(str(error)) from error
    print(trace_compare.as_table(comparison), end="", flush=True)
    return 0 if comparison.same_model else 1
