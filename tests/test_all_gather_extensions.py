"""Tensor subclasses that decide what an all-gather sends and what is made of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import int8_all_gather
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from int8_all_gather import Wrapper, gather_as_int8
from models import Net, shard
from side_by_side import Collectives, build, loss_of, one_batch, one_process, side_by_side, train
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from fsdp_compile import MixedPrecisionPolicy, ShardedState, fully_shard

BF16, FP32 = torch.bfloat16, torch.float32


def padded(data: torch.Tensor, world: int, rows: int) -> torch.Tensor:
    """What uneven sharding asks of an extension."""
    result = data.new_zeros(-(-rows // world), *data.shape[1:])
    result[: data.size(0)] = data
    return result


class SentAsBF16(Wrapper):
    """Sends bfloat16 and computes in the parameter's dtype."""

    calls: list[str] = []

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert mesh.ndim == 1 and outer_stride == tuple(torch.empty(outer_size).stride()), outer_stride
        assert isinstance(module, nn.Linear)
        return (padded(self.wrapped, mesh.size(), outer_size[0]).to(BF16),), {"rows": outer_size[0]}

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        (gathered,) = outputs
        assert gathered.dtype == BF16 and gathered.size(0) >= metadata["rows"] > 0
        SentAsBF16.calls.append("first" if out is None else "again")
        upcast = gathered.to(param_dtype)[: metadata["rows"]]
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(upcast)
            return None
        upcast = upcast.contiguous()
        return upcast, (gathered, upcast)


def with_extension(kind: type[Wrapper], out: int = 4) -> Net:
    """The model with the weights of its linear layers of class ``kind``."""
    model = Net(out=out)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model


def with_int8(out: int = 4) -> Net:
    model = Net(out=out)
    gather_as_int8(model)
    return model


def train_bf16(out: int, kwargs: dict[str, Any]) -> None:
    histories = side_by_side(lambda: with_extension(SentAsBF16, out), **kwargs)
    SentAsBF16.calls.clear()
    train(build(fsdp_compile, lambda: with_extension(SentAsBF16, out), **kwargs))
    assert set(SentAsBF16.calls) == {"first", "again"}
    reference = train(build(fsdp_compile, lambda: Net(out=out)))  # in float32 throughout
    loss, exact = histories[-1]["result 0"], reference[-1]["result 0"]
    assert torch.allclose(loss, exact, rtol=0.02) and not torch.equal(loss, exact)


@pytest.mark.parametrize("out", [4, 3], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"reshard_after_forward": False}, {"mp_policy": {"param_dtype": BF16, "reduce_dtype": FP32}}],
    ids=["fp32", "kept", "bf16"],
)
def test_like_torch(ranks2, out: int, kwargs: dict[str, Any]) -> None:
    ranks2.run(train_bf16, out, kwargs)


def train_over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    side_by_side(lambda: with_extension(SentAsBF16, 4), mesh=mesh)


def test_over_replicas(ranks4) -> None:
    ranks4.run(train_over_replicas)


def train_int8() -> None:
    """Like torch, close to exact training, and with about a quarter of the bytes."""
    history = side_by_side(with_int8)
    assert_close_losses(history, one_process(lambda: Net(out=4)))
    sent = {}
    for name, make in (("int8", with_int8), ("float32", lambda: Net(out=4))):
        model = build(fsdp_compile, make)
        with Bytes() as counted:
            one_batch(model, 0, lambda step: torch.ones(4, 12))
        sent[name] = counted.gathered
    assert sent["int8"] < 0.45 * sent["float32"], sent


def assert_close_losses(ours: list[Any], exact: list[Any]) -> None:
    for mine, theirs in zip(ours, exact, strict=True):
        losses = [torch.zeros(dist.get_world_size()) for _ in range(1)]
        dist.all_gather_single(losses[0], mine["result 0"].reshape(1))
        assert torch.allclose(losses[0].mean(), theirs["result 0"], rtol=0.05), (losses, theirs["result 0"])


class Bytes(Collectives):
    """Counts what all-gathers yield."""

    gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in func._schema.name:
            self.gathered += args[0].numel() * args[0].itemsize
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_int8_with_scales(ranks2) -> None:
    ranks2.run(train_int8)


def look_at_memory() -> None:
    model = build(fsdp_compile, lambda: with_extension(SentAsBF16))
    params = [param for state in model._fsdp_state.context.states for group in state.groups for param in group.params]
    loss_of(model(torch.ones(4, 12))).backward()
    assert all(param.unsharded_nbytes == 0 for param in params)
    model.unshard()
    assert all(param.unsharded_nbytes > 0 for param in model._fsdp_state.groups[0].params)
    assert model.head.weight.dtype == FP32 and type(model.head.weight.data) is torch.Tensor
    model.reshard()
    assert all(param.unsharded_nbytes == 0 and param.sharded_state is ShardedState.SHARDED for param in params)
    assert isinstance(model.head.weight.to_local(), SentAsBF16)


def test_all_memory_is_given_back(ranks2) -> None:
    ranks2.run(look_at_memory)


class OnlyBefore(Wrapper):
    fsdp_pre_all_gather = SentAsBF16.fsdp_pre_all_gather


class OnlyAfter(Wrapper):
    fsdp_post_all_gather = SentAsBF16.fsdp_post_all_gather


def refuse() -> None:
    for kind, missing in ((OnlyBefore, "post"), (OnlyAfter, "pre")):
        model = with_extension(kind)
        weight = model.head.weight
        with pytest.raises(ValueError, match=f"a {kind.__name__}, defines .* but not fsdp_{missing}_all_gather"):
            fully_shard(model)
        assert model.head.weight is weight and type(model) is Net
    with pytest.raises(NotImplementedError, match=r"all-gather extension: inp\.weight"):
        fully_shard(with_extension(SentAsBF16), reshard_after_forward=2)
    model = shard(with_int8(out=3), fully_shard)
    with pytest.raises(RuntimeError, match=r"head\.weight of size \(3, 12\) is sharded unevenly.*padded sharded size"):
        model(torch.ones(4, 12))  # on all ranks, also those whose shard is full


def test_half_an_extension_and_missing_padding_are_refused_on_all_ranks(ranks4) -> None:
    ranks4.run(refuse)


def save_and_load() -> None:
    model = build(fsdp_compile, lambda: with_extension(SentAsBF16, 3))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    before = loss_of(model(torch.ones(4, 12))).detach()
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().copy_(torch.zeros(param.to_local().shape))
    model.load_state_dict(saved)
    assert torch.equal(loss_of(model(torch.ones(4, 12))), before)


def test_state_dict(ranks2) -> None:
    ranks2.run(save_and_load)


def test_the_example_trains_alike() -> None:
    """Its two columns of losses fall, and stay close to each other."""
    example = Path(int8_all_gather.__file__)
    run = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    rows = [tuple(map(float, line.split()[1:])) for line in run.stdout.splitlines()[1:]]
    assert len(rows) == 4 and rows[-1][0] < 0.8 * rows[0][0]
    assert all(abs(exact - rounded) < 0.01 * exact for exact, rounded in rows), rows
