"""CPU offload in the graph: what crosses between host and device, when and in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from fake_device import DEVICE, DeviceProcess, device_world
from fake_world import Stages, graphs_of, skeletons_of
from int8_all_gather import gather_as_int8
from snapshots import assert_snapshot
from torch.fx import Graph, Node
from traced import graphs, of_stage

from fsdp_compile import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp_compile.passes.graph_view import COPIES, alias_root, all_reduces, gathers, made_by, reductions, tag_of
from fsdp_compile.passes.torch_compat import is_alias

RANKS, ROWS, WIDTH = 4, 3, 8
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
NAMES = [f"{block}.{kind}" for block in range(3) for kind in ("weight", "bias")]
GATHERED_AGAIN = ["1.weight"]  # the first block's input and biases need no parameter, and the root keeps its own


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceProcess]:
    process = DeviceProcess()
    yield process
    process.stop()


def blocks(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    linear = [nn.Linear(WIDTH, WIDTH, dtype=dtype, device=DEVICE) for _ in range(2)]
    return nn.Sequential(*linear, nn.LayerNorm(WIDTH, dtype=dtype, device=DEVICE))


def inputs() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH, device=DEVICE)


def offloaded(mesh: Any, model: nn.Sequential | None = None, **kwargs: Any) -> Any:
    """Each block on its own, the norm with the root."""
    model = model or blocks()
    kwargs |= {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}  # fake tensors cannot be pinned
    for block in model[:2]:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


# -- what a training step moves ---------------------------------------------------------------------------------------


def plain(**kwargs: Any) -> Stages:
    with device_world(RANKS) as mesh:
        return graphs_of(offloaded(mesh, **kwargs), inputs())


def in_bf16() -> Stages:
    return plain(mp_policy=BF16)


def reduced_in_bf16() -> Stages:
    return plain(mp_policy=MixedPrecisionPolicy(torch.bfloat16))


def kept_in_bf16() -> Stages:
    """The shards have the narrower dtype."""
    with device_world(RANKS) as mesh:
        policy = MixedPrecisionPolicy(torch.float32)
        return graphs_of(offloaded(mesh, blocks(torch.bfloat16), mp_policy=policy), inputs())


def hsdp() -> Stages:
    with device_world(RANKS, replicate=2, shard=2) as mesh:
        return graphs_of(offloaded(mesh, mp_policy=BF16), inputs())


def sync_after_without() -> Stages:
    with device_world(RANKS) as mesh:
        model = without_sync(mesh)
        model.set_requires_gradient_sync(True)
        return graphs_of(model, inputs())


def without_sync(mesh: Any) -> Any:
    model = offloaded(mesh, mp_policy=BF16)
    model.set_requires_gradient_sync(False)
    return model


def int8() -> Stages:
    with device_world(RANKS) as mesh:
        model = blocks()
        gather_as_int8(model)
        return graphs_of(offloaded(mesh, model, mp_policy=BF16), inputs())


FEATURES = [plain, in_bf16, reduced_in_bf16, kept_in_bf16, hsdp, sync_after_without, int8]


@pytest.mark.parametrize("step", FEATURES, ids=lambda step: step.__name__)
def test_shards_come_before_their_gather_and_gradients_go_after_their_reduction(
    device: DeviceProcess, step: Callable[[], Stages]
) -> None:
    device.run(check_step, step)


def check_step(step: Callable[[], Stages]) -> None:
    stages = dict(step())
    assert shards_moved(stages["forward after"]) == NAMES
    assert shards_moved(stages["backward after"]) == GATHERED_AGAIN
    assert gradients_moved(stages["forward after"]) == []
    assert gradients_moved(stages["backward after"]) == NAMES
    for graph in stages.values():
        assert_nothing_is_computed_on_the_host(graph)


def shards_moved(graph: Graph) -> list[str]:
    """Of which parameters; each is needed by its gather, in its own dtype, and the host does not wait for it."""
    gathered = {node for gather in gathers(graph) for sent in gather.inputs for node in made_by(sent, "unshard")}
    moves = moves_to(graph, DEVICE)
    for move in moves:
        assert move in gathered
        assert alias_root(move.all_input_nodes[0]).op == "placeholder" and not is_cast(move)
        assert not is_waited_for(move)
    return names_of(moves)


def gradients_moved(graph: Graph) -> list[str]:
    """Of which parameters; each is moved when it is reduced over all ranks, and then leaves the graph."""
    moves = moves_to(graph, "cpu")
    for move in moves:
        reduced = made_by(move, "reduce")
        (parameter,) = tag_of(move).params
        for collective in (*reductions(graph), *all_reduces(graph)):
            assert (collective.start in reduced) == (parameter in collective.tag.params)
        assert [user.op for user in move.users] == ["output"] and not is_cast(move)
        assert is_waited_for(move), "the host may read it at once"
    return names_of(moves)


def moves_to(graph: Graph, kind: str) -> list[Node]:
    moves = [node for node in graph.nodes if node.target in COPIES and device_of(node).type == kind]
    return [node for node in moves if device_of(node) != device_of(node.all_input_nodes[0])]


def names_of(moves: list[Node]) -> list[str]:
    return sorted((name for move in moves for name in tag_of(move).params), key=NAMES.index)


def is_waited_for(move: Node) -> bool:
    """Inductor gives ``non_blocking`` by position."""
    return not move.kwargs.get("non_blocking") and True not in move.args


def is_cast(node: Node) -> bool:
    return node.meta["val"].dtype is not node.all_input_nodes[0].meta["val"].dtype


def device_of(node: Node) -> torch.device:
    return node.meta["val"].device


def assert_nothing_is_computed_on_the_host(graph: Graph) -> None:
    """Casts neither: they would take the host's time."""
    moved = moves_to(graph, "cpu")
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and not is_alias(node):
            assert device_of(node).type == DEVICE or node in moved, node.format_node()


# -- other graphs -----------------------------------------------------------------------------------------------------


def test_gradients_that_are_set_aside_stay_on_the_device(device: DeviceProcess) -> None:
    device.run(check_without_sync)


def check_without_sync() -> None:
    with device_world(RANKS) as mesh:
        stages = dict(graphs_of(without_sync(mesh), inputs()))
    assert shards_moved(stages["backward after"]) == GATHERED_AGAIN
    assert gradients_moved(stages["backward after"]) == []


def test_inference(device: DeviceProcess) -> None:
    device.run(check_inference)


def check_inference() -> None:
    with torch.no_grad():
        stages = dict(plain(mp_policy=BF16))
    assert shards_moved(stages["inference after"]) == NAMES


def test_inductor_gets_the_same(device: DeviceProcess) -> None:
    device.run(check_inductor)


def check_inductor() -> None:
    """It takes casts and moves apart by rules of its own. Then it gives up, as it has no code for this device."""
    with device_world(RANKS) as mesh, graphs() as stages:
        model = torch.compile(offloaded(mesh, mp_policy=BF16), fullgraph=True)
        without_patterns = patch("torch._inductor.fx_passes.joint_graph.lazy_init")  # they need real tensors there
        with without_patterns, pytest.raises(Exception, match=DEVICE):
            model(inputs())
    (forward,), (backward,) = (of_stage(stages, name) for name in ("forward after", "backward after"))
    assert shards_moved(forward) == NAMES
    assert shards_moved(backward) == GATHERED_AGAIN
    assert gradients_moved(backward) == NAMES
    for graph in (forward, backward):
        assert_nothing_is_computed_on_the_host(graph)


def test_snapshot(device: DeviceProcess) -> None:
    assert_snapshot("feature_offload", device.run(skeleton))


def skeleton() -> str:
    shown = ("joint before", "forward after", "backward after")
    return skeletons_of([(stage, graph) for stage, graph in in_bf16() if stage in shown])
