"""Traces written by hand, in the format of ``torch.profiler`` and of ``fsdp-compile plan --trace``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

GATHER = "_c10d_functional::all_gather_into_tensor"
REDUCE = "_c10d_functional::reduce_scatter_tensor"
WAIT = "_c10d_functional::wait_tensor"


def bar(name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1, number: int | None = None) -> Entry:
    """Times in microseconds; ``number`` is the external id."""
    args = {} if number is None else {"External id": number}
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": begin, "dur": end - begin, "args": args}


def mark(text: str, at: float) -> Entry:
    return bar(f"fsdp_compile {text}", at, at, "user_annotation")


def by_gloo(kind: str, begin: float, end: float) -> Entry:
    return bar(f"gloo:{kind}", begin, end, "user_annotation", tid=2)


def step_on_gloo(at: float, longer: float = 0.0, groups: str = "a") -> list[Entry]:
    """A gather of 10 us in two parts and a reduction of 20; compute stands still for the last 4 and 8 of them."""
    return [
        mark(f"forward: all_gather [{groups}] x 2", at),
        *(bar("fsdp_passes::gather", at + 1, at + 4), bar(GATHER + "_out", at + 2, at + 3)),
        *(by_gloo("all_gather", at + 3, at + 9), bar("fsdp_passes::gather", at + 5, at + 7)),
        *(by_gloo("all_gather", at + 9, at + 13), bar(WAIT, at + 9, at + 13)),
        bar("autograd::engine::evaluate_function: CompiledFunctionBackward", at + 20, at + 50 + longer),
        mark(f"backward: reduce_scatter [{groups}]", at + 21),
        *(bar("_c10d_functional::all_reduce_", at + 22, at + 24), by_gloo("all_reduce", at + 23, at + 43)),
        bar(WAIT, at + 35, at + 43),
    ]


def simulated(ranks: int, *collectives: tuple[str, str, float, float]) -> list[Entry]:
    """Phase, title, duration and exposed microseconds of each; they follow each other, then 5 us of compute."""
    process = {"ph": "M", "name": "process_name", "pid": 70 + ranks, "tid": 0, "args": {"name": "", "ranks": ranks}}
    entries, now = [process], 0.0
    for phase, title, duration, exposed in collectives:
        args = {"phase": phase, "bytes": 4, "parameters": [], "exposed us": exposed, "exposed as": ""}
        entries.append({**bar(title, now, now + duration), "pid": 70 + ranks, "args": args})
        now += duration
    return [*entries, {**bar("mm", now, now + 5), "pid": 70 + ranks}]


def write(path: Path, entries: list[Entry], ranks: int | None = 2) -> Path:
    more = {} if ranks is None else {"distributedInfo": {"backend": "gloo", "rank": 0, "world_size": ranks}}
    path.write_text(json.dumps({**more, "traceEvents": entries}))
    return path
