"""What compiling leaves in logs and in torch's structured trace: nothing that was not asked for."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from fake_world import fake_world, graphs_of, run_step

from fsdp_compile import backend, fully_shard
from fsdp_compile.passes import print_skeleton, records

WIDTH = 8
RECORDS, SKELETON = "fsdp_compile.passes.records", "fsdp_compile.passes.skeleton"
STEP = (
    "graph 0/0, buckets: {}; forward: gathers 4 -> {}, gather bytes 288 -> 288; "
    "backward: gathers 1 -> 1, gather bytes 128 -> 128, "
    "reductions 4 -> 2, reduction bytes 576 -> 576, copies 0 -> 2"
)
STAGES = [
    *("before", "2_keep_slices", "3_accumulate", "4_bucket", "5_schedule", "6_dedup", "7_fuse_copies", "after"),
    *("8_for_gloo", "9_announce"),
]


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for layer in layers:
        fully_shard(layer)
    return fully_shard(layers)


def compile_step() -> None:
    """What a subprocess does too."""
    with fake_world():
        run_step(torch.compile(model(), backend="fsdp_eager", fullgraph=True), torch.ones(3, WIDTH))


def test_by_default_nothing_is_written(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And no text is made to be thrown away."""
    monkeypatch.setattr(records, "print_skeleton", lambda _: pytest.fail("printed a skeleton"))
    monkeypatch.setattr(records, "_lines", lambda _: pytest.fail("printed reports"))
    compile_step()
    assert capfd.readouterr() == ("", "")


Heard = dict[str, list[str]]  # messages by logger


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: Heard = defaultdict(list)

    def emit(self, record: logging.LogRecord) -> None:
        self.heard[record.name].append(record.getMessage())


@contextmanager
def heard(level: int, name: str) -> Iterator[Heard]:
    """What the logger of that name and those below it say inside. The suite runs without pytest's own listener."""
    logger, listener = logging.getLogger(name), _Listener()
    logger.addHandler(listener)
    logger.setLevel(level)
    try:
        yield listener.heard
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(listener)


@pytest.mark.parametrize(("bucket", "gathers"), [("module", 2), ("auto", 1)])
def test_a_line_for_each_step(bucket: str, gathers: int) -> None:
    with heard(logging.INFO, "fsdp_compile") as said, backend.configured(bucket=bucket):
        compile_step()
    assert said[RECORDS] == [STEP.format(bucket, gathers)]
    assert said[SKELETON] == []


def test_a_line_for_a_graph_without_backward() -> None:
    with heard(logging.INFO, "fsdp_compile") as said, torch.no_grad():
        compile_step()
    assert said[RECORDS] == ["graph 0/0, buckets: module; inference: gathers 4 -> 2, gather bytes 288 -> 288"]


def test_skeletons_have_a_logger_of_their_own() -> None:
    with heard(logging.DEBUG, SKELETON) as said, fake_world():
        graphs = dict(graphs_of(model(), torch.ones(3, WIDTH)))
    before, after = said[SKELETON][-2:]
    for when, text in (("before", before), ("after", after)):
        assert text.startswith(f"graph 0/0 {when} the passes\n== forward ==")
        assert all(print_skeleton(graphs[f"{part} {when}"]) in text for part in ("forward", "backward"))
    assert said[RECORDS] == []


def test_reports_of_each_stage() -> None:
    with heard(logging.DEBUG, RECORDS) as said:
        compile_step()
    found = [message for message in said[RECORDS] if "4_bucket" in message]
    assert found == [
        "graph 0/0, forward_backward_4_bucket\n"
        "bucket: 2 changes; gathers 4 -> 2, gather bytes 288 -> 288\n"
        "bucket: 2 changes; gathers 1 -> 1, gather bytes 128 -> 128, "
        "reductions 4 -> 2, reduction bytes 576 -> 576, copies 0 -> 2"
    ]


def test_torch_logs_and_torch_trace(tmp_path: Path) -> None:
    """By environment alone: TORCH_LOGS takes the names of our modules, and tlparse shows what TORCH_TRACE wrote."""
    settings = {"TORCH_LOGS": f"fsdp_compile,-{SKELETON}", "TORCH_TRACE": str(tmp_path / "trace")}
    code = f"import {Path(__file__).stem} as this; this.compile_step()"
    environment = {**os.environ, **settings}
    where = {"cwd": Path(__file__).parent, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, **where)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert re.match(r"\[rank0\]:I.* \[0/0\] ", line) and line.endswith(STEP.format("module", 2))

    (trace,) = (tmp_path / "trace").iterdir()
    joint = ["fsdp_joint_before", "fsdp_joint_1_regather", "fsdp_joint_after"]
    assert artifacts(trace) == [*joint, *(f"fsdp_forward_backward_{stage}" for stage in STAGES)]
    pages = tmp_path / "pages"
    subprocess.run(["tlparse", trace, "-o", pages, "--no-browser"], check=True, capture_output=True, timeout=60)
    (page,) = pages.glob("*_0_0_0/fsdp_forward_backward_after_*.txt")  # of frame 0, compiled the first time
    assert page.read_text().startswith("== forward ==\n\nall_gather #0 [0] f32 144 B in, 2 ranks: weight bias\n")
    assert page.name in (pages / "index.html").read_text()


def artifacts(trace: Path) -> list[str]:
    """Names of ours, each of which must say that it belongs to the first compile of the first frame."""
    found = []
    for line in trace.read_text().splitlines():
        name = re.search(r'\{"artifact": \{"name": "fsdp_.*', line)
        if name:
            entry = json.loads(name[0])
            assert (entry["frame_id"], entry["frame_compile_id"]) == (0, 0)
            found.append(entry["artifact"]["name"])
    return found
