"""``fully_shard``: from a module to a sharded one, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .fsdp_module import FSDPModule, refresh, reshard, states_under
from .fsdp_param_group import FSDPParamGroup
from .fsdp_state import FSDPState
from .mesh_info import FSDPMeshInfo, default_mesh, device_of, mesh_info_of, post_forward_mesh_info_of
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .staleness import watch_optimizers

_fsdp_classes: dict[type[nn.Module], type[nn.Module]] = {}  # one for each module class, so that the compiler's guards,
# which are on classes, hold for all layers of a model


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
) -> list[FSDPModule]: ...


def fully_shard(  # type: ignore[misc]
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen, and torch's own default
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
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
            after forward, and backward gathers among them only.
        mp_policy: dtypes of the gather, of the reduction and of inputs and outputs.
        offload_policy: where shards live.
        ignored_params: parameters to leave alone: not sharded, not moved, their gradients not reduced.

    Returns:
        ``module`` itself, now also an :class:`FSDPModule`; its parameters are ``DTensor`` shards.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: bad mesh, a module without ``forward``, a module already sharded, a scalar or non-contiguous
            parameter; the message names it. The model is left as it was.
        NotImplementedError: an argument of torch's that has no implementation here yet.
    """
    modules = [module] if isinstance(module, nn.Module) else _without_descendants(module)
    _check_modules(modules)
    _check_types(mesh, mp_policy, offload_policy, ignored_params)
    _check_arguments(reshard_after_forward, shard_placement_fn, offload_policy, dp_mesh_dims)
    mesh_info = mesh_info_of(mesh or default_mesh())
    device = device_of(mesh_info.mesh)
    params, buffers = _managed_tensors(modules, ignored_params or set())
    for param, name in params.items():
        _check_parameter(name, param)
    reshard_after_forward, post_forward_mesh_info = _post_forward(reshard_after_forward, mesh_info)
    _move_to_device([*params, *buffers], device)
    watch_optimizers()
    state = FSDPState(modules, mp_policy, reshard_after_forward)
    if params:
        group = FSDPParamGroup(
            list(params), modules, mesh_info, device, mp_policy, offload_policy, post_forward_mesh_info
        )
        state.groups.append(group)
    for each in modules:
        _become_fsdp_module(each, state)
    _adopt_descendants(state)
    return module


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for module in modules:
        if isinstance(module, FSDPModule):
            raise ValueError(f"fully_shard was already applied to this module: {type(module).__name__}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers without a forward: {type(module).__name__}")


def _check_types(mesh: Any, mp_policy: Any, offload_policy: Any, ignored_params: Any) -> None:
    expected: list[tuple[str, Any, type, bool]] = [
        ("mesh", mesh, DeviceMesh, True),
        ("mp_policy", mp_policy, MixedPrecisionPolicy, False),
        ("offload_policy", offload_policy, OffloadPolicy, False),
        ("ignored_params", ignored_params, set, True),
    ]
    for name, value, kind, optional in expected:
        if not isinstance(value, kind) and not (optional and value is None):
            wanted, found = (f"{cls.__module__}.{cls.__qualname__}" for cls in (kind, type(value)))
            raise TypeError(f"fully_shard({name}=...) takes a {wanted}, not a {found}")  # torch's own policies, say


def _check_arguments(
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Any,
    offload_policy: OffloadPolicy,
    dp_mesh_dims: Any,
) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise ValueError(f"reshard_after_forward should be a bool, an int or None, not {reshard_after_forward!r}")
    for name, value in (("shard_placement_fn", shard_placement_fn), ("dp_mesh_dims", dp_mesh_dims)):
        if value is not None:
            raise NotImplementedError(f"fully_shard({name}=...) has no implementation here yet")
    if isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory:
        raise NotImplementedError("CPUOffloadPolicy(pin_memory=True) has no implementation here yet")


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if isinstance(param, DTensor):
        raise NotImplementedError(f"Parameter {name} is a DTensor; sharding it further has no implementation here yet")
    if param.dim() == 0:
        raise ValueError(f"fully_shard cannot shard the scalar parameter {name}; make it 1D with one element")
    if not param.is_contiguous():
        raise ValueError(
            f"fully_shard needs contiguous parameters, but {name} has size {tuple(param.size())} "
            f"and stride {param.stride()}"
        )


# -- steps ------------------------------------------------------------------------------------------------------------


def _post_forward(
    reshard_after_forward: bool | int | None, mesh_info: FSDPMeshInfo
) -> tuple[bool | None, FSDPMeshInfo | None]:
    """Split an int into whether to reshard and to how many ranks; one rank, or all, are just ``False`` and ``True``."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, None
    if reshard_after_forward in (1, mesh_info.shard_mesh_size):
        return reshard_after_forward != 1, None
    return True, post_forward_mesh_info_of(reshard_after_forward, mesh_info)


def _without_descendants(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """``modules`` without duplicates and without those that lie below another of them."""
    if not isinstance(modules, (list, tuple)) or not all(isinstance(module, nn.Module) for module in modules):
        raise TypeError(f"fully_shard expects a module or a list of modules, not {modules!r:.100}")
    unique = list(dict.fromkeys(modules))
    below = {child for module in unique for child in module.modules() if child is not module}
    return [module for module in unique if module not in below]


def _managed_tensors(
    modules: list[nn.Module], ignored: set[nn.Parameter]
) -> tuple[dict[nn.Parameter, str], list[torch.Tensor]]:
    """Parameters, with their names, and buffers of ``modules`` that no earlier ``fully_shard`` on a submodule took."""
    params: dict[nn.Parameter, str] = {}
    buffers: dict[torch.Tensor, None] = {}
    for root in modules:
        for prefix, module in _managed_modules(root):
            for name, param in module._parameters.items():
                if param is not None and param not in ignored:
                    params.setdefault(param, f"{prefix}.{name}" if prefix else name)
            buffers.update((buffer, None) for buffer in module._buffers.values() if buffer is not None)
    return params, list(buffers)


def _managed_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``root`` and the modules below it, named, down to those already under ``fully_shard``."""
    seen = {root}
    stack = [("", root)]
    while stack:
        prefix, module = stack.pop()
        yield prefix, module
        children = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in module.named_children()
            if child not in seen and not isinstance(child, FSDPModule)
        ]
        seen.update(child for _, child in children)
        stack.extend(reversed(children))


def _move_to_device(tensors: list[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def _become_fsdp_module(module: nn.Module, state: FSDPState) -> None:
    original = type(module)
    if original not in _fsdp_classes:
        _fsdp_classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    module.__class__ = _fsdp_classes[original]
    module._fsdp_state = state  # type: ignore[assignment]
    # A state dict is made from, and loaded into, sharded parameters only.
    module.register_state_dict_pre_hook(lambda *_: reshard([state]))
    module.register_load_state_dict_pre_hook(lambda *_: reshard([state]))
    for owner in {owner: None for group in state.groups for param in group.params for owner, _ in param.owners}:
        owner.register_load_state_dict_post_hook(lambda *_: refresh([state]))


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
            group.set_names(names[below.modules[0]], names)
