"""State dicts of sharded models, and what replaces parameters: loading, conversion, late initialization."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from models import Net, TiedNet, assert_same, batch, shard, train
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compile import fully_shard

MODES = ["eager", "traced"]


def build(cls=Net, api=fully_shard):
    torch.manual_seed(0)
    return shard(cls(), api)


def forward_of(model, mode):
    if mode == "traced":
        return torch.compile(model, backend="fsdp_eager", fullgraph=True)
    if mode == "compiled in place":
        model.compile(backend="fsdp_eager", fullgraph=True)
    return model


def shards(model):
    return [[param.to_local() for param in model.parameters()]]


def assert_like_torch(mine, theirs):
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        other = theirs[name]
        assert isinstance(value, DTensor)
        assert (value.placements, value.shape, value.stride(), value.dtype, value.device_mesh.shape) == (
            other.placements,
            other.shape,
            other.stride(),
            other.dtype,
            other.device_mesh.shape,
        )
        assert torch.equal(value.to_local(), other.to_local())


@pytest.mark.parametrize("mode", [*MODES, "compiled in place"])
@pytest.mark.parametrize("cls", [Net, TiedNet])
def test_state_dict_is_that_of_torch(ranks2, cls, mode):
    ranks2.run(_like_torch, cls, mode)


def _like_torch(cls, mode):
    ours, theirs = build(cls), build(cls, torch_fsdp.fully_shard)
    forward = forward_of(ours, mode)
    assert_like_torch(ours.state_dict(), theirs.state_dict())
    train(ours, forward)
    train(theirs)
    assert_like_torch(ours.state_dict(), theirs.state_dict())
    ours(batch(0))  # between forward and backward the root holds unsharded parameters
    assert_like_torch(ours.state_dict(), theirs.state_dict())
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        mine, other = (get_model_state_dict(model, options=options) for model in (ours, theirs))
        assert list(mine) == list(other)
        assert_same(
            [[getattr(value, "full_tensor", value.clone)() for value in state.values()] for state in (mine,)],
            [[getattr(value, "full_tensor", value.clone)() for value in state.values()] for state in (other,)],
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("cls", [Net, TiedNet])
def test_loading_between_steps(ranks2, cls, assign, mode):
    """After loading, the next steps are those of the model that the weights came from."""
    ranks2.run(_loading, cls, assign, mode)


def _loading(cls, assign, mode):
    source = build(cls)
    train(source)
    loaded = build(cls)
    forward = forward_of(loaded, mode)
    train(loaded, forward, steps=2)
    loaded(batch(0))  # leaves the root unsharded
    with torch.no_grad():
        loaded(batch(0))
    weights = {name: value.detach().clone() for name, value in source.state_dict().items()}
    loaded.load_state_dict(weights, assign=assign)
    assert_same(shards(loaded), shards(source))
    assert torch.equal(forward(batch(1)), source(batch(1)))
    loaded.zero_grad()
    assert_same(train(loaded, forward, steps=2), train(source, steps=2))
    if cls is TiedNet:
        assert loaded.head.weight is loaded.inp.weight


@pytest.mark.parametrize("mode", MODES)
def test_full_state_dict_into_a_sharded_model(ranks2, mode):
    ranks2.run(_full_into_sharded, mode)


def _full_into_sharded(mode):
    torch.manual_seed(1)
    whole = Net().state_dict()
    model = build()
    forward = forward_of(model, mode)
    train(model, forward, steps=1)
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    torch.manual_seed(1)
    assert_same(train(model, forward), train(shard(Net(), fully_shard)))


@pytest.mark.parametrize("mode", MODES)
def test_conversion(ranks2, mode):
    ranks2.run(_conversion, mode)


def _conversion(mode):
    """``.to`` before the first step, after it, and after a compile: like converting before sharding."""
    torch.manual_seed(0)
    expected = train(shard(Net().bfloat16(), fully_shard), part=to_bf16)
    before = build().to(torch.bfloat16)
    assert_same(train(before, forward_of(before, mode), part=to_bf16), expected)
    after = build()
    weights = {name: value.detach().clone() for name, value in after.state_dict().items()}
    forward = forward_of(after, mode)
    train(after, forward, steps=1)
    after.load_state_dict(weights)
    after.to(torch.bfloat16)
    assert all(isinstance(param, DTensor) and param.dtype == torch.bfloat16 for param in after.parameters())
    assert_same(train(after, forward, part=to_bf16), expected)


def to_bf16(whole):
    return whole.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()].bfloat16()


@pytest.mark.parametrize("mode", MODES)
def test_late_initialization(ranks4, mode):
    """From the meta device with dims of 13 and 3 on 4 ranks: uneven shards, and one that is empty."""
    ranks4.run(_late, mode)


class OddNet(Net):
    def __init__(self):
        super().__init__(dim=13)


def _late(mode):
    torch.manual_seed(0)
    weights = OddNet().state_dict()
    expected = train(build(OddNet), dim=13)
    for way in ("copy", "load", "assign"):
        with torch.device("meta"):
            model = shard(OddNet(), fully_shard)
        assert all(param.is_meta and isinstance(param, DTensor) for param in model.parameters())
        if way != "assign":
            model.to_empty(device="cpu")
        named = dict(model.named_parameters())
        pieces = {
            name: distribute_tensor(value, named[name].device_mesh, named[name].placements, src_data_rank=None)
            for name, value in weights.items()
        }
        if way == "copy":
            with torch.no_grad():
                for name, param in named.items():
                    param.copy_(pieces[name])
        else:
            model.load_state_dict(pieces, assign=way == "assign")
        torch._dynamo.reset()
        assert_same(train(model, forward_of(model, mode), dim=13), expected)


def test_wrong_replacement_names_the_parameter(ranks2):
    ranks2.run(_wrong_replacement)


def _wrong_replacement():
    model = build()
    weights = {name: value.detach().full_tensor() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"Parameter \S+ was replaced by a Parameter"):
        model.load_state_dict(weights, assign=True)
