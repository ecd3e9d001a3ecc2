"""How long a graph takes at least, in whatever order and in whatever buckets.

Holds for every plan that runs the graph's compute in any order that dependences allow, and its tagged collectives in
any order and merged in any way, each bucket no sooner than all of its members could start. Compute costs the same in
all of them. Of the copies around collectives (tagged nodes) those count that change dtype or device, which every plan
must do: with the time to read the data and to write it, since a launch may be shared; pads and packing count nothing,
as a cast may write where they would. A copy that is fused into a kernel with others is done within the kernel's time,
after all that it needs and before all that needs it, so it is a job of that length like any other. What is merged
already is taken for one collective.

Let K(b) be the cheapest time to move b bytes by one kind of collective on one process group: concave, as one launch of
all is the cheapest. Whatever the buckets, to move a set of collectives keeps their lane busy for at least the sum over
kinds of K(their bytes): K(a) + K(b) >= K(a + b), and a bucket that holds others too takes no less.

- The *head* of a node is the least time from the graph's start to the node's. All that it is computed from must be
  done: the gathers among its ancestors on each lane (sum of K), the compute among a launch's ancestors, the longest
  path.
- Its *tail* is the least time from its end to the graph's: the same of what is computed from it.
- A stream whose jobs have heads r, durations d and tails q ends no sooner than, for any set S of them,

        min r over S  +  sum of d over S  +  min q over S

  The largest of these over all S is reached by Jackson's rule if jobs may be interrupted: always run the released job
  with the largest tail (Carlier 1982, "The one-machine sequencing problem", EJOR 11:42-47), in O(n log n).
- The bound is the largest over all streams. On the compute stream d is the node's time. On a lane, it is the part
  s/B K(B) of a collective of s bytes among all B bytes of its kind; as K is concave, no set sums to more than its K.

For a chain of modules with s bytes and c seconds of compute each this contains the closed forms

        forward    max over i of  K(s_1 + ... + s_i) + c_i + ... + c_n      S: compute released by gather i
        backward   max over j of  c_1 + ... + c_j + K(s_j + ... + s_n)      S: compute with reductions j ... n behind it
        both       all compute; all communication of a lane                 S: everything

where in the backward c counts what later gradients need, as a plan may put off the rest; all of it does if the order of
compute is given, which makes each compute node depend on the one before.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from torch.fx import Graph, Node

from .costs import COMPUTE, CheapestCosts
from .graph_view import converts, kind_of, phase_of, process_group_of, whole_bytes
from .reach import Sets, sums_at_marks, sums_of_marks, ways

Job = tuple[float, float, float]  # head, duration, tail


def time_bound(
    graph: Graph,
    costs: CheapestCosts,
    without: Collection[Node] = frozenset(),
    in_order: bool = False,
) -> float:
    """Seconds that ``graph`` takes at least.

    Args:
        graph: forward, backward, or a graph without backward.
        costs: of its nodes.
        without: launches, and copies for them, that a plan may do without.
        in_order: compute keeps its order, as our passes have it; the bound is larger and holds only for such plans.
    """
    lanes = {node: costs.lane(node) for node in graph.nodes if node not in without}
    launches = _Launches({node: lane for node, lane in lanes.items() if lane is not None and lane != COMPUTE}, costs)
    kernels = [node for node, lane in lanes.items() if lane == COMPUTE and phase_of(node) is None]
    casts = [node for node, lane in lanes.items() if lane == COMPUTE and phase_of(node) is not None and converts(node)]
    compute = {node: costs.seconds(node) for node in kernels} | {node: costs.least_copy_seconds(node) for node in casts}
    down, up = ways(graph, kernels if in_order else ())
    before, behind = down.passed(launches.marks), up.passed(launches.marks)
    lengths = compute | launches.shares
    heads = down.longest(lengths, launches.least(before, behind, compute))
    tails = up.longest(lengths, launches.least(behind, before, compute))
    streams: defaultdict[str | None, list[Job]] = defaultdict(list)
    for node, seconds in lengths.items():
        streams[lanes[node]].append((heads[node], seconds, tails[node]))
    return max(map(earliest_end, streams.values()), default=0.0)


# -- lanes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What may be merged on a lane; ``name`` is empty for the collectives of others, which no pass merges."""

    lane: str
    name: str
    group: str


class _Launches:
    """The collectives of a graph: what sets of them take at least.

    Args:
        lanes: the lane of each.

    Attributes:
        marks: a bit of each.
        shares: seconds of each, as a part of its whole kind in one launch.
    """

    def __init__(self, lanes: dict[Node, str], costs: CheapestCosts) -> None:
        self._costs = costs
        self.marks = {node: 1 << index for index, node in enumerate(lanes)}
        kinds = {node: _kind(node, lane) for node, lane in lanes.items()}
        self._kinds = list(dict.fromkeys(kinds.values()))
        amounts = {node: whole_bytes(node) if kind.name else costs.seconds(node) for node, kind in kinds.items()}
        self._amounts = np.zeros((len(lanes), len(self._kinds)))  # bytes, or seconds where nothing is merged
        for row, (node, kind) in enumerate(kinds.items()):
            self._amounts[row, self._kinds.index(kind)] = amounts[node]
        totals = dict(zip(self._kinds, self._amounts.sum(axis=0).tolist(), strict=True))
        rates = {kind: self._seconds(kind, total) / total if total else 0.0 for kind, total in totals.items()}
        self.shares: dict[Node, float] = {node: amounts[node] * rates[kind] for node, kind in kinds.items()}

    def least(self, before: Sets, behind: Sets, compute: dict[Node, float]) -> dict[Node, float]:
        """Seconds of what must be done before each node: collectives on one lane; for a launch, compute too.

        Called with the sets exchanged: of what must be done behind it.
        """
        sums = sums_of_marks(before.values(), self._amounts)
        loads = {marks: self._busiest(amounts) for marks, amounts in sums.items()}
        found = {node: loads[marks] for node, marks in before.items()}
        work = sums_at_marks(behind, compute, len(self.marks))
        return found | {node: max(found[node], float(work[row])) for row, node in enumerate(self.marks)}

    def _busiest(self, amounts: Iterable[float]) -> float:
        busy: defaultdict[str, float] = defaultdict(float)
        for kind, amount in zip(self._kinds, amounts, strict=True):
            busy[kind.lane] += self._seconds(kind, amount)
        return max(busy.values(), default=0.0)

    def _seconds(self, kind: _Kind, amount: float) -> float:
        if not amount or not kind.name:
            return float(amount)
        return self._costs.cheapest_seconds(kind.name, kind.group, int(amount))


def _kind(start: Node, lane: str) -> _Kind:
    return _Kind(lane, kind_of(start), process_group_of(start)) if phase_of(start) else _Kind(lane, "", "")


# -- streams ----------------------------------------------------------------------------------------------------------


def earliest_end(jobs: Iterable[Job]) -> float:
    """When one stream has ended all tails, by Jackson's rule with interruptions."""
    coming = sorted(jobs, reverse=True)
    ready: list[tuple[float, float]] = []  # minus the tail, and what is left of the duration
    now = end = 0.0
    while coming or ready:
        if not ready:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, duration, tail = coming.pop()
            heapq.heappush(ready, (-tail, duration))
        minus_tail, left = heapq.heappop(ready)
        done = now + left
        if coming and coming[-1][0] < done:
            heapq.heappush(ready, (minus_tail, done - coming[-1][0]))
            now = coming[-1][0]
        else:
            now = done
            end = max(end, now - minus_tail)
    return end
