"""Topological order that stays as close as it can to the order that is there."""

from __future__ import annotations

from torch.fx import Graph, Node


def sort_stably(graph: Graph) -> None:
    """Move each node that precedes one of its inputs to just after the last of them; linear in nodes and edges."""
    waiting: dict[Node, int] = {}
    placed: set[Node] = set()
    cursor: Node | None = None
    for node in list(graph.nodes):
        missing = sum(1 for source in node.all_input_nodes if source not in placed)
        if missing:
            waiting[node] = missing
            continue
        ready = [node]
        while ready:
            at = ready.pop(0)
            if cursor is not None:
                cursor.append(at)
            cursor = at
            placed.add(at)
            for user in at.users:
                if user in waiting:
                    waiting[user] -= 1
                    if not waiting[user]:
                        del waiting[user]
                        ready.append(user)
    assert not waiting, f"the graph has a cycle through {next(iter(waiting))}"
