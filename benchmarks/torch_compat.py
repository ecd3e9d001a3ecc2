"""Every private torch API that the benchmarks touch, each with the reason."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._dynamo.utils import compilation_time_metrics


def join_imaginary_world(world: int) -> None:
    """Become rank 0 of ``world`` ranks of which the others do not exist; the backend for this is torch's own tests'."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def gather_asynchronously(module: Any) -> None:
    """Have torch's FSDP module start its all-gathers without waiting; on CPU there is no public way."""
    module._set_unshard_async_op(True)


def reset_compile_phases() -> None:
    compilation_time_metrics.clear()


def compile_phases() -> dict[str, float]:
    """Seconds of wall time that each phase of compiling took since the reset; the public form is a printed table."""
    return {name: sum(seconds) for name, seconds in compilation_time_metrics.items()}
