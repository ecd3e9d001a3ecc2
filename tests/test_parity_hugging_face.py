"""Hugging Face's Llama, unmodified: bit for bit the eager result where eager and compiled run the same attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from ranks import Ranks

from fsdp_compile import fully_shard
from fsdp_compile.factory import MakeBatch
from fsdp_compile.parity import compare_training

pytest.importorskip("transformers", reason="needs transformers, of the extra 'test'")


def llama(tied: bool, attention: str) -> tuple[nn.Module, MakeBatch]:
    """A factory: two layers with random weights, each sharded, and the root; (2, 16) tokens on each rank and step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
            tie_word_embeddings=tied,
            attn_implementation=attention,
        )
    )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    def make_batch(step: int, rank: int, world: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step * world + rank))
        return {"input_ids": tokens, "labels": tokens}

    return model, make_batch


def report(backend: str, tied: bool, attention: str) -> Any:
    return compare_training(lambda: llama(tied, attention), steps=5, backend=backend)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_bitwise_in_one_graph(ranks2: Ranks, tied: bool) -> None:
    # Not with "sdpa": while it is traced, this model makes a mask that it does without otherwise, and torch then takes
    # another kernel. That is so without sharding, too, and without AOTAutograd.
    for found in ranks2.run(report, "fsdp_eager", tied, "eager"):
        assert found.bitwise_equal, found
        assert (found.graphs, found.graph_breaks, found.recompiles) == (1, 0, 0), found


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_default_attention_in_one_graph(ranks2: Ranks, tied: bool) -> None:
    for found in ranks2.run(report, "fsdp_eager", tied, "sdpa"):
        assert found.within(1e-6), found
        assert (found.graphs, found.graph_breaks, found.recompiles) == (1, 0, 0), found
