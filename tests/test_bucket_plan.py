"""The choice of buckets against all choices there are, timed by a plain simulation that shares no code with it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

import pytest

from fsdp_compile.passes.alpha_beta import Line
from fsdp_compile.passes.bucket_plan import Load, by_size, fastest_gathers, fastest_reductions

CASES = 300


def all_partitions(count: int) -> Iterator[list[range]]:
    for borders in range(count):
        for inner in combinations(range(1, count), borders):
            ends = [0, *inner, count]
            yield [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def allowed(sizes: Sequence[int], buckets: list[range], room: float) -> bool:
    return all(len(bucket) == 1 or sum(sizes[i] for i in bucket) <= room for bucket in buckets)


def gathers_end(load: Load, buckets: list[range], line: Line, room: float) -> tuple[float, float]:
    """When compute and the lane end. ``used[i]`` is when compute has come to the first use of gather i."""
    lane, now = 0.0, load.compute[0]
    used = []
    for bucket in buckets:
        launch = 0.0
        if bucket.start:
            live = sum(load.sizes[: bucket.stop])
            for i in range(bucket.start):  # used up in order, once the next is used, or compute has come to that point
                if live <= room:
                    break
                launch = used[i + 1] if i + 1 < len(used) else now
                live -= load.sizes[i]
        lane = max(lane, launch) + line.seconds(sum(load.sizes[i] for i in bucket))
        now = max(now, lane)
        for i in bucket:
            used.append(now)
            now += load.compute[i + 1]
    return now, lane


def reductions_end(load: Load, buckets: list[range], line: Line) -> float:
    lane = now = 0.0
    for bucket in buckets:
        now += sum(load.compute[i] for i in bucket)
        lane = max(lane, now) + line.seconds(sum(load.sizes[i] for i in bucket))
    return max(lane, now + load.compute[-1])


def random_load(chance: Random) -> tuple[Load, Line, float]:
    """Bound by compute, by bytes or by latency; small whole numbers, so that there are ties."""
    count = chance.randint(1, 8)
    sizes = [chance.choice([0, 1, 2, 3, 5, 8]) for _ in range(count)]
    compute = [float(chance.choice([0, 0, 1, 2, 4])) for _ in range(count + 1)]
    line = Line(chance.choice([0.0, 0.25, 1.0, 3.0]), chance.choice([0.0, 0.125, 0.5, 1.0]))
    return Load(sizes, compute), line, chance.choice([math.inf, sum(sizes) * chance.random(), 5])


@pytest.mark.parametrize("seed", range(CASES))
def test_gathers_are_as_fast_as_the_best_of_all(seed: int) -> None:
    load, line, room = random_load(Random(seed))
    found = fastest_gathers(load, line, room)
    choices = [each for each in all_partitions(len(load.sizes)) if allowed(load.sizes, each, room)]
    assert found in choices
    assert gathers_end(load, found, line, room) == min(gathers_end(load, each, line, room) for each in choices)


@pytest.mark.parametrize("seed", range(CASES))
def test_reductions_are_as_fast_as_the_best_of_all(seed: int) -> None:
    load, line, _ = random_load(Random(seed))
    found = fastest_reductions(load, line, math.inf)
    ends = [reductions_end(load, each, line) for each in all_partitions(len(load.sizes))]
    assert reductions_end(load, found, line) == min(ends)


def test_reductions_are_gathers_backwards() -> None:
    for seed in range(CASES):
        load, line, room = random_load(Random(seed))
        count = len(load.sizes)
        mirrored = [range(count - each.stop, count - each.start) for each in fastest_gathers(load, line, room)]
        backwards = Load(load.sizes[::-1], load.compute[::-1])
        assert fastest_reductions(backwards, line, room) == mirrored[::-1]


def test_the_best_is_better_than_any_one_size() -> None:
    """Bound by compute: the first bucket is all that is exposed, and the others may not be smaller than it."""
    load = Load([1] * 12, [0.0] + [2.0] * 12)
    found = fastest_gathers(load, Line(1.5, 0.25), math.inf)
    sizes = [by_size(load.sizes, most) for most in range(1, 13)]
    ends = [gathers_end(load, each, Line(1.5, 0.25), math.inf) for each in (found, *sizes)]
    assert len(found[0]) == 1 and len(found) < 12
    assert ends[0] < min(ends[1:])


def test_room_bounds_what_a_bucket_holds() -> None:
    load, line = Load([4, 4, 4, 9, 4], [0.0] * 6), Line(1.0, 1.0)
    assert fastest_gathers(load, line, math.inf) == [range(0, 5)]
    assert fastest_gathers(load, line, 8) in (
        [range(0, 2), range(2, 3), range(3, 4), range(4, 5)],
        [range(0, 1), range(1, 3), range(3, 4), range(4, 5)],
    )


def test_nothing_to_choose() -> None:
    assert fastest_gathers(Load([], [1.0]), Line(1.0, 1.0), 5) == []
    assert fastest_reductions(Load([], [1.0]), Line(1.0, 1.0), 5) == []
    assert by_size([], 5) == []


def test_by_size() -> None:
    assert by_size([2, 2, 2, 7, 1, 4], 5) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    assert by_size([2, 2, 2], 6) == [range(0, 3)]
    assert by_size([0, 9, 0], 5) == [range(0, 1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize("gigabytes", [1.0, 100.0, 1e9])
@pytest.mark.parametrize("bandwidth", [4e9, 4e10, 4e11])
def test_a_thousand_parameters_take_seconds(bandwidth: float, gigabytes: float) -> None:
    """126 layers of nine parameters, bound by bytes, balanced and bound by compute."""
    layer = [8192, 8192 * 8192, 8192 * 1024, 8192 * 1024, 8192 * 8192, 8192, *[8192 * 28672] * 3]
    sizes = [2 * numel for _ in range(126) for numel in layer]
    compute = [0.0, *(size * 4096 / 4e14 + 1e-5 for size in sizes)]
    started = time.process_time()
    fastest_gathers(Load(sizes, compute), Line(1e-4, 1 / bandwidth), gigabytes * 1e9)
    assert time.process_time() - started < 5
