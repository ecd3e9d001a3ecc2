"""What a module may do with its inputs, outputs and parameters: eager, traced, torch's own and one process agree."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from models import Block, Net, assert_close_to_one_process, assert_same, shard, train

from fsdp_compile import fully_shard

Pair = namedtuple("Pair", ["x", "unused"])


@dataclass
class Record:
    x: torch.Tensor
    note: str


class TupleBlock(Block):
    def forward(self, x):
        return super().forward(x), None, (x, 3)


class DictBlock(Block):
    def forward(self, x):
        return {"inner": {"x": super().forward(x)}, "size": x.size(0)}


class RecordBlock(Block):
    def forward(self, x):
        return Record(super().forward(x), "note")


class PairBlock(Block):
    def forward(self, x):
        return Pair(super().forward(x), x.detach())


class Unpacks(Net):
    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = self.unpack(block(x))
        return self.head(x)


class TupleNet(Unpacks):
    block = TupleBlock

    def unpack(self, output):
        return output[0] + output[2][0]


class DictNet(Unpacks):
    block = DictBlock

    def unpack(self, output):
        return output["inner"]["x"]


class RecordNet(Unpacks):
    block = RecordBlock

    def unpack(self, output):
        assert output.note == "note"
        return output.x


class PairNet(Unpacks):
    block = PairBlock

    def unpack(self, output):
        return output.x


class ViewBlock(Block):
    """Returns views, which the caller then writes into."""

    def forward(self, x):
        return super().forward(x).unsqueeze(0)


class ViewNet(Unpacks):
    block = ViewBlock

    def unpack(self, output):
        output.mul_(0.5)
        return output[0]


class KeywordBlock(Block):
    def forward(self, *, x, scale=1.0, extra=None):
        return super().forward(x) * scale + extra["bias"][0]


class KeywordNet(Net):
    block = KeywordBlock

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x=x, scale=0.5, extra={"bias": [x]})
        return self.head(x)


class InPlaceBlock(Block):
    def forward(self, x):
        x.mul_(0.5)
        x[:, :2] += 1
        return super().forward(x)


class InPlaceNet(Net):
    block = InPlaceBlock


class TwiceNet(Net):
    """Each block runs twice in one forward, not in a row."""

    def forward(self, x):
        x = self.inp(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class RepeatingNet(Net):
    """Each block runs twice in a row; compiled, it is gathered once for both runs."""

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(block(x))
        return self.head(x)


class SkippingNet(Net):
    """The last block never runs."""

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.head(x)


class FrozenNet(Net):
    """A frozen first layer, so that the first block's input needs no gradient; a frozen block; a half frozen block."""

    def __init__(self):
        super().__init__(blocks=3)
        self.inp.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)


class NestedBlock(nn.Module):
    """Holds a sharded module and parameters of its own."""

    def __init__(self, dim):
        super().__init__()
        self.inner = Block(dim)
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.inner(x) * self.gain


class NestedNet(Net):
    block = NestedBlock


class BuffersNet(Net):
    """A buffer that forward updates."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count += 1
        return super().forward(x) * self.count[0]


class DetachedNet(Net):
    """The first block runs without gradient, in the middle of a forward that has one."""

    def forward(self, x):
        x = self.inp(x)
        with torch.no_grad():
            y = self.blocks[0](x)
        return self.head(self.blocks[1](x + y))


KINDS = [
    TupleNet,
    DictNet,
    RecordNet,
    PairNet,
    ViewNet,
    KeywordNet,
    InPlaceNet,
    TwiceNet,
    RepeatingNet,
    SkippingNet,
    FrozenNet,
    NestedNet,
    BuffersNet,
    DetachedNet,
]

# torch refuses inputs that are changed in place, fails on output views that are, and sums the gradients of one tensor
# that is passed twice in another order. All others are bit for bit what torch computes.
TORCH_DIFFERS = (InPlaceNet, ViewNet, KeywordNet)


def build(kind, api):
    torch.manual_seed(0)
    model = kind()
    for block in model.blocks:
        if isinstance(block, NestedBlock):
            api(block.inner)
    return shard(model, api)


@pytest.mark.parametrize("kind", KINDS)
def test_all_agree(ranks2, kind):
    ranks2.run(_all_agree, kind)


def _all_agree(kind):
    eager, traced = build(kind, fully_shard), build(kind, fully_shard)
    history = train(eager)
    for step in history:
        assert not any(value is not None and value.isnan().any() for value in step)
    if kind not in TORCH_DIFFERS:
        assert_same(train(build(kind, torch_fsdp.fully_shard)), history)
    torch.manual_seed(0)
    assert_close_to_one_process(eager, kind())
    assert_same(train(traced, torch.compile(traced, backend="fsdp_eager", fullgraph=True)), history)
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["unique_graphs"] == 1
    if kind is SkippingNet:
        assert all(param.grad is None for param in eager.blocks[-1].parameters())
    # Nothing is left behind in the modules or in memory, also where a block runs twice or without gradient.
    for model in (eager, traced):
        for state in model._fsdp_state.context.states:
            for param in (param for group in state.groups for param in group.params):
                assert param.unsharded_nbytes == 0, param
