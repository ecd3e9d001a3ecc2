"""Has the code that Inductor emits launch and wait where the FX graph does.

Passes plan communication by the order of an FX graph. Of itself, Inductor keeps the order of the launches, but not that
of the waits nor where compute stands between them. Its reordering for peak memory brings each launch and its wait
together:

    planned   launch 0 ─ launch 1 ─ wait 0 ─ mm ─ wait 1 ─ mm
    emitted   launch 0 ─ wait 0 ─ mm ─ launch 1 ─ wait 1 ─ mm

Its fusion takes two things in one kernel of which the first is needed by a launch and the second needs a wait that is
planned for later; no reordering heals that. Hence two passes of Inductor's scheduler:

    FX graph ─ lowering ─ PinCommunication ─ fusion ─ reordering for peak memory ─ FxOrder ─ wrapper code

Pins tie communication to communication only, so they forbid just those fusions that contradict the plan. ``FxOrder``
moves whole kernels and makes none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import torch_compat
from .passes import source_digest

Kernel = torch_compat.Kernel


class PinCommunication(torch_compat.CustomSchedulerPass):
    """Has launches and waits run in the order of the FX graph, whatever fusion does; belongs before fusion.

    Attributes:
        inner: the user's pass at that place, which runs first.
    """

    def __init__(self, inner: torch_compat.CustomSchedulerPass | None = None) -> None:
        self.inner = inner

    def __call__(self, nodes: list[Kernel]) -> list[Kernel]:
        return _pinned(self.inner(nodes) if self.inner else nodes)

    def uuid(self) -> Any:
        return _source_digest(), self.inner.uuid() if self.inner else None


def pinned_after(inner: Callable[[list[Kernel]], list[Kernel]] | None) -> Callable[[list[Kernel]], list[Kernel]]:
    """A pass before fusion that runs the user's pass, if any, and then pins communication."""
    if inner is None or isinstance(inner, torch_compat.CustomSchedulerPass):
        return PinCommunication(inner)
    return lambda nodes: _pinned(inner(nodes))  # a plain function, as the user's: Inductor does not cache either


def _pinned(nodes: list[Kernel]) -> list[Kernel]:
    communication = filter(torch_compat.is_communication, nodes)
    return torch_compat.pin_order(nodes, sorted(communication, key=_fx_positions(nodes).__getitem__))


class FxOrder:
    """Puts each kernel at its place in the FX graph; belongs last in ``reorder_for_compute_comm_overlap_passes``.

    Attributes:
        source: hash of the code. Keys of compile caches take a pass in that list by its class's name and attributes, so
            without this an edit would be served artifacts that the code before it made.
    """

    def __init__(self) -> None:
        self.source = _source_digest()

    def __call__(self, nodes: list[Kernel]) -> list[Kernel]:
        if not any(map(torch_compat.is_communication, nodes)):
            return nodes  # nothing was planned, so the order for peak memory is the better one
        return _ordered(nodes, _fx_positions(nodes))


def _fx_positions(nodes: list[Kernel]) -> dict[Kernel, int]:
    """Where in the FX graph the last part of each kernel is: there, all that any part needs has been computed.

    Of a kernel that Inductor made of itself nothing is known; it runs when it is needed.
    """
    position = {node: index for index, node in enumerate(torch_compat.fx_nodes_of_lowering())}
    return {
        kernel: max((position.get(node, -1) for node in torch_compat.origins_of(kernel)), default=len(position))
        for kernel in nodes
    }


def _ordered(nodes: list[Kernel], position: dict[Kernel, int]) -> list[Kernel]:
    """The kernels by position, but each after those it needs, which move forward to stand right before it."""
    makers = {name: kernel for kernel in nodes for name in torch_compat.buffers_made(kernel)}
    placed: dict[Kernel, None] = {}
    for kernel in sorted(nodes, key=position.__getitem__):
        path = [] if kernel in placed else [kernel]
        while path:
            needs = [makers[name] for name in torch_compat.buffers_needed(path[-1]) if name in makers]
            missing = [need for need in needs if need not in placed and need is not path[-1]]
            if missing:
                path.append(min(missing, key=position.__getitem__))
                assert len(path) <= len(nodes), "kernels need each other in a cycle"
            else:
                placed[path.pop()] = None
    return list(placed)


def _source_digest() -> str:
    return source_digest(Path(__file__).parent).hex()
