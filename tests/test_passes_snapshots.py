"""What the passes make of real models' communication, kept as text in ``expected/`` for people to review."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from fake_world import Stages, fake_world, graphs_of, skeletons_of
from snapshots import assert_snapshot

from fsdp_compile import MixedPrecisionPolicy, backend, fully_shard
from fsdp_compile.models import SIZES, Llama, shard_llama

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(scope="module")
def llama() -> Stages:
    with fake_world(size=2):
        return graphs_of(shard_llama(Llama(SIZES["debug"])), torch.zeros(2, 16, dtype=torch.long))


@pytest.mark.parametrize("stage", ["joint", "forward", "backward"])
def test_llama(llama: Stages, stage: str) -> None:
    assert_snapshot(f"llama_{stage}", skeletons_of([(name, graph) for name, graph in llama if name.startswith(stage)]))


def test_llama_without_backward() -> None:
    with fake_world(size=2), torch.no_grad():
        stages = graphs_of(shard_llama(Llama(SIZES["debug"])), torch.zeros(2, 16, dtype=torch.long))
    assert_snapshot("llama_inference", skeletons_of(stages[-1:]))


def two_blocks(**kwargs: object) -> nn.Module:
    """Two linear blocks and a norm at the root; neither 7 nor 5 rows divide among 3 ranks."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5))
    for block in model[:2]:
        fully_shard(block, **kwargs)  # type: ignore[call-overload]
    return fully_shard(model, **kwargs)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("two_blocks_uneven", two_blocks),
        ("two_blocks_kept", lambda: two_blocks(reshard_after_forward=False)),
        ("two_blocks_bf16", lambda: two_blocks(mp_policy=BF16)),
    ],
)
def test_two_blocks(name: str, build: Callable[[], nn.Module]) -> None:
    with fake_world(size=3):
        stages = graphs_of(build(), torch.ones(4, 5))
    shown = ("joint before", "forward after", "backward after")
    assert_snapshot(name, skeletons_of([(stage, graph) for stage, graph in stages if stage in shown]))


@pytest.mark.parametrize(
    ("name", "choices"), [("auto", {"bucket": "auto", "hardware": "h100"}), ("bytes", {"bucket": "100KB"})]
)
def test_buckets_across_modules(name: str, choices: dict[str, str]) -> None:
    with fake_world(size=2), backend.configured(**choices):
        stages = graphs_of(shard_llama(Llama(SIZES["debug"])), torch.zeros(2, 16, dtype=torch.long))
    shown = ("forward after", "backward after")
    assert_snapshot(f"buckets_{name}", skeletons_of([(stage, graph) for stage, graph in stages if stage in shown]))
