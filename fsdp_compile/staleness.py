"""Whether sharded parameters may have been written since unsharded ones were gathered from them.

A stale copy is the worst fault of all: training goes on, the loss still falls, and nothing fails. A tensor's own
version tells of most writes, but fused and foreach optimizers change a DTensor's data without raising it; so every
optimizer step counts as a write to all parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import torch_compat

_optimizer_steps = 0
_watching = False


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


def watch_optimizers() -> None:
    """Count the steps of all optimizers from now on."""
    global _watching
    if not _watching:
        register_optimizer_step_post_hook(_count_step)
        _watching = True


def write_stamp(sharded_param: torch.Tensor) -> tuple[int, int]:
    """Changes whenever ``sharded_param`` may have been written."""
    return _optimizer_steps, torch_compat.version_of(sharded_param)
