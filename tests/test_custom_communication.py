"""Collectives and buffers of the user's own, a group of its own for reductions, and hooks on what is reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Net, shard
from side_by_side import LIBRARIES, api_of, assert_same, build, loss_of, one_batch, side_by_side, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_api as torch_api

import fsdp_compile

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def recording(library: Any) -> tuple[Any, Any]:
    """A gather and a reduce-scatter for ``library`` that keep one buffer and note what they are asked."""
    api = fsdp_compile if library is fsdp_compile else torch_api

    class Kept:
        def __init__(self) -> None:
            self.asked: list[Any] = []

        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            self.asked.append((tuple(size), dtype))
            return torch.empty(*size, dtype=dtype, device=device)

    class Gather(Kept, api.AllGather):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            mine = output_tensor.chunk(group.size())[group.rank()]
            assert mine.data_ptr() == input_tensor.data_ptr() and mine.numel() == input_tensor.numel()
            self.asked.append("gather")
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)

    class Reduce(Kept, api.ReduceScatter):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
            self.asked.append(f"reduce {op}")
            return dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)

    return Gather(), Reduce()


def train_with_custom(mp_policy: dict[str, Any] | None) -> None:
    histories, asked = [], []
    for library in LIBRARIES:
        model = build(library, mp_policy=mp_policy)
        comms = [recording(library) for _ in range(2)]
        for module, (gather, reduce) in zip((model, model.blocks[0]), comms, strict=True):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
        histories.append(train(model))
        asked.append([comm.asked for pair in comms for comm in pair])
    assert_same(*histories)
    assert asked[0] == asked[1] and all(asked[0])


@pytest.mark.parametrize("mp_policy", [None, MIXED], ids=["fp32", "mixed"])
def test_custom_collectives_are_asked_as_torch_asks_them(ranks2, mp_policy: dict[str, Any] | None) -> None:
    ranks2.run(train_with_custom, mp_policy)


class AtOnce(fsdp_compile.AllGather):
    """Is done when it returns, and has nothing to wait for."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        dist.all_gather_single(output_tensor, input_tensor, group=group)


def train_at_once() -> None:
    plain, custom = build(fsdp_compile), build(fsdp_compile)
    custom.set_custom_all_gather(AtOnce())
    assert_same(train(plain), train(custom))


def test_a_collective_without_a_work(ranks2) -> None:
    ranks2.run(train_at_once)


def compiled_with_custom() -> None:
    """There is no traced form: it runs eagerly between graphs, and ``fullgraph=True`` says so."""
    model, plain = build(fsdp_compile), build(fsdp_compile)
    model.set_custom_all_gather(AtOnce())
    with pytest.raises(Exception, match="custom communication"):
        torch.compile(model, backend="fsdp_eager", fullgraph=True)(torch.ones(4, 12))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="fsdp_eager")
    for step in range(2):
        losses = [one_batch(each, step, lambda i: torch.full((4, 12), i + 1.0))[0] for each in (compiled, plain)]
        assert torch.equal(*losses)


def test_compiled(ranks2) -> None:
    ranks2.run(compiled_with_custom)


def from_the_process_group() -> None:
    side_by_side(configure=lambda model: model.set_allocate_memory_from_process_group_for_comm(True))
    model = build(fsdp_compile)
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_custom_all_gather(AtOnce())
    with pytest.raises(RuntimeError, match="the root module has a custom communication"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(RuntimeError, match="the root module has a custom communication"):
        model.set_symm_mem_for_comm()
    with pytest.raises(RuntimeError, match="symmetric memory needs CUDA, but the module is on cpu"):
        build(fsdp_compile).set_symm_mem_for_comm()


def test_memory_of_the_process_group(ranks2) -> None:
    ranks2.run(from_the_process_group)


def reduce_in_a_group_of_its_own(size: int) -> None:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replica", "shard"))
    side_by_side(mesh=mesh, configure=lambda model: model.set_separate_reduce_scatter_group())
    model = build(fsdp_compile, mesh=mesh)
    shared = model._fsdp_state.groups[0].mesh_info.shard_process_group
    model.set_separate_reduce_scatter_group()
    groups = [group for state in model._fsdp_state.context.states for group in state.groups]
    own = {group.reduce_scatter_group for group in groups}
    assert len(own) == 1 and shared not in own  # one for all, as they shard over the same ranks
    model.set_separate_reduce_scatter_group()
    assert {group.reduce_scatter_group for group in groups} == own
    model.set_separate_reduce_scatter_group(False)
    assert {group.reduce_scatter_group for group in groups} == {shared}


def test_separate_reduce_scatter_group(ranks4) -> None:
    ranks4.run(reduce_in_a_group_of_its_own, 4)


def share() -> None:
    """Two stages of a pipeline on one rank: the same values, and one set of streams."""
    histories = []
    for library in LIBRARIES:
        torch.manual_seed(0)
        stages = [shard(Net(out=12), api_of(library)) for _ in range(2)]
        library.share_comm_ctx(stages)
        losses = []
        for step in range(2):
            loss = loss_of(stages[1](stages[0](torch.full((4, 12), step + 1.0))))
            loss.backward()
            losses.append(loss.detach())
        histories.append(losses + [param.grad.to_local() for stage in stages for param in stage.parameters()])
        if library is fsdp_compile:
            assert stages[0]._fsdp_state.context.lanes is stages[1]._fsdp_state.context.lanes
    assert all(torch.equal(mine, other) for mine, other in zip(*histories, strict=True))
    fsdp_compile.share_comm_ctx([])
    with pytest.raises(ValueError, match="Linear"):
        fsdp_compile.share_comm_ctx([torch.nn.Linear(2, 2)])


def test_share_comm_ctx(ranks2) -> None:
    ranks2.run(share)


def set_event() -> None:
    """On CPU there is nothing to wait for; the event is used up by the next forward."""
    model = build(fsdp_compile)
    model.set_post_optim_event(object())
    train(model, steps=1)
    assert model._fsdp_state.context.post_optim_event is None


def test_post_optim_event(ranks2) -> None:
    ranks2.run(set_event)
