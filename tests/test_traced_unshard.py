"""``unshard`` and ``reshard`` called by the user: inside of a graph, before it, and with prefetches set."""

import pytest
import torch
import torch.nn.functional as F
from models import assert_close_to_one_process, assert_same, batch, my_part, shard, train
from traced import SmallNet, Training, assert_equal, compiled, graphs, of_stage, reset

from fsdp_compile import FSDPModule, fully_shard
from fsdp_compile.passes.graph_view import gathers
from fsdp_compile.torch_compat import dynamo_counts


def build(cls=SmallNet, **kwargs):
    torch.manual_seed(0)
    return shard(cls(), fully_shard, **kwargs)


def both(cls=SmallNet, other=None, **kwargs):
    """``cls`` to train eagerly, and ``other``, or the same, compiled."""
    reset()
    model = build(other or cls, **kwargs)
    return Training(build(cls, **kwargs)), Training(model, compiled(model))


def gathered(stages, stage):
    """The parameters that the one graph of ``stage`` gathers, in order."""
    (graph,) = of_stage(stages, f"{stage} after")
    return [name for gather in gathers(graph) for name in gather.tag.params]


BLOCK = ["blocks.0.up.weight", "blocks.0.down.weight"]


class RootFirst(SmallNet):
    """Of the root it does nothing, as the root is unsharded then."""

    def forward(self, x):
        self.unshard()
        return super().forward(x)


class BlockFirst(SmallNet):
    def forward(self, x):
        self.blocks[0].unshard()
        return super().forward(x)


class Waits(SmallNet):
    def forward(self, x):
        handle = self.blocks[0].unshard(async_op=True)
        x = self.inp(x)
        handle.wait()
        return self.head(self.blocks[1](self.blocks[0](x)))


class AllAhead(SmallNet):
    def forward(self, x):
        handles = [block.unshard(async_op=True) for block in self.blocks]
        x = self.inp(x)
        for block, handle in zip(self.blocks, handles, strict=True):
            handle.wait()
            x = block(x)
        return self.head(x)


class Reshards(SmallNet):
    """After the forward of a block that is kept."""

    def forward(self, x):
        x = self.blocks[0](self.inp(x))
        self.blocks[0].reshard()
        return self.head(self.blocks[1](x))


class Twice(SmallNet):
    def forward(self, x):
        self.blocks[0].unshard()
        self.blocks[0].unshard()
        return super().forward(x)


@pytest.mark.parametrize(
    "cls, reshard",
    [
        (RootFirst, True),
        (BlockFirst, True),
        (BlockFirst, False),
        (Waits, True),
        (AllAhead, True),
        (AllAhead, False),
        (Reshards, False),
        (Twice, True),
    ],
)
def test_inside(ranks2, cls, reshard):
    ranks2.run(_inside, cls, reshard)


def _inside(cls, reshard):
    eager, traced = both(cls, reshard_after_forward=reshard)
    eager.steps(0, 1, 2)
    with graphs() as stages:
        traced.steps(0, 1, 2)
    assert_equal(eager, traced)
    assert dynamo_counts()[0] == 1
    everything = sorted(name for name, _ in traced.model.named_parameters())
    forward, backward = gathered(stages, "forward"), gathered(stages, "backward")
    assert sorted(forward) == everything
    assert len(backward) == len(set(backward))
    if cls is BlockFirst:
        assert forward.index(BLOCK[0]) < forward.index("blocks.1.up.weight")
    if reshard is False:
        assert set(backward) <= set(BLOCK if cls is Reshards else [])


def test_without_gradients(ranks2):
    ranks2.run(_without_gradients)


def _without_gradients():
    eager, traced = both(AllAhead)
    with torch.no_grad(), graphs() as stages:
        for training in (eager, traced):
            training.call(batch(0))
    assert_equal(eager, traced)
    assert len(gathered(stages, "inference")) == len(list(traced.model.parameters()))


# -- parameters used without a call of their module -------------------------------------------------------------------


class Uses(SmallNet):
    """The weights of a block that is not called, or called as well."""

    calls, reshards = False, False

    def forward(self, x):
        first = self.blocks[0]
        x = self.inp(x)
        if isinstance(first, FSDPModule):
            first.unshard()
        y = F.linear(torch.relu(F.linear(x, first.up.weight)), first.down.weight)
        if self.reshards and isinstance(first, FSDPModule):
            first.reshard()
        return self.head(self.blocks[1](first(y) if self.calls else y))


class UsesThenReshards(Uses):
    reshards = True


class UsesThenCalls(Uses):
    calls = True


class UsesThenReshardsThenCalls(UsesThenReshards):
    calls = True


@pytest.mark.parametrize("cls", [Uses, UsesThenReshards, UsesThenCalls, UsesThenReshardsThenCalls])
def test_uses_of_weights(ranks2, cls):
    ranks2.run(_uses, cls)


def _uses(cls):
    """Compared with one process: eagerly nothing gathers the weights again for the backward of a use without a call."""
    reset()
    model = build(cls)
    with graphs() as stages:
        train(model, compiled(model))
    torch.manual_seed(0)
    assert_close_to_one_process(model, cls())
    assert dynamo_counts()[0] == 1
    # Also where it is resharded in between: nothing else is gathered there, so ``dedup`` has the first gather serve.
    assert [gathered(stages, "forward").count(name) for name in BLOCK] == [1, 1]


def test_uses_of_weights_as_eagerly(ranks2):
    ranks2.run(_uses_as_eagerly)


def _uses_as_eagerly():
    eager, traced = both(Uses, UsesThenReshards, reshard_after_forward=False)
    assert_equal(eager.steps(0, 1, 2), traced.steps(0, 1, 2))


# -- before a compiled forward ----------------------------------------------------------------------------------------


def unshard_root(model):
    model.unshard()


def unshard_block(model):
    model.blocks[0].unshard()


def unshard_all_ahead(model):
    handles = [module.unshard(async_op=True) for module in (model, *model.blocks)]
    for handle in handles:
        handle.wait()


def start_only(model):
    model.blocks[1].unshard(async_op=True)


def unshard_and_reshard(model):
    model.blocks[0].unshard()
    model.blocks[0].reshard()


BEFORE = [unshard_root, unshard_block, unshard_all_ahead, start_only, unshard_and_reshard]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("reshard", [True, False])
def test_before(ranks2, before, reshard):
    ranks2.run(_before, before, reshard)


def _before(before, reshard):
    """One graph each for training and evaluation; one more where, in one step only, modules show sharded parameters."""
    eager, traced = both(reshard_after_forward=reshard)
    for training in (eager, traced):
        for step in range(3):
            before(training.model)
            training.steps(step)
            before(training.model)
            with torch.no_grad():
                training.call(batch(step))
        training.model.reshard()
        for block in training.model.blocks:
            block.reshard()
        training.steps(3)
    assert_equal(eager, traced)
    shows_sharded = before in (start_only, unshard_and_reshard)
    assert dynamo_counts()[0] == (2 if shows_sharded else 3)


def test_unsharded_while_the_optimizer_steps(ranks2):
    ranks2.run(_stale)


def _stale():
    """What was gathered before an optimizer's step is stale after it."""
    eager, traced = both()
    for training in (eager, traced):
        for step in range(3):
            training.backward(training.call(my_part(batch(step))).square().mean())
            parameters = list(training.model.parameters())
            training.model.blocks[0].unshard(async_op=True)
            assert all(a is b for a, b in zip(training.model.parameters(), parameters, strict=True))
            training.update()
    assert_equal(eager, traced)


# -- settings of the eager schedule -----------------------------------------------------------------------------------


def forward_prefetch(model):
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])


def backward_prefetch(model):
    model.set_modules_to_backward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


def no_unshard_in_backward(model):
    model.blocks[0].set_unshard_in_backward(True)
    model.set_unshard_in_backward(False)


def no_reshard_after_backward(model):
    model.set_reshard_after_backward(False)


def not_the_last_backward(model):
    model.set_is_last_backward(False)


SETTINGS = [
    forward_prefetch,
    backward_prefetch,
    no_unshard_in_backward,
    no_reshard_after_backward,
    not_the_last_backward,
]


@pytest.mark.parametrize("change", SETTINGS)
def test_settings_of_the_schedule(ranks2, change):
    ranks2.run(_settings, change)


def _settings(change):
    """Set after a step: neither results nor communication change."""
    eager, traced = both()
    eager.steps(0, 1, 2)
    with graphs() as stages:
        traced.steps(0)
        change(traced.model)
        traced.steps(1, 2)
    assert_equal(eager, traced)
    assert dynamo_counts()[0] == 1
    assert len(gathered(stages, "forward")) == len(list(traced.model.parameters()))
    set_first = Training(build())
    change(set_first.model)
    assert_same(eager.history, set_first.steps(0, 1, 2).history)
