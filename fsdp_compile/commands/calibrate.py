"""``fsdp-compile calibrate``: measures a machine, and writes a hardware profile."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..calibrate import MIB, calibrate
from ..local_ranks import UsageError
from ..passes.profile_files import is_file_name
from .arguments import at_least, check_writable
from .on_ranks import on_ranks


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        allow_abbrev=False,
        help="measure this machine, and write a hardware profile",
        description="Measure matrix products, copies, launches and collectives on all ranks at once, and write a "
        "hardware profile that the cost model reads. Under torchrun on several nodes, links within and between nodes "
        "are told apart.",
    )
    parser.set_defaults(check=check, start=on_ranks, run=run)
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="to write: .toml or .json")
    add("--name", help="of the profile (default: that of the file)")
    add("--nproc", type=at_least(2), default=2, help="ranks to start; torchrun decides itself (default: %(default)s)")
    add("--largest", type=at_least(1), metavar="MIB", help="of the collectives (default: 16 MiB on CPU, 256 on GPUs)")


def check(args: argparse.Namespace) -> None:
    """Find what is wrong before any rank is started.

    Raises:
        UsageError: the file cannot be written, or there are too few ranks.
    """
    if not is_file_name(args.file.name):
        raise UsageError(f"a hardware profile is a .toml or a .json file, not {args.file.name!r}")
    check_writable(args.file)
    if os.environ.get("WORLD_SIZE") == "1":
        raise UsageError("calibrate measures collectives and needs 2 ranks or more; torchrun started 1")


def run(args: argparse.Namespace) -> int:
    """Measure, and write the profile on the first rank."""
    measured = calibrate(args.name or args.file.stem, args.largest and args.largest * MIB)
    if dist.get_rank() == 0:
        measured.write(args.file)
        print(f"{args.file}: profile {measured.name} of {dist.get_world_size()} ranks", flush=True)
    return 0
