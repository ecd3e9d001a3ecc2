"""Shows in a trace of a real run, by ``torch.profiler``, which collective is whose."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from .measured_trace import MICRO, NAMED, Bar, Entry, Trace, collectives


def name_groups(path: str | Path) -> None:
    """Add to a trace, in place, a process whose bars are the transfers by group: "all_gather [blocks.0]".

    ``profile.export_chrome_trace`` has written it, with ``ProfilerActivity.CPU``, and on GPUs ``CUDA`` as well. There
    is a track for each thread, or stream, of the transport. May be called again.

    Args:
        path: a ``.json``, or ``.json.gz``.

    Raises:
        ValueError: the file cannot be read, or is no trace.
        OSError: it cannot be written.
    """
    path = Path(path)
    trace = Trace(path)
    text = json.dumps({**trace.file, "traceEvents": [*trace.entries, *_entries(trace)]})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def _entries(trace: Trace) -> Iterator[Entry]:
    process = 1 + max((bar.lane[0] for bar in trace.bars if isinstance(bar.lane[0], int)), default=0)
    yield {"ph": "M", "cat": NAMED, "name": "process_name", "pid": process, "tid": 0, "args": {"name": NAMED}}
    for each in collectives(trace):
        for move in each.moves:
            yield _named(each.title, each.phase, move, process)


def _named(title: str, phase: str, move: Bar, process: int) -> Entry:
    times = {"ts": move.begin / MICRO, "dur": (move.end - move.begin) / MICRO}
    args = {"phase": phase, "transport": move.name}
    return {"ph": "X", "cat": NAMED, "name": title, "pid": process, "tid": move.lane[1], **times, "args": args}
