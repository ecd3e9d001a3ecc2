"""Compute that takes time but no core: matrix products that sleep as long as an accelerator would work.

Collectives of a CPU need its cores; compute that needs them as well competes with what it should hide. So a layer here
multiplies a few rows, which brings real outputs and gradients, and then sleeps until its time is over. Its weights are
whole matrices, so their bytes travel for real.

To the cost model, a layer has as many FLOPs as a machine of ``FLOP_RATE`` does in that time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.nn as nn
from contestants import Batch, Task
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

FLOP_RATE = 1e12  # FLOP/s of the emulated machine
ROWS = 2


@torch.library.custom_op("emulated::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """``x @ weight.T``, which takes ``seconds``. Shapes: (rows, in), (out, in) to (rows, out)."""
    with _lasting(seconds):
        return x @ weight.T


@torch.library.custom_op("emulated::linear_backward", mutates_args=())
def linear_backward(grad: Tensor, x: Tensor, weight: Tensor, seconds: float) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and of ``weight``. Two products, so it takes twice as long as the forward."""
    with _lasting(2 * seconds):
        return grad @ weight, grad.T @ x


@contextmanager
def _lasting(seconds: float) -> Iterator[None]:
    end = time.perf_counter() + seconds
    yield
    time.sleep(max(0.0, end - time.perf_counter()))


def launch_seconds() -> float:
    """How much longer such an operator takes than it is to: to be called, and to wake up; the median of many."""
    x, weight, asked = torch.zeros(ROWS, 1), torch.zeros(1, 1), 1e-3

    def once() -> float:
        start = time.perf_counter()
        linear(x, weight, asked)
        return time.perf_counter() - start - asked

    return median(once() for _ in range(100))


@linear.register_fake
def _(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, seconds: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.seconds = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *linear_backward(grad, *ctx.saved_tensors, ctx.seconds), None


linear.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.emulated.linear, get_raw=True)
def _flops(x: Tensor, weight: Tensor, seconds: float, **_: Any) -> int:
    return round(seconds * FLOP_RATE)


@register_flop_formula(torch.ops.emulated.linear_backward, get_raw=True)
def _backward_flops(grad: Tensor, x: Tensor, weight: Tensor, seconds: float, **_: Any) -> int:
    return round(2 * seconds * FLOP_RATE)


class Layer(nn.Module):
    """Two matrices of shape (width, width), and a way around both; the forward takes ``seconds``."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(width, width) / width) for _ in range(2))
        self.seconds = seconds / 2  # of each matrix

    def forward(self, x: Tensor) -> Tensor:
        hidden = linear(x, self.first, self.seconds)
        return x + linear(hidden, self.second, self.seconds)


class Emulated(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width, seconds) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def emulated_task(layers: int, width: int, seconds: float) -> Task:
    """Regression by an ``Emulated`` whose compute takes ``3 * layers * seconds`` a step."""

    def make_batch(generator: torch.Generator) -> Batch:
        return torch.randn(ROWS, width, generator=generator), torch.randn(ROWS, width, generator=generator)

    return Task(lambda: Emulated(layers, width, seconds), make_batch, nn.functional.mse_loss)
