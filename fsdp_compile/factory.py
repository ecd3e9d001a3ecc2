"""What there is to train: a model and its batches, as the commands take them from a user.

A *factory* describes it. ``FACTORY()`` returns ``(model, make_batch)``:

- ``model``: an ``nn.Module``; either plain, and then ``shard`` below shards it, or sharded by the factory;
- ``make_batch(step, rank, world)``: what the model is called with in one step on one rank: a tuple of positional
  arguments, a dict of keyword arguments, or one tensor.

The loss is the model's output if that is a scalar tensor; else its ``loss``, if it has one as an attribute or a key;
else the mean of the squares of all floating-point tensors in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from .fully_shard import FSDPModule, fully_shard
from .nested import map_tensors

MakeBatch = Callable[[int, int, int], Any]
Factory = Callable[[], tuple[nn.Module, MakeBatch]]


BY_FACTORY = "by the factory"  # what ``shard`` says of a model that is sharded already


class FactoryError(ValueError):
    """The factory, or what it returned, does not keep to the protocol; the message says how, in one line."""


# -- what a factory returned ------------------------------------------------------------------------------------------


def shard(model: nn.Module, **how: Any) -> str:
    """Apply ``fully_shard``, with the arguments ``how``, unless something in ``model`` is sharded already.

    Each element of every ``nn.ModuleList`` that has a forward makes a group, and the root takes what is left.

    Returns:
        What was done, in words.

    Raises:
        FactoryError: the model cannot be called, or ``fully_shard`` refuses it.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return BY_FACTORY
    try:
        return _shard(model, **how)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise FactoryError(" ".join(str(error).split())) from error


def _shard(model: nn.Module, **how: Any) -> str:
    lists: list[str] = []
    for name, module in reversed(list(model.named_modules())):  # so that inner lists come first
        if isinstance(module, nn.ModuleList):
            elements = [each for each in module if type(each).forward is not nn.Module.forward]
            for element in elements:
                if not isinstance(element, FSDPModule):
                    fully_shard(element, **how)
            if elements:
                lists.insert(0, f"each of the {len(elements)} modules in {name or 'the model'}")
    if type(model).forward is nn.Module.forward:
        raise FactoryError(f"the factory's model, a {type(model).__name__}, has no forward")
    fully_shard(model, **how)
    return ", ".join([*lists, "and the root" if lists else "the root"])


def loss_of(output: Any) -> torch.Tensor:
    """The scalar to minimize; see the head of this module.

    Raises:
        FactoryError: nothing in ``output`` has a gradient.
    """
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        loss = output
    else:
        named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        loss = named if isinstance(named, torch.Tensor) else _mean_square(output)
    if loss.dim() != 0 or not loss.requires_grad:
        raise FactoryError("the model's output gives no loss: it needs a scalar, or floating tensors, with a gradient")
    return loss


def _mean_square(output: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            found.append(tensor)
        return tensor

    map_tensors(look, output)
    if not found:
        raise FactoryError(f"the model's output, a {type(output).__name__}, holds no floating-point tensor")
    total = torch.stack([tensor.float().square().sum() for tensor in found]).sum()
    return total / sum(tensor.numel() for tensor in found)


def call(factory: Factory) -> tuple[nn.Module, MakeBatch]:
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2:
        raise FactoryError(f"the factory must return (model, make_batch), but returned {_kind(made)}")
    model, make_batch = made
    if not isinstance(model, nn.Module):
        raise FactoryError(f"the factory must return (model, make_batch), but the model is {_kind(model)}")
    if not callable(make_batch):
        raise FactoryError(f"the factory must return (model, make_batch), but make_batch is {_kind(make_batch)}")
    return model, make_batch


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def arguments(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = map_tensors(lambda tensor: tensor.to(device), batch)
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, dict):
        return (), batch
    raise FactoryError(f"make_batch must return a tuple, a dict or a tensor, but returned {_kind(batch)}")


# -- built-in factories -----------------------------------------------------------------------------------------------


class _NextToken(nn.Module):
    """Mean cross entropy, in nats, of a language model that predicts each token from those before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def debug_llama() -> tuple[nn.Module, MakeBatch]:
    """A factory: a Llama of two small blocks on random bytes, (2, 33) int64 on each rank and step."""
    return language_model("debug", batch=2, length=32)()


def language_model(size: str, batch: int, length: int) -> Factory:
    """A factory: a model of one of ``models.SIZES`` on random tokens, (batch, length + 1) int64 on each rank and step.

    Raises:
        ValueError: there is no such size, or its sequences are shorter.
    """
    from .models import SIZES, Llama

    if size not in SIZES:
        raise ValueError(f"unknown model {size!r}; known are {', '.join(SIZES)}")
    config = SIZES[size]
    if length > config.max_seq:
        raise ValueError(f"sequences of {size} have {config.max_seq} tokens at most, not {length}")

    def make_batch(step: int, rank: int, world: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * world + rank)
        return torch.randint(config.vocab, (batch, length + 1), generator=generator)

    return lambda: (_NextToken(Llama(config)), make_batch)
