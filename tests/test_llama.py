"""The Llama model alone: what it computes does not depend on how it was built, and it never looks ahead."""

from __future__ import annotations

import pytest
import torch

from fsdp_compile.models import SIZES, Llama


def tokens(batch: int = 2, seq: int = 24) -> torch.Tensor:
    return torch.randint(256, (batch, seq), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_are_the_same_from_the_meta_device(tied: bool) -> None:
    config = SIZES["debug"].with_head(tied)
    with torch.device("meta"):
        late = Llama(config)
    late.to_empty(device="cpu")
    late.reset_parameters()
    assert torch.equal(late(tokens()), Llama(config)(tokens()))
    late.reset_parameters(seed=1)
    assert not torch.equal(late(tokens()), Llama(config)(tokens()))


def test_is_causal() -> None:
    model, x = Llama(SIZES["debug"]), tokens()
    changed = x.clone()
    changed[:, 16:] = 0
    assert torch.equal(model(x)[:, :16], model(changed)[:, :16])
    assert not torch.equal(model(x)[:, 16:], model(changed)[:, 16:])


def test_positions_matter() -> None:
    model, x = Llama(SIZES["debug"]), tokens()
    swapped = x.clone()
    swapped[:, [0, 1]] = x[:, [1, 0]]
    assert not torch.allclose(model(x)[:, -1], model(swapped)[:, -1], atol=1e-6)


def test_compiles_to_one_graph_in_any_dtype() -> None:
    model = Llama(SIZES["debug"]).bfloat16()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert compiled(tokens()).dtype == torch.bfloat16
    assert torch.equal(compiled(tokens()), model(tokens()))


@pytest.mark.parametrize(("size", "billions"), [("1b", 1.01), ("llama3-8b", 8.03), ("llama3-70b", 70.55)])
def test_sizes(size: str, billions: float) -> None:
    with torch.device("meta"):
        model = Llama(SIZES[size])
    assert sum(param.numel() for param in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
