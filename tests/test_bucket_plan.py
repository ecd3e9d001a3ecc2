"""The choice of buckets against all choices there are, timed by a plain simulation that shares no code with it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from random import Random

import pytest

from fsdp_compile.passes.alpha_beta import Line
from fsdp_compile.passes.bucket_plan import PICO, Load, by_size, fastest_gathers, fastest_reductions
from fsdp_compile.passes.bucket_timeline import Queue, end_of, fastest

CASES = 300


def all_partitions(count: int) -> Iterator[list[range]]:
    for borders in range(count):
        for inner in combinations(range(1, count), borders):
            ends = [0, *inner, count]
            yield [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def launch_point(load: Load, bucket: range) -> int | None:
    """The first use that compute must have come to, the earliest with room from there on; ``None`` if there is none."""
    for point in range(-1, bucket.start + 1):
        stretches = range(point + 1, bucket.stop)
        if all(sum(load.sizes[q : bucket.stop]) <= load.room[q] for q in stretches):
            return point
    return None


def allowed(load: Load, buckets: list[range]) -> bool:
    return all(launch_point(load, bucket) is not None for bucket in buckets)


def gathers_end(load: Load, buckets: list[range], line: Line) -> tuple[float, float]:
    """When compute and the lane end. ``used[i]`` is when compute has come to the first use of gather i."""
    lane, now = 0.0, load.compute[0]
    used: list[float] = []
    for bucket in buckets:
        point = launch_point(load, bucket)
        assert point is not None
        launch = 0.0 if point < 0 else [*used, now][point]
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


def random_load(chance: Random, most: int = 8) -> tuple[Load, Line]:
    """Bound by compute, by bytes or by latency; small whole numbers, so that there are ties."""
    count = chance.randint(1, most)
    sizes = [chance.choice([0, 1, 2, 3, 5, 8]) for _ in range(count)]
    compute = [float(chance.choice([0, 0, 1, 2, 4])) for _ in range(count + 1)]
    line = Line(chance.choice([0.0, 0.25, 1.0, 3.0]), chance.choice([0.0, 0.125, 0.5, 1.0]))
    rooms = chance.choice([[math.inf], [sum(sizes) * chance.random()], [0, 5, 9, 30, math.inf]])
    return Load(sizes, compute, [chance.choice(rooms) for _ in compute], sizes), line


@pytest.mark.parametrize("seed", range(CASES))
def test_gathers_are_as_fast_as_the_best_of_all(seed: int) -> None:
    load, line = random_load(Random(seed))
    found = fastest_gathers(load, line)
    choices = [each for each in all_partitions(len(load.sizes)) if allowed(load, each)]
    assert found in choices
    assert gathers_end(load, found, line) == min(gathers_end(load, each, line) for each in choices)


@pytest.mark.parametrize("seed", range(CASES))
def test_reductions_are_as_fast_as_the_best_of_all(seed: int) -> None:
    load, line = random_load(Random(seed))
    load = unlimited(load.sizes, load.compute)
    found = fastest_reductions(load, line)
    ends = [reductions_end(load, each, line) for each in all_partitions(len(load.sizes))]
    assert reductions_end(load, found, line) == min(ends)


def test_reductions_are_gathers_backwards() -> None:
    for seed in range(CASES):
        load, line = random_load(Random(seed))
        count = len(load.sizes)
        mirrored = [range(count - each.stop, count - each.start) for each in fastest_gathers(load, line)]
        backwards = Load(load.sizes[::-1], load.compute[::-1], load.room[::-1], load.held[::-1])
        assert fastest_reductions(backwards, line) == mirrored[::-1]


def unlimited(sizes: Sequence[int], compute: Sequence[float]) -> Load:
    return Load(sizes, compute, [math.inf] * len(compute), sizes)


def test_the_best_is_better_than_any_one_size() -> None:
    """Bound by compute: the first bucket is all that is exposed, and the others may not be smaller than it."""
    load = unlimited([1] * 12, [0.0] + [2.0] * 12)
    found = fastest_gathers(load, Line(1.5, 0.25))
    sizes = [by_size(load.sizes, most) for most in range(1, 13)]
    ends = [gathers_end(load, each, Line(1.5, 0.25)) for each in (found, *sizes)]
    assert len(found[0]) == 1 and len(found) < 12
    assert ends[0] < min(ends[1:])


def test_room_bounds_what_a_bucket_holds() -> None:
    line = Line(1.0, 1.0)
    assert fastest_gathers(unlimited([4, 4, 4, 9, 4], [0.0] * 6), line) == [range(0, 5)]
    # Beside what is used when the bucket arrives.
    assert fastest_gathers(Load([4, 4, 4, 9, 4], [0.0] * 6, [8.0] * 6, [4, 4, 4, 9, 4]), line) == [
        range(0, 3),
        range(3, 5),
    ]


def test_memory_may_be_another_than_what_travels() -> None:
    load = Load([1, 1, 1], [0.0] * 4, [9.0] * 4, [9, 9, 9])
    assert len(fastest_gathers(load, Line(1.0, 1.0))) == 2  # one is used when it arrives, and one more has room
    assert len(fastest_gathers(Load(load.sizes, load.compute, load.room, load.sizes), Line(1.0, 1.0))) == 1


def test_nothing_to_choose() -> None:
    assert fastest_gathers(unlimited([], [1.0]), Line(1.0, 1.0)) == []
    assert fastest_reductions(unlimited([], [1.0]), Line(1.0, 1.0)) == []
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
    fastest_gathers(Load(sizes, compute, [gigabytes * 1e9] * len(compute), sizes), Line(1e-4, 1 / bandwidth))
    assert time.process_time() - started < 5


# -- several sequences ------------------------------------------------------------------------------------------------


# lane       aaaa.ccbbbb      lanes       aaaa..bbbb     c is there after one second of A, b has room only for its use
# compute    ....AA.....BB                .....cc
#                             compute     ....AA....BB
def test_sequences_share_a_lane() -> None:
    gathered = Load([4, 4], [0.0, 2.0, 2.0], [math.inf, 0.0, math.inf], [4, 4])
    reduced = Load([2], [1.0, 3.0], [math.inf] * 2, [2])
    for lane, seconds in (("lane", 4 + 1 + 2 + 4 + 2), ("another", 4 + 2 + 4 + 2)):
        queues = [Queue(gathered, "lane", Line(0, 1), True), Queue(reduced, lane, Line(0, 1), False)]
        assert end_of(queues, [[range(0, 1), range(1, 2)], [range(0, 1)]]) == seconds * PICO


@pytest.mark.parametrize("seed", range(CASES))
def test_gathers_alone_end_when_their_plan_says(seed: int) -> None:
    load, line = random_load(Random(seed))
    for buckets in filter(lambda each: allowed(load, each), all_partitions(len(load.sizes))):
        assert end_of([Queue(load, "lane", line, True)], [buckets]) == max(gathers_end(load, buckets, line)) * PICO


def test_together_they_are_close_to_the_best_of_all() -> None:
    """A few hundredths from it at worst, in the order in which lanes take buckets."""
    ratios = []
    for seed in range(CASES):
        chance = Random(seed)
        queues = [Queue(*pick(chance), gathers=is_gather) for is_gather in (True, False)]
        choices = product(*(list(all_partitions(len(queue.load.sizes))) for queue in queues))
        best = min(end_of(queues, choice) for choice in choices)
        ratios.append(end_of(queues, fastest(queues)) / best if best else 1.0)
    assert sum(ratios) / CASES < 1.001 and max(ratios) < 1.05


def pick(chance: Random) -> tuple[Load, str, Line]:
    load, line = random_load(chance, most=4)
    return unlimited(load.sizes, load.compute), "lane", line
