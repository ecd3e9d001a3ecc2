"""``fully_shard``: from a module to a sharded one, all or nothing."""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import torch_compat
from .argument_checks import check_modules, check_parameter, check_reshard, check_types
from .fsdp_module import FSDPModule, states_under
from .fsdp_param import FSDPParam
from .fsdp_param_group import FSDPParamGroup
from .fsdp_state import FSDPState
from .managed_modules import managed_tensors, without_descendants
from .mesh_info import (
    DataParallelMeshDims,
    FSDPMeshInfo,
    default_mesh,
    device_of,
    mesh_info_of,
    post_forward_mesh_info_of,
)
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .shard_placement import ShardPlacementFn, placement_of
from .sharded_layout import ShardedLayout, layout_of
from .shared_parameters import check_ties
from .staleness import watch_optimizers

_fsdp_classes: dict[type[nn.Module], type[nn.Module]] = {}  # one for each module class, so that the compiler's guards,
# which are on classes, hold for all layers of a model


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(  # type: ignore[misc]
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen, and torch's own default
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of ``module`` over data-parallel ranks, in place; same call as torch's ``fully_shard``.

    Call it bottom-up: each call makes one group of the parameters that no earlier call on a submodule took. A group is
    all-gathered together before the module's forward and its gradients are reduce-scattered together after its
    backward. The same transitions run eagerly or, under ``torch.compile``, become nodes of the graph.

    Args:
        module: module to shard, or a list of modules that make one group: it is unsharded when the first of them runs
            and resharded when all have run.
        mesh: device mesh of the ranks to shard over; default: all ranks. Over a 2-D mesh, parameters are sharded over
            the last dimension and replicated over the first.
        reshard_after_forward: ``True`` frees the unsharded parameters after forward and gathers them again in
            backward, ``False`` keeps them, ``None`` means ``True`` except for the root, which backward needs first. An
            int that divides the number of shard ranks: that many neighbouring ranks together keep the parameters whole
            after forward, and backward gathers among them only (not for tensor-parallel parameters).
        shard_placement_fn: asked for each parameter which dimension to shard, ``Shard(dim)``, and with a
            :class:`ShardPlacementResult` also over which mesh; ``None`` means dimension 0 of ``mesh``. Other dimensions
            must divide evenly. Parameters of several meshes make several groups, which move together.
        mp_policy: dtypes of the gather, of the reduction and of inputs and outputs.
        offload_policy: where shards live.
        ignored_params: parameters to leave alone: not sharded, not moved, their gradients not reduced.
        dp_mesh_dims: says that ``mesh`` is the mesh of all parallelism, on which the parameters are ``DTensor`` s
            already, and which of its dimensions shard and replicate them. With ``replicate`` only, gradients are
            all-reduced and nothing is sharded. Plain parameters are allowed if the mesh has no other dimensions.

    Returns:
        ``module`` itself, now also an :class:`FSDPModule`; its parameters are ``DTensor`` shards.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: bad mesh, a module without ``forward``, a module already sharded, a scalar or non-contiguous
            parameter; the message names it. The model is left as it was.
        NotImplementedError: uneven sharding of another dimension than 0; an int for tensor-parallel parameters.
    """
    modules = [module] if isinstance(module, nn.Module) else without_descendants(module)
    check_modules(modules)
    check_types(mesh, mp_policy, offload_policy, ignored_params, dp_mesh_dims)
    check_reshard(reshard_after_forward)
    ranks = _rank_count(reshard_after_forward)
    mesh_info = mesh_info_of(mesh or default_mesh(), dp_mesh_dims)
    device = device_of(mesh_info.mesh)
    params, buffers = managed_tensors(modules, ignored_params or set())
    check_ties(_sharded_below(modules), params)
    for param, name in params.items():
        check_parameter(name, param, ranks)
    members = _by_mesh(params, shard_placement_fn, mesh_info)
    post_forward = [_post_forward_mesh_info(ranks, group_mesh_info) for group_mesh_info, _ in members]
    for each in modules:
        _fsdp_class_of(type(each))  # may refuse to have a subclass
    _move_to_device([*params, *buffers], device)
    watch_optimizers()
    state = FSDPState(modules, device, mp_policy, _whether_to_reshard(reshard_after_forward))
    state.groups = [
        FSDPParamGroup(group_params, modules, group_mesh_info, device, mp_policy, offload_policy, fewer)
        for (group_mesh_info, group_params), fewer in zip(members, post_forward, strict=True)
    ]
    for each in modules:
        _become_fsdp_module(each, state)
    _adopt_descendants(state)
    return module


def _sharded_below(modules: list[nn.Module]) -> list[FSDPParam]:
    below = {module: None for root in modules for module in root.modules()}
    return [param for state in states_under(below) for group in state.groups for param in group.params]


def _by_mesh(
    params: dict[nn.Parameter, str], shard_placement_fn: ShardPlacementFn | None, mesh_info: FSDPMeshInfo
) -> list[tuple[FSDPMeshInfo, list[tuple[nn.Parameter, ShardedLayout]]]]:
    """The parameters with their layouts, those that the same process groups serve together, in order of traversal."""
    members: dict[tuple[str | None, str | None], tuple[FSDPMeshInfo, list[tuple[nn.Parameter, ShardedLayout]]]] = {}
    for param, name in params.items():
        place = placement_of(name, param, shard_placement_fn, mesh_info)
        layout = layout_of(name, param, place.mesh_info, place.placement)
        own_mesh_info = place.mesh_info
        members.setdefault(own_mesh_info.process_groups, (own_mesh_info, []))[1].append((param, layout))
    return list(members.values())


def _rank_count(reshard_after_forward: bool | int | None) -> int | None:
    """To how many ranks the user wants to reshard, if they gave a number (of which bools are a kind)."""
    return None if reshard_after_forward is None or isinstance(reshard_after_forward, bool) else reshard_after_forward


def _whether_to_reshard(reshard_after_forward: bool | int | None) -> bool | None:
    """One rank means not at all."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    return reshard_after_forward != 1


def _post_forward_mesh_info(ranks: int | None, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo | None:
    """The fewer ranks to reshard to, if they are neither one, which means not at all, nor all."""
    return None if ranks in (None, 1, mesh_info.shard_mesh_size) else post_forward_mesh_info_of(ranks, mesh_info)


def _move_to_device(tensors: list[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        if tensor.device == device or tensor.is_meta or isinstance(tensor, DTensor):
            continue
        if torch_compat.is_wrapper_subclass(tensor):
            torch_compat.swap_contents(tensor, tensor.detach().to(device))
        else:
            tensor.data = tensor.data.to(device)


def _fsdp_class_of(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _fsdp_classes:
        _fsdp_classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    return _fsdp_classes[original]


def _become_fsdp_module(module: nn.Module, state: FSDPState) -> None:
    module.__class__ = _fsdp_class_of(type(module))
    module.__dict__["_fsdp_state"] = state  # not by assignment, which a module may refuse
    # A state dict is made from, and loaded into, sharded parameters only.
    module.register_state_dict_pre_hook(lambda *_: state.reshard())
    module.register_load_state_dict_pre_hook(lambda *_: state.reshard())
    for owner in {owner: None for group in state.groups for param in group.params for owner, _ in param.owners}:
        owner.register_load_state_dict_post_hook(lambda *_: state.refresh())


def _adopt_descendants(state: FSDPState) -> None:
    """Make ``state`` the root of all FSDP modules below its own, and name everything as seen from there."""
    names: dict[nn.Module, str] = {}
    for module in state.modules:
        for name, child in module.named_modules():
            names.setdefault(child, name)
    context = state.context
    for below in states_under(names):
        if below is not state:
            context.states.append(below)
            below.context = context
        for group in below.groups:
            group.set_names(next(names[module] for module in below.modules if module in names), names)
