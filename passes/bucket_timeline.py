"""Chooses buckets for all sequences of a graph together, which share lanes.

    lane      ├── gather a ──┼─ reduce c ─┼── gather b ──┤
    compute   ├───── c ──────┼───── a ────┼┄┄┄┄┄┄┄┄┄┄┄┄┄┄┼─ b ─┤

The model is that of ``bucket_plan``, but a lane takes the buckets of all sequences on it, in the order in which compute
comes to their launches; gathers ahead of reductions where it comes to both at once.

Without a limit of memory that order loses nothing. Gathers can be launched from the start on, so they all come before
the reductions. In any other order put the gathers first, among themselves as they were: each ends no later, so compute
is no later, nor any gradient; and when the last reduction ends, the lane has either been busy since the start, with the
same work, or since some gradient, with the reductions from there on, of which the other order had no fewer to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from .alpha_beta import Line
from .bucket_plan import Load, fastest_gathers, fastest_reductions, picoseconds

SLOWER = (1, 2, 4, 8)  # what lanes are planned for
AS_FAST = 1.0005  # of the least time: then fewer launches are better

BEHIND_USES = 1 << 60
LAUNCH, WAIT, AHEAD = range(3)  # what comes first at a use: launches for itself, its wait, launches for later uses

# Compute before it, the number of the use, which of the above; and the sequence, the bucket, the duration.
Event = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class Queue:
    """A sequence of gathers, or of reductions; the lane that its launches take, and how long they take there."""

    load: Load
    lane: str
    line: Line
    gathers: bool


def fastest(queues: Sequence[Queue]) -> list[list[range]]:
    """The buckets of each sequence with which all is done first, of those tried; of about as fast ones the fewest.

    For each sequence by itself ``bucket_plan`` finds the best, but others keep its lane busy. So gathers and reductions
    are planned as if their lanes were slower, by each of some factors, and all pairs of such plans are timed together.
    The slower a lane, the fewer and larger the buckets, and the earlier what is needed first. This is no proof, but of
    300 small random cases of gathers and reductions on one lane, without a limit of memory, each against all choices
    that there are, the mean is less than 0.1 % off the best, and the worst less than 5 %.
    """
    plans = [[_plan(queue, slower) for slower in SLOWER] for queue in queues]
    choices = [
        [of[pair[queue.gathers]] for queue, of in zip(queues, plans, strict=True)]
        for pair in product(range(len(SLOWER)), repeat=2)
    ]
    ends = [end_of(queues, choice) for choice in choices]
    as_fast = [choice for choice, end in zip(choices, ends, strict=True) if end <= AS_FAST * min(ends)]
    return min(as_fast, key=lambda choice: sum(map(len, choice)))


def _plan(queue: Queue, slower: int) -> list[range]:
    line = Line(slower * queue.line.fixed, slower * queue.line.per_byte)
    return (fastest_gathers if queue.gathers else fastest_reductions)(queue.load, line)


def end_of(sequences: Sequence[Queue], choice: Sequence[Sequence[range]]) -> int:
    """Picoseconds until all is done.

    Args:
        sequences: of one graph.
        choice: the buckets of each.
    """
    events = sorted(event for index, each in enumerate(sequences) for event in _events(index, each, choice[index]))
    lanes: defaultdict[str, int] = defaultdict(int)
    arrives: dict[tuple[int, int], int] = {}
    now = clock = 0
    for at, _, kind, sequence, bucket, duration in events:
        now, clock = now + at - clock, at
        if kind == WAIT:
            now = max(now, arrives[sequence, bucket])
        else:
            lane = sequences[sequence].lane
            arrives[sequence, bucket] = lanes[lane] = max(lanes[lane], now) + duration
    rest = max((int(each.load.clock[-1]) for each in sequences), default=0) - clock
    return max([now + rest, *lanes.values()])


def _events(index: int, queue: Queue, buckets: Sequence[range]) -> Iterator[Event]:
    load, clock, launches = queue.load, queue.load.clock, queue.load.launches
    before = load.bytes
    for number, bucket in enumerate(buckets):
        duration = int(picoseconds(queue.line, before[bucket.stop] - before[bucket.start]))
        if not queue.gathers:
            yield int(clock[bucket.stop - 1]), BEHIND_USES, LAUNCH, index, number, duration
            continue
        point = int(launches[bucket.stop])
        kind = LAUNCH if point == bucket.start else AHEAD
        yield int(clock[point]) if point >= 0 else 0, point, kind, index, number, duration
        yield int(clock[bucket.start]), bucket.start, WAIT, index, number, 0
