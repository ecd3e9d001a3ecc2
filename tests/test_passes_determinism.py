"""The same model gives the same graphs in every process, whatever Python's hash seed: ranks must agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from fake_world import fake_world, graphs_of, text_of

from fsdp_compile.models import SIZES, Llama, shard_llama
from fsdp_compile.passes import tag_digest


def print_graphs() -> None:
    """What a subprocess of the test does."""
    with fake_world(size=4):
        for stage, graph in graphs_of(shard_llama(Llama(SIZES["debug"])), torch.zeros(1, 8, dtype=torch.long)):
            print(stage, tag_digest(graph.nodes).hex(), text_of(graph), sep="\n")


def test_hash_seed_does_not_matter() -> None:
    command = [sys.executable, "-c", f"import {Path(__file__).stem} as this; this.print_graphs()"]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parent,
            text=True,
            stdout=subprocess.PIPE,
        )
        for hash_seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=300)[0] for process in processes)
    assert all(process.returncode == 0 for process in processes)
    assert "backward after" in first and "all_gather_into_tensor_coalesced" in first
    assert first == second
