"""How long each node of a graph takes on a machine.

Kernels by roofline (Williams, Waterman and Patterson, 2009), the larger of the time for the FLOPs and that for the
bytes, and the launch; collectives by the α-β model. What the nodes do is read by ``work``, what the machine can do is
said by a ``hardware`` profile, and this puts the two together: in numbers, or in sympy with a symbol for the size of
each process group and for each dynamic dimension.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import sympy
import torch
from torch.fx import Graph, Node

from .alpha_beta import ROUNDS, Line, Number
from .data_flow import Size
from .hardware import HardwareProfile, Network
from .work import Compute, Exchange, GraphWork, Work, read_work

COMPUTE = "compute"  # the lane of kernels


@dataclass(frozen=True)
class Placement:
    """Where a process group is.

    Attributes:
        size: number of ranks, or a symbol for it, a positive integer.
        in_node: how many of them sit in each node; default: as many as fit. 1 for a group that takes one rank of each
            node, say the replicas of a mesh whose shards fill the nodes.
        network: its own links, if they are not those of the profile.
    """

    size: int | sympy.Symbol
    in_node: int | None = None
    network: Network | None = None


def world_symbol(group: str) -> sympy.Symbol:
    """The symbol for the size of a process group, for which none is given."""
    return sympy.Symbol(f"W_{group}", integer=True, positive=True)


class CostModel:
    """Times of the nodes of graphs, and of collectives that might be.

    A graph is read as a whole when first asked about, and again when it has got a new node or another number of them;
    so change a graph first, and then ask. Nothing depends on a clock: all ranks get the same times.

    Args:
        profile: the machine.
        groups: of each process group, by the name that graphs call it, the size, which need not be the traced one, and
            the place. A bare size stands for ``Placement(size)``.
        dimensions: sizes of dynamic dimensions, by the names of their symbols; default: those of the trace.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        groups: Mapping[str, Placement | int],
        dimensions: Mapping[str, int] | None = None,
    ) -> None:
        self.profile = profile
        self.groups = {name: each if isinstance(each, Placement) else Placement(each) for name, each in groups.items()}
        self.dimensions = dict(dimensions or {})
        self._graphs: WeakKeyDictionary[Graph, GraphWork] = WeakKeyDictionary()
        self._numbers = _Formulas(profile, self.groups)

    def seconds(self, node: Node) -> float:
        """Time of a node, 0 if it is free.

        Raises:
            ValueError: its process group is unknown, or a size that matters is a symbol without a value.
        """
        read = self._read(node)
        work = read.nodes[node.name]
        if work is None:
            return 0.0
        time = self._numbers.time(work, lambda size: self._value(size, read))
        return self._known(time, f"the time of {node.name}")

    def expression(self, node: Node) -> sympy.Expr:
        """Time of a node as an expression in the sizes of process groups (``world_symbol``) and dynamic dimensions.

        Raises:
            ValueError: its process group is unknown.
        """
        work = self.work(node)
        return sympy.sympify(0 if work is None else self._symbols.time(work, lambda size: size))

    def lane(self, node: Node) -> str | None:
        """What works on a node: "compute"; the lane of a process group, for a launch; ``None`` if it is free."""
        work = self.work(node)
        if work is None:
            return None
        return f"group {work.group}" if isinstance(work, Exchange) else COMPUTE

    def work(self, node: Node) -> Work | None:
        """What a node has to do, ``None`` if it is free."""
        return self._read(node).nodes[node.name]

    def line(self, kind: str, group: str) -> Line:
        """Time of a collective as a function of the bytes of the whole: a gather's output, the input of all others.

        Args:
            kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
            group: name of the process group.

        Raises:
            ValueError: one of them is unknown.
        """
        return self._numbers.line(kind, group)

    def collective_seconds(self, kind: str, bytes_of_output: float, group: str) -> float:
        """Time of a collective that puts out ``bytes_of_output`` on each rank; see ``line`` for the rest."""
        line = self.line(kind, group)
        pieces = self.groups[group].size if kind == "reduce_scatter" else 1
        return self._known(line.seconds(bytes_of_output * pieces), f"the time of {kind}")

    def cheapest_seconds(self, kind: str, group: str, bytes: int) -> float:
        """Time to move ``bytes`` of the whole in one launch, which is never slower than in several.

        Raises:
            ValueError: the kind or the group is unknown, or a size is a symbol without a value.
        """
        return self._known(self.line(kind, group).seconds(bytes), f"the time of {kind}")

    def least_copy_seconds(self, node: Node) -> float:
        """Time of a node without its launch, which others may share; 0 if it is free.

        Raises:
            ValueError: its process group is unknown, or a size that matters is a symbol without a value.
        """
        work = self.work(node)
        launches = work.launches if isinstance(work, Compute) else 0
        return self.seconds(node) - launches * self.profile.kernel_launch

    def at(self, sizes: Mapping[str, int], dimensions: Mapping[str, int] | None = None) -> CostModel:
        """The same model for other sizes; what has been read of graphs is shared.

        Args:
            sizes: of process groups, by name; the others keep theirs.
            dimensions: of dynamic dimensions, by the names of their symbols, likewise.

        Raises:
            ValueError: an unknown process group.
        """
        for name in sizes:
            self._numbers.check_group(name)
        groups = {name: replace(each, size=sizes.get(name, each.size)) for name, each in self.groups.items()}
        other = CostModel(self.profile, groups, {**self.dimensions, **(dimensions or {})})
        other._graphs = self._graphs
        return other

    def digest(self) -> bytes:
        """Hash of all that times depend on but the graph, for keys of compile caches."""
        groups = sorted((name, astuple(each)) for name, each in self.groups.items())
        return hashlib.sha256(self.profile.digest() + repr((groups, sorted(self.dimensions.items()))).encode()).digest()

    @cached_property
    def _symbols(self) -> _Formulas:
        symbolic = {
            name: replace(each, size=world_symbol(name)) if isinstance(each.size, int) else each
            for name, each in self.groups.items()
        }
        return _Formulas(self.profile, symbolic)

    def _read(self, node: Node) -> GraphWork:
        read = self._graphs.get(node.graph)
        if read is None or node.name not in read.nodes or len(read.nodes) != len(node.graph.nodes):
            read = self._graphs[node.graph] = read_work(node.graph)
        return read

    def _value(self, size: Size, read: GraphWork) -> Number:
        if isinstance(size, int):
            return size
        given = {each: self.dimensions[each.name] for each in size.free_symbols if each.name in self.dimensions}
        return size.xreplace({**read.traced_sizes, **given})

    def _known(self, time: Number, what: str) -> float:
        symbols = getattr(time, "free_symbols", ())
        if symbols:
            names = ", ".join(sorted(map(str, symbols)))
            raise ValueError(f"{what} depends on {names}: say with at() what that is, or ask for the expression")
        return float(time)


class _Formulas:
    """Times for sizes of process groups that are numbers, or symbols."""

    def __init__(self, profile: HardwareProfile, groups: Mapping[str, Placement]) -> None:
        self._profile, self._groups = profile, groups
        self._lines: dict[tuple[str, str], Line] = {}
        self._flop_rates: dict[torch.dtype, float] = {}

    def time(self, work: Work, value: Callable[[Size], Number]) -> Number:
        """Time of a node; ``value`` makes the form wanted of a size in the graph."""
        size = value(work.size)
        for group, traced in work.sharded:
            size = size * traced / self._size(group)
        if isinstance(work, Exchange):
            return self.line(work.kind, work.group).seconds(size)
        moving = size / (self._profile.host_bandwidth if work.to_host else self._profile.byte_rate)
        computing = value(work.flops) / self._flop_rate(work.dtype)
        return _larger(moving, computing) + work.launches * self._profile.kernel_launch

    def line(self, kind: str, group: str) -> Line:
        line = self._lines.get((kind, group))
        if line is None:
            if kind not in ROUNDS:
                raise ValueError(f"unknown kind of collective {kind!r}; known are {', '.join(ROUNDS)}")
            size, place = self._size(group), self._groups[group]
            profile = self._profile.on(place.network) if place.network else self._profile
            line = self._lines[kind, group] = profile.line(kind, size, place.in_node)
        return line

    def check_group(self, name: str) -> None:
        if name not in self._groups:
            known = ", ".join(map(repr, self._groups)) or "none"
            raise ValueError(f"unknown process group {name!r}; the cost model was given {known}")

    def _size(self, group: str) -> Number:
        self.check_group(group)
        return self._groups[group].size

    def _flop_rate(self, dtype: torch.dtype) -> float:
        rate = self._flop_rates.get(dtype)
        if rate is None:
            rate = self._flop_rates[dtype] = self._profile.flop_rate(dtype)
        return rate


def _larger(a: Number, b: Number) -> Number:
    symbolic = isinstance(a, sympy.Expr) or isinstance(b, sympy.Expr)
    return sympy.Max(a, b) if symbolic else max(a, b)
