"""Every private torch API that the benchmarks touch, each with the reason."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def join_imaginary_world(world: int) -> None:
    """Become rank 0 of ``world`` ranks of which the others do not exist; the backend for this is torch's own tests'."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def gather_asynchronously(module: Any) -> None:
    """Have torch's FSDP module start its all-gathers without waiting; on CPU there is no public way."""
    module._set_unshard_async_op(True)
