"""What each rank does to measure how much communication a step hides; rank 0 writes the numbers to a file."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch.distributed as dist
from contestants import Contestant, Task
from emulated_compute import FLOP_RATE, emulated_task, launch_seconds
from harness import Numbers, finish, join, write
from measurements import bytes_of_a_step, from_rank_0, live_bytes_of
from overlap_contestants import COMPILED, MAKERS, compiled
from rate_limited_link import join_link, limit_rate
from rounds import over_ranks, run_rounds
from torch.fx import Graph

from fsdp_compile import backend
from fsdp_compile.calibrate import calibrate, networks
from fsdp_compile.passes import CostModel, HardwareProfile, PassConfig, bounds, copy_graph, simulate

SMALL = 1 << 16  # bytes of a collective, where the network does not matter


@dataclass(frozen=True)
class Load:
    """A model and a link.

    Attributes:
        layer_seconds: of a layer's forward; its backward takes twice as long.
        communication: seconds that the link takes for a step's bytes, as a multiple of the compute.
    """

    layers: int
    width: int
    layer_seconds: float
    communication: float

    @property
    def layer_bytes(self) -> int:
        """Of its parameters: two float32 matrices."""
        return 2 * 4 * self.width**2

    @property
    def compute(self) -> float:
        """Seconds a step."""
        return 3 * self.layers * self.layer_seconds

    @property
    def rate(self) -> float:
        """Of the link, bytes per second.

        Each of two ranks sends half of all parameters in each of two gathers, and twice as much to reduce gradients,
        which gloo does by an all-reduce.
        """
        return 2 * self.layers * self.layer_bytes / (self.communication * self.compute)

    def task(self) -> Task:
        return emulated_task(self.layers, self.width, self.layer_seconds)


def times_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    """Times of forward and backward of all contestants, bytes they send, and what is predicted for the compiled."""
    load = _load(args)
    config, costs = _on_link(_join(rank, world, directory), load, directory)
    contestants: dict[str, Contestant] = {}
    predicted: Numbers = {}
    for name, make in MAKERS.items():
        graphs: dict[str, Graph] = {}
        with backend.observed(partial(_keep, graphs)):
            contestants[name] = make(load.task(), config)
        if name in COMPILED:
            predicted[name] = _predict(graphs, costs)
    samples = run_rounds(contestants, args.rounds, args.steps, timed_update=False)
    for name, each in contestants.items():
        samples[name]["sent"] = [float(bytes_of_a_step(each))]
    finish(contestants, {"samples": samples, "predicted": predicted}, directory)


def memory_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    """Live bytes of a step; each contestant is made anew, so that no other is in memory."""
    load = _load(args)
    config, _ = _on_link(_join(rank, world, directory), load, directory)
    samples = {}
    for name, make in MAKERS.items():
        found = live_bytes_of(partial(make, load.task(), config))
        rest, peak = median(step.before for step in found), median(step.peak for step in found)
        samples[name] = {"at rest": [rest], "in the step": [peak - rest]}
    samples = over_ranks(samples)
    if rank == 0:
        write({"samples": samples}, directory)


def prediction_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    """Times of forward and backward of compiled steps, predicted and measured."""
    machine, found = _join(rank, world, directory), []
    for load, bucket in args.predicted:
        config, costs = _on_link(machine, load, directory)
        graphs: dict[str, Graph] = {}
        with backend.observed(partial(_keep, graphs)):
            contestant = compiled(bucket)(load.task(), config)
        samples = run_rounds({"compiled": contestant}, args.rounds, args.steps, timed_update=False)
        measured = {"measured": samples["compiled"]["wall"], "rate": load.rate, "bucket": bucket}
        found.append(asdict(load) | measured | _predict(graphs, costs))
    if rank == 0:
        write({"found": found}, directory)


# -- parts ------------------------------------------------------------------------------------------------------------


def _load(args: argparse.Namespace) -> Load:
    return Load(args.layers, args.width, args.layer_ms / 1e3, args.communication)


def _join(rank: int, world: int, directory: str) -> HardwareProfile:
    """Be a rank on its own core, on a link that is not limited yet; the emulated machine."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    join_link(rank, Path(directory))
    join(rank, world, directory, device=None)
    machine = calibrate("emulated", SMALL)
    return replace(machine, peak_flops=(("float32", FLOP_RATE),), kernel_launch=from_rank_0(launch_seconds()))


def _on_link(machine: HardwareProfile, load: Load, directory: str) -> tuple[PassConfig, CostModel]:
    """Limit the rate as ``load`` has it; what the passes are to reckon with, as measured on that link."""
    limit_rate(load.rate)
    within, across = networks(load.layer_bytes)
    machine = replace(machine, within=within, across=across)
    return PassConfig(hardware=_as_file(machine, directory)), CostModel(machine, {_world_name(): dist.get_world_size()})


def _as_file(machine: HardwareProfile, directory: str) -> str:
    path = Path(directory) / f"machine-of-{dist.get_rank()}.toml"
    machine.write(path)
    return str(path)


def _world_name() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def _keep(graphs: dict[str, Graph], stage: str, graph: Graph) -> None:
    graphs[stage] = copy_graph(graph)


def _predict(graphs: dict[str, Graph], costs: CostModel) -> Numbers:
    """Seconds of a step, and what no plan can do without; the graphs by stage."""
    traced, planned = ([graphs[f"{part} {when}"] for part in ("forward", "backward")] for when in ("before", "after"))
    timeline = simulate(planned, costs)
    return {
        "step": timeline.seconds,
        "exposed": timeline.exposed_seconds,
        "collectives": len(timeline.transfers),
        "bound": bounds(traced, costs).time_step,
    }
