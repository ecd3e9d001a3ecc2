"""Parameters that travel together: one all-gather brings them, one reduce-scatter takes their gradients away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from .all_gather import Gather, launch_all_gather
from .communication import AllGather, DefaultAllGather, DefaultReduceScatter, ReduceScatter
from .fsdp_param import FSDPParam, ShardedState
from .mesh_info import FSDPMeshInfo
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .profiler_marks import mark_launch
from .reduction import Gradient, Reduction, ReductionSettings, Route
from .sharded_layout import ShardedLayout
from .shared_parameters import shared_owners
from .streams import Lane, Lanes
from .traced_group import TracedGroup


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
        self.name = ""
        self.reduction = ReductionSettings()
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
        self.traced = TracedGroup(self)
        self._gather: Gather | None = None
        self._sliced: torch.Event | None = None  # when the slices that a reshard to fewer ranks keeps were written

    def set_names(self, group_name: str, module_names: dict[nn.Module, str]) -> None:
        """Name the group and its parameters as seen from the root; graph nodes will carry these names."""
        self.name = group_name
        for param in self.params:
            # A group may span several trees, of which the root is one.
            module, attribute = next((owner for owner in param.owners if owner[0] in module_names), param.owners[0])
            prefix = module_names.get(module, "")
            param.name = f"{prefix}.{attribute}" if prefix else attribute

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

    def set_requires_sync(self, reduce_grads: bool, all_reduce_grads: bool) -> None:
        """Set whether backward reduces gradients over the shard ranks, and over the replicas."""
        settings = self.reduction
        settings.reduce_grads, settings.all_reduce_grads = reduce_grads, all_reduce_grads
        settings.has_accumulated |= not reduce_grads
        settings.has_kept_partial |= reduce_grads and not all_reduce_grads and self.has_replicas
        self.traced.update()

    @property
    def has_replicas(self) -> bool:
        return self.mesh_info.replicate_mesh_dim is not None

    def set_separate_reduce_scatter_group(self, enable: bool, made: dict[tuple[int, ...], dist.ProcessGroup]) -> None:
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
        self.traced.update()

    @property
    def has_custom_communication(self) -> bool:
        """Whether the user set a communication of their own."""
        ours = isinstance(self.all_gather_comm, DefaultAllGather)
        return not (ours and isinstance(self.reduce_scatter_comm, DefaultReduceScatter))

    @property
    def copies_late(self) -> bool:
        """Whether gradients may still be on their way to the host after the backward."""
        return any(param.pinned for param in self.params)

    def refresh(self) -> None:
        """Follow changes that others made to the sharded parameters."""
        for param in self.params:
            param.refresh_sharded_param()
        self.traced.renew()

    def follow_replacements(self) -> None:
        """Take parameters that someone assigned to the modules."""
        if self.traced.is_open:
            return  # what the modules hold, a graph has put there
        if any([param.follow_replacement() for param in self.params]):
            self.traced.renew()

    # -- eager executor -----------------------------------------------------------------------------------------------

    def unshard(self, lanes: Lanes) -> None:
        """Start the all-gather unless the unsharded parameters are there, or on their way, and up to date."""
        self.follow_replacements()
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
        if mesh_info.shard_mesh_size > 1:
            mark_launch("all_gather", self.name)
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
        self.traced.forget()
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
    def may_hold_data(self) -> bool:
        """Whether unsharded data, or a slice of it, is there or on its way, or modules hold other parameters."""
        return self._gather is not None or self.traced.is_open or self.sharded_state is not ShardedState.SHARDED

    @property
    def is_gathering(self) -> bool:
        return self._gather is not None

    def drop_unused_gather(self) -> None:
        """Free what was gathered ahead but not used."""
        if self._gather is not None:
            self.reshard()

    def show_sharded(self) -> None:
        """Hand the sharded parameters to the modules, and keep the unsharded data if there is any.

        Outside forward and backward a user so never gets hold of an unsharded parameter, from ``parameters()`` say.
        """
        for param in self.params:
            param.register(param.sharded_param)

    def hide_unsharded(self) -> None:
        """Like ``show_sharded`` where modules hold unsharded ones, a graph's or ours; what a user put there stays."""
        if self.traced.is_open:
            self.traced.forget()
            self.show_sharded()
        for param in self.params:
            param.hide_unsharded()

    @property
    def has_new_gradients(self) -> bool:
        """Whether this backward has brought any."""
        return any(param.has_new_gradient for param in self.params)

    @property
    def awaits_reduction(self) -> bool:
        """Whether there are gradients, of this backward or set aside by earlier ones, that are to be reduced now."""
        set_aside = self.reduction.has_accumulated and any(param.accumulated_grad is not None for param in self.params)
        return self.has_new_gradients or (set_aside and self.reduction.reduce_grads)

    def leave_backward(self) -> None:
        """Free the unsharded parameters, or hide them if they are kept."""
        if self.reshard_after_backward:
            self.reshard()
        else:
            self.show_sharded()

    def reduce(self, lanes: Lanes, used: bool) -> list[Reduction]:
        """Take the unsharded gradients, free the unsharded parameters, start the reductions.

        One reduce-scatter for each reduce dtype in the group. Without gradient sync the gradients are set aside.

        Args:
            used: whether the backward has come through the group's module, on all ranks then; else only gradients that
                are there are reduced.
        """
        gradients: list[Gradient] = []
        if self.reduction.reduce_grads:
            gradients = [self._take_gradient(param) for param in self.params]
        else:
            for param in self.params:
                param.keep_unsharded_grad()
        self.leave_backward()
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
            name=self.name,
            shard_group=self.reduce_scatter_group,
            replicate_group=self.mesh_info.replicate_process_group,
            scaling=param.scaling(),
            comm=self.reduce_scatter_comm,
            lanes=lanes,
            hook=self.all_reduce_hook,
            hook_lane=lanes.all_reduce if stream is None else Lane(stream),
            all_reduce=self.reduction.all_reduce_grads or not self.has_replicas,
        )

    def drop_iteration(self) -> None:
        """Forget the gradients and unsharded data of an iteration that failed."""
        for param in self.params:
            param.take_unsharded_grad()
            param.take_partial_grad()
        self.reshard()

    @property
    def why_untraced(self) -> str:
        """What is set that has no traced form; empty if nothing is."""
        if self.all_reduce_hook is not None:
            return "set_all_reduce_hook"
        return "custom communication" if self.has_custom_communication else ""
