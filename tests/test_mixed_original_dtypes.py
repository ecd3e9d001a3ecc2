"""Parameters of several dtypes in one group, which torch's ``fully_shard`` refuses."""

from __future__ import annotations

import pytest
import torch
from models import Net, batch, my_part, shard

from fsdp_compile import fully_shard


class Mixed(Net):
    """Weights in bfloat16, of which the first comes first in its group, and the rest in float32."""

    def __init__(self) -> None:
        super().__init__(out=3)
        for block in self.blocks:
            block.up.to(torch.bfloat16)
            block.up.register_forward_pre_hook(lambda module, args: args[0].to(torch.bfloat16))
            block.up.register_forward_hook(lambda module, args, output: output.float())
        self.inp.to(torch.bfloat16)
        self.inp.register_forward_pre_hook(lambda module, args: args[0].to(torch.bfloat16))
        self.inp.register_forward_hook(lambda module, args, output: output.float())


def train_mixed(backend: str | None, device: str = "cpu") -> None:
    torch.manual_seed(0)
    model = shard(Mixed().to(device), fully_shard)
    torch.manual_seed(0)
    single = Mixed().to(device)
    forward = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, single)]
    for step in range(3):
        forward(my_part(batch(step)).to(device)).square().mean().backward()
        single(batch(step).to(device)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        assert mine.dtype == theirs.dtype
        rough = {"rtol": 0.05, "atol": 0.01} if mine.dtype == torch.bfloat16 else {"rtol": 0.02, "atol": 2e-3}
        torch.testing.assert_close(mine.full_tensor(), theirs, msg=lambda m, n=name: f"{n}: {m}", **rough)


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_trains_as_one_process(ranks2, backend: str | None) -> None:
    ranks2.run(train_mixed, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_trains_as_one_process_on_gpus(gpu_ranks2, backend: str | None) -> None:
    """One coalesced gather moves tensors of both dtypes."""
    gpu_ranks2.run(train_mixed, backend, "cuda")
