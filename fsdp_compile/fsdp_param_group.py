"""Parameters that travel together: one all-gather brings them, one reduce-scatter takes their gradients away."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn as nn

from .collectives import Gather, launch_all_gather
from .fsdp_param import FSDPParam, ShardedState, shared_owners
from .mesh_info import FSDPMeshInfo
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .reduction import Reduction, Route
from .tracing import frees_are_restored, trace_token, warn_once

_group_ids = itertools.count()  # ranks build their models in the same order, so they number groups alike


class FSDPParamGroup:
    """The parameters that one ``fully_shard`` call manages on one mesh.

    Args:
        params: original parameters, without duplicates, in order of traversal.
        post_forward_mesh_info: the fewer ranks that keep a slice between forward and backward, if any.
        modules: roots of the traversal; every module below them that holds one of ``params`` is kept up to date.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
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
        self.reduce_grads = True
        self.all_reduce_grads = True
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.reduce_scatter_unused_params = False
        self.reshard_after_backward = True
        self.params = [
            FSDPParam(param, owners, mesh_info, device, mp_policy, offload_policy)
            for param, owners in zip(params, shared_owners(modules, params), strict=True)
        ]
        self._gather: Gather | None = None
        self._traced: list[torch.Tensor] | None = None  # unsharded tensors that a graph made and modules now see
        self._trace_token = ""

    def set_names(self, group_name: str, module_names: dict[nn.Module, str]) -> None:
        """Name the group and its parameters as seen from the root; graph nodes will carry these names."""
        self.name = group_name
        for index, param in enumerate(self.params):
            module, attribute = param.owners[0]
            prefix = module_names[module]
            param.name = f"{prefix}.{attribute}" if prefix else attribute
            param.set_tag({"group": self.group_id, "name": group_name, "params": [param.name], "index": [index]})

    @property
    def label(self) -> str:
        """How messages call the module."""
        return f"module '{self.name}'" if self.name else "the root module"

    @property
    def sharded_state(self) -> ShardedState:
        return self.params[0].sharded_state if self.params else ShardedState.SHARDED

    # -- eager executor -----------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start the all-gather unless the unsharded parameters are there, or on their way, and up to date."""
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
        self._gather = launch_all_gather(self.params, mesh_info)

    def wait_for_unshard(self) -> None:
        """Finish the all-gather and hand the unsharded parameters to the modules."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        elif self.sharded_state is not ShardedState.UNSHARDED:
            return
        for param in self.params:
            param.to_unsharded()

    def reshard(self) -> None:
        """Free the unsharded parameters and hand the sharded ones to the modules."""
        if self._gather is not None:  # the memory may not go while it is being written
            self._gather.wait()
            self._gather = None
        for param in self.params:
            param.to_sharded()

    def reshard_after_forward(self) -> None:
        """Free the unsharded parameters until backward; with a post-forward mesh, keep a slice among its ranks."""
        if self.post_forward_mesh_info is None or self.sharded_state is not ShardedState.UNSHARDED:
            self.reshard()
            return
        for param in self.params:
            param.to_sharded_post_forward(self.post_forward_mesh_info)

    def drop_unused_gather(self) -> None:
        """After the backward: free what was gathered ahead but never used, for weights may change from here on."""
        if self._gather is not None:
            self.reshard()

    def hide_unsharded(self) -> None:
        """Hand the sharded parameters to the modules but keep the unsharded data for the backward.

        Outside forward and backward a user so never gets hold of an unsharded parameter, from ``parameters()`` say.
        """
        for param in self.params:
            param.register(param.sharded_param)

    def reduce(self) -> list[Reduction]:
        """Take the unsharded gradients, free the unsharded parameters, start the reductions.

        One reduce-scatter for each reduce dtype in the group. Without gradient sync the gradients are set aside.
        """
        if not self.reduce_grads:
            for param in self.params:
                param.keep_unsharded_grad()
        grads = [(param, self._grad_to_reduce(param)) for param in self.params] if self.reduce_grads else []
        if self.reshard_after_backward:
            self.reshard()
        else:
            self.hide_unsharded()
        by_dtype: dict[torch.dtype, list[tuple[FSDPParam, torch.Tensor | None]]] = {}
        for param, grad in grads:
            if grad is not None or param.has_partial_grad:
                by_dtype.setdefault(param.reduce_dtype, []).append((param, grad))
        return [
            Reduction([param for param, _ in pairs], [grad for _, grad in pairs], dtype, self._route(pairs[0][0]))
            for dtype, pairs in by_dtype.items()
        ]

    def _grad_to_reduce(self, param: FSDPParam) -> torch.Tensor | None:
        grad = param.take_unsharded_grad()
        if grad is None and self.reduce_scatter_unused_params and param.sharded_param.requires_grad:
            return torch.zeros(param.orig_size, dtype=param.reduce_dtype, device=param.device)
        return grad

    def _route(self, param: FSDPParam) -> Route:
        return Route(
            shard_group=self.mesh_info.shard_process_group,
            replicate_group=self.mesh_info.replicate_process_group,
            scaling=param.scaling(),
            hook=self.all_reduce_hook,
            all_reduce=self.all_reduce_grads,
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
        """Whether all settings have a traced form."""
        one_dimensional = self.mesh_info.replicate_mesh_dim is None and self.post_forward_mesh_info is None
        return one_dimensional and self.reduce_grads and self.all_reduce_hook is None

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
