"""The cost model of the machine that graphs are compiled for: a profile by the user's choice, or by the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .cost_model import CostModel
from .graph_view import Collective
from .hardware import profile

BY_DEVICE = ("b200", "h200", "h100", "a100")  # shipped profiles, by what the names of devices contain
OTHER_DEVICE = "h100"


def cost_model(collectives: Iterable[Collective], hardware: str | None, others: Iterable[str] = ()) -> CostModel:
    """Costs on a machine, for the process groups of gathers and reduce-scatters, with as many ranks in a node as fit.

    Args:
        collectives: of the graphs; an all-reduce does not say how many ranks take part, and is left out.
        hardware: name of a shipped profile or path of a file; ``None``: the profile for the data's device.
        others: process groups that need a cost too; taken for two ranks where ``collectives`` do not say how many.

    Raises:
        ValueError: there is no such profile, or its file is wrong.
    """
    groups = dict.fromkeys(others, 2)
    device = torch.device("cpu")
    for collective in collectives:
        *_, ranks, group = (None, None, *collective.how)
        if isinstance(ranks, int):
            groups[str(group)] = ranks
        device = collective.inputs[0].meta["val"].device
    return CostModel(profile(hardware or profile_for(device.type)), groups)


def profile_for(device_type: str) -> str:
    """Name of the shipped profile for a device; on all ranks the same if all have the same devices."""
    if device_type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((known for known in BY_DEVICE if known in name), OTHER_DEVICE)
