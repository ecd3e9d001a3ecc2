"""Tensors inside the containers that forwards take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

Fn = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(fn: Fn, value: Any) -> Any:
    """Replace every tensor in nested tuples, lists, sets, dicts and dataclasses by ``fn(tensor)``.

    A tensor that occurs twice is replaced by one result, since forwards ask ``key is value``. A container is copied
    only if something in it changed, so that objects which hold no such tensor keep their identity. Anything else is
    returned as it is.
    """
    done: list[tuple[torch.Tensor, torch.Tensor]] = []

    def once(tensor: torch.Tensor) -> torch.Tensor:
        for old, new in done:
            if old is tensor:
                return new
        done.append((tensor, fn(tensor)))
        return done[-1][1]

    return _map(once, value)[0]


def _map(fn: Fn, value: Any) -> tuple[Any, bool]:
    """The new value and whether it differs; told by a flag, as the compiler cannot trace ``is`` between containers."""
    if isinstance(value, torch.Tensor):
        new = fn(value)
        return new, new is not value
    if isinstance(value, PackedSequence):  # a named tuple whose other tensors have to stay as they are
        data = fn(value.data)
        return value._replace(data=data), data is not value.data
    if isinstance(value, dict):
        return _map_dict(fn, value)
    if isinstance(value, (set, frozenset)):
        members = [_map(fn, item) for item in value]
        changed = any(changed for _, changed in members)
        return (type(value)(member for member, _ in members), True) if changed else (value, False)
    if isinstance(value, (list, tuple)):
        items = [_map(fn, item) for item in value]
        if not any(changed for _, changed in items):
            return value, False
        new_items = [item for item, _ in items]
        return (type(value)(*new_items) if hasattr(value, "_fields") else type(value)(new_items)), True
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(fn, value)
    return value, False


def _map_dict(fn: Fn, value: dict[Any, Any]) -> tuple[Any, bool]:
    items = {key: _map(fn, item) for key, item in value.items()}
    if not any(changed for _, changed in items.values()):
        return value, False
    new_items = {key: item for key, (item, _) in items.items()}
    if type(value) is dict:
        return new_items, True
    if dataclasses.is_dataclass(value):  # such as the output classes of Hugging Face: dict and dataclass at once
        return type(value)(**new_items), True
    if type(value) is OrderedDict:
        return OrderedDict(new_items), True
    copied = copy.copy(value)  # its constructor may take something else, as that of defaultdict
    copied.update(new_items)
    return copied, True


def _map_dataclass(fn: Fn, value: Any) -> tuple[Any, bool]:
    items = {field.name: _map(fn, getattr(value, field.name)) for field in dataclasses.fields(value)}
    changes = {name: item for name, (item, changed) in items.items() if changed}
    return (dataclasses.replace(value, **changes), True) if changes else (value, False)


def cast_floating_point(dtype: torch.dtype, value: Any) -> Any:
    """Cast every floating-point tensor in ``value`` to ``dtype``; integers, bools and the rest stay as they are."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, value)


def tensors_requiring_grad(value: Any) -> list[torch.Tensor]:
    """All tensors in ``value`` that require grad, each once, in order."""
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(look, value)
    return found
