"""Measures what the cost model must know of this machine: matrix products, copies, launches and collectives.

All ranks measure at the same time, as they compute at the same time in training. Each time is the median of several
blocks of calls, and the longest of all ranks, for a step waits for the slowest; so all ranks end with the same numbers.
What is measured is what was reached, so the profile's achievable fractions are 1. Latency α and time per byte β of each
kind of collective come from a least-squares fit over its sizes, of relative errors, so that small sizes count as much
as large ones; the profile says "ring", for which α and β are of one step and one link, whatever the transport does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import numpy
import torch
import torch.distributed as dist

from .passes import GATHER
from .passes.alpha_beta import Line, Link, line_across, line_within
from .passes.hardware import HardwareProfile, Network
from .passes.torch_compat import c10d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
MIB = 1 << 20
LARGEST = {"cpu": 16 * MIB, "cuda": 256 * MIB}  # bytes of the whole in a collective
COPIED = {"cpu": 64 * MIB, "cuda": 512 * MIB}  # bytes, beyond caches
LARGEST_MATRIX = {"cpu": 2048, "cuda": 8192}
LONG_ENOUGH = 0.02  # seconds of a matrix product that says what larger ones reach
BLOCKS, CALLS = 5, 8  # timed blocks, and calls in each
LAUNCHES = 1000


def calibrate(name: str, largest: int | None = None) -> HardwareProfile:
    """Measure this machine; collective over all ranks of the default process group.

    Args:
        name: of the profile.
        largest: bytes of the whole in the largest collective; default: 16 MiB on CPU, 256 MiB on GPUs.

    Returns:
        The same profile on all ranks.

    Raises:
        ValueError: there is one rank only, or ranks sit unevenly on nodes.
    """
    device = _device()
    within, across = networks(largest)
    copied = COPIED[device]
    measured = HardwareProfile(
        name,
        peak_flops=tuple(sorted((str(dtype).removeprefix("torch."), _flop_rate(dtype, device)) for dtype in DTYPES)),
        memory_bandwidth=2 * copied / _copy_seconds(copied, device, device),  # each byte is read and written
        kernel_launch=_launch_seconds(device),
        host_bandwidth=copied / _copy_seconds(copied, "cpu", device),
        ranks_in_node=_ranks_in_node(),
        within=within,
        across=across,
    )
    agreed = [measured]  # times agree already; this way, arithmetic of other processors and environments do as well
    dist.broadcast_object_list(agreed)
    return agreed[0]


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line, nowhere negative, whose relative errors have the least squares.

    Args:
        sizes: bytes; at least two different ones.
        seconds: above 0.
    """
    b, t = numpy.asarray(sizes, float), numpy.asarray(seconds, float)
    ones = numpy.ones_like(t)
    fixed, per_byte = numpy.linalg.lstsq(numpy.stack([1 / t, b / t], axis=1), ones, rcond=None)[0]
    if fixed < 0:
        fixed, per_byte = 0.0, numpy.linalg.lstsq((b / t)[:, None], ones, rcond=None)[0][0]
    elif per_byte <= 0:  # noise hides what a byte takes: it takes at most this
        fixed, per_byte = 0.0, t[b.argmax()] / b.max()
    return Line(float(fixed), float(per_byte))


# -- network ----------------------------------------------------------------------------------------------------------


def networks(largest: int | None = None) -> tuple[Network, Network]:
    """Measure the network alone: in a node and between nodes; where there is only one of them, both are what there is.

    Collective, with the argument, the agreement of ranks and the errors of ``calibrate``.
    """
    device = _device()
    world, local = dist.get_world_size(), _ranks_in_node()
    sizes = _sizes(largest or LARGEST[device], world)
    if world == 1:
        raise ValueError("collectives need at least 2 ranks")
    if world % local:
        raise ValueError(f"{world} ranks do not fill nodes of {local}")
    within = across = None
    if local > 1:
        node, _ = dist.new_subgroups(local)
        lines = _collective_lines(sizes, device, node)
        within = _network({kind: _link_within(kind, local, line) for kind, line in lines.items()})
    if world > local:
        assert dist.group.WORLD is not None
        lines = _collective_lines(sizes, device, dist.group.WORLD)
        near = {kind: within.link(kind) if within else Link(0.0, float("inf")) for kind in KINDS}
        across = _network({kind: _link_across(kind, world, local, near[kind], line) for kind, line in lines.items()})
    assert within or across
    return within or across, across or within  # type: ignore[return-value]


def _network(links: dict[str, Link]) -> Network:
    most_used = links["all_gather"]
    others = tuple(sorted((kind, link) for kind, link in links.items() if kind != "all_gather"))
    return Network(most_used.latency, most_used.bandwidth, collectives=others)


def _link_within(kind: str, size: int, line: Line) -> Link:
    """The link on which a collective takes what was measured."""
    unit = line_within(kind, size, Link(1.0, 1.0), "ring")
    return Link(line.fixed / unit.fixed, unit.per_byte / line.per_byte)


def _link_across(kind: str, size: int, in_node: int, near: Link, line: Line) -> Link:
    """Likewise between nodes, after what is spent within them."""
    inside = line_across(kind, size, in_node, near, Link(0.0, 1.0), "ring")
    unit = line_across(kind, size, in_node, Link(0.0, float("inf")), Link(1.0, 1.0), "ring")
    return Link(max(0.0, line.fixed - inside.fixed) / unit.fixed, unit.per_byte / line.per_byte)


def _collective_lines(sizes: Sequence[int], device: str, group: dist.ProcessGroup) -> dict[str, Line]:
    return {kind: fit_line(sizes, [_collective_seconds(kind, size, device, group) for size in sizes]) for kind in KINDS}


def _collective_seconds(kind: str, size: int, device: str, group: dist.ProcessGroup) -> float:
    """Of one of two, as graphs launch them: the next before one is waited for, and making the output counts too.

    A transport that shakes hands within a collective takes longer for one that is alone on its link than for one that
    others run beside: gloo half as long again, now and then.
    """
    ranks, name = group.size(), group.group_name
    whole = torch.zeros(size // 4, device=device)
    part = torch.zeros(len(whole) // ranks, device=device)
    launch: dict[str, Callable[[], torch.Tensor]] = {
        "all_gather": lambda: GATHER(part, ranks, name),
        "reduce_scatter": lambda: c10d.reduce_scatter_tensor(whole, "sum", ranks, name),
        "all_reduce": lambda: c10d.all_reduce(whole, "sum", name),
    }

    def run_two() -> None:
        for result in [launch[kind](), launch[kind]()]:
            c10d.wait_tensor(result)

    return _seconds(run_two, device, CALLS // 2) / 2


def _sizes(largest: int, world: int) -> list[int]:
    """From 4 KiB on, each 4 times the one before; multiples of what each rank sends."""
    sizes = [largest]
    while sizes[-1] // 4 >= 4096:
        sizes.append(sizes[-1] // 4)
    return sorted({-(-size // (4 * world)) * 4 * world for size in sizes})


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _ranks_in_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


# -- one rank ---------------------------------------------------------------------------------------------------------


def _flop_rate(dtype: torch.dtype, device: str) -> float:
    """FLOP/s of a square product, of a size that takes long enough."""
    size = 256
    while True:
        a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        seconds = _seconds(lambda: torch.mm(a, b), device, calls=2)  # noqa: B023  # runs at once
        if seconds >= LONG_ENOUGH or size >= LARGEST_MATRIX[device]:
            return 2 * size**3 / seconds
        size *= 2


def _copy_seconds(size: int, source: str, target: str) -> float:
    crosses = source != target
    data = torch.ones(size, dtype=torch.uint8, device=source, pin_memory=crosses)
    copy = torch.empty(size, dtype=torch.uint8, device=target)
    return _seconds(lambda: copy.copy_(data, non_blocking=crosses), target)


def _launch_seconds(device: str) -> float:
    number = torch.zeros(1, device=device)
    return _seconds(lambda: number.add_(1), device, calls=LAUNCHES)


def _seconds(run: Callable[[], object], device: str, calls: int = CALLS) -> float:
    """Median over blocks of the time of a call, the longest of all ranks."""
    run()
    longest = torch.tensor(median(_block_seconds(run, device, calls)), dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def _block_seconds(run: Callable[[], object], device: str, calls: int) -> Iterable[float]:
    for _ in range(BLOCKS):
        dist.barrier()
        _wait_for(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        _wait_for(device)
        yield (time.perf_counter() - start) / calls


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
