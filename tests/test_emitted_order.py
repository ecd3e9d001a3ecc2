"""The code that Inductor emits launches and waits where the FX graph does, and fuses no less for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from emitted_code import MATMULS, body, check_memory, emitted, events, events_in
from fake_world import fake_world, run_step, unscheduled
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomSchedulerPass
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph, Node

from fsdp_compile import MixedPrecisionPolicy, backend, fully_shard, inductor_order, passes, torch_compat
from fsdp_compile.inductor_order import FxOrder, PinCommunication
from fsdp_compile.passes.graph_view import gathers, reductions


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Our own schedule is off: each test has a plan of its own, but for those of ours."""
    with fake_world(size=2), unscheduled():
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(number: int = 3, **arguments: Any) -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(number)))
    for block in model:
        fully_shard(block, reshard_after_forward=True, **arguments)
    return fully_shard(model, **arguments)


ROWS = pytest.mark.parametrize("rows", [3, 512])
FEW = 3  # gathered weights are the larger part of memory: Inductor's reordering for it undoes a prefetch
MANY = 512  # activations are, and sums over rows fuse across blocks
X = torch.ones(FEW, 8)


# -- a plan: prefetch one gather, wait for a reduction when the next one starts ---------------------------------------


def prefetch(graph: Graph) -> None:
    """Launch each gather before the wait for the one before it."""
    found = list(gathers(graph))
    for previous, gather in zip(found, found[1:], strict=False):
        wait = min(previous.waits)
        for node in needed_after(gather.start, wait):
            wait.prepend(node)


def prefetch_amid(graph: Graph) -> None:
    """Launch each gather after the first matrix product that uses the one before it."""
    found = list(gathers(graph))
    for previous, gather in zip(found, found[1:], strict=False):
        product = max(previous.waits)
        while product.target not in MATMULS:
            product = product.next
        for node in reversed(needed_after(gather.start, product)):
            product.append(node)


def needed_after(node: Node, limit: Node) -> list[Node]:
    """What ``node`` is computed from, as far as it comes after ``limit``, and ``node``; in graph order."""
    needed = {node: None}
    for at in (stack := [node]):
        fresh = [source for source in at.all_input_nodes if limit < source and source not in needed]
        needed.update(dict.fromkeys(fresh))
        stack.extend(fresh)
    return sorted(needed)


def sink(graph: Graph) -> None:
    """Wait for each reduction, and use its result, after the launch of the next."""
    found = list(reductions(graph))
    for reduction, following in zip(found, found[1:], strict=False):
        late: dict[Node, None] = dict.fromkeys(reduction.waits)
        node = min(late)
        while node is not following.start:
            if any(source in late for source in node.all_input_nodes):
                late[node] = None
            node = node.next
        for node in sorted(late, reverse=True):
            following.start.append(node)


def plan(graph: Graph) -> None:
    prefetch(graph)
    sink(graph)
    graph.lint()


class Plan(CustomGraphPass):
    """Plans, and notes what the order is then: forward, backward."""

    def __init__(self, *steps: Callable[[Graph], None]) -> None:
        self.steps = steps
        self.orders: list[list[str]] = []

    def __call__(self, graph: Graph) -> None:
        for step in self.steps:
            step(graph)
        self.orders.append(events_in(graph))

    def uuid(self) -> str:
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """Of forward and backward: the order that FX had, the code, and how many kernels were made in all."""

    orders: list[list[str]]
    codes: tuple[str, str]
    kernels: int


def compile_blocks(rows: int, *steps: Callable[[Graph], None], **options: Any) -> Compiled:
    metrics.reset()
    noted = Plan(*steps)
    codes = emitted(blocks(), torch.ones(rows, 8), post_grad_custom_post_pass=noted, **options)
    return Compiled(noted.orders, codes, metrics.generated_kernel_count)


@cache
def compiled(rows: int, planned: bool) -> Compiled:
    """What several tests look at."""
    return compile_blocks(rows, *([plan] if planned else []))


def without_ours(monkeypatch: pytest.MonkeyPatch, *, pins: bool = True, order: bool = True) -> None:
    """Leave out one or both of our passes of the scheduler."""
    if pins:
        monkeypatch.setattr(inductor_order, "_pinned", lambda nodes: nodes)
    if order:
        monkeypatch.setattr(FxOrder, "__call__", lambda self, nodes: nodes)


def in_flight(order: list[str]) -> int:
    """The most launches of which none of the outputs has been waited for, at any point."""
    pending: set[str] = set()
    most = 0
    for event in order:
        if event.startswith("L"):
            pending.add(event[1:])
        elif event.startswith("W"):
            pending.discard(event[1:])
        most = max(most, len(pending))
    return most


def communication(order: list[str]) -> list[str]:
    return [event for event in order if event != "mm"]


# -- our own schedule -------------------------------------------------------------------------------------------------


@ROWS
def test_our_schedule_is_emitted_and_costs_no_kernel(rows: int) -> None:
    plain = compiled(rows, False)
    backend.configure(schedule=True)
    found = compile_blocks(rows)
    for code, order in zip(found.codes, found.orders, strict=True):
        assert events(code) == order
        check_memory(code)
    assert [in_flight(order) for order in found.orders] > [in_flight(order) for order in plain.orders]
    assert found.kernels <= plain.kernels


# -- order ------------------------------------------------------------------------------------------------------------


ORDERS = {
    # One wait for each of the six parameters; the backward needs fewer, and the last of its gathers fewer still.
    False: (
        "L0 W0 W0 W0 W0 W0 W0 mm mm L1 W1 W1 W1 W1 W1 W1 mm mm L2 W2 W2 W2 W2 W2 W2 mm mm",
        "L0 W0 W0 W0 mm mm mm mm L1 W1 L2 W2 W2 W2 mm mm mm mm L3 W3 L4 W4 W4 mm mm mm mm L5 W5",
    ),
    True: (
        "L0 L1 W0 W0 W0 W0 W0 W0 mm mm L2 W1 W1 W1 W1 W1 W1 mm mm W2 W2 W2 W2 W2 W2 mm mm",
        "L0 L1 W0 W0 W0 mm mm mm mm L2 L3 W1 W1 W1 mm mm mm mm L4 W2 W3 W3 mm mm mm mm L5 W4 W5",
    ),
}


@ROWS
@pytest.mark.parametrize("planned", [False, True])
def test_emitted_code_has_the_order_of_the_graph(rows: int, planned: bool) -> None:
    found = compiled(rows, planned)
    assert [events(code) for code in found.codes] == found.orders
    assert tuple(" ".join(order) for order in found.orders) == ORDERS[planned]


@ROWS
@pytest.mark.parametrize("planned", [False, True])
def test_emitted_code_leaves_memory_under_way_alone(rows: int, planned: bool) -> None:
    for code in compiled(rows, planned).codes:
        check_memory(code)


@pytest.mark.parametrize("planned", [False, True])
def test_casts_before_a_gather_are_left_alone_too(planned: bool) -> None:
    """What is sent is then no input of the graph but a buffer of Inductor's, which it would like to use again."""
    noted = Plan(*([plan] if planned else []))
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    codes = emitted(blocks(mp_policy=precision), torch.ones(FEW, 8), post_grad_custom_post_pass=noted)
    assert [events(code) for code in codes] == noted.orders
    for code in codes:
        check_memory(code)


def test_a_plan_made_after_partitioning_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where our own passes run; Inductor's FX passes come after."""
    orders: list[list[str]] = []
    pipeline = passes.run_parts

    def planned(forward: Graph, backward: Graph, context: Any) -> None:
        pipeline(forward, backward, context)
        for graph in (forward, backward):
            plan(graph)
            orders.append(events_in(graph))

    monkeypatch.setattr(passes, "run_parts", planned)
    assert [events(code) for code in emitted(blocks(), X)] == orders


def test_memory_reordering_undoes_the_plan_without_our_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ours(monkeypatch)
    found = compile_blocks(FEW, plan)
    for code, order in zip(found.codes, found.orders, strict=True):
        assert events(code) != order
        assert sorted(events(code)) == sorted(order)
    assert in_flight(found.orders[0]) == 2
    assert in_flight(events(found.codes[0])) == 1


@pytest.mark.parametrize("ours", [True, False])
def test_a_launch_amid_compute_stays_there(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """Pins alone keep the order of communication, but let compute move past a launch that does not need it."""
    if not ours:
        without_ours(monkeypatch, pins=False)
    found = compile_blocks(FEW, prefetch_amid)
    emitted_orders = [events(code) for code in found.codes]
    assert [*map(communication, emitted_orders)] == [*map(communication, found.orders)]
    assert (emitted_orders == found.orders) == ours


def test_fusion_undoes_the_plan_without_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of two blocks' sums is needed by one block's reduction, and needs the next block's gather."""
    without_ours(monkeypatch, order=False)
    found = compile_blocks(MANY, plan)
    order, code = found.orders[1], found.codes[1]
    assert order.index("L4") < order.index("W3")
    assert events(code).index("W3") < events(code).index("L4")
    check_memory(code)


def test_deterministic_mode_keeps_the_order_of_communication() -> None:
    """Inductor skips the pass that places compute then; the pins are there."""
    found = compile_blocks(FEW, plan, deterministic=True)
    assert [communication(events(code)) for code in found.codes] == [*map(communication, found.orders)]


# -- kernels ----------------------------------------------------------------------------------------------------------


@ROWS
def test_no_more_kernels_than_without_our_passes_and_plan(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    without_ours(monkeypatch)
    plain = compile_blocks(rows)
    assert plain.kernels > 0
    for planned in (False, True):
        assert compiled(rows, planned).kernels <= plain.kernels


# -- caches -----------------------------------------------------------------------------------------------------------


def compile_and_run() -> tuple[list[list[str]], dict[str, int]]:
    """The orders in the code, and how Inductor's cache was used."""
    torch.compiler.reset()
    counters.clear()
    options = {"post_grad_custom_post_pass": Plan(plan)}
    _, codes = run_and_get_code(run_step, torch.compile(blocks(2), fullgraph=True, options=options), X)
    used = {name: count for name, count in counters["inductor"].items() if name.startswith("fxgraph_cache") and count}
    return [events(code) for code in codes], used


def test_the_cache_keeps_the_order_and_notices_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_cache():
        orders, used = compile_and_run()
        assert used == {"fxgraph_cache_miss": 2}
        assert in_flight(orders[0]) == 2
        assert compile_and_run() == (orders, {"fxgraph_cache_hit": 2})
        without_ours(monkeypatch)
        assert compile_and_run() == (orders, {"fxgraph_cache_hit": 2})  # a patch shows in no key
        monkeypatch.setattr(inductor_order, "_source_digest", lambda: "edited")
        others, used = compile_and_run()
        assert used == {"fxgraph_cache_miss": 2}
        assert others != orders


@pytest.mark.parametrize("key", ["pins", "order"])
def test_each_pass_has_its_code_in_the_key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    def key_of() -> Any:
        return PinCommunication().uuid() if key == "pins" else vars(FxOrder())

    before = key_of()
    assert before == key_of()
    monkeypatch.setattr(inductor_order, "_source_digest", lambda: "edited")
    assert before != key_of()


# -- passes of the user -----------------------------------------------------------------------------------------------


class Noting(CustomSchedulerPass):
    """A pass of the user's that reverses the schedule as far as dependences let it, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.calls += 1
        return torch_compat.pin_order(nodes[::-1], [])

    def uuid(self) -> str:
        return "noting"


def test_passes_of_the_user_run_before_ours() -> None:
    before_fusion, after, noted = Noting(), Noting(), Plan(plan)
    options = {
        "_pre_fusion_custom_pass": before_fusion,
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["sink_waits", after],
        "post_grad_custom_post_pass": noted,
    }
    codes = emitted(blocks(), X, **options)
    assert before_fusion.calls == after.calls == 2
    assert [events(code) for code in codes] == noted.orders


@pytest.mark.parametrize("enabled", [True, False])
def test_settings_of_the_user_stay(enabled: bool) -> None:
    """A list that was not enabled stays without effect."""
    users = ["sink_waits", Noting()]
    compiler = torch_compat.inductor_backend(
        options={
            "reorder_for_compute_comm_overlap": enabled,
            "reorder_for_compute_comm_overlap_passes": users,
        }
    )
    backend.install_into(compiler)
    *before, ours = compiler.config["reorder_for_compute_comm_overlap_passes"]
    assert before == (users if enabled else [])
    assert isinstance(ours, FxOrder)
    assert len(users) == 2


def test_a_plain_function_of_the_user_before_fusion() -> None:
    """Inductor caches nothing that depends on one, and must not take ours for something that it may cache."""
    seen: list[int] = []

    def count(nodes: list[Any]) -> list[Any]:
        seen.append(len(nodes))
        return nodes

    compiler = torch_compat.inductor_backend(options={"_pre_fusion_custom_pass": count})
    backend.install_into(compiler)
    combined = compiler.config["_pre_fusion_custom_pass"]
    assert not isinstance(combined, CustomSchedulerPass)
    emitted(blocks(), X, _pre_fusion_custom_pass=count)
    assert len(seen) == 2


# -- the check itself -------------------------------------------------------------------------------------------------

CODE = """
kernel = async_compile.cpp_pybinding(['const float*', 'float*'], '''
def call(self, args):
    primals_1, primals_2 = args
    buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
    kernel(primals_1, buf0)
    buf1 = torch.ops._c10d_functional.reduce_scatter_tensor.default(reinterpret_tensor(buf0, (4, ), (1, ), 0), 'sum', 2)
    buf2 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([primals_1, primals_2], 2, '0')
    buf3 = buf2[0]
    buf4 = buf2[1]
    del buf2
    # launched
    torch.ops._c10d_functional.wait_tensor.default(buf1)
    del buf0
    torch.ops._c10d_functional.wait_tensor.default(buf3)
    torch.ops._c10d_functional.wait_tensor.default(buf4)
    # waited
    buf5 = buf4; del buf4  # reuse
    extern_kernels.mm(buf3, buf1, out=buf5)
    return (buf5, )

runner = Runner(partitions=[])
"""
WRONG = {
    "extern_kernels.mm(primals_2, primals_2, out=buf0)": "written while it is being sent",
    "kernel(primals_2, buf0)": "written while it is being sent",
    "kernel(buf3, buf9)": "used before its wait",
    "extern_kernels.mm(buf1, buf1, out=buf9)": "used before its wait",
    "buf9 = buf0; del buf0  # reuse": "given up while it is being sent",
    "buf9 = buf3; del buf3  # reuse": "given up before its wait",
    "del buf0": "given up while it is being sent",
    "torch.ops.aten.add_.default(buf0, primals_2)": "written while it is being sent",
    "return (buf3, )": "used before its wait",
    "return (primals_1, )": "never waited for",
}


def test_the_check_of_memory_takes_right_code() -> None:
    check_memory(CODE)
    check_memory(CODE.replace("# launched", "kernel(buf0, buf9)"))  # what is being sent may be read
    assert events(CODE) == ["L0", "L1", "W0", "W1", "W1", "mm"]
    assert len(body(CODE)) == 15


@pytest.mark.parametrize(("line", "complaint"), WRONG.items(), ids=WRONG.keys())
def test_the_check_of_memory_finds(line: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_memory(CODE.replace("# launched", line))
