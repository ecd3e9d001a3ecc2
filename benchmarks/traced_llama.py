"""Graphs of a sharded Llama on one of many ranks, of which the others do not exist: fake tensors, no data."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph

from fsdp_compile import MixedPrecisionPolicy, backend
from fsdp_compile.models import Llama, LlamaConfig, shard_llama
from fsdp_compile.passes import copy_graph
from fsdp_compile.torch_compat import fake_tensors

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def traced_stages(config: LlamaConfig, world: int, sequences: int, length: int) -> dict[str, Graph]:
    """The graphs of a step before our passes: "joint", "forward" and "backward".

    The process group has to be there. bf16 gathers, fp32 reductions, each block sharded, and the root.
    """
    stages: dict[str, Graph] = {}

    def keep(stage: str, graph: Graph) -> None:
        name, when = stage.split()
        if when == "before":
            stages[name] = copy_graph(graph)

    torch.compiler.reset()
    with torch.device("meta"):
        model = Llama(config)
    shard_llama(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=BF16)
    with fake_tensors(), backend.observed(keep):
        model.to_empty(device="cpu")
        compiled = torch.compile(model, backend="fsdp_eager", fullgraph=True)
        compiled(torch.zeros(sequences, length, dtype=torch.long)).float().mean().backward()
    return stages
