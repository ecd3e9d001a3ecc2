"""How what an all-gather brings becomes the unsharded tensor of one parameter.

    dimension 0:      ranks' shards one after the other are the tensor, with padding only at its end
    another:          shards ─ concatenate on that dimension ─> tensor
    an extension:     whatever the user's tensor subclass sends ─ its ``fsdp_post_all_gather`` ─> tensor

The unsharded tensor is built once; afterwards only its storage is resized to zero and back, so that references which
autograd saved stay valid.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from . import torch_compat
from .sharded_layout import ShardedLayout

if TYPE_CHECKING:
    from .fsdp_param import FSDPParam


class Unsharding(ABC):
    """The tensors of one parameter that an all-gather fills, and what is made of them."""

    tensor: torch.Tensor  # local, of the layout's size; exists from the first `finish`, holds data until `free`

    @abstractmethod
    def fits(self, param: FSDPParam) -> bool:
        """Whether it still does, after changes to the parameter's dtype, say."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How much memory the unsharded data takes now."""

    @abstractmethod
    def inputs(self) -> list[torch.Tensor]:
        """What this rank sends, contiguous, from the parameter's sharded data."""

    @abstractmethod
    def outputs(self, inputs: list[torch.Tensor], whole: bool) -> list[torch.Tensor]:
        """Room for what the ranks send, of an element count equal to that of the inputs times the number of ranks.

        Args:
            whole: the inputs are slices of the unsharded tensor's storage, which a reshard to fewer ranks has kept.
        """

    @abstractmethod
    def finish(self) -> None:
        """The outputs hold data: make ``tensor`` of them."""

    @abstractmethod
    def free(self) -> None:
        """Give back the memory of all that is unsharded."""


class PlainUnsharding(Unsharding):
    """Of a plain tensor, in the parameter's compute dtype."""

    def __init__(self, param: FSDPParam) -> None:
        self._param, self._layout = param, param.layout
        with torch.inference_mode(False):  # an inference tensor could never take part in training later
            self._storage = torch.empty(self._layout.padded_size, dtype=param.compute_dtype, device=param.device)
            self.tensor = self._storage.narrow(0, 0, self._layout.size[0]) if self._layout.padding else self._storage
        self._nbytes = self._storage.numel() * self._storage.itemsize
        torch_compat.resize_storage(self._storage, 0)  # whoever asks for outputs takes the memory, in its own stream
        self._pieces: torch.Tensor | None = None

    def fits(self, param: FSDPParam) -> bool:
        return self.tensor.dtype == param.compute_dtype and not param.has_extension

    @property
    def nbytes(self) -> int:
        return self._storage.untyped_storage().nbytes()

    @property
    def flat(self) -> torch.Tensor:
        """All of the unsharded data, with its padding, 1-D."""
        return self._storage.detach().view(-1)

    def inputs(self) -> list[torch.Tensor]:
        param = self._param
        return [param.sharded_data.to(device=param.device, dtype=param.compute_dtype, non_blocking=True)]

    def outputs(self, inputs: list[torch.Tensor], whole: bool) -> list[torch.Tensor]:
        torch_compat.resize_storage(self._storage, self._nbytes)
        # `.data` has a version counter of its own: what autograd saved of the tensor before it was freed stays valid.
        if self._layout.shard_dim == 0 or whole:
            return [self._storage.data]
        self._pieces = self._storage.new_empty(self._layout.world_size, *self._layout.padded_sharded_size)
        return [self._pieces]

    def finish(self) -> None:
        if self._pieces is not None:
            torch.cat(self._pieces.unbind(), dim=self._layout.shard_dim, out=self._storage.data)
            self._pieces = None

    def free(self) -> None:
        self._pieces = None
        torch_compat.resize_storage(self._storage, 0)


class ExtensionUnsharding(Unsharding):
    """Of a tensor subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

    ``fsdp_pre_all_gather(mesh)``, or ``(mesh, outer_size, outer_stride, module, mp_policy)``, returns the tensors to
    send, of any dtypes, and metadata; ``fsdp_post_all_gather(outputs, metadata, param_dtype)`` returns the unsharded
    tensor and the inner tensors whose memory is to be freed with it. On later gathers it is called with ``out=`` that
    tensor, to fill it again. (The protocol is that of torch's FSDP2.)
    """

    def __init__(self, param: FSDPParam) -> None:
        self._param, self._layout = param, param.layout
        self._dtype = param.compute_dtype
        self._metadata: Any = None
        self._input_sizes: list[torch.Size] = []
        self._outputs: list[torch.Tensor] = []
        self._owned: list[tuple[torch.Tensor, int]] = []  # outputs, then inner tensors, and the bytes of each
        self._check_padding()

    def fits(self, param: FSDPParam) -> bool:
        return param.has_extension and self._dtype == param.compute_dtype

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor, _ in self._owned)

    def inputs(self) -> list[torch.Tensor]:
        inputs, self._metadata = self._pre_all_gather(self._param.sharded_local_tensor)
        self._input_sizes = [tensor.size() for tensor in inputs]
        return inputs

    def _pre_all_gather(self, shard: Any) -> tuple[list[torch.Tensor], Any]:
        return pre_all_gather(shard, self._param.device, extension_arguments(self._param))

    def _check_padding(self) -> None:
        """All ranks find out, each by itself, whether the shortest shard is sent at the same size as the others.

        Raises:
            RuntimeError: it is not: the parameter is sharded unevenly and the extension does not pad.
        """
        layout = self._layout
        if not layout.padding:
            return
        shortest = layout.sharded_size_of(layout.world_size - 1)[0]
        padded = self._param.sharded_data
        full, short = (self._pre_all_gather(padded.narrow(0, 0, rows))[0] for rows in (padded.size(0), shortest))
        if [tensor.size() for tensor in full] != [tensor.size() for tensor in short]:
            raise RuntimeError(
                f"Parameter {self._param.name} of size {tuple(layout.size)} is sharded unevenly over "
                f"{layout.world_size} ranks, so its fsdp_pre_all_gather must return tensors of the padded sharded size "
                f"{tuple(layout.padded_sharded_size)} on all of them; for the shortest shard it returned "
                f"{[tuple(tensor.size()) for tensor in short]}"
            )

    def outputs(self, inputs: list[torch.Tensor], whole: bool) -> list[torch.Tensor]:
        if not self._outputs:
            with torch.inference_mode(False):
                self._outputs = [tensor.new_empty(tensor.numel() * self._layout.world_size) for tensor in inputs]
            self._own(self._outputs)
        for tensor, nbytes in self._owned:
            torch_compat.resize_storage(tensor, nbytes)
        return [tensor.data for tensor in self._outputs]

    def _own(self, tensors: Iterable[torch.Tensor]) -> None:
        self._owned.extend((tensor, tensor.untyped_storage().nbytes()) for tensor in tensors)

    def finish(self) -> None:
        gathered = tuple(
            output.view(-1, *size[1:]) for output, size in zip(self._outputs, self._input_sizes, strict=True)
        )
        param, metadata = self._param, self._metadata
        post, self._metadata = param.sharded_local_tensor.fsdp_post_all_gather, None
        with torch.inference_mode(False), torch.no_grad():  # in this order: leaving inference mode enables gradients
            if hasattr(self, "tensor"):
                out = param.unsharded_param
                with torch_compat.preserved_versions([out, *(tensor for tensor, _ in self._owned)]):
                    post(gathered, metadata, param.compute_dtype, out=out)
            else:
                made, inner = post(gathered, metadata, param.compute_dtype)
                self.tensor = without_padding(made, self._layout)
                self._own(inner)

    def free(self) -> None:
        for tensor, _ in self._owned:
            torch_compat.resize_storage(tensor, 0)


def extension_arguments(param: FSDPParam) -> tuple[Any, ...]:
    """What ``fsdp_pre_all_gather`` may ask for: mesh, size and strides of the original, module, policy."""
    return param.mesh_info.shard_mesh, param.layout.size, param.layout.stride, param.owners[0][0], param.mp_policy


def pre_all_gather(shard: Any, device: torch.device, arguments: tuple[Any, ...]) -> tuple[list[torch.Tensor], Any]:
    """What the user's tensor class sends of ``shard``, contiguous and on ``device``, and its metadata."""
    shard = shard.to(device=device, non_blocking=True) if shard.device != device else shard
    with torch.no_grad():
        inputs, metadata = shard.fsdp_pre_all_gather(*arguments[: _argument_count(type(shard))])
    return [tensor.contiguous() for tensor in inputs], metadata


@torch_compat.constant_while_tracing
def _argument_count(tensor_class: Any) -> int:
    """One or five: which of the two signatures its ``fsdp_pre_all_gather`` has."""
    parameters = inspect.signature(tensor_class.fsdp_pre_all_gather).parameters
    return 1 if len(parameters) == 2 else 5  # the first one is `self`


def without_padding(tensor: torch.Tensor, layout: ShardedLayout) -> torch.Tensor:
    if tensor.size() == layout.size:
        return tensor
    return tensor.as_strided(layout.size, layout.stride, 0)


def has_extension(name: str, shard: torch.Tensor) -> bool:
    """Whether ``shard`` takes part in its own all-gather.

    Raises:
        ValueError: it defines only one of the two methods that this needs.
    """
    before, after = (hasattr(shard, f"fsdp_{when}_all_gather") for when in ("pre", "post"))
    if before != after:
        found, missing = ("pre", "post") if before else ("post", "pre")
        raise ValueError(
            f"Parameter {name}, a {type(shard).__name__}, defines fsdp_{found}_all_gather but not "
            f"fsdp_{missing}_all_gather; an all-gather extension needs both"
        )
    return before
