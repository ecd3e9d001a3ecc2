"""One sharded parameter: its tensors and the legal moves between its states.

Terms (after torch's FSDP2 notes):

- *original parameter*: the ``nn.Parameter`` on the module when ``fully_shard`` was applied;
- *sharded parameter*: this rank's chunk of it, a ``DTensor``; the only one an optimizer or a state dict ever sees;
- *sharded data*: the chunk padded to equal length on all ranks, contiguous; the sharded parameter is a view of it.
  It is a plain autograd leaf: a traced graph takes it as input, which is alike on all ranks and needs no ``DTensor``
  in the graph, and its gradient goes on to the sharded parameter;
- *all-gather input*: the sharded data, cast to the compute dtype, or what an extension makes of it;
- *all-gather output*: the inputs of all ranks one after the other;
- *unsharded parameter*: what `unsharding` makes of that; an autograd leaf that compute reads.

        SHARDED ──unshard──> UNSHARDED ──reshard──> SHARDED
                                 └──reshard to fewer ranks──> SHARDED_POST_FORWARD ──unshard──> UNSHARDED

The eager executor builds the unsharded parameter once and afterwards only resizes its storage to zero and back, so
that references which autograd saved stay valid. The traced executor, `traced_group`, makes a new tensor in each graph.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from . import torch_compat
from .mesh_info import FSDPMeshInfo
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .reduction import ReductionSettings, Scaling, scaling_for
from .sharded_layout import ShardedLayout
from .shared_parameters import origin_of
from .staleness import write_stamp
from .traced_param import TracedParam
from .unsharding import ExtensionUnsharding, PlainUnsharding, Unsharding, has_extension


class ShardedState(Enum):
    """Where a parameter's data is.

    - ``SHARDED``: only the shard holds data.
    - ``SHARDED_POST_FORWARD``: the shard, and a slice over a smaller group of ranks for the gather of the backward.
    - ``UNSHARDED``: the shard and the whole unsharded parameter hold data.
    """

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    UNSHARDED = auto()


class FSDPParam:
    """One parameter, sharded over the shard ranks of a mesh.

    Args:
        param: the original parameter, on ``device`` (or on the meta device), contiguous, at least 1-D.
        owners: each (module, attribute name) under which the parameter is registered; more than one if it is shared.
        layout: where its elements live.
        mesh_info: which ranks shard.
        device: where compute happens.
        mp_policy: dtypes of gather and reduction.
        offload_policy: where the shard lives.
        reduction: what the user has set for its group; ``traced.update()`` when it changes.
    """

    def __init__(
        self,
        param: nn.Parameter,
        owners: list[tuple[nn.Module, str]],
        layout: ShardedLayout,
        mesh_info: FSDPMeshInfo,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        reduction: ReductionSettings,
    ) -> None:
        self.owners = owners
        self.layout = layout
        self.mesh_info = mesh_info
        self.device = device
        self.mp_policy = mp_policy
        self.reduction = reduction
        self.offloaded = isinstance(offload_policy, CPUOffloadPolicy)
        self.shard_device = torch.device("cpu") if self.offloaded else device
        self.pinned = self.offloaded and offload_policy.pin_memory and torch.accelerator.is_available()  # type: ignore[attr-defined]
        self.name = owners[0][1]  # lengthened to the name from the root when a root adopts this parameter
        self.origin = origin_of(param)
        self.traced = TracedParam(self)
        self.sharded_state = ShardedState.SHARDED
        self.accumulated_grad: torch.Tensor | None = None  # unsharded, in reduce_dtype; from backwards without sync
        self._partial_grad: torch.Tensor | None = None  # reduced over the shard ranks, not yet over the replicas
        self._post_forward_data: torch.Tensor | None = None  # slice of the unsharded data, among fewer ranks
        self._unsharding: Unsharding | None = None
        self._unsharded_param: nn.Parameter | None = None
        self._gathered_stamp: tuple[int, int, int] | None = None  # of the sharded parameter, when it was gathered
        self._shard(param)

    # -- dtypes -------------------------------------------------------------------------------------------------------

    @property
    def orig_dtype(self) -> torch.dtype:
        return self.sharded_param.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the unsharded parameter and, without an extension, of the all-gather."""
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and self.orig_dtype.is_floating_point else self.orig_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the gradient's reduction. A property of (parameter, policy): it does not depend on who trains."""
        return self.mp_policy.reduce_dtype or self.compute_dtype

    # -- the sharded parameter ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _shard(self, param: nn.Parameter) -> None:
        local = torch_compat.local_tensor(param.detach())
        data = local.new_zeros(self.layout.padded_sharded_size)
        mine = self.layout.shard_of(local)
        if mine is not None and not param.is_meta:
            self.layout.without_padding(data).copy_(mine)
        data = self._to_shard_device(data)
        shard = self.layout.to_sharded_dtensor(self.layout.without_padding(data))
        self.sharded_param = nn.Parameter(shard, requires_grad=param.requires_grad)
        self.register(self.sharded_param)
        self._set_sharded_data(data)

    def _to_shard_device(self, data: torch.Tensor) -> torch.Tensor:
        if data.is_meta:
            return data
        return self._pin_if_wanted(data.to(self.shard_device) if data.device != self.shard_device else data)

    def _pin_if_wanted(self, data: torch.Tensor) -> torch.Tensor:
        return data.pin_memory() if self.pinned and data.device.type == "cpu" and not data.is_pinned() else data

    def _set_sharded_data(self, data: torch.Tensor) -> None:
        self.sharded_data = data.detach()  # padded, of size `layout.padded_sharded_size`
        self.has_extension = has_extension(self.name, data)
        self.traced.set_data(data, self.layout.without_padding(data))

    def check_place(self) -> None:
        """
        Raises:
            RuntimeError: the shard is not where it should be.
        """
        if self.sharded_data.device != self.shard_device:
            raise RuntimeError(self._why_misplaced())

    def _why_misplaced(self) -> str:
        if self.sharded_data.is_meta:
            return (
                f"Parameter {self.name} is still on the meta device. Give it memory with module.to_empty(device=...), "
                "then values, by a state dict or by the modules' reset_parameters()."
            )
        reason = "its module is under CPUOffloadPolicy" if self.offloaded else "that is the device of the mesh"
        return (
            f"The shard of parameter {self.name} should be on {self.shard_device}, as {reason}, but it is on "
            f"{self.sharded_data.device}. Move the module there, or load a state dict that is there."
        )

    @property
    def sharded_local_tensor(self) -> Any:
        """The local tensor of the sharded parameter, without padding; of the user's class if that is an extension."""
        return torch_compat.local_tensor(self.sharded_param)

    def refresh_sharded_param(self) -> None:
        """Follow changes that others made to the registered sharded parameter, and pad its data again if needed.

        ``module.to(...)``, ``to_empty`` and ``load_state_dict(assign=True)`` replace the parameter or its storage.
        """
        module, attribute = self.owners[0]
        registered = module._parameters[attribute]
        if registered is self._unsharded_param:
            return
        if not isinstance(registered, DTensor):
            raise RuntimeError(
                f"Parameter {self.name} was replaced by a {type(registered).__name__}; a module under fully_shard "
                "takes DTensor parameters only, for example from distribute_tensor or a sharded state dict."
            )
        self.sharded_param = registered
        self.register(registered)  # assignment by name gives each owner of a shared parameter one of its own
        local = torch_compat.local_tensor(registered.detach())
        if self._shares_storage(local):
            return
        data = local
        if local.size() != self.layout.padded_sharded_size or not local.is_contiguous():
            data = local.new_zeros(self.layout.padded_sharded_size)
            self.layout.without_padding(data).copy_(local)
        data = self._pin_if_wanted(data)
        self._set_sharded_data(data)
        if data is not local:
            torch_compat.set_local_tensor(registered, self.layout.without_padding(data))

    def follow_replacement(self) -> bool:
        """If someone assigned another parameter to the module, make that the sharded parameter; whether it was so.

        Raises:
            RuntimeError: it is no ``DTensor``.
        """
        module, attribute = self.owners[0]
        registered = module._parameters.get(attribute, self.sharded_param)
        replaced = registered is not self.sharded_param and registered is not self._unsharded_param
        if replaced:
            self.refresh_sharded_param()
        return replaced

    def _shares_storage(self, local: torch.Tensor) -> bool:
        mine, theirs = self.sharded_data, local
        if mine.is_meta and theirs.is_meta:
            return True
        same_kind = type(mine) is type(theirs) and mine.device == theirs.device and mine.dtype == theirs.dtype
        if not same_kind or type(mine) is not torch.Tensor:
            return False
        return mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr() != 0

    def scaling(self) -> Scaling:
        """How this parameter's gradient is averaged."""
        ranks = self.layout.world_size * self.mesh_info.replicate_mesh_size
        return scaling_for(self.reduce_dtype, ranks, self.reduction.divide_factor, self.reduction.force_sum)

    def register(self, tensor: torch.Tensor) -> None:
        """Make ``tensor`` the parameter that every owning module sees."""
        for module, attribute in self.owners:
            module._parameters[attribute] = tensor  # type: ignore[assignment]

    # -- eager executor -----------------------------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether the sharded parameter may have been written after the unsharded one was gathered from it."""
        return self._gathered_stamp != write_stamp(self.sharded_param)

    def all_gather_inputs(self) -> list[torch.Tensor]:
        """What this rank contributes, on the compute device; in state ``SHARDED_POST_FORWARD`` the slice, 1-D.

        Raises:
            RuntimeError: the shard is not where it should be.
        """
        if self._post_forward_data is not None:
            return [self._post_forward_data]
        self.check_place()
        self._gathered_stamp = write_stamp(self.sharded_param)
        unsharding = self._unsharding
        if unsharding is None or not unsharding.fits(self):
            unsharding = ExtensionUnsharding(self) if self.has_extension else PlainUnsharding(self)
            self._unsharding, self._unsharded_param = unsharding, None
        return unsharding.inputs()

    def all_gather_outputs(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Room for the ``inputs`` of all ranks; ``finish_unshard`` makes the unsharded parameter of it."""
        assert self._unsharding is not None
        return self._unsharding.outputs(inputs, whole=self._post_forward_data is not None)

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The leaf that compute reads; it holds data only in state ``UNSHARDED``."""
        if self._unsharded_param is None:
            raise RuntimeError(f"Parameter {self.name} has never been unsharded.")
        return self._unsharded_param

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes that the unsharded data takes now."""
        return 0 if self._unsharding is None else self._unsharding.nbytes

    def finish_unshard(self) -> None:
        """The all-gather outputs hold data: make the unsharded parameter of them."""
        assert self._unsharding is not None
        self._unsharding.finish()
        self._post_forward_data = None
        if self._unsharded_param is None:
            with torch.inference_mode(False):
                unsharded = self.layout.to_unsharded(self._unsharding.tensor)
                self._unsharded_param = nn.Parameter(unsharded, requires_grad=False)
        self.sharded_state = ShardedState.UNSHARDED

    def show_unsharded(self) -> None:
        """Hand the unsharded parameter to the modules."""
        unsharded = self.unsharded_param
        if unsharded.requires_grad != self.sharded_param.requires_grad:
            unsharded.requires_grad_(self.sharded_param.requires_grad)
        self.register(unsharded)

    def hide_unsharded(self) -> None:
        """Hand the sharded parameter to the modules that hold the unsharded one, whose data is kept."""
        if any(module._parameters.get(name) is self._unsharded_param is not None for module, name in self.owners):
            self.register(self.sharded_param)

    def to_sharded(self) -> None:
        """Hand the sharded parameter back to the modules and free the unsharded data."""
        self.register(self.sharded_param)
        self._post_forward_data = None
        if self._unsharding is not None:
            self._unsharding.free()
        self.sharded_state = ShardedState.SHARDED

    def to_sharded_post_forward(self, mesh_info: FSDPMeshInfo) -> None:
        """Keep a slice of the unsharded data among the shard ranks of ``mesh_info``, a part of the mesh; free the rest.

        The modules get the sharded parameter back: the slice is for the gather of the backward only.
        """
        assert isinstance(self._unsharding, PlainUnsharding) and self.sharded_state is ShardedState.UNSHARDED
        flat = self._unsharding.flat
        numel = flat.numel() // mesh_info.shard_mesh_size  # whole, as the padded data divides among more ranks
        self.register(self.sharded_param)
        self._post_forward_data = flat.narrow(0, numel * mesh_info.shard_mesh_rank, numel).clone()
        self._unsharding.free()
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def has_new_gradient(self) -> bool:
        return self._unsharded_param is not None and self._unsharded_param.grad is not None

    def take_unsharded_grad(self) -> torch.Tensor | None:
        """Remove and return the whole gradient of the local tensor, earlier micro-batches included; or ``None``."""
        grad = self._take_accumulated_grad()
        return grad if grad is None else self._local_gradient(grad)

    def _local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """What graphs have set aside is local already."""
        from_graph = self.layout.unsharded_spec is not None and type(grad) is torch.Tensor
        return grad if from_graph else self.layout.local_gradient(grad)

    def _take_accumulated_grad(self) -> torch.Tensor | None:
        grad, accumulated = None, self.accumulated_grad
        if self._unsharded_param is not None:
            grad, self._unsharded_param.grad = self._unsharded_param.grad, None
        self.accumulated_grad = None
        if accumulated is None or grad is None:
            return grad if accumulated is None else accumulated
        if isinstance(grad, DTensor) and not isinstance(accumulated, DTensor):
            grad = self._local_gradient(grad)
        return accumulated.add_(grad)

    def keep_unsharded_grad(self) -> None:
        """Set the whole gradient aside in the reduce dtype, for a later backward to reduce."""
        grad = self._take_accumulated_grad()
        if grad is not None:
            self.accumulated_grad = grad.to(self.reduce_dtype)

    def add_partial_grad(self, piece: torch.Tensor) -> None:
        """Keep a gradient that is reduced over the shard ranks until a later backward reduces it over the replicas."""
        self._partial_grad = piece if self._partial_grad is None else self._partial_grad.add_(piece)

    def take_partial_grad(self) -> torch.Tensor | None:
        partial, self._partial_grad = self._partial_grad, None
        return partial

    def accumulate_sharded_grad(self, reduced: torch.Tensor) -> None:
        """Add this rank's reduced gradient, padded like the sharded data and of any shape, to ``sharded_param.grad``.

        Hooks on the sharded parameter run as autograd would run them: tensor hooks on the reduced gradient, then
        accumulation, then the post-accumulate hooks.
        """
        local = self.layout.without_padding(reduced.view(self.layout.padded_sharded_size))
        existing = self._existing_local_grad
        if existing is not None and existing.device != self.shard_device:
            raise RuntimeError(
                f"The gradient of parameter {self.name} was left on {existing.device}; it belongs with its shard, on "
                f"{self.shard_device}."
            )
        local = local.to(device=self.shard_device, dtype=self.orig_dtype, non_blocking=self._may_copy_late)
        grad = torch_compat.run_tensor_hooks(self.sharded_param, self.layout.to_sharded_dtensor(local))
        if existing is None:
            self.sharded_param.grad = grad
        else:  # on local tensors, as an operation on DTensors takes much longer
            existing.add_(torch_compat.local_tensor(grad))
        torch_compat.run_post_accumulate_hooks(self.sharded_param)

    @property
    def _existing_local_grad(self) -> torch.Tensor | None:
        grad = self.sharded_param.grad
        return None if grad is None else torch_compat.local_tensor(grad)

    @property
    def _may_copy_late(self) -> bool:
        """Whether nobody reads the gradient before the backward ends, so that its copy to the host may overlap."""
        param = self.sharded_param
        return self.pinned and param.grad is None and not torch_compat.has_gradient_hooks(param)

    # -- gradients from graphs ----------------------------------------------------------------------------------------

    def take_reduced_grad(self, grad: torch.Tensor) -> None:
        """A graph has reduced this gradient."""
        if self._still_takes(reduce=True, all_reduce=True):
            self.accumulate_sharded_grad(grad)

    def put_unsharded_grad(self, grad: torch.Tensor) -> None:
        """A graph has not reduced this gradient: set it aside."""
        if self._still_takes(reduce=False, all_reduce=False):
            earlier = self.take_set_aside_grad()
            self.accumulated_grad = grad if earlier is None else earlier.add_(grad)

    def take_set_aside_grad(self) -> torch.Tensor | None:
        """For a graph that reduces: what earlier backwards have not, local and in the reduce dtype."""
        accumulated, self.accumulated_grad = self.accumulated_grad, None
        return None if accumulated is None else self._local_gradient(accumulated)

    def put_partial_grad(self, grad: torch.Tensor) -> None:
        """A graph has reduced this gradient over the shard ranks only: set it aside."""
        if self._still_takes(reduce=True, all_reduce=False):
            self.add_partial_grad(grad.view(-1))

    def take_set_aside_partial(self) -> torch.Tensor | None:
        """For a graph that reduces over replicas: what earlier backwards have not, of the size of the sharded data."""
        partial = self.take_partial_grad()
        return None if partial is None else partial.view(self.layout.padded_sharded_size)

    def _still_takes(self, reduce: bool, all_reduce: bool) -> bool:
        """Whether the parameter takes a gradient that was reduced so; not if it was frozen since the forward.

        Raises:
            RuntimeError: the settings of its reduction were changed since the forward.
        """
        settings = self.reduction
        wanted = settings.reduce_grads and (settings.all_reduce_grads or self.mesh_info.replicate_mesh_dim is None)
        if settings.reduce_grads != reduce or wanted != all_reduce:
            raise RuntimeError(
                f"Parameter {self.name}: gradient synchronization was changed between a compiled forward and its "
                "backward. Call set_requires_gradient_sync and set_requires_all_reduce before the forward: the graph "
                "of its backward is chosen there."
            )
        return self.sharded_param.requires_grad

    def __repr__(self) -> str:
        return f"FSDPParam({self.name}, {tuple(self.layout.global_size)}, {self.sharded_state.name})"
