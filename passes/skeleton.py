"""Prints the communication skeleton of a graph: what is moved, gathered, reduced and freed, and the compute between.

The text depends neither on node names nor on process-group names, so it is stable and can be kept as a snapshot.
"""

from __future__ import annotations

import textwrap
from collections import Counter

import torch
from torch.fx import Graph, Node

from .graph_view import COPIES, WAIT, Collective, Tag, known_kind, tag_of
from .torch_compat import RESIZE, is_alias

DTYPES = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float64": "f64"}
WIDTH = 118


def print_skeleton(graph: Graph) -> str:
    """One entry for each copy between devices, launch, wait and free, and one for the other operations between them.

    Waits that follow each other share a line, and so do frees of one group.
    """
    lines: list[str] = []
    between: Counter[str] = Counter()
    numbers: dict[Node, int] = {}
    for node in graph.nodes:
        line = _line(node, numbers)
        if line is not None:
            lines += _summary(between)
            between.clear()
            what, details = line
            if lines and lines[-1].startswith(what) and what.startswith("  "):
                lines[-1] += f" {details}"
            else:
                lines.append(f"{what} {details}")
        elif node.op == "call_function" and not is_alias(node) and "getitem" not in str(node.target):
            between[_short_name(node)] += 1
    wrapped = (_wrap(line) for line in [*lines, *_summary(between)])
    return "\n".join(wrapped) + "\n"


def _wrap(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 6)
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _line(node: Node, numbers: dict[Node, int]) -> tuple[str, str] | None:
    """What the node does and to what; what begins with spaces can share a line."""
    if node.op != "call_function":
        return None
    tag = tag_of(node)
    kind = known_kind(node)
    if kind is not None:
        numbers[node] = len(numbers)
        return f"{kind} #{numbers[node]}", _describe(Collective(tag, node)) if tag else "untagged"
    if node.target is WAIT:
        start = node.all_input_nodes[0]
        output = ""
        if start not in numbers:  # one output of a coalesced gather
            start, output = start.all_input_nodes[0], f".{start.args[1]}"
        return "  wait", f"#{numbers[start]}{output}" if start in numbers else "for another collective"
    if node.target is RESIZE:
        return (f"  free {_group(tag)}", " ".join(_members(tag))) if tag else ("  free", "untagged")
    if node.target in COPIES and tag and node.meta["val"].device != node.all_input_nodes[0].meta["val"].device:
        return _describe_move(node, tag)
    return None


def _describe_move(node: Node, tag: Tag) -> tuple[str, str]:
    value = node.meta["val"]
    where = "host" if value.device.type == "cpu" else "device"
    size = f"{_dtype_names([value.dtype])} {value.numel() * value.itemsize} B"
    return f"to {where}", f"{_group(tag)} {size}: {' '.join(_members(tag))}"


def _describe(collective: Collective) -> str:
    tag = collective.tag
    ranks = next((f", {how} ranks" for how in collective.how if isinstance(how, int)), "")
    size = f"{_dtype_names(collective.dtypes)} {collective.input_bytes} B in{ranks}"
    return f"{_group(tag)} {size}: {' '.join(_members(tag))}"


def _dtype_names(dtypes: list[torch.dtype]) -> str:
    return "+".join(dict.fromkeys(DTYPES.get(str(dtype), str(dtype).removeprefix("torch.")) for dtype in dtypes))


def _group(tag: Tag) -> str:
    return f"[{tag.name or 'root'}]"


def _members(tag: Tag) -> list[str]:
    return [name.removeprefix(f"{tag.name}.") for name in tag.params]


def _short_name(node: Node) -> str:
    return str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)


def _summary(counts: Counter[str]) -> list[str]:
    if not counts:
        return []
    names = ", ".join(name if n == 1 else f"{name} x{n}" for name, n in sorted(counts.items()))
    return [f"    ({names})"]
