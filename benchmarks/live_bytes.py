"""Live bytes of tensors, from the allocations and frees that torch's profiler records on every thread."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

MEASURED = "measured step"


class LiveBytes(NamedTuple):
    """Of one step: when it begins, and at most while it runs."""

    before: int
    peak: int


def live_bytes(prepare: Callable[[], Callable[[], None]]) -> LiveBytes:
    """Profile ``prepare`` and then one call of the step that it returns.

    Everything that ``prepare`` makes and keeps counts, as do storages that are resized and what the transport allocates
    for itself; what was there before does not.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = prepare()
        with record_function(MEASURED):
            step()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return _from_trace(json.loads(path.read_text())["traceEvents"])


def _from_trace(events: list[dict[str, Any]]) -> LiveBytes:
    (window,) = (event for event in events if event.get("name") == MEASURED and event.get("cat") == "user_annotation")
    start, end = window["ts"], window["ts"] + window["dur"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    live = before = peak = 0
    for when, change in changes:
        live += change
        if when < start:
            before = peak = live
        elif when <= end:
            peak = max(peak, live)
    return LiveBytes(before, peak)
