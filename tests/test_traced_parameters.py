"""Parameters of all kinds in graphs: uneven, tied, frozen, ignored, replaced, of several meshes, tensor parallel."""

import pytest
import torch
import torch.distributed as dist
from models import batch, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from traced import SmallNet, Training, assert_equal, compiled, graphs, of_stage, reset

from fsdp_compile import FSDPMeshInfo, MixedPrecisionPolicy, ShardPlacementResult, fully_shard
from fsdp_compile.passes.graph_view import gathers, reductions
from fsdp_compile.torch_compat import dynamo_counts


def both(make):
    """The model that ``make`` makes, twice: to train eagerly, and compiled."""
    reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return Training(models[0]), Training(models[1], compiled(models[1]))


def agree(make, graph_count=1):
    eager, traced = both(make)
    with graphs() as stages:
        assert_equal(eager.steps(0, 1, 2), traced.steps(0, 1, 2))
    assert dynamo_counts()[0] == graph_count
    return traced.model, stages


def names(stages, stage, find):
    (graph,) = of_stage(stages, f"{stage} after")
    return [name for found in find(graph) for name in found.tag.params]


def sized(dim, out):
    return shard(SmallNet(dim, out=out), fully_shard)


def uneven():
    return sized(12, 3)


def empty():
    """The bias of the head is on the first rank only."""
    return sized(12, 1)


class Tied(SmallNet):
    def __init__(self):
        super().__init__(out=12)
        self.head.weight = self.inp.weight


def tied():
    return shard(Tied(), fully_shard)


def frozen():
    model = SmallNet()
    model.inp.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    return shard(model, fully_shard)


def ignored():
    model = SmallNet()
    return shard(model, fully_shard, ignored_params={model.inp.weight, model.blocks[0].up.weight})


def one_group():
    model = SmallNet(blocks=3)
    fully_shard([model.blocks[0], model.blocks[2]])
    fully_shard([model.inp, model.head])
    return fully_shard(model)


def meshes():
    """The blocks' weights are sharded over pairs of ranks, or on each rank, and replicated among the rest."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replica", "shard"))
    own = FSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    model = SmallNet()
    ups = {id(block.up.weight) for block in model.blocks}
    place = lambda param: ShardPlacementResult(Shard(0), own) if id(param) in ups else None  # noqa: E731
    return shard(model, fully_shard, shard_placement_fn=place)


def divided():
    model = uneven()
    model.set_gradient_divide_factor(3.0)
    model.blocks[0].set_gradient_divide_factor(8.0)
    return model


def sums():
    model = uneven()
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    model.blocks[1].set_gradient_divide_factor(5.0)
    return model


def apart():
    model = uneven()
    model.set_separate_reduce_scatter_group()
    return model


MAKE = [uneven, empty, tied, frozen, ignored, meshes, divided, sums, apart, one_group]


@pytest.mark.parametrize("make", MAKE)
def test_two_ranks(ranks2, make):
    ranks2.run(_parameters, make)


@pytest.mark.parametrize("make", [uneven, empty, tied, meshes, divided])
def test_four_ranks(ranks4, make):
    ranks4.run(_parameters, make)


def _parameters(make):
    """Each sharded parameter is gathered once, and each that trains is reduced once."""
    model, stages = agree(make)
    mine = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    assert sorted(names(stages, "forward", gathers)) == sorted(mine)
    trained = [name for name in mine if model.get_parameter(name).requires_grad]
    assert sorted(names(stages, "backward", reductions)) == sorted(trained)


def test_modules_as_one_group(ranks2):
    ranks2.run(_one_group)


def _one_group():
    agree(one_group)


# -- changes between steps --------------------------------------------------------------------------------------------


def freeze(model, step):
    model.blocks[0].requires_grad_(step % 2 == 0)


def keep(model, step):
    model.blocks[0].set_reshard_after_forward(step % 2 == 0)


def divide(model, step):
    model.blocks[0].set_gradient_divide_factor(2.0 + step % 2)


@pytest.mark.parametrize("change", [freeze, keep, divide])
def test_back_and_forth(ranks2, change):
    ranks2.run(_back_and_forth, change)


def _back_and_forth(change):
    """A new graph for the new setting, and the old graph for the old one."""
    eager, traced = both(uneven)
    for training in (eager, traced):
        for step in range(4):
            change(training.model, step)
            training.steps(step)
    assert_equal(eager, traced)
    assert dynamo_counts()[0] == 2


def assign(model):
    for module in (model.inp, model.blocks[0].up, model.head):
        module.weight = nn.Parameter(module.weight.detach() * 2)


def load_assigning(model):
    model.load_state_dict({name: value.detach() * 2 for name, value in model.state_dict().items()}, assign=True)


def assign_frozen(model):
    module = model.blocks[0].up
    module.weight = nn.Parameter(module.weight.detach() * 2, requires_grad=False)


@pytest.mark.parametrize("replace", [assign, load_assigning, assign_frozen])
@pytest.mark.parametrize("make", [uneven, tied])
def test_replaced(ranks2, replace, make):
    ranks2.run(_replaced, replace, make)


def _replaced(replace, make):
    if make is tied and replace is assign:
        replace = assign_frozen  # assignment to one name unties
    eager, traced = both(make)
    for training in (eager, traced):
        training.steps(0)
        replace(training.model)
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
        training.steps(1, 2)
        replaced = training.model.blocks[0].up.weight
        assert (replaced.grad is None) and (replaced in training.optimizer.state) == replaced.requires_grad
    assert_equal(eager, traced)


# -- tensor parallelism -----------------------------------------------------------------------------------------------


def column_and_row(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class NormNet(SmallNet):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        return self.head(self.norm(self.blocks[1](self.blocks[0](self.inp(x)))))


def sequence(model, mesh):
    """Between the blocks and the head activations are sharded over the sequence, as ``DTensor`` s."""
    column_and_row(model, mesh)
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def distributed_activations(model, mesh):
    """Blocks take and return activations that are sharded over the sequence."""
    for block in model.blocks:
        plan = {
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, {"head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())})


def tensor_parallel(plan, **kwargs):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = NormNet() if plan is sequence else SmallNet(out=4)
    plan(model, mesh["tp"])
    return shard(model, fully_shard, mesh=mesh["dp"], **kwargs), mesh


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    "plan, kwargs",
    [
        (column_and_row, {}),
        (column_and_row, {"mp_policy": BF16}),
        (column_and_row, {"reshard_after_forward": False}),
        (sequence, {}),
        (distributed_activations, {}),
    ],
)
def test_tensor_parallel(ranks4, plan, kwargs):
    ranks4.run(_tensor_parallel, plan, kwargs)


def _tensor_parallel(plan, kwargs):
    trainings = []
    for traced in (False, True):
        torch.manual_seed(0)
        model, mesh = tensor_parallel(plan, **kwargs)
        training = Training(model, compiled(model) if traced else None)
        for step in range(3):
            training.step(batch(step).chunk(2)[mesh.get_local_rank("dp")])
        trainings.append(training)
    assert_equal(*trainings)
    assert dynamo_counts()[0] == 1
