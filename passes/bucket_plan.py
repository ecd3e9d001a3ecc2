"""Chooses which collectives of a sequence travel together: by size, or the fastest of all choices if it is alone.

The sequence is of gathers in order of use; buckets are stretches of it. The model:

- Compute keeps its order. The lane takes buckets in order; one of b bytes keeps it busy for ``line.seconds(b)``.
- What a gather brings is used from its first use on, which needs its whole bucket, to the first use of the next.
- What is gathered takes memory from its launch on. Until its first use, that must be free beside what compute takes in
  each stretch between first uses. A bucket is launched as early as that allows, at the latest when compute comes to the
  first use in it.

        lane      ├── a ──┼──── b c ────┼──── d e ────┤
        compute   ┊       ├─ a ─┤       ├─ b ─┼─ c ─┤ ├─ d ─┼─ e ─┤

A plan for the first i gathers is a state (C, W): when the lane is free, and when compute comes to the first use of
gather i. It is all that the rest depends on. A bucket may be launched once compute has come to some gather f <= i; if
it did not stand still since, that was at W - (compute from f to i), which the sum below counts with; if it did, it
waited for a bucket after f, the lane was busy until then, and C is what counts. So for a bucket of gathers i to j - 1

        C' = max(C, W - compute from f to i) + line.seconds(bytes from i to j)
        W' = max(W, C') + compute from i to j

Both grow with both, so it is enough to keep, for each i, the states that no other one is as good as in both (a Pareto
front): the plan found is optimal, for lines of any latency and bandwidth. Of the fastest it has the lane free first.
States that cannot end in time, by a bound on the rest and a plan known already, are dropped.

Reductions are the same with time running backwards: a gradient takes memory from where it is made to the end of its
reduction, like a parameter from the start of its gather to its use.

Times are whole picoseconds: ties are ties, and all ranks choose alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .alpha_beta import Line

PICO = 1e12
SIZES_TRIED = 24  # fixed sizes of buckets, each half of the one before, for a first plan

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """A sequence of gathers, or of reductions.

    Attributes:
        sizes: bytes of each, of the larger side, in order of first use; of reductions in order of their gradients.
        compute: seconds before the first use, between it and the next, and so on, and from the last to the end; one
            more than ``sizes``. Of reductions: before the first gradient is there, between it and the next, and so on.
        room: bytes that are free in each of these stretches; infinity for no limit.
        held: bytes of memory that each takes.
    """

    sizes: Sequence[int]
    compute: Sequence[float]
    room: Sequence[float]
    held: Sequence[int]

    def reversed(self) -> Load:
        """With time running backwards."""
        return Load(self.sizes[::-1], self.compute[::-1], self.room[::-1], self.held[::-1])

    @cached_property
    def bytes(self) -> Integers:
        """Before each, and of all; shape (sizes + 1,)."""
        return np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    @cached_property
    def clock(self) -> Integers:
        """Picoseconds of compute before each first use, and of all; shape (sizes + 1,)."""
        return np.cumsum(np.rint(np.array(self.compute) * PICO).astype(np.int64))

    @cached_property
    def launches(self) -> Integers:
        """For a bucket that ends before each, the first use that compute must have come to for its launch.

        -1 where it may be launched at once; shape (sizes + 1,). In no stretch from there on may it and what is launched
        before it take more than is free.
        """
        before = np.concatenate([[0], np.cumsum(self.held, dtype=np.int64)])
        # Held before use q by buckets up to j: before[j] - before[q]. So the last q counts whose limit is too low.
        limit = before[:-1] + np.array(self.room[:-1], dtype=np.float64)
        found = np.full(len(before), -1)
        full: list[int] = []  # stretches that a later bucket may find full, of rising limits
        for end in range(1, len(before)):
            while full and limit[full[-1]] >= limit[end - 1]:
                full.pop()
            full.append(end - 1)
            place = bisect_left(full, before[end], key=limit.__getitem__)
            found[end] = full[place - 1] if place else -1
        return found


def by_size(sizes: Sequence[int], most: int) -> list[range]:
    """Buckets that are filled in order up to ``most`` bytes; what is larger by itself travels alone."""
    borders, filled = [0], 0
    for index, size in enumerate(sizes):
        if index > borders[-1] and filled + size > most:
            borders.append(index)
            filled = 0
        filled += size
    return _buckets([*borders, len(sizes)])


def fastest_gathers(load: Load, line: Line) -> list[range]:
    """The buckets with which compute ends first.

    Args:
        load: the gathers.
        line: seconds of a launch of so many bytes.
    """
    return _buckets(_Search(load, line).borders())


def fastest_reductions(load: Load, line: Line) -> list[range]:
    """The buckets with which the last reduction ends first; see ``fastest_gathers``."""
    count = len(load.sizes)
    return _buckets([count - border for border in reversed(_Search(load.reversed(), line).borders())])


def picoseconds(line: Line, size: Integers) -> Integers:
    """Of launches of so many bytes; rounded up, so that no two buckets are faster than both in one."""
    return np.ceil(PICO * line.fixed).astype(np.int64) + np.ceil(PICO * line.per_byte * size).astype(np.int64)


def _buckets(borders: Sequence[int]) -> list[range]:
    return [range(first, end) for first, end in pairwise(borders) if first < end]


# -- the dynamic program ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _States:
    """Plans for the gathers before one. Arrays of shape (states,).

    Attributes:
        lane, compute: picoseconds, C and W.
        at: how many gathers they are for.
        parent: the state that the last bucket was added to, counted over all states.
    """

    lane: Integers
    compute: Integers
    at: Integers
    parent: Integers


class _Search:
    """Attributes, with positions counting gathers:

    bytes: before each, and of all; shape (gathers + 1,).
    before: compute before the first use of each, and all.
    launch: of a bucket that ends before each, the first use that compute must have come to, or -1.
    first: of such a bucket, the first gather that may be in it.
    tail: from when the lane is free there, the time that the rest takes at least.
    """

    def __init__(self, load: Load, line: Line) -> None:
        self._line = line
        self.bytes = load.bytes
        self.before = load.clock
        self.launch = load.launches
        self.first = np.maximum(self.launch, 0)
        self.tail = np.array([self._tail(at) for at in range(len(load.sizes))])

    def borders(self) -> list[int]:
        """Of the fastest plan: 0, where each bucket ends, and so the number of gathers last."""
        end = self._quick_end()
        states = _States(*(np.array([value]) for value in (0, int(self.before[0]), 0, -1)))
        starts = [0]  # of the states at each position
        for to in range(1, len(self.bytes)):
            starts.append(len(states.at))
            found = self._reach(to, states, starts[self.first[to]], end)
            states = _States(*(np.concatenate(both) for both in zip(_arrays(states), _arrays(found), strict=True)))
        return self._trace(states, starts[-1])

    def _reach(self, to: int, states: _States, since: int, end: int) -> _States:
        """The front of all plans for the gathers before ``to``, which add one bucket to states from ``since`` on."""
        lane, compute, at, _ = (each[since:] for each in _arrays(states))
        lane, compute = self._step(lane, compute, at, to)
        least = compute + self.before[-1] - self.before[to]
        if to < len(self.tail):
            least = np.maximum(least, lane + self.tail[to])
        (in_time,) = np.nonzero(least <= end)
        front = in_time[_front(compute[in_time], lane[in_time])]
        return _States(lane[front], compute[front], np.full(len(front), to), since + front)

    def _step(self, lane: Integers, compute: Integers, at: Integers, to: int) -> tuple[Integers, Integers]:
        """Add a bucket of the gathers from ``at`` to ``to``."""
        point = self.launch[to]
        launch = compute - (self.before[at] - self.before[point]) if point >= 0 else 0
        lane = np.maximum(lane, launch) + picoseconds(self._line, self.bytes[to] - self.bytes[at])
        return lane, np.maximum(compute, lane) + self.before[to] - self.before[at]

    def _tail(self, at: int) -> int:
        """For each later gather: all up to it are brought, in one launch at best, and all compute behind it is done."""
        brought = picoseconds(self._line, self.bytes[at + 1 :] - self.bytes[at])
        return int(np.max(brought + self.before[-1] - self.before[at:-1]))

    def _quick_end(self) -> int:
        """When the best plan ends that has buckets of a fixed size."""
        sizes = np.diff(self.bytes).tolist()
        whole = int(self.bytes[-1])
        return min(self._end_of(by_size(sizes, whole >> halved)) for halved in range(SIZES_TRIED))

    def _end_of(self, buckets: Sequence[range]) -> int:
        lane, compute = np.array([0]), self.before[:1]
        for bucket in buckets:
            for part in self._that_fit(bucket):
                lane, compute = self._step(lane, compute, np.array([part.start]), part.stop)
        return int(compute[0])

    def _that_fit(self, bucket: range) -> list[range]:
        """Its parts, where it has no room as one."""
        parts, stop = [], bucket.stop
        while stop > bucket.start:
            start = max(bucket.start, int(self.first[stop]))
            parts.append(range(start, stop))
            stop = start
        return parts[::-1]

    def _trace(self, states: _States, last: int) -> list[int]:
        """Back from the fastest plan for all: the first of the last front."""
        borders, state = [], last if len(self.bytes) > 1 else 0
        while state >= 0:
            borders.append(int(states.at[state]))
            state = int(states.parent[state])
        return borders[::-1]


def _arrays(states: _States) -> tuple[Integers, ...]:
    return states.lane, states.compute, states.at, states.parent


def _front(first: Integers, second: Integers) -> Integers:
    """Which pairs no other is at most as large as in both, in order of ``first``; of equal ones the earliest."""
    order = np.lexsort((second, first))
    least = np.minimum.accumulate(second[order])
    is_less = np.concatenate([[True], second[order][1:] < least[:-1]])
    return order[is_less] if len(order) else order
