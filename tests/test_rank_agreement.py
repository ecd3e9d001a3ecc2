"""Ranks that are about to launch different collectives all say so, and name the first; ranks that agree go on."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from emitted_code import emitted
from fake_world import fake_world, graphs_of
from ranks import Ranks

from fsdp_compile import backend, fully_shard, rank_agreement
from fsdp_compile.passes import PassContext, announce
from fsdp_compile.passes.announce import ANNOUNCE

WIDTH = 8
LAUNCH = "all_gather [root] float32, 4 B"


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def sharded(count: int = 2) -> nn.Module:
    model = Blocks(count)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def steps(model: nn.Module, sizes: list[int]) -> list[float]:
    """Losses of steps with so many rows."""
    torch.compiler.reset()
    compiled = torch.compile(model, backend="fsdp_eager", fullgraph=True, dynamic=False)
    losses = []
    for rows in sizes:
        loss = compiled(torch.ones(rows, WIDTH)).mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def said(count: int = 2, rows: int = 3, **choices: Any) -> str:
    """What the error of a step says; empty if there is none."""
    with backend.configured(**choices):
        try:
            steps(sharded(count), [rows])
        except RuntimeError as error:
            return str(error)
    return ""


def other_buckets() -> str:
    return said(bucket="module" if dist.get_rank() else "none")


def other_sizes() -> str:
    return said(count=1 + dist.get_rank())


def other_order() -> str:
    """The same collectives, which one rank runs in another order."""
    torch.compiler.reset()
    model = sharded()
    if dist.get_rank():
        model.blocks = nn.ModuleList(reversed(model.blocks))
    try:
        steps(model, [3])
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("differently", [other_buckets, other_sizes, other_order])
def test_all_ranks_say_the_same(ranks2: Ranks, differently: Any) -> None:
    first, second = ranks2.run(differently)
    assert first == second and "launch different collectives" in first


def test_the_first_that_differs_is_named(ranks2: Ranks) -> None:
    text, _ = ranks2.run(other_sizes)
    number, first, second = text.splitlines()[:3]
    assert number.endswith("The first that differs is number 2:")
    assert first == "  rank 0: no more" and second.startswith("  rank 1: all_gather [blocks.1] float32, ")


def after_an_error() -> list[float]:
    other_sizes()
    return steps(sharded(), [3])


def test_what_agrees_runs_after_an_error(ranks2: Ranks) -> None:
    first, second = ranks2.run(after_an_error)
    assert first == second


def own_sizes() -> tuple[list[float], int]:
    """One rank compiles more often than the other."""
    compared: list[str] = []
    compare = rank_agreement._compare

    def count(group: dist.ProcessGroup, history: str, skeleton: str) -> str:
        compared.append(skeleton)
        return compare(group, history, skeleton)

    rank_agreement._compare = count
    try:
        losses = steps(sharded(3), [3, 3, 3, 3] if dist.get_rank() else [3, 4, 5, 3])
    finally:
        rank_agreement._compare = compare
    return losses, len(compared)


def test_more_compiles_on_one_rank_do_no_harm(ranks2: Ranks) -> None:
    """What is launched is compared once for forward and once for backward, however often it runs."""
    assert [compared for _, compared in ranks2.run(own_sizes)] == [2, 2]


def alone() -> tuple[str, float]:
    """One rank comes, in a process group of little patience."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    began = time.monotonic()
    if dist.get_rank():
        return "", 0.0
    try:
        rank_agreement.agree({group.group_name: LAUNCH})
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_a_rank_that_does_not_come_is_named(ranks2: Ranks) -> None:
    (text, seconds), _ = ranks2.run(alone)
    assert text.startswith("Rank 0 is about to run a graph that is new to it, and rank 1 of process group ")
    assert "did not come to it within 0:00:02" in text and text.endswith(LAUNCH)
    assert 1.5 < seconds < 20


def said_in(group: dist.ProcessGroup, *skeletons: str) -> str:
    """What comes of running graphs with these launches."""
    try:
        for skeleton in skeletons:
            rank_agreement.agree({group.group_name: skeleton})
    except RuntimeError as error:
        return str(error)
    return ""


def late() -> str:
    """One rank comes when the time of the other is up."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank():
        time.sleep(5)
    return said_in(group, LAUNCH)


def test_a_rank_that_comes_late_raises_the_same(ranks2: Ranks) -> None:
    first, second = ranks2.run(late)
    assert first == second and "did not come" in first


def other_way() -> str:
    """Ranks run what both know in another order, and then something new."""
    ways = ["a", "b", "a", "b", "c"], ["a", "b", "b", "a", "c"]
    return said_in(dist.new_group([0, 1]), *ways[dist.get_rank()])


def test_another_order_is_seen_with_the_next_new_graph(ranks2: Ranks) -> None:
    first, second = ranks2.run(other_way)
    assert first == second and first.startswith("Ranks 0, 1 of process group ") and "in another order" in first


def with_keys_of_another() -> list[str]:
    """As in a process group made anew under the name of one before, whose keys are still in the store."""
    group, said = dist.new_group([0, 1]), []
    for graphs in (("a", "a"), ("b", "c"), ("d", "d")):
        rank_agreement._pasts.clear()
        said.append(said_in(group, graphs[dist.get_rank()]))
    return said


def test_old_keys_in_the_store_are_not_taken_for_new_ones(ranks2: Ranks) -> None:
    for equal, different, again in ranks2.run(with_keys_of_another):
        assert not equal and not again and "different collectives" in different


def test_emitted_code_compares_before_it_launches() -> None:
    with fake_world(2):
        for code in emitted(sharded(), torch.ones(3, WIDTH)):
            launched = re.search(
                r"torch\.ops\.(_c10d_functional|fsdp_passes)\.(all_gather|reduce_scatter|gather)", code
            )
            assert launched and 0 < code.index("fsdp_passes.announce") < launched.start()


def told(rank: int = 0, count: int = 2, rows: int = 3) -> list[dict[str, str]]:
    """What forward and backward tell listeners, by process group."""
    found: list[dict[str, str]] = []
    with fake_world(2, rank):
        stages = dict(graphs_of(sharded(count), torch.ones(rows, WIDTH)))
    for part in ("forward", "backward"):
        graph = stages[f"{part} after"]
        announce(graph, PassContext())
        (mark,) = graph.find_nodes(op="call_function", target=ANNOUNCE)
        *_, groups, skeletons = mark.args
        found.append(dict(zip(groups, skeletons, strict=True)))
    return found


def test_what_is_said_is_of_all_ranks() -> None:
    """Nothing in it is of one rank, or of the data."""
    assert told() == told(rank=1) == told(rows=4) != told(count=3)


def test_what_is_said() -> None:
    forward, _ = told()
    size = (WIDTH * WIDTH + WIDTH) // 2 * 4
    lines = next(iter(forward.values())).splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        f"all_gather [blocks.{block}] float32, {size} B of 2 parameters" for block in range(2)
    ]
    assert lines[0][-10:] != lines[1][-10:], "members have other names"
