"""The eager state machine: states, state dicts, gradients, hooks, errors."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from models import Net, TiedNet, assert_close_to_one_process, assert_same, batch, live_bytes, my_part, shard, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compile import FSDPModule, ShardedState, fully_shard


def build(cls=Net, api=fully_shard, **kwargs):
    torch.manual_seed(0)
    return shard(cls(), api, **kwargs)


def test_state_dict(ranks2):
    ranks2.run(_state_dict)


def _state_dict():
    ours, theirs = build(), build(api=torch_fsdp.fully_shard)
    for (name, mine), (other_name, other) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other_name and isinstance(mine, DTensor)
        assert mine.placements == other.placements and mine.shape == other.shape and mine.stride() == other.stride()
        assert torch.equal(mine.to_local(), other.to_local())
    history = train(ours)
    compiled = torch.compile(ours, backend="fsdp_eager")
    assert list(compiled.state_dict()) == ["_orig_mod." + name for name in ours.state_dict()]
    for assign in (False, True):
        fresh = build()
        train(fresh, steps=1)
        fresh.load_state_dict({name: value.clone() for name, value in ours.state_dict().items()}, assign=assign)
        assert_same([history[-1][-len(list(ours.parameters())):]], [[p.to_local() for p in fresh.parameters()]])
        assert_same(train(fresh, steps=2), train(_with_weights_of(ours), steps=2))


def _with_weights_of(model):
    fresh = build()
    with torch.no_grad():
        for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    return fresh


def test_meta_device_and_dtype_changes(ranks2):
    ranks2.run(_meta)


def _meta():
    torch.manual_seed(0)
    weights = Net(dim=13).state_dict()
    with torch.device("meta"):
        model = shard(Net(dim=13), fully_shard)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            start = sum(chunk.size(0) for chunk in weights[name].chunk(2)[: dist.get_rank()])
            param.to_local().copy_(weights[name][start : start + param.to_local().size(0)])
    torch.manual_seed(0)
    assert_same(train(shard(Net(dim=13), fully_shard), dim=13), train(model, dim=13))
    model.to(torch.float64)
    assert model(batch(0, 13).double()).dtype == torch.float64


def test_nobody_gets_an_unsharded_parameter(ranks2):
    ranks2.run(_never_unsharded)


def _never_unsharded():
    model = build()
    with torch.no_grad():
        model(batch(0))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    output = model(batch(0))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert model._fsdp_state.groups[0].sharded_state is ShardedState.UNSHARDED  # the root keeps its data
    output.sum().backward()
    assert model._fsdp_state.groups[0].sharded_state is ShardedState.SHARDED
    handle = model.unshard(async_op=True)
    handle.wait()
    assert not isinstance(model.head.weight, DTensor)
    model.reshard()
    assert isinstance(model.head.weight, DTensor)


def test_a_kept_copy_is_never_stale(ranks2):
    ranks2.run(_stale)


def _stale():
    model, reference = build(), build()
    for each, extra_forward in ((model, True), (reference, False)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, foreach=True)
        for step in range(3):
            each(my_part(batch(step))).sum().backward()
            if extra_forward:
                each(my_part(batch(step)))  # leaves the root's copy behind, as no backward follows
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model(batch(9)), reference(batch(9)))


def test_accumulation_without_sync(ranks2):
    ranks2.run(_accumulation)


def _accumulation():
    model = build()
    torch.manual_seed(0)
    single = Net()
    for micro_batch in range(3):
        last = micro_batch == 2
        model.set_requires_gradient_sync(last)
        model(my_part(batch(micro_batch))).square().mean().backward()
        single(batch(micro_batch)).square().mean().backward()
        assert all((p.grad is not None) == last for p in model.parameters())
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


class Odd(nn.Module):
    """In-place change of the input, an unused and a frozen parameter, one input twice, a dict out."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight.requires_grad_(False)

    def forward(self, x, *, y):
        assert x is y
        x += 1
        return {"out": self.b(torch.relu(self.a(x))), "nothing": None, "count": 3}


class OddNet(Net):
    def __init__(self):
        super().__init__(blocks=0)
        self.odd = Odd()

    def forward(self, x):
        x = self.inp(x)
        return self.head(self.odd(x, y=x)["out"])


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_odd_module(ranks2, backend):
    ranks2.run(_odd, backend)


def _odd(backend):
    def sharded():
        torch.manual_seed(0)
        model = OddNet()
        fully_shard(model.odd)
        return fully_shard(model)

    model = sharded()
    history = train(model, torch.compile(model, backend=backend, fullgraph=True) if backend else model)
    torch.manual_seed(0)
    single = OddNet()
    assert_close_to_one_process(model, single)
    assert model.odd.unused.weight.grad is None
    assert_same(history, train(sharded()))


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_hooks_on_sharded_parameters(ranks2, backend):
    ranks2.run(_hooks, backend)


def _hooks(backend):
    model = build()
    seen = {"tensor": [], "post": []}
    weight = model.head.weight
    weight.register_hook(lambda grad: seen["tensor"].append(grad.full_tensor()))
    weight.register_post_accumulate_grad_hook(lambda p: seen["post"].append(p.grad.full_tensor()))
    train(model, torch.compile(model, backend=backend, fullgraph=True) if backend else model, steps=1)
    torch.manual_seed(0)
    single = Net()
    single(batch(0)).square().mean().backward()
    for kind in seen.values():
        assert len(kind) == 1
        torch.testing.assert_close(kind[0], single.head.weight.grad)


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_requires_grad_toggled(ranks2, backend):
    ranks2.run(_toggle, backend)


def _toggle(backend):
    def run(model, forward):
        history = []
        for trains in (True, False, True):
            model.blocks[0].up.weight.requires_grad_(trains)
            history += train(model, forward, steps=1)
            index = [name for name, _ in model.named_parameters()].index("blocks.0.up.weight")
            assert (history[-1][1 + index] is None) != trains
        return history

    eager, model = build(), build()
    assert_same(run(eager, eager), run(model, torch.compile(model, backend=backend) if backend else model))


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_no_leak(ranks2, backend):
    ranks2.run(_leak, backend)


def _leak(backend):
    model = build()
    forward = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    train(model, forward)
    before = live_bytes()
    for _ in range(10):
        train(model, forward)
    assert live_bytes() == before


def test_errors_name_the_culprit_and_leave_the_model_alone(ranks2):
    ranks2.run(_errors)


def _errors():
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.table = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 3).t())

    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    cases = [
        (Scalar(), {}, ValueError, "gain"),
        (Strided(), {}, ValueError, "table"),
        (nn.ModuleList([nn.Linear(4, 4)]), {}, ValueError, "ModuleList"),
        (nn.Linear(4, 4), {"mesh": mesh}, ValueError, "3D"),
        (nn.Linear(4, 4), {"reshard_after_forward": 3}, ValueError, "3"),
        (nn.Linear(4, 4), {"reshard_after_forward": "yes"}, ValueError, "yes"),
        (nn.Linear(4, 4), {"shard_placement_fn": lambda p: None}, NotImplementedError, "shard_placement_fn"),
        ([], {}, ValueError, "empty"),
        ("model", {}, TypeError, "str"),
    ]
    for module, kwargs, error, words in cases:
        originals = list(module.parameters()) if isinstance(module, nn.Module) else []
        with pytest.raises(error, match=words):
            fully_shard(module, **kwargs)
        assert not isinstance(module, FSDPModule)
        assert all(now is then for now, then in zip(module.parameters() if originals else [], originals, strict=True))
    with pytest.raises(ValueError, match="already"):
        fully_shard(build())
    with pytest.raises(RuntimeError, match="deep-copied"):
        copy.deepcopy(build(TiedNet))
