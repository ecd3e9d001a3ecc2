"""Names by which graphs call process groups: alike on all ranks, so that all ranks compile the same graph.

torch names the groups of a mesh dimension one after the other, so that rank 0 calls its own "3" and rank 2 calls its
own, which stands in the same place, "4". A graph holds such a name as a constant.
"""

from __future__ import annotations

import itertools
from weakref import WeakKeyDictionary

import torch.distributed as dist

from . import torch_compat

_numbers = itertools.count()  # ranks build their models in the same order, so they number groups alike
_aliases: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def graph_name(group: dist.ProcessGroup | None) -> str | None:
    """The name of ``group`` in graphs; of a group of all ranks its own, which all ranks know; ``None`` if there is no
    group, or no other rank in it."""
    if group is None or group.size() == 1:
        return None
    if group.size() == dist.get_world_size():
        return group.group_name
    if group not in _aliases:
        _aliases[group] = f"fsdp_compile_{next(_numbers)}"
        torch_compat.register_process_group(_aliases[group], group)
    return _aliases[group]
