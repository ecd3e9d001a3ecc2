"""Where graphs hand gradients to, and where they find those that earlier backwards have set aside.

A graph reads what is set aside by an operator, when its backward runs. As an input of the graph it would be read when
the forward runs, and much may happen in between; and whether there is anything would make another graph.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod, WeakValueDictionary

import torch
import torch.nn as nn


def pass_gradients_on(leaf: torch.Tensor, method: Callable[[torch.Tensor], None]) -> None:
    """Give each gradient that ``leaf`` gets to the bound ``method``, whose object the leaf does not keep alive."""
    weak = WeakMethod(method)

    def pass_on(leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        take = weak()
        if take is not None and grad is not None:
            take(grad)

    leaf.register_post_accumulate_grad_hook(pass_on)


def without_memory(size: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of ``size`` with one element in memory."""
    return torch.zeros(1, dtype=dtype, device=device).expand(size)


class Place:
    """Where one parameter's gradients are set aside.

    Args:
        put: bound method that sets a gradient aside.
        take: bound method that removes what is set aside, of the size and dtype given, and returns it; or ``None``.

    Attributes:
        leaf: what graphs know the place by: an autograd leaf of that size, with one element in memory. A gradient that
            it gets is set aside.
    """

    def __init__(
        self,
        size: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        put: Callable[[torch.Tensor], None],
        take: Callable[[], torch.Tensor | None],
    ) -> None:
        # A Parameter, because Dynamo takes the sizes of those as static.
        self.leaf = nn.Parameter(without_memory(size, dtype, device))
        pass_gradients_on(self.leaf, put)
        self._take = WeakMethod(take)
        _places[self.leaf.data_ptr()] = self

    def take(self) -> torch.Tensor | None:
        """Remove and return what is set aside."""
        take = self._take()
        return None if take is None else take()


_places: WeakValueDictionary[int, Place] = WeakValueDictionary()  # by the address of the leaf's one element


@torch.library.custom_op("fsdp_compile::add_set_aside", mutates_args=())
def add_set_aside(grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """``grad`` plus what is set aside at the place of ``leaf``, which is empty then; contiguous."""
    earlier = _places[leaf.data_ptr()].take()
    if earlier is None:
        return grad.clone(memory_format=torch.contiguous_format)
    return earlier.add_(grad).contiguous()


@add_set_aside.register_fake
def _(grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)
