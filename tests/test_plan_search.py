"""Which settings are recommended, and why."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from command import command
from test_planning import net

from fsdp_compile import planning
from fsdp_compile.passes import PassConfig
from fsdp_compile.plan_search import SAME, Found, Setting, as_advice, plans, ranked, settings

MODULE, KEPT = Setting(None, "module", 1), Setting(False, "module", 1)


@pytest.fixture(scope="module")
def found() -> list[Found]:
    return list(plans(net, 16, PassConfig(hardware="h100"), settings(16, "h100")))


def test_what_is_tried() -> None:
    assert [each.replicas for each in settings(8, "h100")] == [1] * 4
    assert {each.replicas for each in settings(16, "h100")} == {1, 2}
    assert {each.replicas for each in settings(12, "h100")} == {1}, "shards do not fill the nodes"
    assert (
        str(Setting(False, "auto", 2)) == "--bucket auto --reshard false --replicas 2"
        and str(MODULE) == "--bucket module"
    )


def test_settings_do_what_they_say(found: list[Found]) -> None:
    by_setting = dict(found)
    assert by_setting[MODULE].traffic[1].gathers > by_setting[KEPT].traffic[1].gathers == 0
    assert by_setting[MODULE].replicas == 1 and by_setting[Setting(None, "module", 2)].replicas == 2
    shards = [by_setting[Setting(None, "module", replicas)].optimizer_bytes for replicas in (1, 2)]
    assert shards[1] == 2 * shards[0]


def test_one_trace_for_all_buckets(found: list[Found], monkeypatch: pytest.MonkeyPatch) -> None:
    """And each plan is the one that a trace of its own gives."""
    traced: list[None] = []
    trace = planning._trace
    monkeypatch.setattr(planning, "_trace", lambda *args: traced.append(None) or trace(*args))
    again = dict(plans(net, 16, PassConfig(hardware="h100"), [MODULE, KEPT, replace(MODULE, bucket="auto")]))
    assert len(traced) == 2
    for setting, shared in again.items():
        config = PassConfig(bucket=setting.bucket, hardware="h100")
        alone = planning.make_plan(net, 16, config, reshard_after_forward=setting.reshard)
        for plan in (shared, dict(found)[setting]):
            assert (plan.traffic, plan.peak, plan.least_peak) == (alone.traffic, alone.peak, alone.least_peak)
            assert plan.result.timeline.seconds == alone.result.timeline.seconds
            assert plan.result.bounds == alone.result.bounds


def test_the_fastest_first_and_the_smaller_of_equals(found: list[Found]) -> None:
    best = ranked(found, None)
    times = [plan.result.timeline.seconds for _, plan in best]
    assert len(best) == len(found) and times[0] <= min(times) * (1 + SAME)
    equals = [plan.peak for _, plan in found if plan.result.timeline.seconds <= min(times) * (1 + SAME / 2)]
    assert best[0][1].peak == min(equals)
    assert all(left <= right * (1 + SAME) for left, right in pairwise(times))


def test_what_fits_comes_first(found: list[Found]) -> None:
    smallest, largest = (choose(found, key=lambda each: each[1].peak) for choose in (min, max))
    memory = smallest[1].peak
    assert largest[1].peak > memory
    assert ranked(found, memory)[0][1].peak == memory
    advice = as_advice([largest, smallest], memory)
    assert f"take {smallest[0]}: nothing else fits" in advice and advice.count("does not fit") == 1
    assert "nothing fits: the best needs" in as_advice(found, memory - 1)


def test_why(found: list[Found]) -> None:
    (first, plan), (second, behind), *_ = ranked(found, None)
    last = as_advice(found, None).splitlines()[-1]
    assert last.startswith(f"take {first}: {second} ")
    slower = behind.result.timeline.seconds / plan.result.timeline.seconds - 1
    assert ("longer" in last) == (slower > SAME) != ("is as fast" in last)


def test_the_command() -> None:
    code, out, err = command("plan", "debug", "--seq", "64", "--search")
    assert code == 0 and not err and out.startswith("8 ranks, the best first:\n") and "\ntake --bucket" in out
    code, out, err = command("plan", "debug", "--search", "--bucket", "auto")
    assert code == 2 and "--search chooses --bucket" in err
