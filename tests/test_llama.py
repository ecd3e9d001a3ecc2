"""The Llama model and its variants alone: how they were built makes no difference, and they never look ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

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


@pytest.mark.parametrize(
    ("size", "billions"),
    [
        *(("1b", 1.01), ("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85)),
        *(("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19)),
        *(("qwen3-14b", 14.77), ("qwen3-32b", 32.76), ("mixtral-8x7b", 46.7), ("mixtral-8x22b", 140.62)),
    ],
)
def test_sizes(size: str, billions: float) -> None:
    with torch.device("meta"):
        model = Llama(SIZES[size])
    assert sum(param.numel() for param in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


VARIANTS = {
    "qwen3": replace(SIZES["debug"], head_width=32, qk_norm=True, tied=True),
    "mixtral": replace(SIZES["debug"], experts=4),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_train_in_one_graph(name: str) -> None:
    model, x = Llama(VARIANTS[name]), tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    compiled(x).square().mean().backward()
    assert all(param.grad is not None and param.grad.any() for param in model.parameters())


def test_experts() -> None:
    """Each token by itself: those with the highest scores, weighted by the softmax of these. In bfloat16."""
    config = VARIANTS["mixtral"]
    layer = Llama(config).blocks[0].ffn
    x = torch.randn(2, 7, config.dim, generator=torch.Generator().manual_seed(0))
    gate, up, down = (each.unflatten(0, (config.experts, -1)) for each in (layer.gate, layer.up, layer.down))

    def one(token: torch.Tensor) -> torch.Tensor:
        scores, chosen = layer.router(token).topk(config.experts_per_token)
        outputs = [down[i] @ (F.silu(gate[i] @ token) * (up[i] @ token)) for i in chosen]
        return scores.softmax(0) @ torch.stack(outputs)

    expected = torch.stack([one(token) for token in x.flatten(0, 1)]).view_as(x)
    assert torch.allclose(layer(x), expected, rtol=0, atol=0.01 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"heads": 3}, "even width"), ({"kv_heads": 3}, "must divide"), ({"experts": 1}, "2 of 1 experts")],
    ids=["heads", "kv heads", "experts"],
)
def test_impossible_shapes(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(SIZES["debug"], **wrong)
