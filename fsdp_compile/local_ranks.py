"""Ranks as processes of this machine that begin, fail and end together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

SETTLE = 0.5  # seconds in which a rank that died is seen to have ended
GRACE = 3.0  # seconds from asking a rank to end until it is killed


class RankFailed(Exception):
    """A rank failed. ``exit_code`` is 2 if the user can mend it by another command line, else 1."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UsageError(Exception):
    """What was asked for cannot be done; the message says why, and no traceback adds to it."""


def run_ranks(target: Callable[..., None], world: int, *args: Any) -> None:
    """Call ``target(rank, world, *args)`` in ``world`` new processes and wait for all of them.

    However this call ends, no rank outlives it: not on Ctrl-C, not when one of them fails, not when this process is
    killed.

    Raises:
        RankFailed: some rank raised or died.
    """
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        with _interrupt_ignored():
            for rank in range(world):
                ranks.append(_start(target, rank, world, args))
        _wait_for_all(ranks)
    finally:
        _end([process for process, _ in ranks])


def _start(target: Callable[..., None], rank: int, world: int, args: tuple[Any, ...]) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_rank_main, args=(target, rank, world, args, theirs), name=f"rank {rank}")
    process.start()
    theirs.close()
    return process, ours


def _wait_for_all(ranks: list[tuple[BaseProcess, Connection]]) -> None:
    running = dict(enumerate(ranks))
    while running:
        wait([end for process, report in running.values() for end in (process.sentinel, report)])
        for rank, (process, report) in list(running.items()):
            if report.poll():
                try:
                    said = report.recv()
                except EOFError:
                    process.join()  # it ended without a report; its exit code says how
                else:
                    raise _dead_rank(running) or RankFailed(*said)
            if process.exitcode is not None:
                if process.exitcode != 0:
                    raise RankFailed(f"rank {rank} {_how_it_ended(process.exitcode)}")
                del running[rank]


def _dead_rank(running: dict[int, tuple[BaseProcess, Connection]]) -> RankFailed | None:
    """The true cause, if a rank died: its connections break, and others may report that before it has ended."""
    ending = wait([process.sentinel for process, _ in running.values()], timeout=SETTLE)
    for rank, (process, _) in running.items():
        if process.sentinel in ending:
            process.join()  # its files, sentinel and sockets, are closed a little before its exit code is known
        if process.exitcode:
            return RankFailed(f"rank {rank} {_how_it_ended(process.exitcode)}")
    return None


def _how_it_ended(exit_code: int) -> str:
    return f"exited with code {exit_code}" if exit_code > 0 else f"was ended by {signal.Signals(-exit_code).name}"


def _end(processes: list[BaseProcess]) -> None:
    """End what still runs, and all that it started: each rank leads a process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE
        for process in processes:
            if process.exitcode is None:
                _signal_group(process, number)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))


def _signal_group(process: BaseProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        process.kill()  # so young that it leads no group yet


@contextmanager
def _interrupt_ignored() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C from their first instruction on: ending them is this process's part."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


# -- in a rank --------------------------------------------------------------------------------------------------------


def _rank_main(target: Callable[..., None], rank: int, world: int, args: tuple[Any, ...], report: Connection) -> None:
    os.setpgid(0, 0)  # compiler processes that this rank starts are in its group and end with it
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # that group may still write to the terminal
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        target(rank, world, *args)
        leave()
    except UsageError as error:
        _report(report, str(error), 2)
    except BaseException:
        _report(report, f"rank {rank} failed\n{traceback.format_exc().rstrip()}", 1)


def leave(exit_code: int = 0) -> NoReturn:
    """End this process, its work done, without Python's shutdown.

    A gloo thread may still be letting go of the last collective's tensors; for that it asks for the interpreter's lock,
    and where it asks a shutdown the whole process aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _report(report: Connection, message: str, exit_code: int) -> None:
    """Say what happened, then wait to be ended: a rank that just left would make the others fail as well, noisily."""
    report.send((message, exit_code))
    while True:
        signal.pause()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
