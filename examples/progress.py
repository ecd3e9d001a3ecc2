"""What a user sees of a run while it goes: the bar with its rates, and the file of losses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm


class Progress:
    """A bar over the steps that remain; silent on all ranks but one.

    Args:
        done: steps taken before this run.
        steps: the last step.
        tokens: tokens that all ranks together read in a step.
        communicated: bytes that the collectives bring to each rank in a step.
        shown: whether this rank shows the bar.
    """

    def __init__(self, done: int, steps: int, tokens: int, communicated: float, shown: bool) -> None:
        self.done, self.steps, self.tokens, self.communicated = done, steps, tokens, communicated
        self.taken = 0
        self._first_done = 0.0
        tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, and would outlive a killed rank
        self._bar = tqdm(desc="first step", initial=done, total=steps, unit="step", disable=not shown, mininterval=0.5)

    def __iter__(self) -> Iterator[int]:
        with self._bar:
            yield from range(self.done + 1, self.steps + 1)

    def step_done(self, loss: float) -> None:
        self.taken += 1
        if self.taken == 1:  # the first step compiles: the rate counts from its end
            self._first_done = time.perf_counter()
            self._bar.set_description("training", refresh=False)
        self._bar.set_postfix_str(f"loss {loss:.3f}, {self.rates()}", refresh=False)
        self._bar.update()

    def rates(self) -> str:
        """Tokens a second, without the first step, and bytes communicated so far."""
        rate = (self.taken - 1) * self.tokens / max(1e-9, time.perf_counter() - self._first_done)
        return f"{rate:,.0f} tokens/s, {self.taken * self.communicated / 1e6:,.0f} MB communicated a rank"


class LossLog:
    """A file of ``{"step": ..., "loss": ...}`` lines; resuming cuts off what lies after the checkpoint.

    Args:
        path: the file, or ``None`` to write nothing.
        done: steps taken before this run.
    """

    def __init__(self, path: Path | None, done: int) -> None:
        kept: list[str] = []
        if path is not None and done and path.exists():
            kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= done]
        self._file = None if path is None else open(path, "w", buffering=1)  # by line: a kill loses no step
        if self._file is not None:
            self._file.writelines(kept)

    def write(self, step: int, loss: float) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"step": step, "loss": loss}) + "\n")
