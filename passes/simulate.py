"""When everything happens: a training step on one compute stream and one stream for each communication lane.

The host runs ahead of the device, so only the order of nodes in the graphs matters, not the time it takes to launch
them. Streams take nodes in graph order:

- compute: a node starts when the one before it is done;
- launch: the collective starts when all compute before it is done (the transport waits for the compute stream, not for
  the inputs alone) and its lane is free; the compute stream does not wait;
- wait: the compute stream stands still until the collective is done, hence all earlier ones of its lane too.

    host      launch 0  launch 1  wait 0   mm a   wait 1   mm b
    lane      ├─── gather 0 ───┼──── gather 1 ────┤
    compute   ┊    stalled     ├─── a ───┤ stalled├─── b ───┤
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from .costs import COMPUTE, Costs
from .graph_view import WAIT, Tag, has_backward, launch_of, tag_of, title_of, whole_bytes


@dataclass
class Phase:
    """One graph's part of the step: seconds from the step's start to its begin and its end, and its compute."""

    name: str
    begin: float
    end: float = 0.0
    compute: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(eq=False)
class Transfer:
    """One collective on the timeline. Times are seconds since the step's start.

    Attributes:
        start: the node that launches it.
        lane: its stream.
        phase: the graph that it is in.
        behind: the collective before it on its lane, if there is one.
        after: the last compute before its launch, if there is any.
        seconds: how long it takes.
        launched: when the compute before its launch was done.
        compute_before: seconds of compute in its graph before its launch.
        begin: when it began.
        waited: when the compute stream came to its first wait; ``None`` if nothing waits for it.
        compute_until_wait: seconds of compute in its graph before that.
        exposed: seconds that the compute stream stood still at its waits.
    """

    start: Node
    lane: str
    phase: Phase
    behind: Transfer | None
    after: Node | None
    seconds: float
    launched: float
    compute_before: float
    begin: float
    waited: float | None = None
    compute_until_wait: float = 0.0
    exposed: float = 0.0

    @property
    def end(self) -> float:
        return self.begin + self.seconds

    @property
    def tag(self) -> Tag | None:
        """Whose parameters it moves; ``None`` if it is not ours."""
        return tag_of(self.start)

    @property
    def bytes(self) -> int:
        """What a gather brings, what a reduction takes."""
        return whole_bytes(self.start)

    @property
    def title(self) -> str:
        """Kind and module, for people."""
        return title_of(self.start)

    @property
    def reason(self) -> str:
        """Why it is exposed: what explains at least half of it; empty if it is not."""
        if not self.exposed:
            return ""
        queued = self.begin - self.launched
        if self.behind is not None and 2 * queued >= self.exposed:
            return f"lane busy with {self.behind.title}"
        if not self.compute_before:
            return f"first of the {self.phase.name}"
        if self.compute_before == self.phase.compute:
            return f"last of the {self.phase.name}"
        if self.compute_before == self.compute_until_wait:
            return "waited for at once"
        return f"launched only after {self._last_compute}"

    @property
    def _last_compute(self) -> str:
        tag = tag_of(self.after) if self.after is not None else None
        return f"copies for [{tag.name or 'root'}]" if tag else str(self.after)


@dataclass(frozen=True)
class Event:
    """A bar of a timeline drawing: a collective, or one node of compute. Seconds since the step's start.

    Attributes:
        exposed: seconds that compute stands still for it.
        reason: why.
        phase: of a collective, the graph that launches it: "forward" or "backward".
    """

    name: str
    lane: str
    group: str
    params: tuple[str, ...]
    bytes: int
    begin: float
    end: float
    exposed: float = 0.0
    reason: str = ""
    phase: str = ""


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        nodes: of all graphs, in order.
        begins, ends: of each node, seconds on the compute stream; a wait lasts as long as the stream stands still.
        transfers: the collectives, in order of their launches.
        phases: one for each graph.
    """

    nodes: list[Node]
    begins: list[float]
    ends: list[float]
    transfers: list[Transfer]
    phases: list[Phase]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.phases[-1].end

    @property
    def compute_seconds(self) -> float:
        """How long the compute stream is busy."""
        return sum(phase.compute for phase in self.phases)

    @property
    def lane_seconds(self) -> dict[str, float]:
        """How long each lane is busy."""
        busy: defaultdict[str, float] = defaultdict(float)
        for transfer in self.transfers:
            busy[transfer.lane] += transfer.seconds
        return dict(busy)

    @property
    def exposed_seconds(self) -> float:
        """How long the compute stream stands still for collectives."""
        return sum(transfer.exposed for transfer in self.transfers)

    def events(self) -> Iterator[Event]:
        """All bars of a drawing: compute, then collectives."""
        for node, begin, end in zip(self.nodes, self.begins, self.ends, strict=True):
            if end > begin and node.target is not WAIT:
                yield Event(node.name, COMPUTE, "", (), 0, begin, end)
        for each in self.transfers:
            group, params = (each.tag.name, each.tag.params) if each.tag else ("", ())
            moved = group, params, each.bytes
            why = each.exposed, each.reason, each.phase.name
            yield Event(each.title, each.lane, *moved, each.begin, each.end, *why)


def simulate(graphs: Sequence[Graph], costs: Costs) -> Timeline:
    """Run a forward and its backward, or one graph.

    What happens between the graphs (the loss, if the model does not compute it) takes no time.

    Args:
        graphs: in the order in which they run.
        costs: of their nodes.
    """
    streams = _Streams(costs)
    for graph in graphs:
        streams.run(graph, Phase("backward" if has_backward(graph) else "forward", streams.now))
    return Timeline(streams.nodes, streams.begins, streams.ends, [*streams.transfers.values()], streams.phases)


@dataclass
class _Streams:
    """Where the streams have got to."""

    costs: Costs
    now: float = 0.0  # the end of what the compute stream has been given
    last_compute: Node | None = None
    last_on: dict[str, Transfer] = field(default_factory=dict)  # by lane
    transfers: dict[Node, Transfer] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def run(self, graph: Graph, phase: Phase) -> None:
        self.phases.append(phase)
        for node in graph.nodes:
            self.nodes.append(node)
            self.begins.append(self.now)
            self._take(node, phase)
            self.ends.append(self.now)
        # Every launch should have a wait; a graph is not done before its collectives are.
        self.now = max([self.now, *(transfer.end for transfer in self.last_on.values())])
        phase.end = self.now

    def _take(self, node: Node, phase: Phase) -> None:
        if node.target is WAIT:
            self._wait(node, phase)
            return
        lane = self.costs.lane(node)
        if lane == COMPUTE:
            seconds = self.costs.seconds(node)
            self.now += seconds
            phase.compute += seconds
            self.last_compute = node if seconds else self.last_compute
        elif lane is not None:
            self._launch(node, lane, phase)

    def _launch(self, node: Node, lane: str, phase: Phase) -> None:
        behind = self.last_on.get(lane)
        begin = max(self.now, behind.end if behind else 0.0)
        seconds = self.costs.seconds(node)
        transfer = Transfer(node, lane, phase, behind, self.last_compute, seconds, self.now, phase.compute, begin)
        self.transfers[node] = self.last_on[lane] = transfer

    def _wait(self, node: Node, phase: Phase) -> None:
        start = launch_of(node)
        transfer = self.transfers.get(start) if start is not None else None
        if transfer is None:  # launched in an earlier graph, at whose end it was done
            return
        if transfer.waited is None:
            transfer.waited, transfer.compute_until_wait = self.now, phase.compute
        transfer.exposed += max(0.0, transfer.end - self.now)
        self.now = max(self.now, transfer.end)
