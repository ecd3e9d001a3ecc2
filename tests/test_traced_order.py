"""What happens before and after compiling in either order: loading, saving, optimizers, dtypes."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import assert_same, shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from traced import SmallNet, Training, assert_equal, compiled, reset, weights

from fsdp_compile import fully_shard
from fsdp_compile.torch_compat import dynamo_counts


def build(seed=0):
    torch.manual_seed(seed)
    return shard(SmallNet(13), fully_shard)


def batch13(step):
    return torch.randn(4, 13, generator=torch.Generator().manual_seed(step))


def train(training, *steps):
    for step in steps:
        training.step(batch13(step).to(next(training.model.parameters()).dtype))
    return training


def compile_in_place(model):
    model.compile(backend="fsdp_eager", fullgraph=True)
    return model


HOW = {"torch.compile": compiled, "module.compile": compile_in_place}
how = pytest.mark.parametrize("how", HOW)


# -- orders -----------------------------------------------------------------------------------------------------------


def compiles(training, how):
    training.forward = HOW[how](training.model)


def compiles_and_runs(training, how):
    """As the former, and traces, with the weights, dtypes and gradients that there are by then."""
    compiles(training, how)
    training.forward(batch13(9)).square().mean().backward()
    training.model.zero_grad()


def loads(training, how):
    training.model.load_state_dict(build(seed=1).state_dict())


def loads_by_assignment(training, how):
    training.model.load_state_dict(build(seed=1).state_dict(), assign=True)


def makes_an_optimizer(training, how):
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)


def becomes_double(training, how):
    training.model.to(torch.float64)


def becomes_bfloat16_and_back(training, how):
    training.model.to(torch.bfloat16)
    training.model.to(torch.float32)


@pytest.mark.parametrize(
    "event", [loads, loads_by_assignment, makes_an_optimizer, becomes_double, becomes_bfloat16_and_back]
)
def test_compiling_before_and_after(ranks2, event):
    ranks2.run(_before_and_after, event)


def _before_and_after(event):
    histories = []
    for how, order in (
        ("", [event]),
        ("torch.compile", [event, compiles]),
        ("module.compile", [compiles, event]),
        ("torch.compile", [compiles_and_runs, event]),
    ):
        reset()
        training = Training(build())
        for act in order:
            act(training, how)
        makes_an_optimizer(training, how)
        histories.append(train(training, 0, 1))
    eager, *traced = histories
    for each in traced:
        assert_equal(eager, each)


@how
def test_events_between_steps(ranks2, how):
    ranks2.run(_between_steps, how)


def _between_steps(how):
    """Weights that are loaded need no new graph; another dtype does."""
    trainings = [Training(build()), Training(model := build(), HOW[how](model))]
    graphs = []
    for training in trainings:
        for event in (None, loads, becomes_double, loads):
            if event:
                event(training, how)
                makes_an_optimizer(training, how)
            train(training, 0, 1)
            graphs.append(dynamo_counts()[0])
    assert_equal(*trainings)
    assert graphs == [0] * 4 + [1, 1, 2, 2]


# -- state dicts ------------------------------------------------------------------------------------------------------


@how
def test_keys_are_those_of_torch(ranks2, how):
    ranks2.run(_keys, how)


def _keys(how):
    plain, sharded = HOW[how](SmallNet(13)), HOW[how](build())
    prefix = "_orig_mod." if how == "torch.compile" else ""
    names = [prefix + name for name, _ in SmallNet(13).named_parameters()]
    for ran in (False, True):
        for state in (sharded.state_dict(), dict(sharded.named_parameters())):
            assert list(state) == list(plain.state_dict()) == names
            assert all(isinstance(value, DTensor) for value in state.values())
        assert list(get_model_state_dict(sharded)) == list(build().state_dict())
        if not ran:
            sharded(batch13(0)).sum().backward()


def copies(state):
    """Loading may keep tensors as they are, and training goes on in those that were saved."""
    return {name: value.detach().clone() for name, value in state.items()}


def with_state_dict(source, target, path):
    prefixed = {name.removeprefix("_orig_mod."): value for name, value in copies(source.state_dict()).items()}
    names = list(target.state_dict())
    target.load_state_dict(dict(zip(names, prefixed.values(), strict=True)))


def with_model_state_dict(source, target, path):
    set_model_state_dict(target, copies(get_model_state_dict(source)))


def with_full_model_state_dict(source, target, path):
    options = StateDictOptions(full_state_dict=True)
    state = copies(get_model_state_dict(source, options=options))
    assert not any(isinstance(value, DTensor) for value in state.values())
    set_model_state_dict(target, state, options=options)


def with_files(source, target, path):
    dcp.save(get_model_state_dict(source), checkpoint_id=path)
    state = get_model_state_dict(target)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(target, state)


@how
@pytest.mark.parametrize("from_compiled", [True, False])
def test_weights_travel(ranks2, tmp_path, how, from_compiled):
    ranks2.run(_travel, how, from_compiled, str(tmp_path))


def _travel(how, from_compiled, path):
    """From a compiled model to an eager one, or back; both then train on alike."""
    model = build(seed=1)
    eager, traced = Training(build()), Training(model, HOW[how](model))
    source, target = (traced, eager) if from_compiled else (eager, traced)
    for transfer in (with_state_dict, with_model_state_dict, with_full_model_state_dict, with_files):
        for step, training in enumerate((source, target)):
            train(training, 5 + step)
        assert not torch.equal(weights(source.model)[0], weights(target.model)[0])
        transfer(source.forward, target.forward, path)
        assert_same([weights(source.model)], [weights(target.model)])
        for training in (source, target):
            training.history, training.forms = [], []
            makes_an_optimizer(training, how)
            train(training, 0, 1)
        assert_equal(source, target)
