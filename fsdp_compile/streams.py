"""Where communication runs while compute goes on: on CPU in the backend's threads, on an accelerator in streams.

A *lane* takes one kind of communication. On CPU a collective returns at once with a work to wait for. On an
accelerator it is ordered in the lane's stream, and whoever reads its result waits for an event. Memory is handed out
again stream by stream, so a buffer that two streams use is kept until the one that it was allocated in has waited for
the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from .profiler_marks import marked_wait


class Ticket:
    """A communication under way."""

    def __init__(self, work: dist.Work | None = None, event: torch.Event | None = None) -> None:
        self._work, self._event = work, event

    def wait(self) -> None:
        """On CPU, return when it is done; on an accelerator, have the current stream wait for it."""
        if self._work is not None:
            with marked_wait():
                self._work.wait()
            self._work = None
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)


class Lane:
    """One kind of communication; ``stream`` is ``None`` on CPU."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def on(self) -> AbstractContextManager[object]:
        """Inside, operations run in this lane's stream."""
        return nullcontext() if self._stream is None else self._stream

    def catch_up(self) -> None:
        """Have the lane wait for all that the current stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())

    def wait_for(self, event: torch.Event) -> None:
        """Have the lane wait for ``event``, recorded in another stream."""
        if self._stream is not None:
            self._stream.wait_event(event)

    def mark(self) -> Ticket:
        """A ticket for all that the lane was given so far; on CPU that is done already."""
        return Ticket(event=None if self._stream is None else self._stream.record_event())

    def run(self, collective: Callable[[bool], dist.Work | None]) -> Ticket:
        """Start ``collective(async_op)``."""
        if self._stream is None:
            return Ticket(collective(True))
        with self.on():
            collective(False)
        return self.mark()


class Lanes:
    """The lanes of one model, or of several that share them.

    Attributes:
        in_streams: whether communication is ordered in streams, so that this thread never waits; not on CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.in_streams = device.type != "cpu"

        def lane(priority: int) -> Lane:
            return Lane(torch.Stream(device, priority=priority) if self.in_streams else None)

        self.copy_in = lane(-1)  # so that copies for the next all-gather overlap with the one before
        self.all_gather = lane(-1)
        self.reduce_scatter = lane(-1)
        self.all_reduce = lane(0)  # goes over other links, often: between nodes instead of within
        self._retired: list[tuple[torch.Tensor, torch.Event]] = []

    def now(self) -> torch.Event | None:
        """All that the current stream was given so far, to wait for later; ``None`` on CPU."""
        return torch.accelerator.current_stream().record_event() if self.in_streams else None

    def after_writes(self, event: torch.Event | None) -> None:
        """Have all-gathers wait for what wrote the shards: for ``event`` if given, else for the current stream."""
        for lane in (self.copy_in, self.all_gather):
            lane.catch_up() if event is None else lane.wait_for(event)

    def retire(self, gathered: torch.Tensor) -> None:
        """``gathered``, filled by the all-gather lane, was given its last use in the current stream.

        It is kept until the next all-gather has been started: what comes first in the lanes need not wait for the use.
        """
        event = self.now()
        if event is not None:
            self._retired.append((gathered, event))

    def release_retired(self) -> None:
        """Give back what was retired; from here on the all-gather lanes wait for its last use."""
        for _, event in self._retired:
            self.copy_in.wait_for(event)
            self.all_gather.wait_for(event)
        self._retired.clear()
