"""Runs a command on ranks: torchrun's, or some that are started on this machine."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..factory import FactoryError
from ..local_ranks import UsageError, leave, run_ranks


def on_ranks(args: argparse.Namespace) -> int:
    """Run on torchrun's ranks, or on some of this machine; returns the exit code.

    Raises:
        RankFailed, UsageError: some rank raised or died; ranks do not have a device each.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        run_under_torchrun(args)
    check_devices(args.nproc)
    return run_on_local_ranks(args)


def check_devices(ranks: int) -> None:
    """Find whether ranks of this machine have a device each, if there are any devices.

    Raises:
        UsageError: they have not.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        raise UsageError(
            f"--nproc {ranks} needs a CUDA device for each rank, and there are {torch.cuda.device_count()}; "
            "take fewer ranks, or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )


def run_under_torchrun(args: argparse.Namespace) -> NoReturn:
    leave(run_rank(args, int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))))


def run_on_local_ranks(args: argparse.Namespace) -> int:
    """Run on ``args.nproc`` ranks of this machine; returns the exit code.

    Raises:
        RankFailed: some rank raised or died.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the ranks, which share this machine's cores
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(_rank_main, args.nproc, args, directory)
        return int(Path(directory, "exit_code").read_text())


def _rank_main(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        exit_code = run_rank(args, rank, dist.FileStore(f"{directory}/rendezvous", world))
    except FactoryError as error:
        raise UsageError(str(error)) from error
    if rank == 0:
        Path(directory, "exit_code").write_text(str(exit_code))


def run_rank(args: argparse.Namespace, local_rank: int, store: dist.Store | None = None) -> int:
    """Run the command with a process group; returns its exit code, which is the same on all ranks."""
    rendezvous: dict[str, Any] = {} if store is None else {"store": store}
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        rendezvous["device_id"] = torch.device("cuda", local_rank)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, rank=rank, world_size=world, **rendezvous)
    exit_code = args.run(args)
    dist.destroy_process_group()
    return exit_code
