"""Tensors inside the containers that forwards take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Replace every tensor in nested tuples, lists, dicts and dataclasses by ``fn(tensor)``.

    A container is copied only if something in it changed, so that objects which hold no such tensor keep their
    identity. Anything else is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return _map_dict(fn, value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(fn, value)
    return value


def _map_dict(fn: Callable[[torch.Tensor], torch.Tensor], value: dict[Any, Any]) -> dict[Any, Any]:
    items = {key: map_tensors(fn, item) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        return items
    if dataclasses.is_dataclass(value):  # such as the output classes of Hugging Face: dict and dataclass at once
        return type(value)(**items)  # type: ignore[return-value]
    return type(value)(items)


def _map_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = map_tensors(fn, old)
        if new is not old:
            changed[field.name] = new
    return dataclasses.replace(value, **changed) if changed else value


def cast_floating_point(dtype: torch.dtype, value: Any) -> Any:
    """Cast every floating-point tensor in ``value`` to ``dtype``; integers, bools and the rest stay as they are."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, value)


def tensors_requiring_grad(value: Any) -> list[torch.Tensor]:
    """All tensors in ``value`` that require grad, in order."""
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(look, value)
    return found
