"""Ranks for the tests of a file, on CPU (gloo) and, where there are enough of them, on GPUs (NCCL)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks

from fsdp_compile import backend


@pytest.fixture(scope="session", autouse=True)
def _compile_caches() -> Iterator[None]:
    """What an earlier run has compiled does not come back in this one, whose tests look at what the passes do."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", directory)
        yield


@pytest.fixture(scope="session", autouse=True)
def _verified() -> Iterator[None]:
    """Graphs that tests compile are verified after each pass; on ranks of their own, see ``ranks``, too."""
    with backend.configured(verify=True):
        yield


def _ranks(world: int, backend: str = "gloo") -> Iterator[Ranks]:
    ranks = Ranks(world, backend)
    yield ranks
    if ranks._processes:
        ranks.stop()


@pytest.fixture(scope="module")
def ranks2() -> Iterator[Ranks]:
    yield from _ranks(2)


@pytest.fixture(scope="module")
def ranks4() -> Iterator[Ranks]:
    yield from _ranks(4)


@pytest.fixture(scope="module")
def gpu_ranks2() -> Iterator[Ranks]:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    yield from _ranks(2, "nccl")
