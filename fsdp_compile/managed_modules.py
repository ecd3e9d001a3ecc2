"""Which modules and tensors a call of ``fully_shard`` is about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn as nn

from .fsdp_module import FSDPModule


def without_descendants(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """``modules`` without duplicates and without those that lie below another of them."""
    if not isinstance(modules, (list, tuple)) or not all(isinstance(module, nn.Module) for module in modules):
        raise TypeError(f"fully_shard expects a module or a list of modules, not {modules!r:.100}")
    unique = list(dict.fromkeys(modules))
    below = {child for module in unique for child in module.modules() if child is not module}
    return [module for module in unique if module not in below]


def managed_tensors(
    modules: list[nn.Module], ignored: set[nn.Parameter]
) -> tuple[dict[nn.Parameter, str], list[torch.Tensor]]:
    """Parameters, with their names, and buffers of ``modules`` that no earlier ``fully_shard`` on a submodule took."""
    params: dict[nn.Parameter, str] = {}
    buffers: dict[torch.Tensor, None] = {}
    for root in modules:
        for prefix, module in _managed_modules(root):
            for name, param in module._parameters.items():
                if param is not None and param not in ignored:
                    params.setdefault(param, f"{prefix}.{name}" if prefix else name)
            buffers.update((buffer, None) for buffer in module._buffers.values() if buffer is not None)
    return params, list(buffers)


def _managed_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``root`` and the modules below it, named, down to those already under ``fully_shard``."""
    seen = {root}
    stack = [("", root)]
    while stack:
        prefix, module = stack.pop()
        yield prefix, module
        children = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in module.named_children()
            if child not in seen and not isinstance(child, FSDPModule)
        ]
        seen.update(child for _, child in children)
        stack.extend(reversed(children))
