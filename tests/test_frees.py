"""Nothing that a transition makes outlives its last use, though no free is left in the graphs that run.

Operator by operator, real storages die where ``memory`` reckons: views, lists of outputs, parts of a packed reduction,
what is saved for the backward and what is kept unsharded until there. In code by Inductor, memory is given up right
after the last line that reads it.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn as nn
from emitted_code import LAUNCH, body, emitted
from fake_world import fake_world, graphs_of
from test_feature_snapshots import BF16, RANKS, ROWS, WIDTH, features, shard
from torch.fx import Graph, GraphModule

from fsdp_compile import torch_compat
from fsdp_compile.passes import MemoryProfile


@dataclass
class Lives:
    """Notes which nodes have run, and which storages, named by their maker and output, are alive then.

    Attributes:
        alive: by node in the order in which they run, the storages alive when it has.
    """

    alive: dict[str, set[str]] = field(default_factory=dict)
    graphs: int = 0
    _names: dict[int, str] = field(default_factory=dict)  # by the address of a storage that is alive

    def watch(self, module: GraphModule) -> None:
        """Have the graph note each node right after it has run."""
        graph, number = module.graph, self.graphs
        self.graphs += 1
        for node in list(graph.nodes):
            if node.op == "call_function":
                with graph.inserting_after(node):
                    graph.call_function(self._note, (f"{number} {node}", node))

    def _note(self, name: str, result: Any) -> None:
        for index, each in enumerate(result if isinstance(result, (list, tuple)) else [result]):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self._names:
                    self._names[storage._cdata] = f"{name} {index}"
                    weakref.finalize(storage, self._names.pop, storage._cdata)
        self.alive[name] = set(self._names.values())


def reckoned(*graphs: Graph) -> dict[str, set[str]]:
    """The same, as ``memory`` has it; without what graphs are given, and what they leave to the caller."""
    profile = MemoryProfile.of(graphs)
    names = [f"{number} {node}" for number, graph in enumerate(graphs) for node in graph.nodes]
    name_of = dict(zip(profile.nodes, names, strict=True))
    alive: dict[str, set[str]] = {name_of[node]: set() for node in profile.nodes if node.op == "call_function"}
    outputs: Counter[str] = Counter()
    for each in profile.lifetimes:
        maker = name_of[each.maker]
        storage = f"{maker} {outputs[maker]}"
        outputs[maker] += 1
        if each.maker.op == "call_function":
            # At the last node that reads it, it is given up, but it was there; the note is taken a moment later.
            for name in names[each.first : max(each.last, each.first + 1)]:
                alive.get(name, set()).add(storage)
    return alive


def check_lives(build: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> None:
    """Train one step for real, and assert that no storage is alive at a node where it is not reckoned to be."""
    lives, boxed = Lives(), torch_compat.boxed

    def watched(module: GraphModule) -> Any:
        lives.watch(module)
        return boxed(module)

    monkeypatch.setattr(torch_compat, "boxed", watched)
    with fake_world(RANKS):
        stages = dict(graphs_of(build(**kwargs), torch.ones(ROWS, WIDTH)))
    expected = reckoned(stages["forward after"], stages["backward after"])
    lives.alive = {name: alive for name, alive in lives.alive.items() if "announce" not in name}  # added later
    assert expected.keys() == lives.alive.keys()
    made = set().union(*expected.values())  # and not given, as what a view of an input shows
    assert made <= set().union(*lives.alive.values())
    late = {name: (alive & made) - expected[name] for name, alive in lives.alive.items()}
    assert not any(late.values()), {name: storages for name, storages in late.items() if storages}


@features
def test_storages_of_features(build: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    check_lives(build, monkeypatch, mp_policy=BF16)


def test_what_is_kept_unsharded_dies_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    check_lives(shard, monkeypatch, reshard_after_forward=False)


def uneven(**kwargs: Any) -> nn.Module:
    """What is read of each parameter is a view, without the padding; what is reduced is a copy with padding."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH), nn.LayerNorm(WIDTH))
    return shard(layers, **kwargs)


def test_views_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    check_lives(uneven, monkeypatch)


class Viewed(nn.Linear):
    """Its backward needs a view of another view of the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.view(2, -1, WIDTH).transpose(0, 1).reshape(WIDTH, WIDTH)[:, : WIDTH // 2]
        return torch.tanh(super().forward(x) + torch.tanh(x[:, : WIDTH // 2] @ weight.t()))


def test_views_of_views(monkeypatch: pytest.MonkeyPatch) -> None:
    check_lives(lambda: shard(nn.Sequential(*(Viewed(WIDTH, WIDTH) for _ in range(3)))), monkeypatch)


# -- code by Inductor -------------------------------------------------------------------------------------------------


GIVES_UP = re.compile(r"(?:.*; )?del (\w+)(?:  # reuse)?$")


def given_up_late(code: str) -> list[str]:
    """Names of memory that is still there when something runs after the last line that reads it.

    What a launch takes must stay until the wait, and is not looked at. Memory that Inductor gives to another buffer as
    soon as that is made is not counted: it holds that back only where its own peak is no higher for it.
    """
    lines = body(code)
    sent = set(re.findall(r"\w+", " ".join(match[3] for match in map(LAUNCH.match, lines) if match)))
    late, last, ran = [], {}, 0
    for line in lines:
        given_up = GIVES_UP.match(line)
        if given_up and "# reuse" not in line and given_up[1] not in sent and last.get(given_up[1], ran) < ran:
            late.append(given_up[1])
        if not given_up and not line.startswith("assert_"):
            ran += 1
            last |= dict.fromkeys(re.findall(r"\w+", line), ran)
    return late


@pytest.mark.parametrize(
    "kwargs", [{}, {"mp_policy": BF16}, {"reshard_after_forward": False}], ids=["f32", "bf16", "kept"]
)
@pytest.mark.parametrize("build", [shard, uneven])
def test_code(build: Callable[..., nn.Module], kwargs: dict[str, Any]) -> None:
    with fake_world(RANKS):
        codes = emitted(build(**kwargs), torch.ones(ROWS, WIDTH))
    for code in codes:
        assert any(map(GIVES_UP.match, body(code)))
        assert given_up_late(code) == []
