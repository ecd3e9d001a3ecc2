"""Precision is torch's own: which dtype each input, parameter, gradient and output has, and every bit of it."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
import torch.nn as nn
from models import Net, TiedNet
from side_by_side import loss_of, side_by_side

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
POLICIES = {
    "parameters bf16": {"param_dtype": BF16},
    "parameters fp16": {"param_dtype": FP16},
    "parameters fp64": {"param_dtype": FP64},
    "reduce bf16": {"reduce_dtype": BF16},
    "reduce fp16": {"reduce_dtype": FP16},
    "reduce fp64": {"reduce_dtype": FP64},
    "bf16, reduce fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "bf16, reduce bf16": {"param_dtype": BF16, "reduce_dtype": BF16},
    "fp16, reduce bf16": {"param_dtype": FP16, "reduce_dtype": BF16},
    "bf16, reduce fp16": {"param_dtype": BF16, "reduce_dtype": FP16},
    "parameters as they are": {"param_dtype": FP32, "reduce_dtype": FP32},
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies(ranks2, name):
    ranks2.run(_policies, name)


def _policies(name):
    (first, *_) = side_by_side(TiedNet, iterate=with_output, mp_policy=POLICIES[name])
    assert first["result 1"].dtype == POLICIES[name].get("param_dtype", FP32)
    assert all(value.dtype == FP32 for name, value in first.items() if "result" not in name)


def with_output(model, step, data):
    output = model(data(step))
    loss = loss_of(output)
    loss.backward()
    return [loss, output]


PER_MODULE = {  # of the root, which holds the two outer layers, and of the two blocks
    "outputs": [{"output_dtype": BF16}, {"output_dtype": FP32}, None],
    "output of the root only": [{"param_dtype": BF16, "output_dtype": FP64}, *[{"param_dtype": BF16}] * 2],
    "one block in bf16": [{}, {"param_dtype": BF16, "output_dtype": FP32}, {}],
    "one block in fp32": [{"param_dtype": BF16}, {"param_dtype": FP32, "output_dtype": BF16}, {"param_dtype": BF16}],
    "all differ": [
        {"param_dtype": FP64, "reduce_dtype": FP32, "output_dtype": FP16},
        {"param_dtype": FP16, "reduce_dtype": BF16, "output_dtype": FP32},
        {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP64},
    ],
    "not cast": [{"cast_forward_inputs": False}, {"param_dtype": FP64, "output_dtype": FP32}, None],
}


@pytest.mark.parametrize("name", PER_MODULE)
def test_policies_of_modules(ranks2, name):
    ranks2.run(_of_modules, name)


def _of_modules(name):
    def apply(model, fully_shard):
        root, *others = PER_MODULE[name]
        for block, policy in zip(model.blocks, others, strict=True):
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=root)

    (first, *_) = side_by_side(iterate=with_output, apply=apply)
    root = PER_MODULE[name][0]
    assert first["result 1"].dtype == root.get("output_dtype", root.get("param_dtype", FP32))


@pytest.mark.parametrize("dtype", [BF16, FP64])
@pytest.mark.parametrize("name", ["parameters bf16", "reduce fp16", "bf16, reduce fp32"])
def test_other_original_dtypes(ranks2, dtype, name):
    ranks2.run(_other_original, dtype, name)


def _other_original(dtype, name):
    def iterate(model, step, data):
        loss = loss_of(model(data(step).to(dtype)))
        loss.backward()
        return [loss]

    side_by_side(lambda: Net().to(dtype), iterate=iterate, mp_policy=POLICIES[name])


Pair = namedtuple("Pair", ["x", "count"])


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    mask: torch.Tensor
    note: str = "note"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: tuple


class Scale(nn.Module):
    """Scales the floating-point tensors in its input and notes what arrived: the type and dtype of each thing."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.seen = []

    def forward(self, value, **more):
        self.seen = kinds((value, more))
        return self._scaled(value), self._scaled(more)

    def _scaled(self, value):
        if isinstance(value, torch.Tensor):
            return value * self.scale[0] if value.is_floating_point() else value
        if isinstance(value, dict):
            return OrderedDict((key, self._scaled(child)) for key, child in value.items())
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._scaled, value))
        if isinstance(value, (list, tuple, set)):
            return list(map(self._scaled, value))
        if dataclasses.is_dataclass(value):
            return type(value)(*map(self._scaled, children(value)))
        return value


def children(value):
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set)):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []


def everything(value):
    return [value, *(thing for child in children(value) for thing in everything(child))]


def kinds(value):
    """Types and dtypes; all dicts count as one type, as casting makes plain ones of torch's."""
    things = everything(value)
    return [("dict" if isinstance(x, dict) else type(x).__name__, getattr(x, "dtype", None)) for x in things]


INTEGERS = torch.arange(4)
MASK = torch.tensor([True, False])
CONTAINERS = {
    "tensor": lambda x: x,
    "list": lambda x: [x, [x * 2, (x * 3, INTEGERS)], MASK],
    "dict": lambda x: {"x": x, "inner": {"mask": MASK, "half": x.half(), "number": 2.5}},
    "ordered dict": lambda x: OrderedDict(b=x, a=INTEGERS),
    "named tuple": lambda x: (Pair(x, 3), Pair(x.bfloat16(), INTEGERS)),
    "dataclass": lambda x: [Item(x, MASK), Item(x.double(), x > 0)],
    "frozen dataclass": lambda x: Frozen(x, (x * 2, {"mask": MASK})),
    "nothing": lambda x: {"x": x, "none": None, "text": "text", "empty": []},
    "set": lambda x: [{x}],
    "default dict": lambda x: defaultdict(list, x=x, mask=MASK),
}
CASTS = {
    "cast": {"param_dtype": BF16, "output_dtype": FP32},
    "no cast": {"param_dtype": BF16, "cast_forward_inputs": False},
    "outputs": {"output_dtype": BF16},
    "no cast, outputs": {"param_dtype": BF16, "cast_forward_inputs": False, "output_dtype": FP16},
}


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.scale = nn.Linear(12, 6), Scale()

    def forward(self, x, name):
        x = self.inp(x)
        return self.scale(CONTAINERS[name](x), keyword=CONTAINERS[name](x * 2))


def scale_only(model, fully_shard, mp_policy):
    fully_shard(model.scale, mp_policy=mp_policy)
    return fully_shard(model)


def root_only(model, fully_shard, mp_policy):
    return fully_shard(model, mp_policy=mp_policy)


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name != "default dict"])  # where torch fails
def test_containers(ranks2, name):
    """Inside the model, with gradients through inputs and outputs."""
    ranks2.run(_containers, Containers, name, scale_only)


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_at_the_root(ranks2, name):
    ranks2.run(_containers, Scale, name, root_only)


def _containers(make, name, apply):
    for policy in CASTS.values():
        seen = []

        def iterate(model, step, data, seen=seen):
            x = data(step)
            output = model(CONTAINERS[name](x)) if make is Scale else model(x, name)
            found = [thing for thing in everything(output) if isinstance(thing, torch.Tensor)]
            loss = sum(tensor.float().square().mean() for tensor in found)
            loss.backward()
            seen.append(((model if make is Scale else model.scale).seen, kinds(output)))
            return [loss, *found]

        side_by_side(make, iterate=iterate, apply=apply, mp_policy=policy)
        assert seen[:3] == seen[3:]
