"""Which casts, divisions and copies become one: in small graphs made by hand, in Llama's, and in code by Inductor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from emitted_code import body, check_memory, emitted
from fake_world import fake_world, graphs_of
from graph_maker import WORLD, GraphMaker, aten, count, run_pass
from simulated_ranks import same_bits
from torch.fx import Graph, Node

from fsdp_compile import MixedPrecisionPolicy, passes
from fsdp_compile.models import SIZES, Llama, shard_llama
from fsdp_compile.passes import MemoryProfile, PassContext, Report, Traffic, bucket, fuse_copies, teach_inductor
from fsdp_compile.passes.graph_view import UNSHARD, Tag, gathers, reductions, set_tag
from fsdp_compile.passes.operators import PACK
from fsdp_compile.passes.torch_compat import c10d, emit

CAST = torch.ops.prims.convert_element_type.default
F32, BF16 = torch.float32, torch.bfloat16


def fused(make: GraphMaker, *outputs: Node) -> Graph:
    """A graph in buckets after the pass, which must not change what it computes, nor raise its peak."""
    graph = make.finish(*outputs)
    bucket(graph, PassContext())
    peak = MemoryProfile.of([graph]).peak
    before, after = run_pass(fuse_copies, graph)
    assert same_bits(before, after)
    assert MemoryProfile.of([graph]).peak <= peak
    return graph


# -- the operator -----------------------------------------------------------------------------------------------------

TENSORS = [(4, 3), (8,), (4, 2, 5), (0, 3)]


@pytest.mark.parametrize(("before", "after"), [*product((F32, BF16, torch.float16), repeat=2)], ids=str)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_packing(before: torch.dtype, after: torch.dtype, rows: int, divisor: float) -> None:
    tensors = [torch.randn(size).to(before) for size in TENSORS]
    tensors.append(torch.randn(5, 8).to(before).t())
    packed = PACK(tensors, rows, after, divisor)
    assert same_bits(packed, plain_packing(tensors, rows, after, divisor))


def test_packing_is_a_proper_operator() -> None:
    torch.library.opcheck(PACK, ([torch.randn(4, 3), torch.randn(8)], 4, BF16, 3.0))


def plain_packing(tensors: list[torch.Tensor], rows: int, dtype: torch.dtype, divisor: float) -> torch.Tensor:
    cast = [tensor.to(dtype) for tensor in tensors]
    divided = [tensor if divisor == 1 else tensor / divisor for tensor in cast]
    length = sum(tensor.numel() for tensor in tensors) // rows
    return torch.cat([tensor.reshape(rows, tensor.numel() // rows) for tensor in divided], 1).reshape(rows * length)


def test_packing_by_inductor() -> None:
    """Inductor divides before it rounds to a smaller dtype, here as everywhere, so that is left out."""
    teach_inductor()
    tensors = [torch.randn(4, 3), torch.randn(8), torch.randn(5, 8).t()]
    for dtype, divisor in ((F32, 1.0), (F32, 3.0), (BF16, 1.0)):
        compiled = torch.compile(lambda *each, to=dtype, by=divisor: PACK(each, 4, to, by), fullgraph=True)
        assert same_bits(compiled(*tensors), PACK(tensors, 4, dtype, divisor))


# -- gathers ----------------------------------------------------------------------------------------------------------


def cast(make: GraphMaker, source: Node, param: str, dtype: torch.dtype = BF16) -> Node:
    node = emit(make.graph, CAST, source, dtype)
    set_tag(node, Tag(0, "", (param,), (ord(param) - ord("a"),), UNSHARD))
    return node


def test_casts_of_shards_are_one() -> None:
    make = GraphMaker()
    shards = {"a": make.input(size=(4, 3)), "b": make.input(size=(8,)), "c": make.input(size=(4, 2, 5))}
    wholes = [make.gather(cast(make, shard, param), param) for param, shard in shards.items()]
    graph = fused(make, *map(make.double, wholes))
    assert count(graph, PACK) == 1 and not count(graph, CAST)
    (gather,) = gathers(graph)
    assert gather.tag.params == ("a", "b", "c")
    assert [each.tag.params for each in gather.params] == [("a",), ("b",), ("c",)]


def test_casts_to_several_dtypes_are_one_each() -> None:
    make = GraphMaker()
    dtypes = {"a": BF16, "b": torch.float64, "c": BF16, "d": torch.float64, "e": torch.float16}
    wholes = [make.gather(cast(make, make.input(), param, dtype), param) for param, dtype in dtypes.items()]
    graph = fused(make, *map(make.double, wholes))
    assert (count(graph, PACK), count(graph, CAST), len(list(gathers(graph)))) == (2, 1, 1)


@pytest.mark.parametrize("casts", ["", "a"])
def test_what_needs_no_cast_is_not_copied(casts: str) -> None:
    """A single cast is a single copy."""
    make = GraphMaker()
    for_a = make.input()
    shards = {"a": cast(make, for_a, "a") if casts else for_a, "b": make.input(dtype=BF16 if casts else F32)}
    graph = fused(make, *(make.double(make.gather(shard, param)) for param, shard in shards.items()))
    assert not count(graph, PACK) and count(graph, CAST) == len(casts)
    assert len(list(gathers(graph))) == 1


def test_a_cast_that_something_else_reads_stays() -> None:
    make = GraphMaker()
    casts = [cast(make, make.input(), param) for param in "abc"]
    read = make.double(casts[0])
    graph = fused(
        make, read, *(make.double(make.gather(node, param)) for node, param in zip(casts, "abc", strict=True))
    )
    assert count(graph, PACK) == count(graph, CAST) == 1


def test_casts_that_move_to_another_device_stay() -> None:
    make = GraphMaker()
    moved = []
    for param in "ab":
        node = make.graph.call_function(aten._to_copy.default, (make.input(),), {"dtype": BF16, "device": "meta"})
        node.meta["val"] = torch.empty(4, 3, dtype=BF16, device="meta")
        set_tag(node, Tag(0, "", (param,), (ord(param) - ord("a"),), UNSHARD))
        moved.append(node)
    tag = Tag(0, "", ("a", "b"), (0, 1), UNSHARD)
    start = make.graph.call_function(c10d.all_gather_into_tensor_coalesced.default, (moved, WORLD, "0"))
    set_tag(start, tag)
    graph = make.finish(start)
    assert fuse_copies(graph, PassContext()).changes == 0


# -- gradients --------------------------------------------------------------------------------------------------------


def divided(make: GraphMaker, source: Node, param: str, by: float = 3.0) -> Node:
    return make._tagged(emit(make.graph, aten.div.Tensor, source, by), param, 0)


def padded(make: GraphMaker, source: Node, param: str, value: float = 0.0) -> Node:
    return make._tagged(emit(make.graph, aten.constant_pad_nd.default, source, [0, 0, 0, 2], value), param, 0)


def wider(make: GraphMaker, param: str) -> Node:
    return make.cast(make.input(dtype=BF16), F32, param)


DIVIDE, PAD = aten.div.Tensor, aten.constant_pad_nd.default
PREPARATIONS: dict[str, tuple[Callable[[GraphMaker, str], Node], list[object]]] = {
    "cast": (lambda make, p: wider(make, p), []),
    "divided": (lambda make, p: divided(make, make.input(), p), []),
    "both": (lambda make, p: divided(make, wider(make, p), p), []),
    "padded": (lambda make, p: padded(make, divided(make, wider(make, p), p), p), [PAD]),
    "divided first": (lambda make, p: make.cast(divided(make, make.input(BF16), p), F32, p), [DIVIDE]),
    "divided twice": (lambda make, p: divided(make, divided(make, make.input(), p), p), [DIVIDE]),
    "cast to a smaller dtype": (lambda make, p: divided(make, make.cast(make.input(), BF16, p), p), [CAST]),
}


@pytest.mark.parametrize(("prepare", "left"), PREPARATIONS.values(), ids=PREPARATIONS.keys())
def test_gradients_are_packed_at_once(prepare: Callable[[GraphMaker, str], Node], left: list[object]) -> None:
    make = GraphMaker()
    graph = fused(make, *(make.reduce(prepare(make, param), param) for param in "ab"))
    assert count(graph, PACK) == 1 and not count(graph, aten.cat.default)
    for step in (CAST, DIVIDE, PAD):
        assert count(graph, step) == (2 if step in left else 0)
    (reduction,) = reductions(graph)
    assert reduction.tag.params == ("a", "b")


def test_padding_with_ones() -> None:
    make = GraphMaker()
    graph = fused(make, *(make.reduce(padded(make, wider(make, param), param, 1.0), param) for param in "ab"))
    assert count(graph, aten.cat.default) == 1 and not count(graph, PACK)


def test_gradients_that_are_sent_as_they_are_stay() -> None:
    make = GraphMaker()
    graph = fused(make, *(make.reduce(make.input(), param) for param in "ab"))
    assert count(graph, aten.cat.default) == 1 and not count(graph, PACK)


def test_other_divisors_stay_apart() -> None:
    make = GraphMaker()
    graph = fused(make, *(make.reduce(divided(make, make.input(), param, ord(param)), param) for param in "ab"))
    assert count(graph, aten.div.Tensor) == 2 and not count(graph, PACK)


def test_what_else_reads_a_cast_gradient() -> None:
    make = GraphMaker()
    casts = [wider(make, param) for param in "ab"]
    graph = fused(
        make, make.double(casts[0]), *(make.reduce(node, param) for node, param in zip(casts, "ab", strict=True))
    )
    assert count(graph, CAST) == 1 and count(graph, PACK) == 1


# -- results ----------------------------------------------------------------------------------------------------------


def test_results_are_cast_and_divided_as_a_whole() -> None:
    make = GraphMaker()
    reduced = [make.reduce(make.input(dtype=BF16), param) for param in "ab"]
    graph = fused(make, *(make.cast(divided(make, each, p), F32, p) for each, p in zip(reduced, "ab", strict=True)))
    assert count(graph, CAST) == count(graph, aten.div.Tensor) == 1


def test_results_that_differ_are_left_alone() -> None:
    make = GraphMaker()
    reduced = [make.reduce(make.input(dtype=BF16), param) for param in "ab"]
    graph = fused(make, make.cast(reduced[0], F32, "a"), make.cast(reduced[1], torch.float64, "b"))
    assert count(graph, CAST) == 2


def test_a_result_that_is_also_read_as_it_is() -> None:
    make = GraphMaker()
    reduced = [make.reduce(make.input(dtype=BF16), param) for param in "ab"]
    graph = fused(make, reduced[0], *(make.cast(each, F32, p) for each, p in zip(reduced, "ab", strict=True)))
    assert count(graph, CAST) == 2


# -- Llama ------------------------------------------------------------------------------------------------------------


def llama() -> torch.nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    return shard_llama(Llama(SIZES["debug"]), mp_policy=policy)


TOKENS = torch.zeros(2, 16, dtype=torch.long)


def test_copies_of_llama() -> None:
    """One kernel before each collective and none after it: all its parameters divide among the ranks."""
    with fake_world(2):
        stages = dict(graphs_of(llama(), TOKENS))
    for part in ("forward", "backward"):
        before, after = (Traffic.of(stages[f"{part} {when}"]) for when in ("before", "after"))
        assert before.copies == before.gathers + before.reductions  # one for each parameter
        assert after.copies == after.gathers + after.reductions


def test_inductor_needs_no_more_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pass it makes one of the casts of a gather too; what it packs it fuses into what makes it."""
    with fake_world(2):
        fused_codes = emitted(llama(), TOKENS)
    monkeypatch.setattr(passes, "fuse_copies", lambda graph, _: Report("", 0, Traffic.of(graph), Traffic.of(graph)))
    with fake_world(2):
        codes = emitted(llama(), TOKENS)
    for with_pass, without in zip(fused_codes, codes, strict=True):
        check_memory(with_pass)
        assert 0 < kernel_calls(with_pass) <= kernel_calls(without)


def kernel_calls(code: str) -> int:
    return sum(line.startswith("cpp_fused") for line in body(code))
