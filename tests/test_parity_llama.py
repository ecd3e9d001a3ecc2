"""The debug Llama: one graph, bit for bit the eager result, and what one process computes."""

import pytest
import torch
import torch.distributed as dist
from models import live_bytes

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile.factory import debug_llama, loss_of
from fsdp_compile.models import SIZES, Llama
from fsdp_compile.models.llama import shard_llama
from fsdp_compile.parity import compare_training

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DYNAMO = torch._dynamo.utils.counters


def llama_factory(policy=None, tied=False, reshard_after_forward=None):
    def factory():
        model, make_batch = debug_llama()
        model.model = Llama(SIZES["debug"].with_head(tied))
        for block in model.model.blocks:
            fully_shard(block, mp_policy=policy or MixedPrecisionPolicy(), reshard_after_forward=reshard_after_forward)
        fully_shard(model, mp_policy=policy or MixedPrecisionPolicy(), reshard_after_forward=reshard_after_forward)
        return model, make_batch

    return factory


def compare(backend, **kwargs):
    report = compare_training(llama_factory(**kwargs), steps=5, backend=backend)
    return report.bitwise_equal, report.graphs, report.graph_breaks, report.recompiles, str(report)


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"policy": BF16}, {"tied": True}, {"reshard_after_forward": False}, {"reshard_after_forward": True}],
    ids=str,
)
def test_bitwise_and_one_graph(ranks2, kwargs):
    for equal, graphs, breaks, recompiles, report in ranks2.run(_compare_eager, kwargs):
        assert equal, report
        assert (graphs, breaks, recompiles) == (1, 0, 0), report


def _compare_eager(kwargs):
    return compare("fsdp_eager", **kwargs)


def test_inductor_losses(ranks2):
    ranks2.run(_inductor, timeout=400)


def _inductor():
    report = compare_training(llama_factory(), steps=5, backend="inductor")
    assert (report.graphs, report.graph_breaks, report.recompiles) == (1, 0, 0)
    for step in report.steps:
        assert step.loss <= 1e-4 * 5, report  # the losses are between 5 and ln 256 = 5.55
    return True


def test_against_one_process(ranks2):
    ranks2.run(_one_process)


def _one_process():
    config = SIZES["debug"]
    sharded, single = shard_llama(Llama(config)), Llama(config)
    compiled = torch.compile(sharded, backend="fsdp_eager", fullgraph=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, single)]
    for step in range(5):
        tokens = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        for forward, data in ((compiled, mine), (single, tokens)):
            forward(data).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(sharded.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_no_unsharded_storage_survives_the_step(ranks2, backend):
    ranks2.run(_storages, backend)


def _storages(backend):
    factory = llama_factory(reshard_after_forward=None)
    model, make_batch = factory()
    forward = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    live = []
    for step in range(4):
        loss_of(forward(make_batch(step, dist.get_rank(), dist.get_world_size()))).backward()
        for state in model._fsdp_state.context.states:
            for group in state.groups:
                for param in group.params:
                    assert param.unsharded_nbytes == 0, param
        live.append(live_bytes())
        model.zero_grad()
    shards = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
    assert live[-1] == live[1], live
    assert live[-1] < 2.6 * shards, (live, shards)  # shards, their gradients, and little else; a whole copy would be 4


@pytest.mark.gpu
@pytest.mark.parametrize("kwargs", [{}, {"policy": BF16}], ids=str)
def test_bitwise_on_gpus(gpu_ranks2, kwargs):
    for equal, graphs, breaks, recompiles, report in gpu_ranks2.run(_compare_eager, kwargs):
        assert equal, report
        assert (graphs, breaks, recompiles) == (1, 0, 0), report
