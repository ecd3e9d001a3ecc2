"""Checkpoints of model and optimizer: written and read by other numbers of ranks, by torch's own, in every form."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from models import Net, TiedNet, assert_same, batch, local, my_part, shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard

DIM = 13  # uneven on 2 and on 4 ranks; the head's 3 rows leave the last of 4 ranks without any


class OddNet(Net):
    def __init__(self):
        super().__init__(DIM)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class OddTied(TiedNet):
    def __init__(self):
        super().__init__(DIM)


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "groups": lambda params: torch.optim.AdamW(
        [{"params": (found := list(params))[:3], "lr": 0.1}, {"params": found[3:], "weight_decay": 0.5}], lr=1e-2
    ),
}


CASES = [(OddNet, "adamw"), (OddTied, "momentum"), (OddNet, "groups")]


def build(cls=OddNet, api=fully_shard, kind="adamw", seed=0, device="cpu"):
    torch.manual_seed(seed)
    with torch.device(device):
        model = shard(cls(), api) if api else cls()
    return model, OPTIMIZERS[kind](model.parameters())


def train(model, optimizer, steps, part=my_part):
    for step in steps:
        model(part(batch(step, DIM))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(value, name=""):
    """Nested state as one dict, with each tensor whole: the same on any number of ranks."""
    if isinstance(value, dict) or isinstance(value, (list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: leaf for key, item in items for path, leaf in flat(item, f"{name}/{key}").items()}
    if isinstance(value, torch.Tensor):
        value = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach().clone()
    return {name: value}


def assert_equal_state(mine, expected):
    """Of two states, flat."""
    assert list(mine) == list(expected)
    for name, value in expected.items():
        same = torch.equal(mine[name], value) if isinstance(value, torch.Tensor) else mine[name] == value
        assert same, f"{name}: {mine[name]} != {value}"


def copies(value):
    """Loading keeps some tensors as they are: to train on must not change where they come from."""
    if isinstance(value, dict):
        return {key: copies(item) for key, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def state_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def flat_state_of(model, optimizer):
    return flat(state_of(model, optimizer))


# -- distributed checkpoints ------------------------------------------------------------------------------------------


def _save(folder, api=fully_shard):
    for cls, kind in CASES:
        model, optimizer = build(cls, api, kind)
        train(model, optimizer, range(2))
        path = f"{folder}/{cls.__name__}-{kind}"
        dcp.save(state_of(model, optimizer), checkpoint_id=path)
        before = flat_state_of(model, optimizer)
        train(model, optimizer, range(2, 4))
        after = flat_state_of(model, optimizer)
        if dist.get_rank() == 0:
            torch.save((before, after), f"{path}/whole")


def _load(folder, api, same_ranks, backend=None, cases=CASES):
    for cls, kind in cases:
        model, optimizer = build(cls, api, kind, seed=1)
        forward = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        train(forward, optimizer, range(5, 6))  # other weights, and state that loading has to replace
        state = state_of(forward, optimizer)
        path = f"{folder}/{cls.__name__}-{kind}"
        dcp.load(state, checkpoint_id=path)
        set_state_dict(forward, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        before, after = torch.load(f"{path}/whole")
        assert_equal_state(flat_state_of(forward, optimizer), before)
        train(forward, optimizer, range(2, 4))
        state = flat_state_of(forward, optimizer)
        if same_ranks:
            assert_equal_state(state, after)
        for name, value in after.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("up", [True, False])
def test_other_number_of_ranks(ranks2, ranks4, tmp_path, up):
    before, after = (ranks2, ranks4) if up else (ranks4, ranks2)
    before.run(_save, str(tmp_path))
    after.run(_load, str(tmp_path), fully_shard, False)


@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_of_torch(ranks4, tmp_path, ours_first):
    """Written by torch's own and read by ours, and the other way round: the training continues bit for bit."""
    apis = (fully_shard, torch_fsdp.fully_shard)
    ranks4.run(_save, str(tmp_path), apis[not ours_first])
    ranks4.run(_load, str(tmp_path), apis[ours_first], True)


def test_into_a_compiled_model(ranks2, tmp_path):
    ranks2.run(_save, str(tmp_path))
    ranks2.run(_load, str(tmp_path), fully_shard, True, "fsdp_eager", CASES[:1])


# -- state dicts in each form -----------------------------------------------------------------------------------------


OPTIONS = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "offloaded": {"cpu_offload": True},
    "full and offloaded": {"full_state_dict": True, "cpu_offload": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_forms(ranks4, name):
    ranks4.run(_forms, OPTIONS[name], "groups")


def _forms(choices, kind):
    """Each form is torch's own, bit for bit; and a model that gets it trains on like the model that it is from."""
    ours, theirs = (build(OddNet, api, kind) for api in (fully_shard, torch_fsdp.fully_shard))
    states = []
    for model, optimizer in (ours, theirs):
        train(model, optimizer, range(2))
        options = StateDictOptions(**{key: value for key, value in choices.items() if key != "broadcast_from_rank0"})
        states.append(
            copies(
                {
                    "model": get_model_state_dict(model, options=options),
                    "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
                }
            )
        )
    assert_equal_state(*map(flat, states))
    is_full = bool(choices.get("full_state_dict"))
    of_rank0 = is_full and (dist.get_rank() > 0) and bool(choices.get("cpu_offload"))
    assert bool(states[0]["model"]) != of_rank0
    assert all(isinstance(value, DTensor) != is_full for name, value in states[0]["model"].items() if name != "seen")
    set_into(build(OddNet, fully_shard, kind, seed=1), states[0], choices, ours)


def set_into(other, state, choices, ours):
    if choices.get("full_state_dict") and (choices.get("cpu_offload") or choices.get("broadcast_from_rank0")):
        choices = {"full_state_dict": True, "broadcast_from_rank0": True}
        state = {"model": {}, "optimizer": {}} if dist.get_rank() else state
    options = StateDictOptions(**choices)
    set_model_state_dict(other[0], state["model"], options=options)
    set_optimizer_state_dict(*other, state["optimizer"], options=options)
    assert_equal_state(flat_state_of(*other), flat_state_of(*ours))
    for each in (ours, other):
        train(*each, range(2, 4))
    assert_equal_state(flat_state_of(*other), flat_state_of(*ours))


@pytest.mark.parametrize("cls", [OddNet, OddTied])
def test_from_one_process_to_a_model_on_the_meta_device(ranks4, cls):
    ranks4.run(_meta, cls)


def _meta(cls):
    """Rank 0 has the whole weights, all have a sharded model without storage, then train like one made in full."""
    expected, expected_optimizer = build(cls)
    weights = build(cls, api=None)[0].state_dict() if dist.get_rank() == 0 else {}
    for sized in (True, False):
        model, _ = build(cls, device="meta")
        if sized:
            model.to_empty(device="cpu")
        set_model_state_dict(
            model, dict(weights), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        train(model, optimizer := OPTIMIZERS["adamw"](model.parameters()), range(2))
        if sized:
            train(expected, expected_optimizer, range(2))
        assert_equal_state(flat_state_of(model, optimizer), flat_state_of(expected, expected_optimizer))


# -- when -------------------------------------------------------------------------------------------------------------


def test_between_forward_and_backward(ranks2):
    ranks2.run(_between)


def _between():
    """Writing a checkpoint anywhere in a step changes neither the step nor what is written."""
    plain, writes = build()[0], build()[0]
    for step in range(2):
        losses = [model(my_part(batch(step, DIM))).square().mean() for model in (plain, writes)]
        states = [flat(writes.state_dict()), flat(get_model_state_dict(writes))]
        for loss in losses:
            loss.backward()
        states += [flat(writes.state_dict()), flat(plain.state_dict())]
        for state in states:
            assert_equal_state(state, states[0])
        gradients = [[local(p.grad) for p in model.parameters()] for model in (plain, writes)]
        assert_same([gradients[0]], [gradients[1]])


def test_written_while_training_goes_on(ranks2, tmp_path):
    ranks2.run(_asynchronously, str(tmp_path))


def _asynchronously(path):
    model, optimizer = build()
    train(model, optimizer, range(2))
    expected = flat_state_of(model, optimizer)
    group = dist.new_group(backend="gloo")  # of its own, as the writing thread communicates too
    written = dcp.async_save(state_of(model, optimizer), checkpoint_id=path, process_group=group)
    train(model, optimizer, range(2, 6))
    written.result()
    other, other_optimizer = build(seed=1)
    state = state_of(other, other_optimizer)
    dcp.load(state, checkpoint_id=path)
    assert_equal_state(flat(state), expected)


def test_wrong_state_is_refused(ranks2):
    ranks2.run(_wrong)


def _wrong():
    """With the name of what is wrong, and nothing half loaded afterwards that could not train."""
    model, optimizer = build()
    state = model.state_dict()
    missing = {name: value for name, value in state.items() if name != "head.bias"}
    extra = {**state, "tail.bias": state["head.bias"]}
    wide, _ = build(Net)  # of 12, not 13
    for wrong, message in ((missing, "head.bias"), (extra, "tail.bias"), (wide.state_dict(), "size mismatch")):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(wrong)
    model.load_state_dict(missing, strict=False)
    train(model, optimizer, range(2))
    assert all(isinstance(p, DTensor) for p in model.parameters())
