"""Graphs of Llamas of any size on any number of ranks: nothing is allocated, nothing computed."""

from __future__ import annotations

from dataclasses import replace

import torch
from fake_world import fake_world, graphs_of
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph

from fsdp_compile import MixedPrecisionPolicy
from fsdp_compile.models import SIZES, Llama, LlamaConfig, shard_llama

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def config_of(size: str, layers: int) -> LlamaConfig:
    """A shape with another number of layers."""
    return replace(SIZES[size], layers=layers)


def llama_graphs(
    config: LlamaConfig, world: int, tokens: int, mp_policy: MixedPrecisionPolicy = BF16
) -> tuple[Graph, Graph]:
    """Forward and backward of one step after the passes, for a batch of one sequence; seconds for each layer."""
    with fake_world(world):
        with torch.device("meta"):
            model = Llama(config)
        shard_llama(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=mp_policy)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            stages = dict(graphs_of(model, torch.zeros(1, tokens, dtype=torch.long)))
    return stages["forward after"], stages["backward after"]
