"""What the scripts share: checks of arguments, ranks that write numbers to a file, results as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from comparison import Comparison, as_table
from contestants import Contestant, check_same_work

from fsdp_compile.local_ranks import RankFailed, UsageError, run_ranks

TIMEOUT = timedelta(seconds=120)  # of one collective: a rank that waits longer fails, and all end

Numbers = dict[str, Any]
Measured = tuple[list[Comparison], Numbers]

# -- in the script ----------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def report(measure: Callable[[], dict[str, Measured]], args: argparse.Namespace, contestants: tuple[str, str]) -> None:
    """Measure, print the table and write ``args.json``, or end with an error."""
    try:
        measured = measure()
    except UsageError as error:
        _fail(str(error), 2)
    except RankFailed as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    print(as_table([each for rows, _ in measured.values() for each in rows], *contestants))
    if args.json:
        args.json.write_text(json.dumps(_as_json(args, measured), indent=1) + "\n")


def on_ranks(target: Callable[..., None], world: int, args: argparse.Namespace) -> Numbers:
    """Run ``target`` on ``world`` ranks and return what rank 0 wrote."""
    print(f"running {target.__name__} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(target, world, args, directory)
        return json.loads((Path(directory) / "numbers.json").read_text())


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def _as_json(args: argparse.Namespace, measured: dict[str, Measured]) -> Numbers:
    return {
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "comparisons": [asdict(each) | {"met": each.met} for rows, _ in measured.values() for each in rows],
        "numbers": {name: numbers for name, (_, numbers) in measured.items()},
    }


# -- in a rank --------------------------------------------------------------------------------------------------------


def join(rank: int, world: int, directory: str, device: str | None = "lo") -> None:
    """Become a rank of a gloo group over ``device``; ``None`` leaves the choice to gloo."""
    torch.set_num_threads(1)
    if device is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = device
    dist.init_process_group("gloo", f"file://{directory}/rendezvous", TIMEOUT, world, rank)


def finish(contestants: dict[str, Contestant], numbers: Numbers, directory: str) -> None:
    """Write the numbers if the contestants did the same work; plain ones, unsharded, saw the data of one rank only."""
    check_same_work(each for name, each in contestants.items() if not name.startswith("plain"))
    if dist.get_rank() == 0:
        write(numbers, directory)
    dist.barrier()  # a rank that ends closes its connections


def write(numbers: Numbers, directory: str) -> None:
    (Path(directory) / "numbers.json").write_text(json.dumps(numbers))
