"""Prints the communication skeleton of a graph: what is gathered, reduced and freed, and the compute between.

The text depends neither on node names nor on process-group names, so it is stable and can be kept as a snapshot.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Graph, Node

from .graph_view import GATHERS, REDUCTIONS, WAIT, Collective, tag_of
from .torch_compat import RESIZE, is_alias

DTYPES = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float64": "f64"}


def print_skeleton(graph: Graph) -> str:
    """One line for each launch, wait and free, and one for each stretch of other operations between them."""
    lines: list[str] = []
    between: Counter[str] = Counter()
    numbers: dict[Node, int] = {}
    for node in graph.nodes:
        line = _line(node, numbers)
        if line is not None:
            lines += _summary(between)
            between.clear()
            lines.append(line)
        elif node.op == "call_function" and not is_alias(node) and "getitem" not in str(node.target):
            between[_short_name(node)] += 1
    return "\n".join([*lines, *_summary(between)]) + "\n"


def _line(node: Node, numbers: dict[Node, int]) -> str | None:
    if node.op != "call_function":
        return None
    tag = tag_of(node)
    if node.target in (*GATHERS, *REDUCTIONS):
        numbers[node] = len(numbers)
        kind = "all_gather" if node.target in GATHERS else "reduce_scatter"
        collective = Collective(tag, node) if tag else None
        return f"{kind} #{numbers[node]} {_describe(collective)}" if collective else f"{kind} #{numbers[node]} untagged"
    if node.target is WAIT:
        start = node.all_input_nodes[0]
        output = ""
        if start not in numbers:  # one output of a coalesced gather
            start, output = start.all_input_nodes[0], f".{start.args[1]}"
        return f"  wait #{numbers[start]}{output}" if start in numbers else "  wait for another collective"
    if node.target is RESIZE:
        return f"  free {', '.join(tag.params)}" if tag else "  free untagged"
    return None


def _describe(collective: Collective) -> str:
    tag = collective.tag
    dtypes = "+".join(dict.fromkeys(DTYPES.get(str(d), str(d).removeprefix("torch.")) for d in collective.dtypes))
    members = [name.removeprefix(f"{tag.name}.") for name in tag.params]
    group = f"[{tag.name or 'root'}]"
    return f"{group} {dtypes} {collective.input_bytes} B in, {collective.world_size} ranks: {' '.join(members)}"


def _short_name(node: Node) -> str:
    return str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)


def _summary(counts: Counter[str]) -> list[str]:
    if not counts:
        return []
    names = ", ".join(name if n == 1 else f"{name} x{n}" for name, n in sorted(counts.items()))
    return [f"    ({names})"]
