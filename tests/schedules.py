"""Makes graphs of schedules that are written as text, for tests.

    "a b /a A=4 /b B=2 -A /-A"

a       launch the gather of module a's parameter
/a      wait for it
A=4     4 s of compute that needs it, if it has been waited for, and the compute before
-A      launch the reduction of what A computed
/-A     wait for it
"""

from __future__ import annotations

from graph_maker import WORLD, GraphMaker
from plain_costs import PlainCosts
from torch.fx import Graph, Node

from fsdp_compile.passes.graph_view import WAIT, Tag, set_tag
from fsdp_compile.passes.torch_compat import c10d, emit

ROWS = 8  # of what gathers bring, reductions take, and compute makes
BYTES = ROWS * 3 * 4
GATHER, REDUCTION = 3.0, 2.0  # seconds


def schedule(text: str, name: str = "batch", group: str = "0", saves: bool = False) -> Graph:
    """The graph of a schedule.

    Args:
        text: as above.
        name: of the input of the first compute; "tangents" makes it a backward.
        group: process group of the reductions; that of the gathers is "0".
        saves: return the shards too, as a forward does whose backward gathers again.
    """
    make = GraphMaker()
    made: dict[str, Node] = {}
    last = make.input(size=(ROWS, 3), name=name)
    letters = sorted(word for word in text.split() if len(word) == 1)
    shards = {word: make.input(size=(ROWS // WORLD, 3), name=f"primals_{word}") for word in letters}
    for word in text.split():
        if word in shards:
            made[word] = emit(make.graph, c10d.all_gather_into_tensor.default, shards[word], WORLD, "0")
        elif word.startswith("/"):
            made[word] = emit(make.graph, WAIT, made[word[1:]])
        elif word.startswith("-"):
            made[word] = emit(make.graph, c10d.reduce_scatter_tensor.default, made[word[1:]], "avg", WORLD, group)
        else:
            gathered = made.get(f"/{word[0].lower()}")
            last = make.made_up(word, (ROWS, 3), *([last] if gathered is None else [last, gathered]))
            made[word[0]] = last
        if "=" not in word:
            set_tag(made[word], _tag(word))
    reduced = [node for word, node in made.items() if word.startswith("/-")]
    return make.finish(last, *reduced, *(shards.values() if saves else ()))


def long_schedule(modules: int, compute: int) -> Graph:
    """A backward of many modules, each of which gathers, computes ``compute`` times and reduces."""
    make = GraphMaker()
    shards = [make.input(size=(ROWS // WORLD, 3), name=f"primals_{module}") for module in range(modules)]
    last = make.input(size=(ROWS, 3), name="tangents_1")
    reduced = []
    for module, shard in enumerate(shards):
        last = make.made_up("A=1", (ROWS, 3), last, make.gather(shard, "a", module))
        for _ in range(compute - 1):
            last = make.made_up("A=1", (ROWS, 3), last)
        reduced.append(make.reduce(last, "a", module))
    return make.finish(*reduced)


def _tag(word: str) -> Tag:
    module = word.strip("/-").lower()
    return Tag(ord(module), module, (f"{module}.weight",), (0,), "reduce" if "-" in word else "unshard")


def seconds_in_name(node: Node) -> float:
    """What a schedule says of a compute node."""
    return float(node.name.split("_")[1])


COSTS = PlainCosts(seconds_in_name, rates=(("all_gather", BYTES / GATHER), ("reduce_scatter", BYTES / REDUCTION)))
