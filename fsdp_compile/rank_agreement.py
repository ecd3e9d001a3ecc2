"""Ranks compare what a graph is about to launch, before they launch it for the first time.

    rank 0   compare A ─ graph A ─ compare B ─ graph B ─ graph A ─ graph B ─ compare C ─ error
    rank 1   compare A ─ graph A ─ compare B ─ graph B ─ graph A ─ graph B ─ compare D ─ the same error

Ranks that launch unlike collectives hang, or mix up each other's data. Those that run equal graphs come to what is new
at the same point, whoever compiled when, or not at all because a cache had it; so the n-th comparison of a process
group is of the same graph on all its ranks, and costs nothing once all is known. It goes through the group's store, not
through collectives, and ends when the time of the process group is up.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import zip_longest
from weakref import WeakKeyDictionary

import torch.distributed as dist

from . import passes, torch_compat


@dataclass
class _Past:
    """What has been compared in a process group."""

    comparisons: int = 0
    agreed: set[str] = field(default_factory=set)


_pasts: WeakKeyDictionary[dist.ProcessGroup, _Past] = WeakKeyDictionary()


def agree(group_name: str, skeleton: str) -> None:
    """Compare what this rank is about to launch in a process group with its other ranks, unless it has been compared.

    Args:
        group_name: of the process group.
        skeleton: a line for each collective.

    Raises:
        RuntimeError: ranks differ, and then all raise; or some have not come in the time of the process group.
    """
    group = torch_compat.process_group(group_name)
    past = _pasts.setdefault(group, _Past())
    if skeleton in past.agreed:
        return
    past.comparisons += 1
    if group.size() > 1 and dist.get_backend(group) != "fake":
        _compare(group, past.comparisons, skeleton)
    past.agreed.add(skeleton)


def _compare(group: dist.ProcessGroup, number: int, skeleton: str) -> None:
    # A connection of its own: whoever else uses the store should not wait for us.
    store = dist.PrefixStore(f"fsdp_compile/{number}", group.get_group_store().clone())  # type: ignore[attr-defined]
    rank, size = group.rank(), group.size()
    store.set(f"digest {rank}", hashlib.sha256(skeleton.encode()).hexdigest())
    if store.add("came", 1) == size:
        digests = [store.get(f"digest {each}") for each in range(size)]
        store.set("first of a kind", json.dumps([digests.index(each) for each in dict.fromkeys(digests)]))
    try:
        store.wait(["first of a kind"], torch_compat.timeout_of(group))
    except RuntimeError as error:  # torch has no other class for it
        raise RuntimeError(_missing(store, group, skeleton)) from error
    firsts = json.loads(store.get("first of a kind"))
    if len(firsts) > 1:
        if rank in firsts:
            store.set(f"skeleton {rank}", skeleton)
        raise RuntimeError(_difference(group, {each: store.get(f"skeleton {each}").decode() for each in firsts}))


def _difference(group: dist.ProcessGroup, skeletons: dict[int, str]) -> str:
    """The first collective that is not the same, alike on all ranks."""
    ranks = [_in_world(group, rank) for rank in skeletons]
    for number, lines in enumerate(zip_longest(*(each.splitlines() for each in skeletons.values())), 1):
        if len(set(lines)) > 1:
            said = "".join(f"\n  rank {rank}: {line or 'no more'}" for rank, line in zip(ranks, lines, strict=True))
            return (
                f"Ranks are about to run graphs that launch different collectives in process group {group.group_name}. "
                f"The first that differs is number {number}:{said}\n"
                "Models, configurations of the passes and the ways through the forward must be the same on all ranks"
            )
    raise AssertionError("skeletons of different digests differ")


def _missing(store: dist.Store, group: dist.ProcessGroup, skeleton: str) -> str:
    absent = [rank for rank in range(group.size()) if not store.check([f"digest {rank}"])]
    ranks = ", ".join(str(_in_world(group, rank)) for rank in absent)
    return (
        f"Rank {dist.get_rank()} is about to run a graph that is new to it, and rank {ranks} of process group "
        f"{group.group_name} did not come to it within {torch_compat.timeout_of(group)}: they have died, or run "
        f"something else. The graph first launches {skeleton.splitlines()[0]}"
    )


def _in_world(group: dist.ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)


passes.listen(agree)
