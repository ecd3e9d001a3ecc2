"""Time of a collective by the α-β model: a latency α for each step, and bytes over the bandwidth of the slowest link.

With n ranks and B bytes, the size of the whole (what an all-gather puts out, a reduce-scatter takes in):

    algorithm   steps         bytes on each link    of an all-gather or reduce-scatter; an all-reduce is one of each
    ring        n - 1         (n - 1) / n · B       rank to rank, around
    tree        ⌈log2 n⌉      (n - 1) / n · B       recursive doubling and halving
    direct      1             (n - 1) / n · B       each rank to all others at once, through a switch

So the time is affine in B, a :class:`Line`. Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005; for rings over several nodes NCCL's own tuning (``src/graph/tuning.cc``): of
the steps of a ring, one for each node but the first crosses the network, and the others stay within a node.

Formulas are written once, for numbers and for sympy: a number of ranks may be a symbol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

Number = Any  # int, float or sympy.Expr: formulas take either

ALGORITHMS = ("ring", "tree", "direct")
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1}  # kinds


@dataclass(frozen=True)
class Line:
    """A time that is affine in the bytes: ``fixed + per_byte * bytes``, in seconds."""

    fixed: Number
    per_byte: Number

    def seconds(self, size: Number) -> Number:
        """Time for ``size`` bytes."""
        return self.fixed + self.per_byte * size


@dataclass(frozen=True)
class Link:
    """What one kind of collective finds on one level of the network.

    Attributes:
        latency: seconds for each step.
        bandwidth: bytes per second that a rank sends and, at the same time, receives.
        overhead: seconds for each collective, however many ranks take part.
    """

    latency: float
    bandwidth: float
    overhead: float = 0.0


def line_within(kind: str, size: Number, link: Link, algorithm: str) -> Line:
    """Of a group of ``size`` ranks that all sit in one node."""
    return Line(
        link.overhead + ROUNDS[kind] * _steps(size, algorithm) * link.latency, _traffic(kind, size) / link.bandwidth
    )


def line_across(kind: str, size: Number, in_node: int, near: Link, far: Link, algorithm: str) -> Line:
    """Of a group of ``size`` ranks on several nodes, ``in_node`` in each.

    Args:
        near: between ranks of one node.
        far: between nodes; its bandwidth is the share of one rank, its own network card say.

    A ring or a tree enters and leaves a node once, so that all network cards of its ranks there carry a part of it; in
    other exchanges each rank's data crosses its own card.
    """
    nodes = -(-size // in_node)
    crossing = _steps(nodes, algorithm)
    staying = _steps(size, algorithm) - crossing
    cards = 1 if algorithm == "direct" or kind == "all_to_all" else in_node
    bandwidth = far.bandwidth * cards if in_node == 1 else min(near.bandwidth, far.bandwidth * cards)
    return Line(
        far.overhead + ROUNDS[kind] * (staying * near.latency + crossing * far.latency),
        _traffic(kind, size) / bandwidth,
    )


def _steps(size: Number, algorithm: str) -> Number:
    if algorithm == "ring":
        return size - 1
    if algorithm == "direct":
        return 1
    return (size - 1).bit_length() if isinstance(size, int) else sympy.ceiling(sympy.log(size, 2))


def _traffic(kind: str, size: Number) -> Number:
    """Bytes on each link for each byte of the whole."""
    return 1 if kind == "broadcast" else ROUNDS[kind] * (size - 1) / size
