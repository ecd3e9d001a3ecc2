"""Runs one graph for all ranks of a world in lockstep in one process, with collectives that really move data.

Each node is computed for every rank before the next one. A fake process group traces a graph for any world, but its
collectives leave garbage in their outputs; here they have their true results, and garbage only until their wait, so
that a pass that lets compute read too early is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from fsdp_compile.passes import GATHER
from fsdp_compile.passes.graph_view import WAIT
from fsdp_compile.passes.operators import OWN_PART
from fsdp_compile.passes.torch_compat import RESIZE, c10d

Ranks = list[Any]  # one value for each rank
Parts = Mapping[str, Sequence[Sequence[int]]]  # by name of a process group, which ranks are together


def run_on_all_ranks(
    graph: Graph, inputs: Sequence[Sequence[Any]], parts: Parts | None = None
) -> list[tuple[Any, ...]]:
    """Run ``graph`` on ``len(inputs)`` ranks, rank r with ``inputs[r]``; returns the outputs of each rank.

    Frees leave data alone, so that a joint graph that reads freed tensors shows what it is meant to compute.

    Args:
        parts: of process groups that are not of all ranks.
    """
    ranks = range(len(inputs))
    feeds = [iter(of_rank) for of_rank in inputs]
    values: list[dict[Node, Any]] = [{} for _ in ranks]
    pending: dict[int, torch.Tensor] = {}  # by the id of the garbage that stands for it, which `values` keeps alive
    for node in graph.nodes:
        if node.op == "output":
            return [tuple(map_arg(node.args[0], of_rank.__getitem__)) for of_rank in values]
        if node.op == "placeholder":
            results = [next(feed) for feed in feeds]
        else:
            args = [map_arg(node.args, of_rank.__getitem__) for of_rank in values]
            kwargs = [map_arg(node.kwargs, of_rank.__getitem__) for of_rank in values]
            results = _compute(node, args, kwargs, pending, parts or {})
            _check_against_meta(node, results)
        for of_rank, result in zip(values, results, strict=True):
            of_rank[node] = result
    raise AssertionError("the graph has no output")


def _compute(node: Node, args: list[Any], kwargs: list[Any], pending: dict[int, torch.Tensor], parts: Parts) -> Ranks:
    assert node.op == "call_function", f"cannot run {node.format_node()}"
    if node.target in COLLECTIVES:
        results: Ranks = [None for _ in args]
        for part in parts.get(args[0][-1], [range(len(args))]):
            outputs = COLLECTIVES[node.target](*_merged([args[rank] for rank in part], len(part)))
            for rank, output in zip(part, outputs, strict=True):
                results[rank] = map_aggregate(output, lambda result: _launch(result, pending))
                if node.target is c10d.all_reduce_.default:  # who reads what was sent finds garbage as well
                    args[rank][0].copy_(results[rank])
        return results
    if node.target is OWN_PART:
        parted = {rank: part for part in parts.get(args[0][-1], [range(len(args))]) for rank in part}
        return [of_rank[0].chunk(len(parted[rank]))[parted[rank].index(rank)] for rank, of_rank in enumerate(args)]
    if node.target is WAIT:
        return [pending.pop(id(of_rank[0])) for of_rank in args]
    if node.target is RESIZE:
        return [None for _ in args]
    return [node.target(*of_rank, **named) for of_rank, named in zip(args, kwargs, strict=True)]  # type: ignore[operator]


def _merged(args: list[Any], count: int) -> tuple[Any, ...]:
    """What all ranks of one process group send, and what they agree on."""
    how = args[0][1:]
    assert all(of_rank[1:] == how for of_rank in args), "ranks disagree on a collective"
    assert how[-2] == count or not isinstance(how[-2], int), "not the process group's number of ranks"
    return ([of_rank[0] for of_rank in args], *how)


def _all_gather(sent: list[torch.Tensor], *_: Any) -> Ranks:
    return [torch.cat(sent) for _ in sent]


def _all_gather_coalesced(sent: list[list[torch.Tensor]], *_: Any) -> Ranks:
    return [[torch.cat(parts) for parts in zip(*sent, strict=True)] for _ in sent]


def _reduce_scatter(sent: list[torch.Tensor], kind: str, *_: Any) -> Ranks:
    return [part.clone() for part in _reduced(sent, kind).chunk(len(sent))]


def _all_reduce(sent: list[torch.Tensor], kind: str, *_: Any) -> Ranks:
    return [_reduced(sent, kind) for _ in sent]


def _reduced(sent: list[torch.Tensor], kind: str) -> torch.Tensor:
    """Element by element in the order of ranks, so that where in a bucket an element is cannot change its bits."""
    total = sent[0].clone()
    for of_rank in sent[1:]:
        total += of_rank
    if kind == "avg":
        total /= len(sent)
    else:
        assert kind == "sum", kind
    return total


COLLECTIVES: dict[Any, Callable[..., Ranks]] = {
    c10d.all_gather_into_tensor.default: _all_gather,
    GATHER: _all_gather,
    c10d.all_gather_into_tensor_coalesced.default: _all_gather_coalesced,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _all_reduce,
}


def _launch(result: torch.Tensor, pending: dict[int, torch.Tensor]) -> torch.Tensor:
    garbage = torch.full_like(result, float("nan") if result.is_floating_point() else -1)
    pending[id(garbage)] = result
    return garbage


def _check_against_meta(node: Node, results: Ranks) -> None:
    """What a pass wrote into ``meta["val"]`` must be what runs: the compiler generates code from it."""

    def check(result: Any, promised: Any) -> None:
        if isinstance(promised, (list, tuple)):
            for pair in zip(result, promised, strict=True):
                check(*pair)
        elif isinstance(promised, torch.Tensor):
            assert result.shape == promised.shape and result.dtype == promised.dtype, (
                f"{node.format_node()} gives {result.dtype} {tuple(result.shape)} but its meta says "
                f"{promised.dtype} {tuple(promised.shape)}"
            )

    if node.target is not RESIZE:
        for result in results:
            check(result, node.meta["val"])


# -- inputs and outputs -----------------------------------------------------------------------------------------------


def random_inputs(graph: Graph, world: int, seed: int = 0) -> list[list[Any]]:
    """Inputs for each rank, all different; integers are 0 or 1, so that they can index anything."""
    generator = torch.Generator().manual_seed(seed)

    def draw(example: Any) -> Any:
        if not isinstance(example, torch.Tensor):
            return example
        if example.is_floating_point():
            drawn = torch.randn(example.shape, generator=generator).to(example.dtype)
        else:
            drawn = torch.randint(0, 2, example.shape, generator=generator).to(example.dtype)
        if example.is_contiguous():
            return drawn
        # An operator may need just this layout: all inputs of such graphs are dense.
        return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype).copy_(drawn)

    examples = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return [[draw(example) for example in examples] for _ in range(world)]


def flat(nested: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts."""
    leaves: list[Any] = []
    map_aggregate(nested, leaves.append)
    return leaves


def same_bits(left: Any, right: Any) -> bool:
    """Whether two nested structures hold tensors of equal dtypes, shapes and bits, NaNs included."""
    mine, theirs = flat(left), flat(right)
    return len(mine) == len(theirs) and all(_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
