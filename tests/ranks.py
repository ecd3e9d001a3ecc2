"""Real ranks for tests: processes that start once for a test file and then run one function after another."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compile.backend import configure

TIMEOUT = 120.0  # seconds for one call


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung; the message holds what each rank said."""


class Ranks:
    """``world`` ranks of one process group. After a failure they are started anew, as groups may be out of step."""

    def __init__(self, world: int, backend: str = "gloo") -> None:
        self.world = world
        self._backend = backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call a module-level ``function(*args)`` on all ranks; returns the results in order of ranks.

        Raises:
            RanksFailed: with the traceback of each rank that raised and the stacks of each that hung.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, timeout))
        answers = self._answers(timeout)
        if all(ok for ok, _ in answers):
            return [result for _, result in answers]
        self.stop()
        raise RanksFailed("\n".join(f"-- rank {rank}\n{said}" for rank, (ok, said) in enumerate(answers) if not ok))

    def _answers(self, timeout: float) -> list[tuple[bool, Any]]:
        """What each rank says; once one has failed, the others, which may wait for it in vain, have little time."""
        deadline = time.monotonic() + timeout + 10  # a hung rank prints its stacks at `timeout`
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.world and time.monotonic() < deadline:
            waiting = {self._pipes[rank]: rank for rank in range(self.world) if rank not in answers}
            for pipe in wait(list(waiting), timeout=0.2):
                rank = waiting[pipe]  # type: ignore[index]
                answers[rank] = self._receive(rank)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 5)
        self._kill_ranks_without(answers)
        return [answers.get(rank) or (False, self._last_words(rank)) for rank in range(self.world)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            ok, said = self._pipes[rank].recv()
            return ok, pickle.loads(said) if ok else said
        except EOFError:
            self._processes[rank].join(5)
            return False, f"died with exit code {self._processes[rank].exitcode}\n{self._stacks(rank)}"

    def _kill_ranks_without(self, answers: dict[int, tuple[bool, Any]]) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in answers:
                process.kill()

    def _last_words(self, rank: int) -> str:
        return self._stacks(rank) or "still running when another rank had failed"

    def _stacks(self, rank: int) -> str:
        """What it wrote of its threads when it crashed or ran out of time."""
        with open(self._stacks_file(rank)) as file:
            return file.read()

    def _stacks_file(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"stacks-{rank}")

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # Forked from a process that has only imported: as clean as one that is spawned, and there at once.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.tensor", "torch._dynamo", "fsdp_compile"])
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            args = (rank, self.world, self._backend, self._folder.name, self._stacks_file(rank), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends when the rank does
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End the ranks; the next call starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        self._folder.cleanup()


def _serve(rank: int, world: int, backend: str, folder: str, stacks: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT))
    with open(stacks, "w") as file:
        faulthandler.enable(file)
        while True:
            try:
                function, args, timeout = pipe.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(timeout, file=file)
            try:
                _forget_earlier_tests()
                answer = (True, bytes(ForkingPickler.dumps(function(*args))))
            except BaseException:
                answer = (False, traceback.format_exc())
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)


def _forget_earlier_tests() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    configure(verify=True)
