"""The cost model of the machine that graphs are compiled for: a profile by the user's choice, or by the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from .cost_model import CostModel, Placement
from .graph_view import is_launch, kind_of, process_group_of
from .hardware import profile
from .torch_compat import ranks_of

BY_DEVICE = ("b200", "h200", "h100", "a100")  # shipped profiles, by what the names of devices contain
OTHER_DEVICE = "h100"


def cost_model(graphs: Iterable[Graph], hardware: str | None) -> CostModel:
    """Costs on a machine, for all process groups that the graphs call; nodes are full of ranks in a row.

    Args:
        hardware: name of a shipped profile or path of a file; ``None``: the profile for the data's device.

    Raises:
        ValueError: there is no such profile, or its file is wrong.
    """
    launches = [node for graph in graphs for node in graph.nodes if is_launch(node)]
    devices = [node.all_input_nodes[0].meta["val"].device.type for node in launches]
    machine = profile(hardware or profile_for(devices[-1] if devices else "cpu"))
    # What a launch says comes last, and so counts: the process group may not be there any more.
    launches.sort(key=_says_how_many)
    return CostModel(machine, {process_group_of(node): _placement(node, machine.ranks_in_node) for node in launches})


def _says_how_many(launch: Node) -> bool:
    return kind_of(launch) in ("all_gather", "reduce_scatter")


def _placement(launch: Node, ranks_in_node: int) -> Placement:
    """Where the process group is: as its ranks say; if it is no more, as many as the launch says, or two, in a row."""
    ranks = ranks_of(process_group_of(launch)) or []
    size = int(launch.args[-2]) if _says_how_many(launch) else len(ranks) or 2  # type: ignore[arg-type]
    if size != len(ranks):
        return Placement(size)
    return Placement(size, max(Counter(rank // ranks_in_node for rank in ranks).values()))


def profile_for(device_type: str) -> str:
    """Name of the shipped profile for a device; on all ranks the same if all have the same devices."""
    if device_type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((known for known in BY_DEVICE if known in name), OTHER_DEVICE)
