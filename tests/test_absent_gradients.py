"""Parameters that only some ranks use, or none: the right gradient or none, by the same collectives on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from side_by_side import Collectives

from fsdp_compile import fully_shard


def ranks_use_different_parameters(world: int, unused_too: bool) -> None:
    """A parameter that only some ranks use has the gradient of those; one that nobody uses has none."""
    torch.manual_seed(0)
    model = fully_shard(Choice())
    model.set_reduce_scatter_unused_params(unused_too)
    rank = dist.get_rank()
    with Collectives() as counted:
        for use in (rank % 2 == 0, rank == world - 1):
            model(torch.ones(2, 12), "left" if use else "right").sum().backward()
    torch.manual_seed(0)
    single = Choice()
    for chooses in (lambda r: r % 2 == 0, lambda r: r == world - 1):
        for r in range(world):
            (single(torch.ones(2, 12), "left" if chooses(r) else "right").sum() / world).backward()
    for (name, mine), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        if name.startswith("never"):
            assert theirs.grad is None and (mine.grad is None) == (not unused_too)
        else:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    assert counted.issued == gathered_from_all(counted.issued)[0]


def gathered_from_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def only_the_first_rank_has_gradients(prefetch: bool) -> None:
    """The others come through the module without using a parameter of it."""
    model = fully_shard(Choice())
    if prefetch:
        model.set_modules_to_backward_prefetch([model])
    x = torch.ones(2, 12, requires_grad=True)
    model(x, "left" if dist.get_rank() == 0 else "nothing").sum().backward()
    expected = torch.full((5, 12), 2 / dist.get_world_size())
    assert torch.equal(model.left.weight.grad.full_tensor(), expected)
    assert model.right.weight.grad is None


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_rank_without_any_gradient(ranks4, prefetch: bool) -> None:
    ranks4.run(only_the_first_rank_has_gradients, prefetch)


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))

    def forward(self, scale: torch.Tensor | None) -> torch.Tensor:
        return self.weight.sum() + (0 if scale is None else (self.gate * scale).sum())


def negative_zeros_are_a_gradient() -> None:
    model = fully_shard(Gate())
    model(torch.full((8,), -0.0) if dist.get_rank() == 0 else None).backward()
    assert torch.equal(model.gate.grad.full_tensor(), torch.zeros(8))


def test_a_gradient_of_negative_zeros_is_not_absent(ranks4) -> None:
    ranks4.run(negative_zeros_are_a_gradient)


class Choice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (torch.nn.Linear(12, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return x * 2 if which == "nothing" else getattr(self, which)(x)


@pytest.mark.parametrize("unused_too", [False, True])
def test_ranks_that_use_different_parameters(ranks4, unused_too: bool) -> None:
    ranks4.run(ranks_use_different_parameters, 4, unused_too)
