"""Shards, gradients and optimizer states on the host, and what says so if they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from models import Net, shard
from side_by_side import assert_same, build, loss_of, one_batch, train

import fsdp_compile
from fsdp_compile import MixedPrecisionPolicy, fully_shard


def offload(policy: dict[str, Any], steps: int = 3) -> None:
    """Shards, gradients and optimizer states on the host; the same values as without."""
    model = build(fsdp_compile, offload_policy=fsdp_compile.CPUOffloadPolicy(**policy))
    assert_same(train(model, steps=steps), train(build(torch_fsdp), steps=steps))
    optimizer = torch.optim.Adam(model.parameters())
    one_batch(model, 0, lambda step: torch.ones(4, 12))
    optimizer.step()
    for param in model.parameters():
        states = [value for value in optimizer.state[param].values() if value.dim()]
        assert {param.device.type, param.grad.device.type, *(state.device.type for state in states)} == {"cpu"}


@pytest.mark.parametrize("policy", [{}, {"pin_memory": True}, {"pin_memory": False}])
def test_cpu_offload(ranks2, policy: dict[str, Any]) -> None:
    ranks2.run(offload, policy)


def refuse_misplaced() -> None:
    kwargs = {"offload_policy": fsdp_compile.CPUOffloadPolicy(), "mp_policy": MixedPrecisionPolicy()}
    model = shard(Net(), fully_shard, **kwargs)
    model.to("meta")
    for forward in (model, torch.compile(model, backend="fsdp_eager", fullgraph=True)):
        with pytest.raises(RuntimeError, match=r"inp\.weight is still on the meta device.*to_empty"):
            forward(torch.ones(4, 12))
    model = shard(Net(), fully_shard, **kwargs)
    loss = loss_of(model(torch.ones(4, 12)))
    model.head.bias.grad = torch.zeros_like(model.head.bias)
    model.head.bias.grad._local_tensor = model.head.bias.grad.to_local().to("meta")
    with pytest.raises(RuntimeError, match=r"gradient of parameter head\.bias was left on meta.*on cpu"):
        loss.backward()


def test_misplaced_shards_and_gradients_are_named(ranks2) -> None:
    ranks2.run(refuse_misplaced)
