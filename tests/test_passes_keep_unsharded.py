"""Which groups stay unsharded by the passes' choice: the best there is for the memory, with equal bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn as nn
from fake_world import Stages, fake_world, graphs_of, skeletons_of
from models import assert_same, shard, train
from ranks import Ranks
from snapshots import assert_snapshot
from torch.utils.checkpoint import CheckpointPolicy
from traced import SmallNet, graphs, of_stage

from fsdp_compile import backend, fully_shard
from fsdp_compile.passes import MemoryProfile, PassConfig, PassContext, copy_graph, profile, regather
from fsdp_compile.passes.graph_view import gathers
from fsdp_compile.passes.keep_unsharded import Item, best

BLOCKS, WIDTH = 6, 64
AGAIN = BLOCKS - 1  # the first one's weight is not needed: its input takes no gradient
WEIGHT = 4 * WIDTH * WIDTH
PLENTY = 1 << 40


@contextmanager
def configured(**choices: object) -> Iterator[None]:
    with backend.configured(**choices):
        yield
    torch.compiler.reset()


# -- the knapsack -----------------------------------------------------------------------------------------------------


def worth(items: Sequence[Item], kept: Sequence[int], most: int) -> tuple[int, int]:
    return min(most, sum(items[index].seconds for index in kept)), -sum(items[index].bytes for index in kept)


def fits(items: Sequence[Item], kept: Sequence[int]) -> bool:
    """The groups kept so far, at each of all groups, kept or not."""
    sums = [sum(items[index].bytes for index in kept if index <= at) for at in range(len(items))]
    return all(taken <= max(item.room, 0) for taken, item in zip(sums, items, strict=True))


@pytest.mark.parametrize("seed", range(200))
def test_no_other_choice_buys_more(seed: int) -> None:
    chance = Random(seed)
    items = [Item(chance.randint(1, 9), chance.randint(0, 9), chance.randint(-2, 30)) for _ in range(8)]
    most = chance.choice([-3, 0, 5, 20, 100])
    choices = [kept for count in range(9) for kept in combinations(range(8), count) if fits(items, kept)]
    found = best(items, most)
    assert found in choices
    assert worth(items, found, max(most, 0)) == max(worth(items, kept, max(most, 0)) for kept in choices)


def test_many_groups_of_different_sizes() -> None:
    """With exact bytes there would be two to the power of 60 sums, as each group is worth what it takes."""
    chance = Random(0)
    sizes = [chance.randint(10**8, 10**9) for _ in range(60)]
    items = [Item(size, size, 10**10) for size in sizes]
    found = best(items, sum(sizes))
    assert fits(items, found)
    assert worth(items, found, sum(sizes))[0] >= 10**10 - 61 * 10**7 - max(sizes)


# -- graphs -----------------------------------------------------------------------------------------------------------


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(BLOCKS)))


def stages_of(hardware: str = "cpu", **choices: object) -> Stages:
    """Of a model whose collectives take far longer than its compute, on most machines."""
    model = Blocks()
    for block in model:
        fully_shard(block)
    with configured(hardware=hardware, **choices):
        return graphs_of(fully_shard(model), torch.ones(2, WIDTH))


def gathered_again(stages: Stages) -> list[str]:
    (backward,) = (graph for stage, graph in stages if stage == "backward after")
    return [param for gather in gathers(backward) for param in gather.tag.params]


def peak_of(stages: Stages) -> int:
    named = dict(stages)
    return MemoryProfile.of([named["forward after"], named["backward after"]]).peak


def test_what_can_be_kept_is_kept_where_collectives_take_longest() -> None:
    with fake_world(size=4):
        assert len(gathered_again(stages_of())) == AGAIN
        assert gathered_again(stages_of(regather="auto", memory_budget=PLENTY)) == []


@pytest.mark.parametrize("blocks", range(AGAIN + 1))
def test_a_budget_for_some_blocks(blocks: int) -> None:
    """Inner ones first: they are kept for the shortest time, and there the least is alive."""
    with fake_world(size=4):
        least = peak_of(stages_of(schedule=False))
        budget = least + blocks * WEIGHT
        stages = stages_of(regather="auto", memory_budget=budget, schedule=False)
    assert peak_of(stages) <= budget
    assert AGAIN - len(gathered_again(stages)) >= blocks


def test_nothing_is_kept_without_need(tmp_path: Path) -> None:
    """On a machine that takes longer to compute than to communicate."""
    slow = str(tmp_path / "slow.toml")
    replace(profile("cpu"), achievable_flops=1e-6).write(slow)
    with fake_world(size=4):
        assert len(gathered_again(stages_of(slow, regather="auto", memory_budget=PLENTY))) == AGAIN


def test_a_second_run_changes_nothing() -> None:
    """What is kept has no free any more, and so is not taken for what must be gathered again."""
    with fake_world(size=4):
        graph = copy_graph(dict(stages_of())["joint before"])
        context = PassContext(PassConfig(regather="auto", memory_budget=PLENTY, hardware="cpu"))
        marks = []
        for _ in range(2):
            regather(graph, context)
            marks.append([(node.name, node.meta.get("recompute")) for node in graph.nodes])
    assert marks[0] == marks[1]
    assert CheckpointPolicy.MUST_SAVE in dict(marks[0]).values()


def test_other_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="regather must be None or 'auto', not 'never'"):
        PassConfig(regather="never")


def test_snapshot() -> None:
    with fake_world(size=4):
        stages = stages_of(regather="auto", memory_budget=PLENTY)
    shown = ("forward after", "backward after")
    assert_snapshot("regather_auto", skeletons_of([(stage, graph) for stage, graph in stages if stage in shown]))


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_bits_are_equal(ranks2: Ranks) -> None:
    counts = ranks2.run(compare)
    assert len(set(counts)) == 1, "ranks kept other groups"
    without, with_choice = counts[0]
    assert with_choice < without


def compare() -> tuple[int, int]:
    """Train eagerly, compiled, and with the choice; returns the backward's gathers without and with it."""
    eager, counts = train(build(), steps=2), []
    for choice in (None, "auto"):
        with configured(regather=choice, memory_budget=PLENTY, hardware="cpu"), graphs() as stages:
            model = build()
            compiled = train(model, torch.compile(model, backend="fsdp_eager", fullgraph=True), steps=2)
        assert_same(eager, compiled)
        (backward,) = of_stage(stages, "backward after")
        counts.append(len(list(gathers(backward))))
    return counts[0], counts[1]


def build() -> nn.Module:
    torch.manual_seed(0)
    return shard(SmallNet(), fully_shard)
