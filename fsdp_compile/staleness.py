"""Whether sharded parameters may have been written since unsharded ones were gathered from them.

A stale copy is the worst fault of all: training goes on, the loss still falls, and nothing fails. A tensor's own
version tells of most writes, but fused and foreach optimizers change a DTensor's data without raising it; so a step of
an optimizer counts as a write to its parameters. Optimizers of other tensors do not count: whether they take a step may
differ between ranks, but whether a gather is due may not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import torch_compat

_STEPS = "_fsdp_optimizer_steps"  # attribute of a sharded parameter: how many steps have written it
_watching = False


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if hasattr(param, _STEPS):
                setattr(param, _STEPS, getattr(param, _STEPS) + 1)


def watch_optimizers() -> None:
    """Count the steps of all optimizers from now on."""
    global _watching
    if not _watching:
        register_optimizer_step_post_hook(_count_step)
        _watching = True


def write_stamp(sharded_param: torch.Tensor) -> tuple[int, int, int]:
    """Changes whenever ``sharded_param``, or its local tensor, may have been written."""
    if not hasattr(sharded_param, _STEPS):
        setattr(sharded_param, _STEPS, 0)
    local = torch_compat.local_tensor(sharded_param)
    return getattr(sharded_param, _STEPS), torch_compat.version_of(sharded_param), torch_compat.version_of(local)
