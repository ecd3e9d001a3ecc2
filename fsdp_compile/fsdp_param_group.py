"""Parameters that travel together: one all-gather brings them, one reduce-scatter takes their gradients away."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from .all_gather import Gather, launch_all_gather
from .communication import AllGather, DefaultAllGather, DefaultReduceScatter, ReduceScatter
from .fsdp_param import FSDPParam, ShardedState
from .mesh_info import FSDPMeshInfo
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .reduction import Gradient, Reduction, ReductionSettings, Route
from .sharded_layout import ShardedLayout
from .shared_parameters import shared_owners
from .streams import Lane, Lanes
from .tracing import frees_are_restored, trace_token, warn_once

_group_ids = itertools.count()  # ranks build their models in the same order, so they number groups alike


class FSDPParamGroup:
    """The parameters that one ``fully_shard`` call manages on one mesh.

    Args:
        params: original parameters with their layouts, without duplicates, in order of traversal.
        modules: roots of the traversal; every module below them that holds one of ``params`` is kept up to date.
        post_forward_mesh_info: the fewer ranks that keep a slice between forward and backward, if any.
    """

    def __init__(
        self,
        params: Sequence[tuple[nn.Parameter, ShardedLayout]],
        modules: list[nn.Module],
        mesh_info: FSDPMeshInfo,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        post_forward_mesh_info: FSDPMeshInfo | None = None,
    ) -> None:
        self.mesh_info = mesh_info
        self.post_forward_mesh_info = post_forward_mesh_info
        self.group_id = next(_group_ids)
        self.name = ""
        self.reduction = ReductionSettings()
        self.reduce_grads = True
        self.all_reduce_grads = True
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.all_reduce_hook_stream: torch.Stream | None = None
        self.reduce_scatter_unused_params = False
        self.reshard_after_backward = True
        self.all_gather_comm: AllGather = DefaultAllGather()
        self.reduce_scatter_comm: ReduceScatter = DefaultReduceScatter()
        self.params = [
            FSDPParam(param, owners, layout, mesh_info, device, mp_policy, offload_policy, self.reduction)
            for (param, layout), owners in zip(params, shared_owners(modules, [p for p, _ in params]), strict=True)
        ]
        self._gather: Gather | None = None
        self._sliced: torch.Event | None = None  # when the slices that a reshard to fewer ranks keeps were written
        self._traced: list[torch.Tensor] | None = None  # unsharded tensors that a graph made and modules now see
        self._trace_token = ""

    def set_names(self, group_name: str, module_names: dict[nn.Module, str]) -> None:
        """Name the group and its parameters as seen from the root; graph nodes will carry these names."""
        self.name = group_name
        for index, param in enumerate(self.params):
            # A group may span several trees, of which the root is one.
            module, attribute = next((owner for owner in param.owners if owner[0] in module_names), param.owners[0])
            prefix = module_names.get(module, "")
            param.name = f"{prefix}.{attribute}" if prefix else attribute
            param.set_tag({"group": self.group_id, "name": group_name, "params": [param.name], "index": [index]})

    @property
    def label(self) -> str:
        """How messages call the module."""
        return f"module '{self.name}'" if self.name else "the root module"

    @property
    def sharded_state(self) -> ShardedState:
        return self.params[0].sharded_state if self.params else ShardedState.SHARDED

    @property
    def reduce_scatter_group(self) -> dist.ProcessGroup | None:
        """The group that reduces over the shard ranks: one of its own if the user wants so, else the all-gathers'."""
        return self.reduction.separate_group or self.mesh_info.shard_process_group

    def update_recipes(self) -> None:
        """Tell graphs what was set."""
        for param in self.params:
            param.update_recipe()

    def set_separate_reduce_scatter_group(
        self, enable: bool, made: dict[tuple[int, ...], dist.ProcessGroup]
    ) -> None:
        """Reduce in a group apart from the all-gathers'; one for each set of ranks, which ``made`` remembers."""
        shared = self.mesh_info.shard_process_group
        if shared is None:
            return
        ranks = tuple(dist.get_process_group_ranks(shared))
        if enable and ranks not in made:
            made[ranks] = self.reduction.separate_group or dist.new_group(
                list(ranks), use_local_synchronization=True, group_desc="fsdp_reduce_scatter"
            )
        self.reduction.separate_group = made[ranks] if enable else None
        self.update_recipes()

    @property
    def has_custom_communication(self) -> bool:
        """Whether the user set a communication of their own."""
        ours = isinstance(self.all_gather_comm, DefaultAllGather)
        return not (ours and isinstance(self.reduce_scatter_comm, DefaultReduceScatter))

    @property
    def copies_late(self) -> bool:
        """Whether gradients may still be on their way to the host after the backward."""
        return any(param.pinned for param in self.params)

    # -- eager executor -----------------------------------------------------------------------------------------------

    def unshard(self, lanes: Lanes) -> None:
        """Start the all-gather unless the unsharded parameters are there, or on their way, and up to date."""
        for param in self.params:
            param.follow_replacement()
        stale = any(param.is_stale for param in self.params)
        if self._gather is not None and stale:
            self.reshard()  # it was started before the sharded parameters were written
        if self._gather is not None or not self.params:
            return
        if self.sharded_state is ShardedState.UNSHARDED and not stale:
            return
        mesh_info = self.mesh_info
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            if stale:
                self.reshard()
            else:
                assert self.post_forward_mesh_info is not None
                mesh_info = self.post_forward_mesh_info
                if self._sliced is not None:
                    lanes.copy_in.wait_for(self._sliced)
        self._gather = launch_all_gather(self.params, mesh_info, lanes, self.all_gather_comm)

    def wait_for_unshard(self) -> None:
        """Finish the all-gather and hand the unsharded parameters to the modules."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            for param in self.params:
                param.finish_unshard()
        elif self.sharded_state is not ShardedState.UNSHARDED:
            return
        for param in self.params:
            param.show_unsharded()

    def reshard(self) -> None:
        """Free the unsharded parameters and hand the sharded ones to the modules."""
        if self._gather is not None:  # the memory may not go while it is being written
            self._gather.wait()
            self._gather = None
        for param in self.params:
            param.to_sharded()

    def reshard_after_forward(self, lanes: Lanes) -> None:
        """Free the unsharded parameters until backward; with a post-forward mesh, keep a slice among its ranks."""
        if self.post_forward_mesh_info is None or self.sharded_state is not ShardedState.UNSHARDED:
            self.reshard()
            return
        for param in self.params:
            param.to_sharded_post_forward(self.post_forward_mesh_info)
        self._sliced = lanes.now()

    @property
    def is_gathering(self) -> bool:
        return self._gather is not None

    def drop_unused_gather(self) -> None:
        """Free what was gathered ahead but not used."""
        if self._gather is not None:
            self.reshard()

    def hide_unsharded(self) -> None:
        """Hand the sharded parameters to the modules but keep the unsharded data for the backward.

        Outside forward and backward a user so never gets hold of an unsharded parameter, from ``parameters()`` say.
        """
        for param in self.params:
            param.register(param.sharded_param)

    def reduce(self, lanes: Lanes, used: bool) -> list[Reduction]:
        """Take the unsharded gradients, free the unsharded parameters, start the reductions.

        One reduce-scatter for each reduce dtype in the group. Without gradient sync the gradients are set aside.

        Args:
            used: whether the backward has come through the group's module, on all ranks then; else only gradients that
                are there are reduced.
        """
        gradients: list[Gradient] = []
        if self.reduce_grads:
            gradients = [self._take_gradient(param) for param in self.params]
        else:
            for param in self.params:
                param.keep_unsharded_grad()
        if self.reshard_after_backward:
            self.reshard()
        else:
            self.hide_unsharded()
        if not used and not any(gradient.is_present for gradient in gradients):
            return []
        by_dtype: dict[torch.dtype, list[Gradient]] = {}
        for gradient in gradients:
            if gradient.param.sharded_param.requires_grad or gradient.is_present:
                by_dtype.setdefault(gradient.param.reduce_dtype, []).append(gradient)
        return [Reduction(some, dtype, self._route(some[0].param, lanes)) for dtype, some in by_dtype.items()]

    def _take_gradient(self, param: FSDPParam) -> Gradient:
        always = self.reduce_scatter_unused_params and param.sharded_param.requires_grad
        return Gradient(param, param.take_unsharded_grad(), param.take_partial_grad(), always)

    def _route(self, param: FSDPParam, lanes: Lanes) -> Route:
        stream = self.all_reduce_hook_stream
        return Route(
            shard_group=self.reduce_scatter_group,
            replicate_group=self.mesh_info.replicate_process_group,
            scaling=param.scaling(),
            comm=self.reduce_scatter_comm,
            lanes=lanes,
            hook=self.all_reduce_hook,
            hook_lane=lanes.all_reduce if stream is None else Lane(stream),
            all_reduce=self.all_reduce_grads or self.mesh_info.replicate_mesh_dim is None,
        )

    def drop_iteration(self) -> None:
        """Forget the gradients and unsharded data of an iteration that failed."""
        for param in self.params:
            param.take_unsharded_grad()
            param.take_partial_grad()
        self._traced = None
        self.reshard()

    # -- traced executor ----------------------------------------------------------------------------------------------

    @property
    def is_traced(self) -> bool:
        """Whether the modules hold tensors that a compiled graph made."""
        return self._traced is not None

    @property
    def is_traceable(self) -> bool:
        """Whether all settings have a traced form, and no gradient that was set aside waits to be reduced."""
        only_shards = self.mesh_info.replicate_mesh_dim is None and self.post_forward_mesh_info is None
        usual = self.all_reduce_hook is None and not self.has_custom_communication and self.reduce_grads
        return only_shards and usual and all(param.is_traceable for param in self.params)

    def unshard_traced(self) -> None:
        """Emit the all-gathers of all parameters into the graph being traced."""
        self._trace_token = trace_token()
        self._traced = [param.unshard_traced() for param in self.params]

    def reshard_traced(self, free: bool) -> None:
        """Give the sharded parameters back to the modules.

        With ``free`` the graph also records that the unsharded tensors hold no data from here on. Not if a graph
        break came in between: this graph would free what an earlier one has saved for its backward. Not either if
        the compiler does not run the pass that gathers again in the backward.
        """
        traced, self._traced = self._traced, None
        if traced is None:
            return
        if self._trace_token != trace_token():
            warn_once(
                f"fsdp_compile: a graph break inside {self.label} splits its forward over several graphs; "
                "its unsharded parameters are kept until the backward."
            )
            free = False
        free = free and frees_are_restored()
        for param, full in zip(self.params, traced, strict=True):
            param.reshard_traced(full, free)
