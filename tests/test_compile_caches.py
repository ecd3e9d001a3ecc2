"""Compile caches: a second process, on whatever rank, compiles nothing; what differs is never mixed up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from fake_world import fake_world, run_step
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from fsdp_compile import backend, fully_shard

X = torch.ones(3, 5)


def two_blocks(whole: bool = False) -> nn.Module:
    """Each block sharded alone, or both together in one group."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    for block in model:
        if not whole:
            fully_shard(block, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


def compile_and_count(model: nn.Module, backend_name: str) -> dict[str, int]:
    """How one training step used the caches of AOTAutograd and of Inductor."""
    torch.compiler.reset()
    counters.clear()
    run_step(torch.compile(model, backend=backend_name, fullgraph=True), X)
    found: dict[str, int] = {**counters["inductor"], **counters["aot_autograd"]}
    return {name: count for name, count in found.items() if "cache" in name and count}


def run_process(rank: int, backend_name: str) -> None:
    """What a subprocess of the test does."""
    with fake_world(size=4, rank=rank):
        print(json.dumps(compile_and_count(two_blocks(), backend_name)))


@pytest.mark.parametrize("backend_name", ["inductor", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_second_process_compiles_nothing(tmp_path: Path, backend_name: str) -> None:
    """The second process is another rank, with shards of other sizes; also see ``AOTAutograd``'s own cache."""

    def counts(rank: int) -> dict[str, int]:
        code = f"import {Path(__file__).stem} as this; this.run_process({rank}, {backend_name!r})"
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)  # type: ignore[no-any-return]

    first, second = counts(rank=0), counts(rank=3)
    assert first["fxgraph_cache_miss"] == 2
    assert "fxgraph_cache_miss" not in second and "fxgraph_cache_bypass" not in second, second
    assert second["fxgraph_cache_hit"] == 2
    if backend_name == "fsdp":
        assert first["autograd_cache_miss"] == 1 and second["autograd_cache_hit"] == 1
        assert "autograd_cache_bypass" not in second


def one_bucket_each() -> nn.Module:
    backend.configure(bucket="none")
    return two_blocks()


@pytest.mark.parametrize("other", [lambda: two_blocks(whole=True), one_bucket_each], ids=["groups", "configuration"])
def test_what_differs_is_not_mixed_up(other: Callable[[], Any]) -> None:
    """Neither other groups of the same parameters, nor another configuration, may take the first one's artifacts."""
    with fake_world(size=2), fresh_cache(), backend.configured():
        compile_and_count(two_blocks(), "fsdp")
        found = compile_and_count(other(), "fsdp")
        assert found["autograd_cache_miss"] == 1 and "autograd_cache_hit" not in found
        assert "autograd_cache_hit" in compile_and_count(other(), "fsdp")
