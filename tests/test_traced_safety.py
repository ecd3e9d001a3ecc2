"""Where the compiler does not see everything: other backends, graph breaks, parts compiled alone, checkpointing."""

import warnings

import pytest
import torch
from models import Block, Net, assert_same, shard, train
from torch.utils.checkpoint import checkpoint

from fsdp_compile import backend as fsdp_backend
from fsdp_compile import explain, fully_shard, traced_ops

DYNAMO = torch._dynamo.utils.counters


def build(cls=Net, **kwargs):
    torch.manual_seed(0)
    return shard(cls(), fully_shard, **kwargs)


class BrokenBlock(Block):
    def forward(self, x):
        x = self.norm(x)
        torch._dynamo.graph_break()
        return x + self.down(torch.relu(self.up(x)))


class BrokenNet(Net):
    block = BrokenBlock


class CheckpointedBlock(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedInside(Net):
    block = CheckpointedBlock


class CheckpointedAround(Net):
    reentrant = False

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedReentrant(CheckpointedAround):
    reentrant = True


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fsdp_eager"])
def test_every_backend_is_right(ranks2, backend):
    ranks2.run(_backend, backend)


def _backend(backend):
    frees = []

    def count_frees(graph, inputs):
        frees.append(sum(node.target is traced_ops.free for node in graph.graph.nodes))
        return graph.forward

    eager = train(build())
    model = build()
    assert_same(eager, train(model, torch.compile(model, backend=backend, fullgraph=True)))
    assert DYNAMO["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    model = build()
    assert_same(eager, train(model, torch.compile(model, backend=count_frees, fullgraph=True)))
    assert frees == [0]


@pytest.mark.parametrize("backend", ["aot_eager", "fsdp_eager"])
def test_graph_break_inside_a_module(ranks2, backend):
    ranks2.run(_graph_break, backend)


def _graph_break(backend):
    from fsdp_compile import tracing

    tracing._warned.clear()
    eager = train(build(BrokenNet))
    model = build(BrokenNet)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(eager, train(model, torch.compile(model, backend=backend)))
    ours = [str(w.message) for w in caught if "fsdp_compile" in str(w.message)]
    for name in ("module 'blocks.0'", "module 'blocks.1'", "the root module"):
        assert sum(name in message for message in ours) == 1, ours


def test_modules_compiled_alone(ranks2):
    ranks2.run(_alone)


def _alone():
    eager = train(build())
    for how in ("block.compile()", "torch.compile(block)", "root.compile()", "one block only"):
        torch._dynamo.reset()
        model = build()
        if how == "root.compile()":
            model.compile(backend="fsdp_eager", fullgraph=True)
        elif how == "torch.compile(block)":
            for index, block in enumerate(model.blocks):
                model.blocks[index] = torch.compile(block, backend="fsdp_eager", fullgraph=True)
        else:
            for block in model.blocks[: 1 if how == "one block only" else None]:
                block.compile(backend="fsdp_eager", fullgraph=True)
        assert_same(eager, train(model))


@pytest.mark.parametrize("cls", [CheckpointedInside, CheckpointedAround, CheckpointedReentrant])
def test_activation_checkpointing(ranks2, cls):
    ranks2.run(_checkpointing, cls)


def _checkpointing(cls):
    plain = train(build())
    assert_same(plain, train(build(cls)))
    if cls is CheckpointedReentrant:
        return  # torch.compile has no reentrant checkpointing with side effects in it
    gathers = {}

    def count(stage, graph):
        gathers[stage] = sum("all_gather" in str(node.target) for node in graph.nodes)

    model = build(cls)
    allow = {}
    with torch._dynamo.config.patch(allow), fsdp_backend.observed(count):
        assert_same(plain, train(model, torch.compile(model, backend="fsdp_eager", fullgraph=True)))
    assert gathers["forward after"] == 3  # the root and two blocks
    assert gathers["backward after"] == 2  # the blocks


def test_inference_graph_frees_and_sees_new_weights(ranks2):
    ranks2.run(_inference)


def _inference():
    def train_and_evaluate(model, forward):
        outputs = []
        for _ in range(2):
            history = train(model, forward, steps=1)
            with torch.no_grad():
                outputs.append(forward(torch.ones(2, 12)))
        return [*history, outputs]

    eager, model = build(), build()
    assert_same(
        train_and_evaluate(eager, eager),
        train_and_evaluate(model, torch.compile(model, backend="fsdp_eager", fullgraph=True)),
    )


def test_settings_without_a_traced_form_run_eagerly(ranks2):
    ranks2.run(_untraced)


def _untraced():
    def hooked():
        model = build()
        model.blocks[0].set_all_reduce_hook(lambda grad: grad.mul_(2))
        return model

    eager, model = hooked(), hooked()
    assert_same(train(eager), train(model, torch.compile(model, backend="fsdp_eager")))
    ran = explain(model)
    assert [run.name for run in ran.modules if run.how == "eagerly"] == ["blocks.0"]
    assert "set_all_reduce_hook has no traced form" in str(ran)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="explain"):
        torch.compile(hooked(), backend="fsdp_eager", fullgraph=True)(torch.ones(2, 12))
