"""The cost model of the machine that graphs are compiled for: a profile by the user's choice, or by the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from .cost_model import CostModel
from .graph_view import is_launch, kind_of, process_group_of
from .hardware import profile
from .torch_compat import ranks_of

BY_DEVICE = ("b200", "h200", "h100", "a100")  # shipped profiles, by what the names of devices contain
OTHER_DEVICE = "h100"


def cost_model(graphs: Iterable[Graph], hardware: str | None) -> CostModel:
    """Costs on a machine, for all process groups that the graphs call, with as many ranks in a node as fit.

    Args:
        hardware: name of a shipped profile or path of a file; ``None``: the profile for the data's device.

    Raises:
        ValueError: there is no such profile, or its file is wrong.
    """
    launches = [node for graph in graphs for node in graph.nodes if is_launch(node)]
    # What a launch says comes last, and so counts: the process group may not be there any more.
    groups = {process_group_of(node): _ranks(node) for node in sorted(launches, key=_says_how_many)}
    devices = [node.all_input_nodes[0].meta["val"].device.type for node in launches]
    return CostModel(profile(hardware or profile_for(devices[-1] if devices else "cpu")), groups)


def _says_how_many(launch: Node) -> bool:
    return kind_of(launch) in ("all_gather", "reduce_scatter")


def _ranks(launch: Node) -> int:
    """How many take part: as the launch says, or else the process group; two, if that is no more."""
    return int(launch.args[-2]) if _says_how_many(launch) else ranks_of(process_group_of(launch)) or 2  # type: ignore[arg-type]


def profile_for(device_type: str) -> str:
    """Name of the shipped profile for a device; on all ranks the same if all have the same devices."""
    if device_type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((known for known in BY_DEVICE if known in name), OTHER_DEVICE)
