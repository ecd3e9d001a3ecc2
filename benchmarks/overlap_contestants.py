"""Who trains an ``Emulated`` over the link: torch's ``fully_shard``, a schedule written by hand, and ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from contestants import Contestant, Task, list_prefetches, make_ours, make_torch
from hand_scheduled import HandScheduled
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch_compat import gather_asynchronously

from fsdp_compile import backend
from fsdp_compile.passes import PassConfig

Make = Callable[[Task, PassConfig], Contestant]


def make_torch_asynchronous(task: Task, _: PassConfig) -> Contestant:
    """torch's around compiled layers, each of which has the gather of the next launched: ``unshard(async_op=True)``."""
    model = task.make_model()
    for at, block in enumerate(model.blocks):
        model.blocks[at] = torch_fully_shard(torch.compile(block, backend="aot_eager", fullgraph=True))
    gather_asynchronously(torch_fully_shard(model))
    list_prefetches(model)
    return Contestant(task, model)


def compiled(bucket: str | int) -> Make:
    """Ours as a graph, with communication in such buckets."""

    def make(task: Task, config: PassConfig) -> Contestant:
        contestant = make_ours(task)
        # On its own: graphs of another contestant would pass its guards.
        contestant.model = torch.compile(
            contestant.model, backend="fsdp_eager", fullgraph=True, isolate_recompiles=True
        )
        with backend.configured(bucket=bucket, hardware=config.hardware):
            contestant.forward_and_backward(contestant.batch())  # compiles
        contestant.optimizer.zero_grad()
        return contestant

    return make


OPPONENTS: dict[str, Make] = {
    "torch": lambda task, _: make_torch(task),
    "torch asynchronous": make_torch_asynchronous,
    "by hand": lambda task, _: Contestant(task, HandScheduled(task.make_model())),
}
COMPILED: dict[str, Make] = {"module": compiled("module"), "auto": compiled("auto")}
MAKERS: dict[str, Make] = {**OPPONENTS, "eager": lambda task, _: make_ours(task), **COMPILED}
