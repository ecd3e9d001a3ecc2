"""What the backward gathers again and what the forward saves for it, in graphs traced from real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn as nn
from fake_world import Stages, fake_world, graphs_of, text_of
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard
from fsdp_compile.passes import PassContext, copy_graph, regather
from fsdp_compile.passes.graph_view import frees, gathers, reductions

WIDTH = 24  # of all blocks; no batch has this size, so that a weight is told from an activation by its shape


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(size=4):
        yield


class Block(nn.Module):
    """A linear layer whose input is saved and whose weight is needed in the backward."""

    def __init__(self, weight_to_use: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)
        self.weight_to_use = weight_to_use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight_to_use(self.weight))


class Chain(nn.Module):
    """Blocks one after the other, each called by ``call``."""

    def __init__(self, blocks: list[nn.Module], call: Callable[..., torch.Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def sharded(model: Chain, **kwargs: object) -> Chain:
    for block in model.blocks:
        fully_shard(block, **kwargs)  # type: ignore[call-overload]
    return fully_shard(model, **kwargs)  # type: ignore[call-overload, no-any-return]


def stage(stages: Stages, name: str) -> Graph:
    return next(graph for each, graph in stages if each == name)


def saved_weights(stages: Stages) -> list[str]:
    """The placeholders of the backward that are as large as a whole weight: each keeps one alive."""
    return [
        node.name
        for node in stage(stages, "backward after").nodes
        if node.op == "placeholder" and node.meta["val"].numel() >= WIDTH * WIDTH
    ]


def gathered(stages: Stages, name: str) -> list[str]:
    return [param for gather in gathers(stage(stages, name)) for param in gather.tag.params]


X = torch.randn(2, WIDTH)


def graphs(model: nn.Module) -> Stages:
    return graphs_of(model, X.clone().requires_grad_())


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight,
        lambda weight: weight.t(),
        lambda weight: weight.view(WIDTH, 4, -1).permute(1, 2, 0).reshape(WIDTH, WIDTH),
        lambda weight: weight.split(WIDTH)[0],
        lambda weight: weight.t().contiguous(),
        lambda weight: weight.double().float().t().contiguous().t(),
        lambda weight: weight.unsqueeze(0).expand(1, WIDTH, WIDTH).select(0, 0),
        lambda weight: weight[:WIDTH, :],
    ],
    ids=["itself", "t", "views", "split", "transposed copy", "casts", "expand", "slice"],
)
def test_no_form_of_a_freed_weight_is_saved(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    stages = graphs(sharded(Chain([Block(use), Block(use)])))
    assert len(gathered(stages, "forward after")) == 2
    assert saved_weights(stages) == []
    assert gathered(stages, "backward after") == ["blocks.1.weight", "blocks.0.weight"]


def test_autocast_saves_no_low_precision_copy() -> None:
    model = sharded(Chain([Block(), Block()]))
    with torch.autocast("cpu", torch.bfloat16):
        stages = graphs(model)
    assert saved_weights(stages) == []
    assert len(gathered(stages, "backward after")) == 2


def test_a_kept_weight_is_saved_once_and_not_gathered_again() -> None:
    stages = graphs(sharded(Chain([Block(lambda w: w.t()), Block()]), reshard_after_forward=False))
    assert len(saved_weights(stages)) == 2
    assert gathered(stages, "backward after") == []


@pytest.mark.parametrize("keep", [False, True], ids=["freed", "kept"])
def test_checkpoint_inside_fsdp(keep: bool) -> None:
    inner = [Chain([Block()], lambda block, x: checkpoint(block, x, use_reentrant=False)) for _ in range(2)]
    stages = graphs(sharded(Chain(inner), reshard_after_forward=not keep))
    assert len(gathered(stages, "forward after")) == 2
    assert len(gathered(stages, "backward after")) == (0 if keep else 2)
    assert len(saved_weights(stages)) == (2 if keep else 0)


@pytest.mark.parametrize("keep", [False, True], ids=["freed", "kept"])
def test_fsdp_inside_checkpoint(keep: bool) -> None:
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    try:
        model = Chain([Block(), Block()], lambda block, x: checkpoint(block, x, use_reentrant=False))
        stages = graphs(sharded(model, reshard_after_forward=not keep))
    finally:
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = False
    assert len(gathered(stages, "forward after")) == 2
    assert len(gathered(stages, "backward after")) == (0 if keep else 2)
    assert len(saved_weights(stages)) == (2 if keep else 0)


def test_a_module_that_runs_twice_is_gathered_again_for_both_runs() -> None:
    block = Block()
    model = Chain([block, Block()], lambda each, x: each(each(x)))
    stages = graphs(sharded(model))
    names = ["blocks.0.weight", "blocks.0.weight", "blocks.1.weight", "blocks.1.weight"]
    assert gathered(stages, "forward before") == names
    assert sorted(gathered(stages, "backward before")) == names
    assert saved_weights(stages) == []


def test_frozen_weights_are_gathered_again_but_not_reduced() -> None:
    model = Chain([Block(), Block()])
    model.blocks[0].weight.requires_grad_(False)
    stages = graphs(sharded(model))
    assert saved_weights(stages) == []
    assert sorted(gathered(stages, "backward after")) == ["blocks.0.weight", "blocks.1.weight"]
    assert [r.tag.params for r in reductions(stage(stages, "backward after"))] == [("blocks.1.weight",)]


def test_a_weight_that_the_backward_does_not_read_is_not_gathered_again() -> None:
    class Scale(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight.sum()

    stages = graphs(sharded(Chain([Scale(), Scale()])))
    assert len(gathered(stages, "forward after")) == 2
    assert gathered(stages, "backward after") == []
    assert saved_weights(stages) == []


def checkpoints(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("model", "runs"),
    [
        (lambda: Chain([Block(), Block()]), 1),
        (lambda: Chain([Block(lambda w: w.t().contiguous()), Block()]), 1),
        (lambda: Chain([Block(), Block()], lambda block, x: block(block(x))), 2),
        (lambda: Chain([Chain([Block()], checkpoints) for _ in range(2)]), 1),
        (lambda: Chain([Block(), Block()], checkpoints), 1),
    ],
    ids=["plain", "transposed copy", "twice", "checkpoint inside", "inside checkpoint"],
)
def test_a_slice_among_fewer_ranks_is_saved(model: Callable[[], Chain], runs: int) -> None:
    stages = graphs(sharded(model(), reshard_after_forward=2))
    assert saved_weights(stages) == []
    assert [gather.how[0] for gather in gathers(stage(stages, "forward before"))] == [4] * 2 * runs
    assert [gather.how[0] for gather in gathers(stage(stages, "backward after"))] == [2] * 2 * runs


def test_buffers_that_the_forward_changes() -> None:
    stages = graphs(sharded(Chain([nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)), nn.Sequential(Block())])))
    assert saved_weights(stages) == []


def test_without_backward_only_the_frees_go() -> None:
    with torch.no_grad():
        stages = graphs_of(sharded(Chain([Block(), Block()])), X)
    assert [name for name, _ in stages] == ["inference before", "inference after"]
    assert len(frees(stages[0][1])) == 2 and not frees(stages[1][1])


def test_running_again_changes_nothing() -> None:
    joint = copy_graph(stage(graphs(sharded(Chain([Block(), Block()]))), "joint before"))
    assert regather(joint, PassContext()).changes == 2
    once = marks(joint), text_of(joint)
    assert regather(joint, PassContext()).changes == 0
    assert once == (marks(joint), text_of(joint))


def marks(graph: Graph) -> list[tuple[object, object]]:
    return [(node.meta.get("recompute"), node.meta.get("ac_graph_id")) for node in graph.nodes]
