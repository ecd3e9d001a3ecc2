"""What graphs take of one parameter: tensors and a recipe.

Graphs take the sharded data as a plain autograd leaf, alike on all ranks, so that no ``DTensor`` comes into a graph by
it. A graph knows from when it was traced whether gradients are reduced, and whether over all ranks; so these settings
count as they are at the forward, and when one of them changes before the backward, that is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from .group_names import graph_name
from .mesh_info import FSDPMeshInfo
from .recipes import Recipe
from .set_aside import Place, pass_gradients_on, without_memory
from .traced_dtensor import unsharded_dtensor
from .unsharding import extension_arguments

if TYPE_CHECKING:
    from .fsdp_param import FSDPParam


class TracedParam:
    """What graphs take of ``param``.

    Attributes:
        data: the sharded data; or the local tensor, if that is of the user's class and an all-gather extension.
        extension_arguments: for ``fsdp_pre_all_gather``.
    """

    def __init__(self, param: FSDPParam) -> None:
        self._param = param
        self.data = self._leaf = nn.Parameter(torch.empty(0), requires_grad=False)
        self.extension_arguments: tuple[Any, ...] = ()
        self._accumulated: Place | None = None
        self._kept_partial: Place | None = None
        self._slice_index: torch.Tensor | None = None

    def set_data(self, data: torch.Tensor, local: torch.Tensor) -> None:
        """Take new sharded data, of which ``local`` is the part without padding."""
        trains = data.is_floating_point() or data.is_complex()
        with torch.inference_mode(False):
            # Parameters, because Dynamo takes the sizes of those as static.
            if self._param.has_extension:
                self.extension_arguments = extension_arguments(self._param)
                self.data = nn.Parameter(local.detach(), requires_grad=False)
                self._leaf = nn.Parameter(without_memory(data.size(), data.dtype, data.device), requires_grad=trains)
            else:
                self.data = self._leaf = nn.Parameter(data.detach(), requires_grad=trains)
        if trains:
            pass_gradients_on(self._leaf, self._param.take_reduced_grad)
        self._accumulated = self._kept_partial = None  # their dtypes may differ now

    def recipe(self, position: Callable[[torch.Tensor | None], int | None], fewer: FSDPMeshInfo | None) -> Recipe:
        """Write down how to unshard and to reduce.

        Args:
            position: gives a tensor its position among the inputs of the group.
            fewer: the fewer ranks that keep a slice between forward and backward, if any.
        """
        param, layout, settings = self._param, self._param.layout, self._param.reduction
        shards, replicas = param.mesh_info.shard_process_group, param.mesh_info.replicate_process_group
        scaling, all_reduces = param.scaling(), settings.all_reduce_grads or replicas is None
        data = position(self.data)
        assert data is not None
        target, unsharded_place, partial_place = self._where_gradients_go(all_reduces)
        return Recipe(
            data=data,
            target=position(target),
            unsharded_place=position(unsharded_place),
            partial_place=position(partial_place),
            slice_index=position(self._slice_index_among(fewer)),
            device=param.device,
            sharded_device=self.data.device,
            sharded_dtype=self.data.dtype,
            grad_device=(self.data if target is None else target).device,
            grad_dtype=(self.data if target is None else target).dtype,
            rows=layout.size[0],
            padding=layout.padding,
            shard_dim=layout.shard_dim,
            world=layout.world_size,
            compute_dtype=param.compute_dtype,
            reduce_dtype=param.reduce_dtype,
            pre=scaling.pre,
            op=scaling.op,
            post=scaling.post,
            gather_group=graph_name(shards),
            reduce_group=graph_name(settings.separate_group or shards),
            replicate_group=graph_name(replicas),
            syncs=settings.reduce_grads,
            all_reduces=all_reduces,
            slice=None if fewer is None else (fewer.shard_mesh_size, str(graph_name(fewer.shard_process_group))),
        )

    def _where_gradients_go(self, all_reduces: bool) -> tuple[torch.Tensor | None, ...]:
        """The leaf that gets them, and those of places where gradients to be added may lie."""
        self._make_places()
        accumulated = None if self._accumulated is None else self._accumulated.leaf
        partial = None if self._kept_partial is None else self._kept_partial.leaf
        if not self._param.reduction.reduce_grads:
            return accumulated, None, None
        if not all_reduces:
            return partial, accumulated, None
        return self._leaf, accumulated, partial

    def _make_places(self) -> None:
        param, settings = self._param, self._param.reduction
        if not self._leaf.requires_grad:
            return
        if settings.has_accumulated and self._accumulated is None:
            put, take = param.put_unsharded_grad, param.take_set_aside_grad
            self._accumulated = Place(param.layout.size, param.reduce_dtype, param.device, put, take)
        if settings.has_kept_partial and self._kept_partial is None:
            size = param.layout.padded_sharded_size
            put, take = param.put_partial_grad, param.take_set_aside_partial
            self._kept_partial = Place(size, param.reduce_dtype, param.device, put, take)

    def _slice_index_among(self, fewer: FSDPMeshInfo | None) -> torch.Tensor | None:
        if fewer is not None and self._slice_index is None:
            self._slice_index = torch.tensor([fewer.shard_mesh_rank], device=self._param.device)
        return None if fewer is None else self._slice_index

    def as_distributed(self, full: torch.Tensor) -> torch.Tensor:
        """In a graph: the unsharded tensor the way that the original parameter was distributed, if it was."""
        layout, spec = self._param.layout, self._param.layout.unsharded_spec
        if spec is None:
            return full
        return unsharded_dtensor(full, spec.mesh, spec.placements, layout.global_size, layout.data_parallel_dims)
