"""Optimizers on shards: bit for bit as under torch's own, with clipping, groups, empty shards and steps in backward."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from models import Net, TiedNet, assert_same, batch, local, my_part, shard
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard

DIM = 13  # uneven on 2 and on 4 ranks; the head's 3 rows leave the last of 4 ranks without any
APIS = (fully_shard, torch_fsdp.fully_shard)


def build(api=fully_shard, cls=Net, **kwargs):
    torch.manual_seed(0)
    model = cls(DIM)
    return shard(model, api, **kwargs) if api else model


def loss_of(model, step, part=my_part):
    return model(part(batch(step, DIM))).square().mean()


def gradients(model):
    return [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]


def weights(model):
    return [local(p.detach()).clone() for p in model.parameters()]


def states(model, optimizer):
    """The optimizer's tensors, in order of the parameters."""
    of_each = [optimizer.state.get(param, {}) for param in model.parameters()]
    return [local(value).clone() for state in of_each for value in state.values() if isinstance(value, torch.Tensor)]


def train(model, optimizer, steps=3, set_to_none=True):
    history = []
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        history.append([*gradients(model), *weights(model), *states(model, optimizer)])
        optimizer.zero_grad(set_to_none=set_to_none)
        history.append(gradients(model))
    return history


# -- kinds ------------------------------------------------------------------------------------------------------------


WAYS = {"default": {}, "foreach": {"foreach": True}, "one by one": {"foreach": False}, "fused": {"fused": True}}
KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
}
OTHERS = {
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "adamax": (torch.optim.Adamax, {"lr": 0.1}),
}


@pytest.mark.parametrize("way", WAYS)
def test_bitwise_as_under_torch(ranks4, way):
    kinds = {name: kind for name, kind in KINDS.items() if way != "fused" or name.startswith("adam")}
    ranks4.run(_bitwise, kinds, WAYS[way])  # DTensor has no fused SGD


def test_other_kinds(ranks4):
    ranks4.run(_bitwise, OTHERS, {})


def _bitwise(kinds, way):
    for name, (kind, choices) in kinds.items():
        histories = []
        for api in APIS:
            model = build(api)
            before = weights(model)
            histories.append(train(model, kind(model.parameters(), **choices, **way)))
            assert not all(map(torch.equal, before, weights(model))), name
        assert_same(*histories)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(ranks4, set_to_none):
    ranks4.run(_zero_grad, set_to_none)


def _zero_grad(set_to_none):
    """By the optimizer and by the module; also where a gradient has been accumulated."""
    histories = []
    for api in APIS:
        model = build(api)
        loss_of(model, 7).backward()
        loss_of(model, 8).backward()
        model.zero_grad(set_to_none=set_to_none)
        assert all((param.grad is None) == set_to_none for param in model.parameters())
        assert set_to_none or not any(grad.any() for grad in gradients(model))
        histories.append(train(model, torch.optim.AdamW(model.parameters(), lr=0.1), set_to_none=set_to_none))
    assert_same(*histories)


def test_gradient_of_an_empty_shard(ranks4):
    ranks4.run(_empty)


def _empty():
    """Every rank has a gradient for every parameter, be its shard empty, so that all ranks step alike."""
    models = [build(api) for api in APIS]
    for model in models:
        loss_of(model, 0).backward()
        grads = [param.grad for param in (model.head.weight, model.head.bias)]
        rows = 0 if dist.get_rank() == 3 else 1
        assert [tuple(local(grad).shape) for grad in grads] == [(rows, DIM), (rows,)]
        for param, grad in zip((model.head.weight, model.head.bias), grads, strict=True):
            assert isinstance(grad, DTensor) and grad.shape == param.shape and grad.placements == param.placements
            assert local(grad).stride() == local(param).stride()
    assert_same([gradients(models[0])], [gradients(models[1])])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping(ranks2, ranks4, norm_type, foreach):
    ranks = ranks2 if norm_type == float("inf") else ranks4  # torch has no infinity norm of an empty shard
    ranks.run(_clipping, norm_type, foreach)


def _clipping(norm_type, foreach):
    """Frozen parameters and those without gradient included; the norm is that of one process."""
    norms = {}
    models = {api: build(api) for api in (*APIS, None)}
    for api, model in models.items():
        model.blocks[0].up.weight.requires_grad_(False)
        loss_of(model, 0, my_part if api else lambda whole: whole).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach)
        norms[api] = norm.full_tensor() if api else norm
        assert norms[api] > 0.1
    assert torch.equal(norms[APIS[0]], norms[APIS[1]])
    assert_same([gradients(models[APIS[0]])], [gradients(models[APIS[1]])])
    torch.testing.assert_close(norms[fully_shard], norms[None], rtol=1e-4, atol=0)
    for mine, expected in zip(models[fully_shard].parameters(), models[None].parameters(), strict=True):
        assert (mine.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6)


def test_clipping_of_what_is_not_finite(ranks2):
    ranks2.run(_not_finite)


def _not_finite():
    """All ranks find out, whichever has the element."""
    model = build()
    loss_of(model, 0).backward()
    if dist.get_rank() == 1:
        local(model.head.bias.grad)[0] = torch.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_scaled_loss(ranks2):
    ranks2.run(_scaled)


def _scaled():
    """What overflows on one rank only is skipped by all, and the scale falls everywhere."""
    histories = []
    for api in APIS:
        model = build(api)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        history = []
        for step in range(3):
            scaler.scale(loss_of(model, step)).backward()
            if step == 1 and dist.get_rank() == 0:
                local(model.head.bias.grad)[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append([torch.tensor(scaler.get_scale()), *weights(model)])
        assert [scale.item() for scale, *_ in history] == [8, 4, 4]
        assert_same([history[0][1:]], [history[1][1:]])
        histories.append(history)
    assert_same(*histories)


# -- which parameters, and when ---------------------------------------------------------------------------------------


def evaluate(model):
    with torch.no_grad():
        model(my_part(batch(9, DIM)))


def forward_only(model):
    loss_of(model, 9)


def forward_and_backward(model):
    loss_of(model, 9).backward()
    model.zero_grad()


@pytest.mark.parametrize("cls", [Net, TiedNet])
@pytest.mark.parametrize("first", [evaluate, forward_only, forward_and_backward])
def test_built_after(ranks2, first, cls):
    """An optimizer may be built at any time: it gets the sharded parameters."""
    ranks2.run(_built_after, first, cls)


def _built_after(first, cls):
    expected = build(cls=cls)
    history = train(expected, torch.optim.AdamW(expected.parameters(), lr=0.1))
    for choices in ({}, {"reshard_after_forward": False}):
        model = build(cls=cls, **choices)
        first(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        assert all(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])
        assert_same(train(model, optimizer), history)


def test_parameters_are_the_same_objects_always(ranks2):
    ranks2.run(_identity)


def _identity():
    """What an optimizer holds stays what the module has, so that its state is found by parameter."""
    model = build()
    before = [id(param) for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = loss_of(model, 0)
    assert [id(param) for param in model.parameters()] == before
    loss.backward()
    optimizer.step()
    evaluate(model)
    model.load_state_dict(model.state_dict())
    assert [id(param) for param in model.parameters()] == before
    assert set(map(id, optimizer.state)) == set(before)


def test_groups_and_late_groups(ranks2):
    ranks2.run(_groups)


def _groups():
    """Groups with choices of their own, a schedule, and a part that is unfrozen and added later."""
    histories = []
    for api in APIS:
        model = build(api)
        late = list(model.blocks[0].parameters())
        for param in late:
            param.requires_grad_(False)
        biases = [p for n, p in model.named_parameters() if n.endswith("bias") and p.requires_grad]
        matrices = [p for n, p in model.named_parameters() if not n.endswith("bias") and p.requires_grad]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": matrices, "lr": 0.05}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        history = train(model, optimizer, steps=2)
        schedule.step()
        for param in late:
            param.requires_grad_(True)
        optimizer.add_param_group({"params": late, "lr": 0.01})
        histories.append(history + train(model, optimizer, steps=2))
    assert_same(*histories)


KEEPS = {"reshard_after_forward": False}


@pytest.mark.parametrize("choices, backend", [({}, None), (KEEPS, None), (KEEPS, "fsdp_eager")])
def test_steps_in_backward(ranks2, choices, backend):
    ranks2.run(_in_backward, choices, backend)


def _in_backward(choices, backend):
    """One optimizer a parameter, which steps as soon as its gradient is there: like one step after the backward."""
    expected, model = build(**choices), build(**choices)
    forward = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    history = list(train_and_keep_weights(expected))
    optimizers = {param: torch.optim.AdamW([param], lr=0.1) for param in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    mine = []
    for index in range(3):
        loss_of(forward, index).backward()
        mine.append(weights(model))
    assert_same(mine, history)
    assert all(param.grad is None for param in model.parameters())


def train_and_keep_weights(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield weights(model)
