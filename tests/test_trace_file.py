"""Traces of plans: what a viewer is given adds up to what the plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_planning import net

from fsdp_compile.planning import Plan, make_plan
from fsdp_compile.trace_file import write_trace


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [make_plan(net, ranks) for ranks in (2, 8)]


@pytest.fixture(scope="module")
def events(plans: list[Plan], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path: Path = tmp_path_factory.mktemp("trace") / "plan.json"
    write_trace(plans, path)
    return json.loads(path.read_text())["traceEvents"]  # type: ignore[no-any-return]


def bars(events: list[dict[str, Any]], process: int) -> list[dict[str, Any]]:
    return [event for event in events if event["pid"] == process and event["ph"] == "X"]


def test_tracks_have_names(events: list[dict[str, Any]]) -> None:
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {(0, 0): "compute", (0, 1): "group 0", (1, 0): "compute", (1, 1): "group 0"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} == set(named)


def test_bars_add_up(events: list[dict[str, Any]], plans: list[Plan]) -> None:
    for process, plan in enumerate(plans):
        timeline, found = plan.result.timeline, bars(events, process)
        stalls = [event for event in found if event["name"].startswith("stands still")]
        compute = [event for event in found if event["tid"] == 0 and event not in stalls]
        for chosen, seconds in (
            (compute, timeline.compute_seconds),
            (stalls, timeline.exposed_seconds),
            ([event for event in found if event["tid"] == 1], timeline.lane_seconds["group 0"]),
        ):
            assert sum(event["dur"] for event in chosen) == pytest.approx(seconds * 1e6)


def test_bars_of_a_track_follow_each_other(events: list[dict[str, Any]], plans: list[Plan]) -> None:
    for process in range(len(plans)):
        for track in (0, 1):
            end = 0.0
            for event in sorted(
                (each for each in bars(events, process) if each["tid"] == track), key=lambda e: e["ts"]
            ):
                assert event["ts"] >= end - 1e-6
                end = event["ts"] + event["dur"]


def test_collectives_say_what_they_move(events: list[dict[str, Any]], plans: list[Plan]) -> None:
    moved = [event["args"] for event in bars(events, 0) if event["tid"] == 1]
    assert moved[0]["parameters"] == ["blocks.0.weight", "blocks.0.bias"] and moved[0]["bytes"] == 4 * (64 * 64 + 64)
    assert all(bool(each["exposed as"]) == (each["exposed us"] > 0) for each in moved)


def test_memory_peaks_where_the_plan_says(events: list[dict[str, Any]], plans: list[Plan]) -> None:
    for process, plan in enumerate(plans):
        found = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == process]
        assert max(found) == plan.result.memory.peak
