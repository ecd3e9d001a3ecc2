"""Random trees of modules, randomly sharded, for property tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import strategies as st

from fsdp_compile import FSDPModule, MixedPrecisionPolicy, fully_shard

VOCAB = 6
POLICIES = {
    "as is": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, f32 reduction": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 reduction": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "f16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
}


@dataclass(frozen=True)
class Block:
    """One module of a tree.

    Attributes:
        kind: a leaf of ``LEAVES``, or how ``children`` are run, of ``BRANCHES``.
        hidden: an inner width of a leaf.
        sharded: whether ``fully_shard`` is called on it.
        reshard: its ``reshard_after_forward``.
        frozen: whether its own parameters require no gradient.
    """

    kind: str
    hidden: int = 1
    sharded: bool = False
    reshard: bool | None = None
    frozen: bool = False
    children: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Tree:
    """A model: blocks that map (2, 3, width) to the same size, after an embedding if ``tokens``."""

    width: int
    world: int
    policy: str
    tokens: bool
    root_reshard: bool | None
    blocks: tuple[Block, ...] = field(default=())

    def build(self) -> nn.Module:
        """The sharded model; the world must have ``world`` ranks."""
        torch.manual_seed(0)
        parts: list[nn.Module] = [nn.Embedding(VOCAB, self.width)] if self.tokens else []
        parts += [_build(block, self.width, POLICIES[self.policy]) for block in self.blocks]
        model = nn.Sequential(*parts)
        return fully_shard(model, reshard_after_forward=self.root_reshard, mp_policy=POLICIES[self.policy])

    def example(self) -> torch.Tensor:
        if self.tokens:
            return torch.arange(6).reshape(2, 3) % VOCAB
        return torch.linspace(-1, 1, 6 * self.width).reshape(2, 3, self.width)


# -- blocks -----------------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """One weight under two names, used three times, also transposed."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.sin(self.first(x)) * self.second(x), self.first.weight.t())


class Convolution(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2).contiguous()


class Scale(nn.Module):
    """A parameter that is used as it is, and one row of another."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.scale, self.rows = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.rows[0]


class Copied(nn.Module):
    """The backward needs a copy of the weight rather than the weight."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, width * width).reshape(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t().contiguous()


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Twice(nn.Sequential):
    """Runs its children, and gathers their parameters, twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for child in self:
                x = child(x)
        return x


LEAVES: dict[str, Callable[[int, int], nn.Module]] = {
    "perceptron": Perceptron,
    "tied": Tied,
    "norm": lambda width, hidden: nn.LayerNorm(width),
    "convolution": Convolution,
    "scale": Scale,
    "copied": Copied,
}
BRANCHES: dict[str, Callable[..., nn.Module]] = {"sequence": nn.Sequential, "residual": Residual, "twice": Twice}


def _build(block: Block, width: int, policy: MixedPrecisionPolicy) -> nn.Module:
    if block.children:
        module = BRANCHES[block.kind](*(_build(child, width, policy) for child in block.children))
    else:
        module = LEAVES[block.kind](width, block.hidden)
        module.requires_grad_(not block.frozen)
    if block.sharded and not isinstance(module, FSDPModule):
        fully_shard(module, reshard_after_forward=block.reshard, mp_policy=policy)
    return module


# -- strategies -------------------------------------------------------------------------------------------------------


def blocks() -> st.SearchStrategy[Block]:
    """Trees of up to about five leaves. Simplest first, as hypothesis shrinks to what comes first."""
    placement: dict[str, Any] = {"sharded": st.booleans(), "reshard": st.sampled_from([None, True, False])}
    leaves = st.builds(
        Block,
        kind=st.sampled_from(list(LEAVES)),
        hidden=st.integers(1, 9),
        frozen=st.sampled_from([False, False, False, True]),
        **placement,
    )
    return st.recursive(
        leaves,
        lambda inner: st.builds(
            Block,
            kind=st.sampled_from(list(BRANCHES)),
            children=st.lists(inner, min_size=1, max_size=3).map(tuple),
            **placement,
        ),
        max_leaves=5,
    )


def trees() -> st.SearchStrategy[Tree]:
    return st.builds(
        Tree,
        width=st.integers(1, 7),
        world=st.integers(2, 5),
        policy=st.sampled_from(list(POLICIES)),
        tokens=st.booleans(),
        root_reshard=st.sampled_from([None, True, False]),
        blocks=st.lists(blocks(), min_size=1, max_size=3).map(tuple),
    ).filter(_trains)


def _trains(tree: Tree) -> bool:
    """Whether some parameter requires a gradient."""

    def leaves(block: Block) -> list[Block]:
        return [leaf for child in block.children for leaf in leaves(child)] if block.children else [block]

    return tree.tokens or any(not leaf.frozen for block in tree.blocks for leaf in leaves(block))
