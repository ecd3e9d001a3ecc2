"""What ``fully_shard`` adds to a module: its call with the transitions around it, and its methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
from typing_extensions import deprecated

from . import torch_compat
from .communication import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllGather,
    ProcessGroupReduceScatter,
    ReduceScatter,
    SymmetricMemoryAllGather,
    SymmetricMemoryReduceScatter,
)
from .fsdp_param_group import FSDPParamGroup
from .fsdp_state import FSDPState


def _closed_after_errors(call: Callable[..., Any]) -> Callable[..., Any]:
    """Have the modules show sharded parameters again if an exception leaves ``call``, which has transitions in it."""

    @functools.wraps(call)
    def closing(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except BaseException:
            if not torch.compiler.is_compiling():  # while it is traced, modules show nothing of it yet
                self._fsdp_state.abandon_forward()
            raise

    return torch_compat.run_by_python(closing)


class FSDPModule:
    """What ``fully_shard`` adds to a module: sharding around its call, and the methods below.

    ``fully_shard`` changes a module's class to a subclass of this one and of its own class.
    """

    _fsdp_state: FSDPState
    _compiled_call: Callable[..., Any] | None = None  # beside nn.Module's own, which is inside of the transitions

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class: code such as ``type(self)(...)`` in a container means a plain one."""
        original = cls.__mro__[2]
        instance = original.__new__(original)  # type: ignore[call-overload]
        instance.__init__(*args, **kwargs)
        return instance

    @_closed_after_errors
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call_with_transitions if self._compiled_call is None else self._compiled_call
        return call(*args, **kwargs)

    def _call_with_transitions(self, *args: Any, **kwargs: Any) -> Any:
        # Not hooks: torch.compile would run the root's hooks outside of its graph.
        state = self._fsdp_state
        args, kwargs = state.pre_forward(self, args, kwargs)  # type: ignore[arg-type]
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return state.post_forward(self, output)  # type: ignore[arg-type]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's call in place, as ``nn.Module.compile`` does, with the transitions around it.

        A module that was compiled so before ``fully_shard`` has them outside of its graph, where they run eagerly.

        Args:
            *args, **kwargs: of ``torch.compile``.
        """
        self._compiled_call = torch.compile(self._call_with_transitions, *args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters (not its FSDP submodules') and hand them to the module.

        Args:
            async_op: only start the all-gather; call ``wait`` on the returned handle before using the parameters.
        """
        handle = UnshardHandle(self._fsdp_state)
        if torch.compiler.is_compiling() and not self._fsdp_state.why_untraced:
            torch_compat.with_side_effects(self._fsdp_state.unshard_traced)
            return handle if async_op else None
        self._fsdp_state.context.lanes.after_writes(None)
        self._fsdp_state.start_unshard([self._fsdp_state])
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's unsharded parameters (not its FSDP submodules')."""
        self._fsdp_state.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, over shard ranks and over replicas; if not, they accumulate unsharded in
        the reduce dtype."""
        for group in self._groups(recurse):
            group.set_requires_sync(requires_gradient_sync, requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward also reduces over the replicas of a 2-D mesh; if not, gradients stay reduced over shards."""
        for group in self._groups(recurse):
            group.set_requires_sync(group.reduction.reduce_grads, requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's summed gradients by ``factor`` instead of the number of data-parallel ranks."""
        for group in self._groups(recurse=False):
            group.reduction.divide_factor = factor
            group.traced.update()

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce this module's gradients with sums only and divide separately, as some transports need."""
        for group in self._groups(recurse=False):
            group.reduction.force_sum = enable
            group.traced.update()

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters without a gradient are reduced as zeros, for when ranks use different parameters."""
        for group in self._groups(recurse):
            group.reduce_scatter_unused_params = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reduce-scatters, each with a buffer of its group's gradients, may be under way at once; what counts
        is the largest number among the modules of a tree.

        Raises:
            TypeError, ValueError: not an int, or less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}")
        for state in self._states(recurse):
            state.max_reductions_in_flight = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether gradients are reduced in a process group of their own, so that a transport which takes the
        collectives of one group in turn lets them overlap with all-gathers. Collective: makes process groups."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in self._groups(recurse):
            group.set_separate_reduce_scatter_group(enable, made)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call ``hook`` with this module's flat reduced gradients, before they are divided and handed out.

        Args:
            hook: may change its argument, 1-D in the reduce dtype, in place; on a 2-D mesh that is all-reduced already.
            stream: where to run it; without, it runs in the stream of all-reduces.

        Raises:
            ValueError: parameters of the module are sharded over several meshes; or ``stream`` with a 2-D mesh.
        """
        for group in self._only_group("set_all_reduce_hook"):
            if stream is not None and group.mesh_info.replicate_mesh_dim is not None:
                raise ValueError("set_all_reduce_hook takes no stream on a 2D mesh: the hook follows its all-reduce")
            group.all_reduce_hook, group.all_reduce_hook_stream = hook, stream
            group.traced.update()

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """All-gather this module's parameters with ``comm``.

        Raises:
            ValueError: parameters of the module are sharded over several meshes.
        """
        for group in self._only_group("set_custom_all_gather"):
            group.all_gather_comm = comm
            group.traced.update()

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this module's gradients with ``comm``.

        A parameter that no rank used keeps ``None`` for a gradient only if ``comm`` sums ``-0.0`` and ``-0.0`` to
        ``-0.0``, as addition does; a sum that starts from 0.0 gives zeros instead.

        Raises:
            ValueError: parameters of the module are sharded over several meshes.
        """
        for group in self._only_group("set_custom_reduce_scatter"):
            group.reduce_scatter_comm = comm
            group.traced.update()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether buffers of this module's communication come from the process group's own allocator, if it has one.

        Raises:
            RuntimeError: the module has a custom communication, whose buffers are its own.
        """
        groups = list(self._groups(recurse=False))
        self._refuse_custom_communication("set_allocate_memory_from_process_group_for_comm", groups)
        for group in groups:
            shard_group = group.mesh_info.shard_process_group
            group.all_gather_comm, group.reduce_scatter_comm = DefaultAllGather(), DefaultReduceScatter()
            if enable and shard_group is not None:
                group.all_gather_comm = ProcessGroupAllGather(shard_group)
                group.reduce_scatter_comm = ProcessGroupReduceScatter(group.reduce_scatter_group or shard_group)
            group.traced.update()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Take the buffers of this module's all-gathers, and of its reduce-scatters if those are sums only
        (``set_force_sum_reduction_for_comms``), from symmetric memory. Collective.

        Raises:
            RuntimeError: there is none on this device, or the module has a custom communication.
        """
        groups = list(self._groups(recurse=False))
        self._refuse_custom_communication("set_symm_mem_for_comm", groups)
        device = self._fsdp_state.device
        if device.type != "cuda":
            raise RuntimeError(f"set_symm_mem_for_comm: symmetric memory needs CUDA, but the module is on {device}")
        for group in groups:
            shard_group = group.mesh_info.shard_process_group
            if shard_group is None:
                continue
            group.all_gather_comm = SymmetricMemoryAllGather(shard_group, backend)
            if group.reduction.force_sum:
                reduce_group = group.reduce_scatter_group or shard_group
                group.reduce_scatter_comm = SymmetricMemoryReduceScatter(reduce_group, backend)
            group.traced.update()

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next forward's all-gathers wait for ``event``, recorded after the optimizer step, instead of for all
        that the current stream was given. Call it on the root, with a new event in each iteration."""
        self._fsdp_state.context.post_optim_event = event

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this module's parameters; not needed where it does not read them (embeddings)."""
        self._fsdp_state.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Start the all-gathers of ``modules`` as soon as this module's own is done, in forward."""
        self._fsdp_state.forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In backward, start the all-gathers of ``modules``, instead of that of the module that ran before this one."""
        self._fsdp_state.backward_prefetch = _states_of(modules)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the unsharded parameters; keeping them spares the next forward's gather if no
        optimizer step comes between."""
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward frees the unsharded parameters; from now on on all ranks, not down to fewer."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward).__name__}")
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward
            for group in state.groups:
                group.post_forward_mesh_info = None
                group.traced.update()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last of this iteration."""
        self._fsdp_state.context.is_last_backward = is_last_backward

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: forget the iteration, so that the next one starts clean.

        Raises:
            RuntimeError: this is not the root.
        """
        if self._fsdp_state.context.root is not self._fsdp_state:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        self._fsdp_state.reset()

    def _only_group(self, method: str) -> list[FSDPParamGroup]:
        groups = list(self._groups(recurse=False))
        if len(groups) > 1:
            raise ValueError(
                f"{method}: parameters of {groups[0].label} are sharded over {len(groups)} meshes "
                "(shard_placement_fn), so it is not clear which of them is meant"
            )
        return groups

    def _refuse_custom_communication(self, method: str, groups: list[FSDPParamGroup]) -> None:
        for group in groups:
            if group.has_custom_communication:
                raise RuntimeError(f"{method}: {group.label} has a custom communication, which has buffers of its own")

    def _states(self, recurse: bool) -> Iterator[FSDPState]:
        yield from states_under([self] if not recurse else self.modules())  # type: ignore[attr-defined, list-item]

    def _groups(self, recurse: bool) -> Iterator[FSDPParamGroup]:
        for state in self._states(recurse):
            yield from state.groups

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # `.to(...)`, `to_empty` and friends must see sharded parameters, and give their data new storage.
        states = list(self._states(recurse=True))
        for state in states:
            state.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for state in states:
            state.refresh()
        return result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "A module under fully_shard cannot be pickled or copied: its parameters are tied to process groups. "
            "Save its state dict instead, for example with torch.distributed.checkpoint."
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "A module under fully_shard cannot be deep-copied: its parameters are tied to process groups. "
            "Build a second model and load this one's state dict into it."
        )


class UnshardHandle:
    """A gather started by :meth:`FSDPModule.unshard`."""

    def __init__(self, state: FSDPState) -> None:
        self._state = state

    def wait(self) -> None:
        """Wait for the gather and hand the unsharded parameters to the module; in a graph that is done."""
        if self._state.is_open:
            return
        for group in self._state.groups:
            group.wait_for_unshard()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make calls of ``module.method_name`` unshard and reshard like calls of ``module`` itself.

    Does nothing if ``module`` is not an :class:`FSDPModule`.

    Raises:
        ValueError: ``module`` has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    original = getattr(module, method_name)

    @_closed_after_errors
    @functools.wraps(original)
    def with_transitions(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: FSDPState = self._fsdp_state  # type: ignore[assignment]
        args, kwargs = state.pre_forward(self, args, kwargs)
        return state.post_forward(self, original(*args, **kwargs))

    setattr(module, method_name, with_transitions.__get__(module))  # type: ignore[attr-defined]


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Have several roots, the chunks of a pipeline say, communicate in the same streams, which saves memory on
    accelerators: each stream keeps memory of its own.

    Raises:
        ValueError: not all are FSDP modules.
    """
    contexts = [state.context for state in _states_of(modules)]
    for context in contexts[1:]:
        context.lanes = contexts[0].lanes


def _states_of(modules: list[FSDPModule]) -> list[FSDPState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected FSDP modules, got {type(module).__name__}: apply fully_shard to it first")
    return list(states_under(modules))  # type: ignore[arg-type]


def states_under(modules: Iterable[nn.Module]) -> Iterator[FSDPState]:
    """The state of each FSDP module among ``modules``, each once."""
    seen: dict[int, FSDPState] = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            seen.setdefault(id(module._fsdp_state), module._fsdp_state)
    yield from seen.values()
