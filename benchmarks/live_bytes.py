"""Live bytes of tensors, from the allocations and frees that torch's profiler records."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from torch_compat import late_waits

MEASURED = "measured step"
LET_GO = 0.02  # seconds in which a thread of the transport drops what it was given


class LiveBytes(NamedTuple):
    """Of one step: when it begins, and at most while it runs."""

    before: int
    peak: int


def live_bytes(prepare: Callable[[], Callable[[], None]], steps: int) -> list[LiveBytes]:
    """Profile ``prepare`` and then ``steps`` calls of the step that it returns.

    Everything that ``prepare`` makes and keeps counts, as do storages that are resized and what the transport allocates
    for itself; what was there before does not.

    Returns:
        One for each step that ended with as many bytes as it began with. The profiler may miss a free by a thread of
        the transport; a step with such a one ends with more.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, _transport_lets_go_first():
        step = prepare()
        for _ in range(steps):
            with record_function(MEASURED):
                step()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return _from_trace(json.loads(path.read_text())["traceEvents"])


@contextmanager
def _transport_lets_go_first() -> Iterator[None]:
    """Inside, a wait for a collective lasts longer, so that its tensors die in a thread that is profiled.

    A thread of the transport first says that its work is done and then, no longer profiled, drops the tensors. In a
    graph the wait itself drops the work, so it is put off.
    """
    original = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        result = original(work, *args, **kwargs)
        time.sleep(LET_GO)
        return result

    dist.Work.wait = wait  # type: ignore[method-assign]
    try:
        with late_waits(LET_GO):
            yield
    finally:
        dist.Work.wait = original  # type: ignore[method-assign]


def _from_trace(events: list[dict[str, Any]]) -> list[LiveBytes]:
    changes = sorted((each["ts"], each["args"]["Bytes"]) for each in events if each.get("name") == "[memory]")
    steps = [each for each in events if each.get("name") == MEASURED and each.get("cat") == "user_annotation"]
    found = []
    for start, end in sorted((step["ts"], step["ts"] + step["dur"]) for step in steps):
        live = before = sum(change for when, change in changes if when < start)
        peak = live
        for when, change in changes:
            if start <= when <= end:
                live += change
                peak = max(peak, live)
        if live == before:
            found.append(LiveBytes(before, peak))
    return found
