"""The command ``fsdp-compile``: checks, from a shell, what compiling does to a sharded model, and measures machines.

    fsdp-compile parity MODULE:FACTORY --steps 5 --backend fsdp_eager --nproc 2
    fsdp-compile plan llama3-8b --world-size 8,64,512 --hardware h100 --memory 80GiB
    fsdp-compile explain my_model.py:factory --world-size 8
    fsdp-compile compare simulated.json measured.json
    fsdp-compile calibrate machine.toml --nproc 2
    torchrun --nproc-per-node 8 -m fsdp_compile.cli calibrate machine.toml

Exit codes: 0 all is well; 1 different, does not fit or a rank failed; 2 bad arguments. torchrun itself exits with 1 for
either failure.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from .commands import calibrate, compare, explain, parity, plan
from .factory import FactoryError
from .local_ranks import RankFailed, UsageError

COMMANDS = (parity, plan, explain, compare, calibrate)


class Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line instead of with its usage as well."""

    def error(self, message: str) -> NoReturn:
        _fail_alike(message)


def main() -> None:
    args = parse_arguments()
    try:
        args.check(args)
        sys.exit(args.start(args))
    except UsageError as error:
        _fail_alike(str(error))
    except FactoryError as error:
        _fail(str(error), 2)
    except RankFailed as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        prog="fsdp-compile",
        description="Checks on torch.compile(fully_shard(model)), and measurements for its cost model.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for each in COMMANDS:
        each.add_to(commands)
    return parser.parse_args()


def _fail_alike(message: str) -> NoReturn:
    """All ranks find the same fault in their arguments: the first one says so."""
    if os.environ.get("RANK", "0") == "0":
        _fail(message, 2)
    sys.exit(2)


def _fail(message: str, exit_code: int) -> NoReturn:
    print(f"fsdp-compile: error: {message}", file=sys.stderr, flush=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
