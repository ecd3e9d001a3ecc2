"""Every private torch API that the passes touch, each with the reason; no other pass imports torch internals."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils.checkpoint import CheckpointPolicy  # the partitioner reads it from a node's meta

# Dynamo records `untyped_storage().resize_(n)` as this operator; it has no public name.
RESIZE = torch.ops.inductor.resize_storage_bytes_.default

c10d = torch.ops._c10d_functional  # functional collectives: the public wrappers add nodes of their own


# Shares memory with its input although its schema does not say so.
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

# The partitioner turns "recompute" into "save" where a later checkpointed region (by `ac_graph_id`) uses the node.
# Gathered parameters are used by all regions and must not be saved by any, hence an id above all others.
REGATHER_REGION = 1 << 30


def is_alias(node: Node) -> bool:
    """Whether the node's result may share memory with an input that it does not write (views, `detach`, ...)."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_alias(node.args[0])
    return _returns_alias(node.target)


@cache
def _returns_alias(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    declared = not schema.is_mutable and any(argument.alias_info is not None for argument in schema.arguments)
    return declared or target is UNSAFE_VIEW


@cache
def is_mutating(target: Any) -> bool:
    """Whether an operator writes to an argument."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def shares_memory(node: Node, source: Node) -> bool:
    """Whether the two results share memory; operators like ``reshape`` copy, but only if they must."""
    # Public functions compare addresses, which fake tensors do not have.
    return torch._C._is_alias_of(node.meta["val"], source.meta["val"])  # type: ignore[attr-defined]


def as_expression(size: Any) -> tuple[Any, dict[Any, int]]:
    """A size as an int or in sympy, and which values the symbols in it had in the trace, as far as they had any.

    ``int(size)`` would bind the graph to the size that it was traced with.
    """
    if not isinstance(size, torch.SymInt):
        return size, {}
    expression = size.node.expr
    traced = size.node.shape_env.backed_var_to_val
    return expression, {symbol: int(traced[symbol]) for symbol in expression.free_symbols if symbol in traced}


def shared_inputs(node: Node) -> list[Node]:
    """The inputs whose memory the node's results are in, written or not; schemas tell, but for two operators."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    if node.target in (UNSAFE_VIEW, c10d.wait_tensor.default):
        return node.all_input_nodes
    shared: list[Node] = []
    for index, name in _shared_arguments(node.target):
        torch.fx.node.map_arg(node.args[index] if index < len(node.args) else node.kwargs.get(name), shared.append)
    return shared


@cache
def _shared_arguments(target: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Position and name of the arguments whose memory the results are in."""
    schema = target._schema
    returned = {name for result in schema.returns if result.alias_info for name in result.alias_info.before_set}
    return [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info
        # Where views come in a list, only the argument's side of the schema says so.
        and (not schema.is_mutable or returned.intersection(argument.alias_info.before_set))
    ]


def is_functional_collective(node: Node) -> bool:
    """Whether the node launches a functional collective or waits for one; their namespace has no public name."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional"


def goes_by_gloo(group: str, device: torch.device) -> bool:
    """Whether gloo carries tensors on ``device`` for the process group of that name; for one that is no more, no."""
    found = _process_group(group)
    return found is not None and f"{device.type}:gloo" in str(dist.get_backend_config(found)).split(",")


def ranks_of(group: str) -> list[int] | None:
    """The ranks of the process group of that name, as numbered in the world; ``None`` if it is no more."""
    found = _process_group(group)
    return None if found is None else dist.get_process_group_ranks(found)


def rank_in(group: str) -> int:
    """This rank's position in the process group of that name."""
    found = _process_group(group)
    assert found is not None, f"there is no process group {group}"
    return found.rank()


def _process_group(name: str) -> dist.ProcessGroup | None:
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # graphs have names only

    try:
        return _resolve_process_group(GroupName(name)) if dist.is_initialized() else None
    except (RuntimeError, ValueError):
        return None


def hint(size: int | torch.SymInt) -> int:
    """The size as traced; unlike ``int``, adds no guard to a dynamic one."""
    return optimization_hint(size)


def mark_regather(node: Node) -> None:
    """Have the partitioner compute this node again in the backward, like an activation under checkpointing."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = REGATHER_REGION


def is_marked_regather(node: Node) -> bool:
    """Whether ``mark_regather`` was called on it."""
    return node.meta.get("ac_graph_id") == REGATHER_REGION and "recompute" in node.meta


def mark_save(node: Node) -> None:
    """Forbid the partitioner to compute this node again: the backward gets it, or what it needs of it, saved."""
    unmark(node)
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def unmark(node: Node) -> None:
    """Leave the choice to the partitioner."""
    node.meta.pop("recompute", None)
    node.meta.pop("ac_graph_id", None)


def emit(graph: Graph, target: Callable[..., Any], *args: Any, result: Any = None) -> Node:
    """Add a call with its ``meta["val"]``: later passes and the compiler expect a fake result on every node.

    Args:
        result: what the fake result is; ``None``: to be found by running the operator, which takes longer.
    """
    node = graph.call_function(target, args)
    if result is not None:
        node.meta["val"] = result
        return node
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    if target is operator.getitem:
        node.meta["val"] = values[0][values[1]]
        return node
    with fake_mode_of(values):
        node.meta["val"] = target(*values)
    return node


def copy_graph(graph: Graph) -> Graph:
    """A copy with its own nodes and ``meta``, owned by a module so that it can be run.

    The nodes' fake results are shared.
    """
    return GraphModule(graph.owning_module or torch.nn.Module(), copy_to_try(graph)).graph


def copy_to_try(graph: Graph) -> Graph:
    """The same without a module, whose making takes longer; ``graph_copy`` alone leaves out the output node."""
    copied = Graph()
    output = copied.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(output, tuple)
    copied.output(output[0]).meta = {**output[1].meta}
    return copied


def copy_node(graph: Graph, node: Node, copies: Mapping[Node, Node | None]) -> Node:
    """Add a call like ``node`` of another graph, whose arguments ``copies`` replaces.

    Its fake result is a new tensor. Running the operator for it is slow, so that is done for views only.
    """
    take = copies.__getitem__
    args, kwargs = (torch.fx.node.map_arg(arguments, take) for arguments in (node.args, node.kwargs))
    copy = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    value = node.meta["val"]
    if is_alias(node) or not isinstance(value, torch.Tensor):
        values, named = (torch.fx.node.map_arg(arguments, lambda n: n.meta["val"]) for arguments in (args, kwargs))
        with fake_mode_of(values):
            copy.meta["val"] = node.target(*values, **named)  # type: ignore[operator, arg-type]
    else:
        with fake_mode_of(value):
            copy.meta["val"] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return copy


def update_result(node: Node) -> None:
    """Find a node's fake result anew: that of an input is another now."""
    values, named = (torch.fx.node.map_arg(each, lambda n: n.meta["val"]) for each in (node.args, node.kwargs))
    with fake_mode_of((values, named)):
        node.meta["val"] = node.target(*values, **named)  # type: ignore[operator, arg-type]


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, of any dtype, at once where there is a kernel for it, as torch's FSDP does."""
    torch._foreach_copy_(targets, sources)


def inductor_lowerings() -> tuple[Mapping[Any, Callable[..., Any]], Callable[..., Any]]:
    """Inductor's code generators of operators, and what registers one: there is no public way for custom operators."""
    from torch._inductor import lowering

    return lowering.lowerings, lowering.register_lowering


def launch_by_inductor(launch: Any, source: Any, *how: Any) -> Any:
    """Have Inductor emit ``launch`` like a functional collective: it keeps the order, and ``source`` until the wait."""
    from torch._inductor import ir

    return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(launch, source, *how))  # type: ignore[arg-type]


def profiler_runs() -> bool:
    """Whether a profiler would show a range; asking is public nowhere."""
    return torch.autograd.profiler._is_profiler_enabled


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Inside, the trace of a profiler, if one runs, has a bar of that name."""
    return torch.profiler.record_function(name) if profiler_runs() else nullcontext()


def name_of_compile() -> str:
    """Which of this process's compiles runs, as torch numbers them in its logs, or empty; there is no public way."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id() or "")


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text into the running compile's part of torch's structured trace, if one is written (``TORCH_TRACE``).

    There is no public way. ``text`` is not called where no trace is written.
    """
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def real_tensors() -> AbstractContextManager[Any]:
    """Inside, tensors that a pass reckons with are real, though it runs while a compiler works with fake ones."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_mode_of(values: Any) -> Any:
    """The fake mode that the graph's values were made in."""
    from torch._guards import detect_fake_mode
    from torch.utils._pytree import tree_leaves

    mode = detect_fake_mode(tree_leaves(values))
    assert mode is not None, "a graph node has no fake tensor in meta['val']"
    return mode
