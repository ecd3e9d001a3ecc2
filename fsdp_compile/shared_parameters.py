"""Parameters under several names: one parameter for all its owners, if they are in one group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn

import torch.nn as nn

if TYPE_CHECKING:
    from .fsdp_param import FSDPParam

_origins = itertools.count()


def shared_owners(modules: list[nn.Module], params: list[nn.Parameter]) -> Iterator[list[tuple[nn.Module, str]]]:
    """For each of ``params``, every (module, name) under ``modules`` that holds it, in order of traversal."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {param: [] for param in params}
    seen: dict[nn.Module, None] = {}
    for root in modules:
        for module in root.modules():
            seen.setdefault(module)
    for module in seen:
        for name, param in module._parameters.items():
            if param in owners:
                owners[param].append((module, name))
    return iter(owners.values())


def origin_of(param: nn.Parameter) -> int:
    """A number that names the original parameter ``param``, to recognize it in other modules after it was sharded."""
    if not hasattr(param, "_fsdp_origin"):
        param._fsdp_origin = next(_origins)  # type: ignore[attr-defined]
    return param._fsdp_origin  # type: ignore[attr-defined]


def check_ties(sharded: Iterable[FSDPParam], params: dict[nn.Parameter, str]) -> None:
    """Refuse a parameter that two groups share: it would become two parameters, which then go apart unnoticed.

    Args:
        sharded: parameters that are in a group already, in the same tree.
        params: parameters that are to make a group now, with their names.

    Raises:
        ValueError: two groups share a parameter.
    """
    taken: dict[int, FSDPParam] = {}
    for param in sharded:
        other = taken.setdefault(param.origin, param)
        if other is not param:
            _refuse_tie(param.name, other.name)
    for original, name in params.items():
        if origin_of(original) in taken:
            _refuse_tie(name, taken[origin_of(original)].name)


def _refuse_tie(name: str, other: str) -> NoReturn:
    raise ValueError(
        f"Parameter {name} is shared with {other}, which an earlier fully_shard has put in another group. Put all "
        "modules that share a parameter in one group, with fully_shard([module, other_module]), or leave them to the "
        "module above both."
    )
