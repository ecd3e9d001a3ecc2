"""One sharded parameter: its tensors and the legal moves between its states.

Terms (after torch's FSDP2 notes):

- *original parameter*: the ``nn.Parameter`` on the module when ``fully_shard`` was applied;
- *sharded parameter*: this rank's chunk of it, a ``DTensor``; the only one an optimizer or a state dict ever sees;
- *sharded data*: the chunk padded to equal length on all ranks, contiguous; the sharded parameter is a view of it.
  It is a plain autograd leaf: a traced graph takes it as input, which is alike on all ranks and needs no ``DTensor``
  in the graph, and its gradient goes on to the sharded parameter;
- *all-gather input*: the sharded data, cast to the compute dtype;
- *all-gather output*: the inputs of all ranks one after the other, so the original rows with padding only at the end;
- *unsharded parameter*: the all-gather output without the padding; an autograd leaf that compute reads.

        SHARDED ──unshard──> UNSHARDED ──reshard──> SHARDED
                                 └──reshard to fewer ranks──> SHARDED_POST_FORWARD ──unshard──> UNSHARDED

The eager executor builds the unsharded parameter once and afterwards only resizes its storage to zero and back, so
that references which autograd saved stay valid. The traced executor makes a new tensor in each graph instead: there,
`unshard_traced` and `reshard_traced` put it into the modules and take it out again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import torch_compat
from .collectives import UnshardFunction
from .mesh_info import FSDPMeshInfo
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .reduction import Scaling, scaling_for
from .staleness import write_stamp
from .tracing import tagged, write_recipe


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
    """One parameter, sharded on dim 0 over the shard ranks of a mesh.

    Args:
        param: the original parameter, on ``device`` (or on the meta device), contiguous, at least 1-D.
        owners: each (module, attribute name) under which the parameter is registered; more than one if it is shared.
        mesh_info: which ranks shard.
        device: where compute happens.
        mp_policy: dtypes of gather and reduction.
        offload_policy: where the shard lives.
    """

    def __init__(
        self,
        param: nn.Parameter,
        owners: list[tuple[nn.Module, str]],
        mesh_info: FSDPMeshInfo,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self.owners = owners
        self.mesh_info = mesh_info
        self.device = device
        self.mp_policy = mp_policy
        self.shard_device = torch.device("cpu") if isinstance(offload_policy, CPUOffloadPolicy) else device
        self.name = owners[0][1]  # lengthened to the name from the root when a root adopts this parameter
        self._tag: dict[str, Any] = {}  # what graph nodes made for this parameter carry
        self.recipe = ""  # for graphs; see `write_recipe`
        self.sharded_state = ShardedState.SHARDED
        self.gradient_divide_factor: float | None = None
        self.force_sum_reduction = False
        self.accumulated_grad: torch.Tensor | None = None  # unsharded, in reduce_dtype; from backwards without sync
        self._partial_grad: torch.Tensor | None = None  # reduced over the shard ranks, not yet over the replicas
        self._post_forward_data: torch.Tensor | None = None  # slice of the all-gather output, among fewer ranks
        self._all_gather_output: torch.Tensor | None = None
        self._unsharded_param: nn.Parameter | None = None
        self._gathered_stamp: tuple[int, int] | None = None  # of the sharded parameter, when it was gathered
        self._shard(param)

    # -- shapes and dtypes --------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self.mesh_info.shard_mesh_size

    @property
    def padded_sharded_size(self) -> torch.Size:
        """Size of the sharded data: dim 0 rounded up so that it is equal on all ranks."""
        rows, *rest = self.orig_size
        return torch.Size([-(-rows // self.world_size), *rest])

    @property
    def sharded_size(self) -> torch.Size:
        """Size of this rank's sharded parameter; dim 0 may be shorter than the padded size, or 0."""
        padded_rows, *rest = self.padded_sharded_size
        left = self.orig_size[0] - padded_rows * self.mesh_info.shard_mesh_rank
        return torch.Size([min(max(left, 0), padded_rows), *rest])

    @property
    def padded_sharded_numel(self) -> int:
        return math.prod(self.padded_sharded_size)

    @property
    def orig_dtype(self) -> torch.dtype:
        return self.sharded_param.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the all-gather and of the unsharded parameter."""
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and self.orig_dtype.is_floating_point else self.orig_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the gradient's reduction. A property of (parameter, policy): it does not depend on who trains."""
        return self.mp_policy.reduce_dtype or self.compute_dtype

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of the sharded parameter on its mesh."""
        kinds: list[Placement] = [Replicate()] * self.mesh_info.mesh.ndim
        kinds[self.mesh_info.shard_mesh_dim] = Shard(0)
        return tuple(kinds)

    # -- the sharded parameter ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _shard(self, param: nn.Parameter) -> None:
        self.orig_size = param.size()
        data = param.new_zeros(self.padded_sharded_size, device="meta" if param.is_meta else self.shard_device)
        rows = self.sharded_size[0]
        start = self.padded_sharded_size[0] * self.mesh_info.shard_mesh_rank
        if rows and not param.is_meta:
            data.narrow(0, 0, rows).copy_(param.narrow(0, start, rows))
        self.sharded_param = nn.Parameter(self.to_dtensor(data.narrow(0, 0, rows)), requires_grad=param.requires_grad)
        self.register(self.sharded_param)
        self._set_sharded_data(data)

    def _set_sharded_data(self, data: torch.Tensor) -> None:
        with torch.inference_mode(False):
            # A Parameter, because Dynamo takes the sizes of those as static.
            leaf = nn.Parameter(data.detach(), requires_grad=data.is_floating_point() or data.is_complex())
        if leaf.requires_grad:
            this = weakref.ref(self)  # the leaf must not keep alive what owns it

            def pass_on(leaf: torch.Tensor) -> None:
                grad, leaf.grad = leaf.grad, None
                param = this()
                if param is not None and grad is not None:
                    param.accumulate_sharded_grad(grad)

            leaf.register_post_accumulate_grad_hook(pass_on)
        self._sharded_data = leaf
        self.update_recipe()

    def to_dtensor(self, local: torch.Tensor) -> DTensor:
        """Wrap a tensor of size ``sharded_size`` as a shard of the whole parameter."""
        return torch_compat.dtensor_from_local(local, self.mesh_info.mesh, self.placements, self.orig_size)

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
        local = registered.detach().to_local()
        if local.is_meta or self._shares_storage(local):
            return
        if local.size() == self.padded_sharded_size and local.is_contiguous():
            self._set_sharded_data(local)
            return
        data = local.new_zeros(self.padded_sharded_size)
        rows = local.size(0)
        data.narrow(0, 0, rows).copy_(local)
        self._set_sharded_data(data)
        torch_compat.set_local_tensor(registered, data.narrow(0, 0, rows))

    def _shares_storage(self, local: torch.Tensor) -> bool:
        mine, theirs = self._sharded_data, local
        same_kind = mine.device == theirs.device and mine.dtype == theirs.dtype
        return same_kind and mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr() != 0

    def set_tag(self, tag: dict[str, Any]) -> None:
        """Set what graph nodes made for this parameter carry: see ``passes.graph_view``."""
        self._tag = tag
        self.update_recipe()

    def update_recipe(self) -> None:
        """Write down for graphs how to unshard and to reduce; to be called when any of it changes."""
        rows, world = self.orig_size[0], self.world_size
        padding = self.padded_sharded_size[0] * world - rows
        group_name = self.mesh_info.shard_process_group.group_name
        scaling = self.scaling()
        self.recipe = write_recipe(
            tag=self._tag,
            unshard=[rows, padding, self.compute_dtype, world, group_name],
            reduce=[padding, self.reduce_dtype, *scaling, world, group_name],
        )

    def scaling(self) -> Scaling:
        """How this parameter's gradient is averaged."""
        ranks = self.world_size * self.mesh_info.replicate_mesh_size
        return scaling_for(self.reduce_dtype, ranks, self.gradient_divide_factor, self.force_sum_reduction)

    def register(self, tensor: torch.Tensor) -> None:
        """Make ``tensor`` the parameter that every owning module sees."""
        for module, attribute in self.owners:
            module._parameters[attribute] = tensor  # type: ignore[assignment]

    # -- eager executor -----------------------------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether the sharded parameter may have been written after the unsharded one was gathered from it."""
        return self._gathered_stamp != write_stamp(self.sharded_param)

    def all_gather_input(self) -> torch.Tensor:
        """What this rank contributes, in the compute dtype on the compute device: the sharded data, of size
        ``padded_sharded_size``, or in state ``SHARDED_POST_FORWARD`` the larger 1-D slice."""
        if self._post_forward_data is not None:
            return self._post_forward_data
        return self._sharded_data.detach().to(device=self.device, dtype=self.compute_dtype, non_blocking=True)

    def alloc_all_gather_output(self) -> torch.Tensor:
        """The all-gather output with room for data, of size ``(world_size * padded rows, ...)``."""
        output = self._all_gather_output
        if output is None or output.dtype != self.compute_dtype or output.device != self.device:
            rows, *rest = self.padded_sharded_size
            with torch.inference_mode(False):  # an inference tensor could never take part in training later
                output = torch.empty(rows * self.world_size, *rest, dtype=self.compute_dtype, device=self.device)
                self._unsharded_param = nn.Parameter(output.narrow(0, 0, self.orig_size[0]), requires_grad=False)
            self._all_gather_output = output
        else:
            torch_compat.resize_storage(output, output.numel() * output.itemsize)
        self._gathered_stamp = write_stamp(self.sharded_param)
        return output

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The leaf that compute reads; it holds data only in state ``UNSHARDED``."""
        if self._unsharded_param is None:
            raise RuntimeError(f"Parameter {self.name} has never been unsharded.")
        return self._unsharded_param

    def to_unsharded(self) -> None:
        """The all-gather output holds data: hand it to the modules."""
        unsharded = self.unsharded_param
        if unsharded.requires_grad != self.sharded_param.requires_grad:
            unsharded.requires_grad_(self.sharded_param.requires_grad)
        self.register(unsharded)
        self._post_forward_data = None
        self.sharded_state = ShardedState.UNSHARDED

    def to_sharded(self) -> None:
        """Hand the sharded parameter back to the modules and free the unsharded data."""
        self.register(self.sharded_param)
        self._post_forward_data = None
        self._free_unsharded_data()
        self.sharded_state = ShardedState.SHARDED

    def to_sharded_post_forward(self, mesh_info: FSDPMeshInfo) -> None:
        """Keep a slice of the unsharded data among the shard ranks of ``mesh_info``, a part of the mesh; free the rest.

        The modules get the sharded parameter back: the slice is for the gather of the backward only.
        """
        assert self._all_gather_output is not None and self.sharded_state is ShardedState.UNSHARDED
        flat = self._all_gather_output.detach().view(-1)
        numel = flat.numel() // mesh_info.shard_mesh_size  # whole, as the padded data divides among more ranks
        self.register(self.sharded_param)
        self._post_forward_data = flat.narrow(0, numel * mesh_info.shard_mesh_rank, numel).clone()
        self._free_unsharded_data()
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD

    def _free_unsharded_data(self) -> None:
        if self._all_gather_output is not None:
            torch_compat.resize_storage(self._all_gather_output, 0)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def take_unsharded_grad(self) -> torch.Tensor | None:
        """Remove and return the whole gradient, accumulated micro-batches included; ``None`` if there is none."""
        grad, accumulated = None, self.accumulated_grad
        if self._unsharded_param is not None:
            grad, self._unsharded_param.grad = self._unsharded_param.grad, None
        self.accumulated_grad = None
        if accumulated is None or grad is None:
            return grad if accumulated is None else accumulated
        return accumulated.add_(grad)

    def keep_unsharded_grad(self) -> None:
        """Set the whole gradient aside in the reduce dtype, for a later backward to reduce."""
        grad = self.take_unsharded_grad()
        if grad is not None:
            self.accumulated_grad = grad.to(self.reduce_dtype)

    @property
    def has_partial_grad(self) -> bool:
        return self._partial_grad is not None

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
        local = reduced.view(self.padded_sharded_size).narrow(0, 0, self.sharded_size[0])
        local = local.to(device=self._sharded_data.device, dtype=self.orig_dtype)
        grad = torch_compat.run_tensor_hooks(self.sharded_param, self.to_dtensor(local))
        if self.sharded_param.grad is None:
            self.sharded_param.grad = grad
        else:
            self.sharded_param.grad.add_(grad)
        torch_compat.run_post_accumulate_hooks(self.sharded_param)

    # -- traced executor ----------------------------------------------------------------------------------------------

    def unshard_traced(self) -> torch.Tensor:
        """Emit the all-gather into the graph being traced and give its result to the modules."""
        shard = self._sharded_data if self.sharded_param.requires_grad else self._sharded_data.detach()
        with tagged(self.recipe, "unshard"):
            full = UnshardFunction.apply(shard, self.recipe)
        self.register(full)
        return full

    def reshard_traced(self, full: torch.Tensor, free: bool) -> None:
        """Give the sharded parameter back to the modules; with ``free``, record that ``full`` holds no data now."""
        self.register(self.sharded_param)
        if free:
            with tagged(self.recipe, "reshard"):
                full.untyped_storage().resize_(0)

    def __repr__(self) -> str:
        return f"FSDPParam({self.name}, {tuple(self.orig_size)}, {self.sharded_state.name})"


def shared_owners(modules: list[nn.Module], params: list[nn.Parameter]) -> Iterator[list[tuple[nn.Module, str]]]:
    """For each of ``params``, every (module, name) under ``modules`` that holds it, in order of traversal."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {param: [] for param in params}
    seen: dict[nn.Module, None] = {}
    for root in modules:
        for module in root.modules():
            seen.setdefault(module)
    for module in seen:
        for name, param in module._parameters.items():
            if param in owners:
                owners[param].append((module, name))
    return iter(owners.values())
