"""Modules that ``fully_shard`` refuses: the error names what is wrong, and the model stays as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn as nn
from fake_world import fake_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compile import FSDPModule, fully_shard


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(size=4):
        yield


class Branches(nn.Module):
    """Good parameters before and after the place for a bad one: a failure half way would show."""

    def __init__(self, bad: nn.Parameter) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Module()
        self.inner.bad = bad
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def assert_refused_unchanged(model: nn.Module, error: type[Exception], match: str, **kwargs: object) -> None:
    before, classes = dict(model.named_parameters()), [type(module) for module in model.modules()]
    values = {name: param.detach().clone() for name, param in before.items()}
    with pytest.raises(error, match=match):
        fully_shard(model, **kwargs)  # type: ignore[call-overload]
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    for name, value in values.items():
        mine = after[name].to_local() if isinstance(value, DTensor) else after[name]
        assert torch.equal(mine, value.to_local() if isinstance(value, DTensor) else value)
    assert [type(module) for module in model.modules()] == classes
    assert not isinstance(model, FSDPModule)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mp_policy", None),
        ("mp_policy", torch.distributed.fsdp.MixedPrecisionPolicy()),
        ("offload_policy", torch.distributed.fsdp.CPUOffloadPolicy()),
        ("ignored_params", []),
        ("mesh", 4),
    ],
    ids=str,
)
def test_argument_of_a_wrong_type(name: str, value: object) -> None:
    model = Branches(nn.Parameter(torch.ones(4)))
    assert_refused_unchanged(model, TypeError, rf"{name}=.*not a {type(value).__module__}", **{name: value})


@pytest.mark.parametrize("module", [5, "model", torch.ones(3), [nn.Linear(2, 2), None]], ids=str)
def test_not_a_module(module: object) -> None:
    with pytest.raises(TypeError, match="a module or a list of modules"):
        fully_shard(module)  # type: ignore[call-overload]


def test_no_modules() -> None:
    with pytest.raises(ValueError, match="empty"):
        fully_shard([])


def test_scalar_parameter() -> None:
    model = Branches(nn.Parameter(torch.tensor(1.0)))
    assert_refused_unchanged(model, ValueError, r"scalar parameter inner\.bad")


def test_non_contiguous_parameter() -> None:
    model = Branches(nn.Parameter(torch.randn(4, 6).t()))
    assert_refused_unchanged(model, ValueError, r"contiguous.*inner\.bad.*\(6, 4\)")


def test_dtensor_parameter_on_the_data_parallel_mesh() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for placement in (Shard(0), Replicate()):  # on the mesh of data parallelism, where it cannot be sharded once more
        model = Branches(nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [placement])))
        assert_refused_unchanged(model, ValueError, r"inner\.bad is a DTensor .* does not fit together")


@pytest.mark.parametrize("container", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_container_without_forward(container: nn.Module) -> None:
    assert_refused_unchanged(container, ValueError, f"without a forward: {type(container).__name__}")


def test_container_with_forward_is_fine() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x)
            return x

    assert isinstance(fully_shard(Chain([nn.Linear(2, 2)])), FSDPModule)


def test_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="already applied.*Sequential"):
        fully_shard(model)
    assert all(param is before[name] for name, param in model.named_parameters())


def test_a_list_with_a_bad_element() -> None:
    good, bad = nn.Linear(4, 4), Branches(nn.Parameter(torch.tensor(1.0)))
    weight = good.weight
    with pytest.raises(ValueError, match=r"inner\.bad"):
        fully_shard([good, bad])
    assert good.weight is weight and type(good) is nn.Linear and type(bad) is Branches


def test_three_dimensional_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    assert_refused_unchanged(Branches(nn.Parameter(torch.ones(4))), ValueError, "(?i)mesh", mesh=mesh)


def test_bad_reshard_after_forward() -> None:
    for value, match in ((3, "3"), ("yes", "yes")):
        model = Branches(nn.Parameter(torch.ones(4)))
        assert_refused_unchanged(model, ValueError, match, reshard_after_forward=value)


def test_copying_is_refused() -> None:
    from copy import deepcopy

    with pytest.raises(RuntimeError, match="cannot be deep-copied"):
        deepcopy(fully_shard(nn.Linear(4, 4)))


def test_without_a_process_group() -> None:
    dist.destroy_process_group()
    try:
        model = Branches(nn.Parameter(torch.ones(4)))
        before = list(model.parameters())
        with pytest.raises((RuntimeError, ValueError)):
            fully_shard(model)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True)) and type(model) is Branches
    finally:
        if not dist.is_initialized():  # a default mesh starts a group of its own
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
