"""``fsdp-compile parity``: trains a model eagerly and compiled, and compares."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from ..local_ranks import UsageError
from ..parity import compare_training
from .arguments import at_least, load_factory, not_negative
from .on_ranks import on_ranks


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "parity",
        allow_abbrev=False,
        help="train a model eagerly and compiled, and compare",
        description="Train two equal copies of a model, one eagerly and one compiled, and compare losses, gradients "
        "and parameters after each step. FACTORY() returns (model, make_batch); make_batch(step, rank, world) returns "
        "what the model is called with: a tuple, a dict of keyword arguments or one tensor. Exits with 0 if all is "
        "equal, 1 if not.",
    )
    parser.set_defaults(check=check, start=on_ranks, run=run)
    add = parser.add_argument
    add(
        "factory",
        metavar="MODULE:FACTORY",
        help="module name or .py file, and a callable in it; try fsdp_compile.parity:debug_llama",
    )
    add("--steps", type=at_least(1), default=5, help="optimizer steps (default: %(default)s)")
    add("--backend", default="fsdp_eager", help="of torch.compile (default: %(default)s)")
    add("--nproc", type=at_least(1), default=2, help="ranks to start; torchrun decides itself (default: %(default)s)")
    add("--tolerance", type=not_negative, metavar="T", help="accept differences up to T (default: bits must be equal)")
    add("--lr", type=not_negative, default=1e-2, help="learning rate of SGD (default: %(default)s)")
    add("--seed", type=at_least(0), default=0, help="of weights, batches and dropout (default: %(default)s)")
    add("--allow-graph-breaks", action="store_true", help="count graph breaks instead of failing at the first")


def check(args: argparse.Namespace) -> None:
    """Find what is wrong before any rank is started.

    Raises:
        UsageError: an unknown backend, or a factory that cannot be found.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if args.backend not in known:
        raise UsageError(f"unknown backend {args.backend!r}; known are {', '.join(known)}")
    load_factory(args.factory)


def run(args: argparse.Namespace) -> int:
    """Compare, and print the report on the first rank; 0 if it passed."""
    report = compare_training(
        load_factory(args.factory),
        steps=args.steps,
        backend=args.backend,
        learning_rate=args.lr,
        fullgraph=not args.allow_graph_breaks,
        seed=args.seed,
    )
    passed = report.bitwise_equal if args.tolerance is None else report.within(args.tolerance)
    if dist.get_rank() == 0:
        print(report)
        if args.tolerance is not None:
            print(f"within tolerance {args.tolerance:g}: {'yes' if passed else 'no'}", flush=True)
    return 0 if passed else 1
