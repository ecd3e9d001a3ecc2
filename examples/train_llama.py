"""Trains a byte-level Llama on real text, its parameters sharded and its collectives compiled: the command line.

    python examples/train_llama.py                      two ranks on this machine's CPU
    torchrun --nproc-per-node 8 examples/train_llama.py --size 1b --dtype bf16

The training itself is in llama_training.py. Only what is cheap to import is imported here, so that a bad argument or
Ctrl-C is answered at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from checkpoints import newest


class Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line instead of with its usage as well."""

    def error(self, message: str) -> NoReturn:
        fail(message, 2)


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell starts this with interrupts ignored
    try:
        train(args)
    except KeyboardInterrupt:
        last = newest(args.checkpoint_dir)
        print(f"\ninterrupted; last checkpoint: {last or 'none'}", file=sys.stderr)
        sys.exit(130)


def train(args: argparse.Namespace) -> None:
    """Train on the ranks that torchrun started, or else on some of our own."""
    from fsdp_compile.local_ranks import RankFailed, UsageError

    try:
        if "RANK" in os.environ:
            train_under_torchrun(args)
        else:
            train_on_local_ranks(args)
    except UsageError as error:
        fail(str(error), 2)
    except RankFailed as error:
        fail(str(error), error.exit_code)


def train_on_local_ranks(args: argparse.Namespace) -> None:
    from llama_training import check, train_rank

    from fsdp_compile.local_ranks import run_ranks

    check(args, args.nproc)
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(train_rank, args.nproc, args, f"file://{directory}/rendezvous")


def train_under_torchrun(args: argparse.Namespace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once and silently; torchrun speaks for its ranks
    from llama_training import check, train_rank

    from fsdp_compile.local_ranks import leave

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check(args, world)
    train_rank(rank, world, args, "env://")
    leave()


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        prog="train_llama.py", description="Train a byte-level Llama on real text with fully_shard.", allow_abbrev=False
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    add("--size", default="small", help="debug, small (default), 100m, 1b, llama3-8b or llama3-70b")
    model.add_argument("--tied", action="store_true", help="the output head is the embedding")
    model.add_argument("--untied", action="store_false", dest="tied", help="the head has a weight of its own (default)")
    add("--text", metavar="FILE_OR_DIR", help="text to learn (default: the source of Python's standard library)")
    add("--steps", type=at_least(1), default=300, help="optimizer steps (default: %(default)s)")
    add("--batch", type=at_least(1), default=8, help="sequences a rank and step (default: %(default)s)")
    add("--seq", type=at_least(2), default=128, help="bytes a sequence (default: %(default)s)")
    add("--lr", type=positive, default=3e-3, help="peak learning rate (default: %(default)s)")
    add("--seed", type=at_least(0), default=0, help="of the weights and of the order of the text")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of compute and gathers; gradients reduce in fp32")
    add("--compile", choices=("inductor", "fsdp_eager", "none"), default="inductor", help="default: %(default)s")
    add("--nproc", type=at_least(1), default=2, help="ranks to start; torchrun decides itself (default: %(default)s)")
    directory = Path("checkpoints/train_llama")
    add("--checkpoint-dir", type=Path, default=directory, metavar="DIR", help="default: %(default)s")
    add("--checkpoint-every", type=at_least(1), default=100, metavar="N", help="steps (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the newest complete checkpoint")
    add("--log-losses", type=Path, metavar="FILE", help="write each step's loss, in full precision, as JSON lines")
    add("--prompt", help="what the sample begins with (default: a line of the held-out text)")
    add("--no-sample", action="store_false", dest="sample", help="generate no text at the end")
    return parser.parse_args()


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return parse


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def fail(message: Any, exit_code: int) -> NoReturn:
    print(f"train_llama.py: error: {message}", file=sys.stderr)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
