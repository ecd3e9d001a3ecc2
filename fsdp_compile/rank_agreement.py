"""Ranks compare what a graph is about to launch, before they launch it for the first time.

    rank 0   compare A ─ graph A ─ compare B ─ graph B ─ graph A ─ graph B ─ compare C ─ error
    rank 1   compare A ─ graph A ─ compare B ─ graph B ─ graph A ─ graph B ─ compare D ─ the same error

Ranks that launch unlike collectives hang, or mix up each other's data. Those that run equal graphs come to what is new
at the same point, whoever compiled when, or not at all because a cache had it; so the n-th comparison of a process
group is of the same graph on all its ranks. What is known costs a look-up. What has run since the last comparison is
compared as well, by a hash. All goes through the group's store, not through collectives, and ends when the time of the
process group is up. Each process group compares for itself: ranks that share none with those that differ are not told.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from weakref import WeakKeyDictionary

import torch.distributed as dist

from . import torch_compat

KINDS = 4  # different graphs that an error shows
UNTIL_READ = 10.0  # seconds for which a rank that fails keeps the store for others, if it is in this process


@dataclass
class _Past:
    """What has run in a process group: each graph's digest, by its skeleton, and a hash of all in their order."""

    digests: dict[str, str] = field(default_factory=dict)
    history: str = ""


_pasts: WeakKeyDictionary[dist.ProcessGroup, _Past] = WeakKeyDictionary()


def agree(launches: Mapping[str, str]) -> None:
    """Compare what this rank is about to launch with the other ranks, unless it has been compared.

    Args:
        launches: by name of the process group a line for each collective.

    Raises:
        RuntimeError: ranks of a process group differ, or some have not come in its time; all its ranks raise.
    """
    faults = [_agree_in(torch_compat.process_group(name), skeleton) for name, skeleton in launches.items()]
    for fault in filter(None, faults):
        raise RuntimeError(fault)


def _agree_in(group: dist.ProcessGroup, skeleton: str) -> str:
    """What is wrong, or nothing."""
    past = _pasts.setdefault(group, _Past())
    if skeleton not in past.digests:
        fault = _compare(group, past.history, skeleton)
        if fault:
            past.history = ""
            return fault
        past.digests[skeleton] = _hash(skeleton)
    past.history = _hash(past.history + past.digests[skeleton])
    return ""


def _compare(group: dist.ProcessGroup, history: str, skeleton: str) -> str:
    """What is wrong, alike on all ranks, or nothing.

    The last rank to come gives the verdict, or the first whose time is up.
    """
    store, rank, size = _store_of(group), group.rank(), group.size()
    if store is None:
        return ""
    # The store counts, as it may outlive the process group and serve another of the same name.
    store = dist.PrefixStore(str(store.add(f"comparisons of rank {rank}", 1)), store)
    store.set(f"digest {rank}", _hash(history + skeleton))
    if store.add("came", 1) == size:
        digests = _get_all(store, [f"digest {each}" for each in range(size)])
        kinds = [digests.index(each) for each in dict.fromkeys(digests)]
        store.compare_set("verdict", "", json.dumps({"ranks": kinds[:KINDS]}))
    try:
        store.wait(["verdict"], torch_compat.timeout_of(group))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # not every store has a class of its own for it
        store.compare_set("verdict", "", json.dumps({"missing": _missing(store, group, skeleton)}))
    verdict = json.loads(store.get("verdict"))
    if "missing" in verdict:
        return str(verdict["missing"])
    if len(verdict["ranks"]) == 1:
        return ""
    if rank in verdict["ranks"]:
        store.set(f"skeleton {rank}", skeleton)
    skeletons = _get_all(store, [f"skeleton {each}" for each in verdict["ranks"]])
    _wait_for_readers(store, size)
    return _difference(group, dict(zip(verdict["ranks"], skeletons, strict=True)))


def _store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The group's store by a connection of its own, as others should not wait for us; ``None`` where there is none."""
    try:
        if group.size() == 1 or dist.get_backend(group) == "fake":
            return None
        return dist.PrefixStore("fsdp_compile", group.get_group_store().clone())  # type: ignore[attr-defined]
    except (RuntimeError, ValueError):  # MPI, and groups that users write
        return None


def _get_all(store: dist.Store, keys: list[str]) -> list[str]:
    has_many = store.has_extended_api()  # type: ignore[attr-defined]
    values: Iterable[bytes] = store.multi_get(keys) if has_many else map(store.get, keys)  # type: ignore[attr-defined]
    return [value.decode() for value in values]


def _wait_for_readers(store: dist.Store, size: int) -> None:
    """The store may be in the first of the ranks that are about to fail."""
    deadline = time.monotonic() + UNTIL_READ
    read = store.add("read", 1)
    while read < size and time.monotonic() < deadline:
        time.sleep(0.05)
        read = store.add("read", 0)


def _difference(group: dist.ProcessGroup, skeletons: dict[int, str]) -> str:
    """The first collective that is not the same."""
    ranks = [dist.get_global_rank(group, rank) for rank in skeletons]
    for number, lines in enumerate(zip_longest(*(each.splitlines() for each in skeletons.values())), 1):
        if len(set(lines)) > 1:
            said = "".join(f"\n  rank {rank}: {line or 'no more'}" for rank, line in zip(ranks, lines, strict=True))
            return (
                f"Ranks are about to run graphs that launch different collectives in process group {group.group_name}. "
                f"The first that differs is number {number}:{said}\n"
                "Models, configurations of the passes, graph breaks and the ways through the forward must be the same "
                "on all ranks"
            )
    return (
        f"Ranks {', '.join(map(str, ranks))} of process group {group.group_name} have run different graphs, or the "
        "same ones in another order, since they last compared. The ways through the forward must be the same on all "
        "ranks"
    )


def _missing(store: dist.Store, group: dist.ProcessGroup, skeleton: str) -> str:
    absent = [rank for rank in range(group.size()) if not store.check([f"digest {rank}"])]
    ranks = ", ".join(str(dist.get_global_rank(group, rank)) for rank in absent)
    return (
        f"Rank {dist.get_rank()} is about to run a graph that is new to it, and rank {ranks} of process group "
        f"{group.group_name} did not come to it within {torch_compat.timeout_of(group)}: they have died, or run "
        f"something else, a module eagerly say. The graph first launches {skeleton.splitlines()[0]}"
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
