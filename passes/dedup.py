"""Gathers a parameter once for runs of its module that follow each other, instead of once for each run.

        a ─ gather ─ wait ─ run 1                     a ─ gather ─ wait ─┬─ run 1
        a ─ gather ─ wait ─ run 2          ->                            └─ run 2

A gather is dropped if an earlier one in the same graph brings the same: the same shards, cast in the same way, to which
nothing has written in between, from the same ranks. Forward and backward are graphs of their own, so what is freed in
between is gathered in both all the same. Reductions of a parameter whose module runs more than once are merged by
``accumulate``.

The data then stay from one run to the next, which must not take more memory than before. So the earlier gather is

- the one before it in order of use. FSDP2's eager order, where ``schedule`` starts and from where it moves launches to
  earlier places only, launches a gather while what the one before it has brought is read, so both are there at once;
- or one whose data are saved for the backward and there to the end;
- or, with a budget (the user's, or that of "auto") or without ``schedule``, one whose data are still read after the
  launch that is dropped; then only these two.

Without a budget that does not depend on the sizes of activations, so all ranks drop the same gathers whatever they have
traced.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .bucket_load import first_use
from .context import PassContext, Report, Traffic
from .graph_view import UNSHARD, Collective, GatheredParam, alias_root, aliases_of, gathers, gathers_repeat, phase_of
from .torch_compat import is_mutating


def dedup(graph: Graph, context: PassContext) -> Report:
    """Drop gathers of what is there already.

    Args:
        graph: forward or backward graph, or a graph without backward, after ``schedule``.
        context: shared by the passes; its configuration says whether there is a budget, and a schedule.
    """
    before = Traffic.of(graph)
    dropped = 0
    if gathers_repeat(graph):
        like_eager = context.config.schedule and context.config.memory_budget is None
        kept: list[Brought] = []
        for later in _brought(graph):
            earlier = next(
                (each for each in reversed(kept) if _may_go(later, each, each is kept[-1], like_eager)), None
            )
            if earlier is None:
                kept.append(later)
            else:
                _use_instead(graph, later, earlier)
                dropped += 1
        graph.lint()
    return Report("dedup", dropped, before, Traffic.of(graph))


# -- which bring the same ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Brought:
    """What a gather brings.

    Attributes:
        params: by what is sent of each, which is equal where the same is sent.
    """

    gather: Collective
    params: dict[Hashable, GatheredParam]

    def is_in(self, other: Brought) -> bool:
        """Whether ``other`` brings all of this, before this is waited for, and nothing writes to either."""
        return (
            self.params.keys() <= other.params.keys()
            and self.gather.how == other.gather.how
            and max(other.gather.waits) < min(self.gather.waits)
            and not any(is_mutating(node.target) for each in (self, other) for node in each.readers(self.params))
        )

    def readers(self, sent: Iterable[Hashable]) -> set[Node]:
        """The nodes that take any data of these parameters."""
        made = [node for each in sent for node in self.params[each].made]
        data = {alias for node in made for alias in aliases_of(node)}
        return {user for node in data for user in node.users}

    def last_uses(self, sent: Iterable[Hashable]) -> list[Node]:
        """The last node that takes data of each of these parameters."""
        return [max(self.readers([each]), default=self.params[each].wait) for each in sent]


def _brought(graph: Graph) -> list[Brought]:
    """By all gathers, in order of use."""
    writes = [node for node in graph.nodes if is_mutating(node.target)]
    return [
        Brought(gather, {_expression(param.input, gather.start, writes): param for param in gather.params})
        for gather in sorted(gathers(graph), key=lambda gather: (first_use(gather), gather.start))
    ]


def _expression(node: Node, reader: Node, writes: Sequence[Node]) -> Hashable:
    """How transitions compute ``node``, from what, and how often that was written to before ``reader`` reads it."""
    if node.op != "call_function" or phase_of(node) != UNSHARD:
        memory, changes = alias_root(node), [write for write in writes if write < reader]
        return node, sum(memory in map(alias_root, write.all_input_nodes) for write in changes)

    def read(source: Node) -> Any:
        return _expression(source, node, writes)

    return node.target, map_arg(node.args, read), map_arg(node.kwargs, read)


def _may_go(later: Brought, earlier: Brought, adjacent: bool, like_eager: bool) -> bool:
    """Whether ``later`` may be dropped because ``earlier`` brings the same and may stay."""
    if not later.is_in(earlier):
        return False
    lasts = earlier.last_uses(later.params)
    if all(last.op == "output" for last in lasts):
        return True
    return adjacent if like_eager else later.gather.start < min(lasts)


# -- dropping ---------------------------------------------------------------------------------------------------------


def _use_instead(graph: Graph, later: Brought, earlier: Brought) -> None:
    """Have what reads ``later`` read ``earlier``, and remove what is not used any more."""
    chains = {node for param in later.params.values() for node in param.chain}
    waits, start = later.gather.waits, later.gather.start
    for sent, param in later.params.items():
        param.wait.replace_all_uses_with(earlier.params[sent].wait)
        _share_what_is_made(graph, earlier.params[sent].wait)
    items = [output for wait in waits for output in wait.all_input_nodes if output is not start]
    for node in (*waits, *items, start, *sorted(chains, reverse=True)):
        if not node.users:
            graph.erase_node(node)


def _share_what_is_made(graph: Graph, source: Node) -> None:
    """Have transitions make of ``source`` everything once."""
    made: dict[Hashable, Node] = {}
    for user in sorted(user for user in source.users if phase_of(user) == UNSHARD):
        first = made.setdefault((user.target, user.args, tuple(user.kwargs.items())), user)
        if first is not user:
            user.replace_all_uses_with(first)
            graph.erase_node(user)
    for node in made.values():
        _share_what_is_made(graph, node)
