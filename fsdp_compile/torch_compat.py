"""Every private torch API that the runtime touches, each with the reason; nothing else may import torch internals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass  # a pass whose results may be cached
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn  # the same for a partitioner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.fx import GraphModule, Node

# -- tensors ----------------------------------------------------------------------------------------------------------


def dtensor_from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], size: torch.Size
) -> DTensor:
    """``DTensor.from_local`` without autograd and without its per-call checks, which cost more than a small kernel."""
    from torch._prims_common import make_contiguous_strides_for
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(size, make_contiguous_strides_for(size), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


def set_local_tensor(param: DTensor, local: torch.Tensor) -> None:
    """Point a DTensor at other local data; there is no public way that keeps the parameter object."""
    param._local_tensor = local


def version_of(tensor: torch.Tensor) -> int:
    """Raised by each write that autograd sees; read only through a private attribute."""
    return tensor._version


def base_of_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that ``tensor`` is a view of, if any; read only through a private attribute."""
    return tensor._base


def resize_storage(tensor: torch.Tensor, nbytes: int) -> None:
    """Free (0) or give back a tensor's memory while all its aliases keep pointing at it."""
    storage = tensor.untyped_storage()
    if storage.size() != nbytes:
        storage.resize_(nbytes)


def run_tensor_hooks(param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """Run ``param.register_hook`` hooks as autograd would; they are only listed in a private attribute."""
    for hook in (param._backward_hooks or {}).values():  # type: ignore[attr-defined]
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    return grad


def run_post_accumulate_hooks(param: nn.Parameter) -> None:
    """Run ``param.register_post_accumulate_grad_hook`` hooks; they are only listed in a private attribute."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
        hook(param)


# -- autograd engine --------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether the autograd engine is running a node on this thread."""
    return torch._C._current_graph_task_id() != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# -- collectives ------------------------------------------------------------------------------------------------------


def all_gather_coalesced(
    group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
) -> dist.Work:
    """Gather each input into its own output in one work; the public coalescing manager hides the work handle."""
    return group.allgather_into_tensor_coalesced(outputs, inputs)


# -- Dynamo -----------------------------------------------------------------------------------------------------------

# Dynamo calls a function marked so while it traces and takes the result as a constant of the graph, without a guard.
constant_while_tracing = torch._dynamo.assume_constant_result


def current_frame_id() -> str:
    """The frame and the attempt at it that Dynamo is compiling now; empty when it compiles none."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return f"{compile_id.frame_id}/{compile_id.frame_compile_id}" if compile_id else ""


def current_compiler_fn() -> Any:
    """The backend that will receive the graph that Dynamo is tracing now, or ``None``."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tx = InstructionTranslator.current_tx()
    return tx.output.compiler_fn if tx else None


# -- backends ---------------------------------------------------------------------------------------------------------


def innermost_backend(compiler_fn: Any) -> Any:
    """The backend inside Dynamo's wrappers (debugging, lookup by name)."""
    while hasattr(compiler_fn, "_torchdynamo_orig_backend"):
        compiler_fn = compiler_fn._torchdynamo_orig_backend
    if isinstance(compiler_fn, torch._TorchCompileWrapper):  # backend=... with a name or function
        return compiler_fn.compiler_fn
    return compiler_fn


def is_inductor(backend: Any) -> bool:
    """Whether this is what ``torch.compile`` makes for its default backend; its ``config`` holds its options."""
    return isinstance(backend, torch._TorchCompileInductorWrapper)


def inductor_backend(mode: str | None = None, options: dict[str, Any] | None = None, **_: Any) -> Any:
    """What ``torch.compile`` makes for its default backend."""
    return torch._TorchCompileInductorWrapper(mode, options, None)


def inductor_config(name: str) -> Any:
    """A value of Inductor's global configuration."""
    from torch._inductor import config

    return getattr(config, name)


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Make ``torch.compile(backend=name)`` find ``backend``; the public entry points need an installed package."""
    from torch._dynamo.backends.registry import register_backend as register

    register(backend, name=name)  # type: ignore[call-arg]


def min_cut_partition(joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """The partitioner that Inductor uses: it recomputes what is marked, and what is cheap."""
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def boxed(graph: GraphModule) -> Callable[..., Any]:
    """Run a graph operator by operator; it takes its inputs in a list that it empties, so that each dies early."""
    from torch.fx.graph import _BoxedCodeGen

    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    forward = graph.forward

    def run(inputs: list[Any]) -> Any:
        return forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def aot_autograd(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    compiler: Callable[..., Any],
    inference_compiler: Callable[..., Any],
    partitioner: Callable[..., Any],
) -> Callable[..., Any]:
    """AOTAutograd with a partitioner of ours; the public wrapper is for backends of one function."""
    from torch._dynamo.backends.common import aot_autograd as make

    compiled = make(fw_compiler=compiler, inference_compiler=inference_compiler, partition_fn=partitioner)
    return compiled(module, inputs)


def nodes_of_trace() -> list[Node]:
    """The nodes of the graph that Dynamo is tracing, or has just given to its backend; else none."""
    from torch._dynamo.symbolic_convert import tls

    tx = getattr(tls, "current_tx", None)
    return list(tx.output.graph.nodes) if tx else []


def caching_of_autograd_functions() -> AbstractContextManager[Any]:
    """Inside, AOTAutograd caches graphs that contain custom autograd functions.

    By default it does not: its key covers what Dynamo traced of the function, but not what the function's author may
    do otherwise. Ours does nothing otherwise, as long as tags are part of the key.
    """
    return functorch_config.patch(autograd_cache_allow_custom_autograd_functions=True)


def no_common_subexpressions() -> AbstractContextManager[Any]:
    """Inside, the partitioner does not merge equal nodes."""
    return functorch_config.patch(cse=False)


# -- counters ---------------------------------------------------------------------------------------------------------


def dynamo_counts() -> tuple[int, int, int]:
    """Graphs, graph breaks and recompiles since ``torch.compiler.reset``; no public API counts them."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    graph_breaks = sum(counters["graph_break"].values())
    recompiles = sum(count - 1 for count in FRAME_COMPILE_COUNTER.values())
    return counters["stats"]["unique_graphs"], graph_breaks, recompiles
