"""Each choice of buckets on real ranks against eager: bit for bit, or to rounding where sums take another order."""

from __future__ import annotations

import pytest
import torch
from models import assert_same, mesh_2d, shard, train
from ranks import Ranks
from traced import SmallNet, graphs, of_stage

from fsdp_compile import MixedPrecisionPolicy, backend, fully_shard
from fsdp_compile.passes.graph_view import all_reduces, gathers, reductions

MODES = ["module", "none", "auto", 3000, "1GB"]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 2


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks(ranks2: Ranks, mode: str | int) -> None:
    assert len(set(ranks2.run(compare, mode))) == 1, "ranks made other buckets"


def test_two_ranks_in_bf16(ranks2: Ranks) -> None:
    ranks2.run(compare, "auto", BF16)


def test_modules_on_four_ranks(ranks4: Ranks) -> None:
    ranks4.run(compare, "module")


@pytest.mark.parametrize("mode", ["auto", 3000])
def test_across_modules_on_four_ranks(ranks4: Ranks, mode: str | int) -> None:
    """Gloo adds the elements of a buffer in an order that depends on where in it they are."""
    ranks4.run(compare, mode, None, False, False)


@pytest.mark.parametrize("mode", ["auto", 3000])
def test_replicas(ranks4: Ranks, mode: str | int) -> None:
    """An all-reduce has the members of its reduction, and adds two ranks' parts."""
    for _, reduced, all_reduced in ranks4.run(compare, mode, None, True):
        assert reduced == all_reduced


def compare(
    mode: str | int, policy: MixedPrecisionPolicy | None = None, replicas: bool = False, same_bits: bool = True
) -> tuple[int, ...]:
    """Train eagerly and compiled; returns how many gathers, reductions and all-reduces the backward has."""
    eager = train(build(policy, replicas), steps=STEPS)
    with backend.configured(bucket=mode), graphs() as stages:
        model = build(policy, replicas)
        compiled = train(model, torch.compile(model, backend="fsdp_eager", fullgraph=True), steps=STEPS)
    torch.compiler.reset()
    if same_bits:
        assert_same(eager, compiled)
    else:
        assert torch.equal(eager[0][0], compiled[0][0]), "gathers changed bits"
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-5)
    (backward,) = of_stage(stages, "backward after")
    return tuple(len(list(kind(backward))) for kind in (gathers, reductions, all_reduces))


def build(policy: MixedPrecisionPolicy | None, replicas: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    arguments = {"mp_policy": policy} if policy else {}
    return shard(SmallNet(), fully_shard, **arguments, **({"mesh": mesh_2d()} if replicas else {}))
