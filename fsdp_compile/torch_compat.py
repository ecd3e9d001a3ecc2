"""Every private torch API that the runtime touches, each with the reason; nothing else may import torch internals."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.exc import Unsupported, UserError
from torch._functorch import config as functorch_config
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass  # a pass whose results may be cached
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn  # the same for a partitioner
from torch._inductor.custom_graph_pass import CustomSchedulerPass as CustomSchedulerPass  # the same, before fusion
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec  # how a DTensor is distributed
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx import GraphModule, Node

StridedShard = _StridedShard  # a shard of what mesh dimensions to the right have sharded already

# -- tensors ----------------------------------------------------------------------------------------------------------


def contiguous_stride(size: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor; no public function computes them."""
    from torch._prims_common import make_contiguous_strides_for

    return make_contiguous_strides_for(size)


def contiguous_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], size: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """How a contiguous tensor of ``size`` is distributed; ``DTensor.from_local`` checks and makes it at each call."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(size, contiguous_stride(size), dtype))


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """``spec`` for a tensor of another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    return replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """``DTensor.from_local`` without autograd and without its per-call checks, which cost more than a small kernel."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements and global size of a DTensor in one object."""
    return tensor._spec


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor itself, without the autograd-aware view that ``to_local`` makes; of no DTensor, ``tensor``."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def wait_if_async(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor parallelism hands on results of collectives under way, which wait when they are used."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def preserved_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Inside, in-place writes do not make autograd refuse what it saved of ``tensors``."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def set_local_tensor(param: DTensor, local: torch.Tensor) -> None:
    """Point a DTensor at other local data; there is no public way that keeps the parameter object."""
    param._local_tensor = local


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` wraps other tensors, so that its data cannot be replaced by assignment to ``.data``."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def swap_contents(param: torch.Tensor, other: torch.Tensor) -> None:
    """Make ``param``, which others hold, the tensor that ``other`` is."""
    kind = nn.Parameter(other, requires_grad=param.requires_grad) if isinstance(param, nn.Parameter) else other
    torch.utils.swap_tensors(param, kind)


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


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Whether the two functions below would run anything."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


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


# -- meshes -----------------------------------------------------------------------------------------------------------


def concatenate_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with the dimensions of all, which are slices of one; public slicing gives slices in mesh order only."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All dimensions of ``mesh`` as one; collective. Not public yet."""
    return mesh._flatten(name)


def register_process_group(name: str, group: dist.ProcessGroup) -> None:
    """Have functional collectives find ``group`` under ``name`` too, until it is destroyed; there is no public way."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


@contextmanager
def hidden_from_checkpoint_policies() -> Iterator[None]:
    """Inside, policies of selective activation checkpointing see no operators; there is no public way.

    They match the operators of a forward with those of its recomputation one by one, but transitions differ.
    """
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    if torch._C._len_torch_dispatch_stack() == 0:
        yield
        return
    with _disable_current_modes() as modes, ExitStack() as others:
        for mode in modes:
            if not isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode)):
                others.enter_context(mode)
        yield


# -- autograd engine --------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether the autograd engine is running a node on this thread."""
    return torch._C._current_graph_task_id() != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# -- collectives ------------------------------------------------------------------------------------------------------


def allocate_from_process_group(
    group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Memory that the group's transport prefers, 1-D; ``None`` if it has no allocator. There is no public way."""
    backend = group._get_backend(device)
    return backend.allocate_tensor(numel, dtype=dtype, device=device) if backend.supports_tensor_alloc(device) else None


def use_symmetric_memory(backend: str) -> None:
    """Choose who provides symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.set_backend(backend)  # type: ignore[arg-type]


def symmetric_memory_pool(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, CUDA memory is allocated from the pool of symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric_memory

    return torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(device))


def rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Make ``tensor``, in symmetric memory, known to all ranks of ``group``; collective."""
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.rendezvous(tensor, group=group.group_name)


# -- Dynamo -----------------------------------------------------------------------------------------------------------

# Dynamo calls a function marked so while it traces and takes the result as a constant of the graph, without a guard.
constant_while_tracing = torch._dynamo.assume_constant_result


one_node_functions: list[str] = []  # names of the functions that are marked so


def one_node(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark ``function``: to Dynamo a call of it is one node, which it does not look into; AOTAutograd does.

    Inside function transforms, such as ``torch.vmap`` around a module, it runs as if outside of them: they are about
    tensors that the module is called with. There is no public way to step out of them.
    """
    one_node_functions.append(f"{function.__module__}.{function.__name__}")

    @functools.wraps(function)
    def outside_of_transforms(*args: Any) -> Any:
        with temporarily_clear_interpreter_stack():
            return function(*args)

    return torch._dynamo.allow_in_graph(outside_of_transforms)


def run_by_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark ``function``: Dynamo does not compile a call of it by itself, but what it calls; inside others it traces it.

    A frame with a ``try`` cannot be resumed after a graph break. Without the mark Dynamo gives up such code at the
    first, for all models, of which some have been compiled with it. There is no public way that allows tracing.
    """
    torch._dynamo.eval_frame.skip_code(function.__code__)
    return function


def below_autograd() -> AbstractContextManager[Any]:
    """Inside, operators skip autograd; for functional collectives that is a slow layer of Python."""
    return torch._C._AutoDispatchBelowAutograd()


def with_side_effects(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` and have Dynamo allow its writes also inside a higher-order operator.

    In activation checkpointing ours are undone where the region ends; replaying them in the recomputation would be
    wrong. Elsewhere there is nothing to allow, and allowing is slow.
    """
    if _is_traced_in_an_operator():
        return torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(function, *args)
    return function(*args)


@constant_while_tracing
def _is_traced_in_an_operator() -> bool:
    from torch._dynamo.symbolic_convert import tls

    tx = getattr(tls, "current_tx", None)
    return tx is not None and tx.output.current_tracer.parent is not None


def current_frame_id() -> str:
    """The frame and the attempt at it that Dynamo is compiling now; empty when it compiles none."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return f"{compile_id.frame_id}/{compile_id.frame_compile_id}" if compile_id else ""


def traced_self() -> Any:
    """The object whose method Dynamo is tracing now, without a guard on it."""
    return _variable_of_self().value


def number_in_trace(thing: Any) -> int:
    """The place of ``thing`` among those that were asked about while Dynamo traced this graph."""
    numbers = _output_of_trace().__dict__.setdefault("_fsdp_compile_numbers", {})
    return numbers.setdefault(thing, len(numbers))


_numbers_of_graphs = itertools.count(1)


def number_of_graph() -> int:
    """A number for the graph that Dynamo is tracing now, which no other in this process gets."""
    notes = _output_of_trace().__dict__
    if "_fsdp_compile_number" not in notes:
        notes["_fsdp_compile_number"] = next(_numbers_of_graphs)
    return notes["_fsdp_compile_number"]  # type: ignore[no-any-return]


def number_of_graph_if_any() -> int:
    """The number of the graph that Dynamo is tracing now, or has just given to its backend; 0 if it has none."""
    from torch._dynamo.symbolic_convert import tls

    tx = getattr(tls, "current_tx", None)
    return tx.output.__dict__.get("_fsdp_compile_number", 0) if tx else 0


def guard_self(ask: Callable[[Any], Any]) -> Any:
    """What ``ask`` says of the object whose method Dynamo is tracing now; the graph serves only while it says that.

    One guard of our own is much cheaper, in each call of the compiled function, than one for each thing asked about.
    """
    from torch._dynamo.guards import install_guard

    variable = _variable_of_self()
    answer = ask(variable.value)

    def ASKED(builder: Any, guard: Any) -> None:  # the logs of guards print the name
        check = f"{ask.__qualname__} of {guard.name} is what it was"
        builder.get_guard_manager(guard).add_lambda_guard(lambda it: ask(it) == answer, [check], guard.user_stack)

    install_guard(variable.source.make_guard(ASKED))
    return answer


def _variable_of_self() -> Any:
    return _output_of_trace().current_tx.symbolic_locals["self"]


def _output_of_trace() -> Any:
    from torch._dynamo.symbolic_convert import tls

    return tls.current_tx.output


def current_compiler_fn() -> Any:
    """The backend that will receive the graph that Dynamo is tracing now, or ``None``."""
    from torch._dynamo.symbolic_convert import tls

    tx = getattr(tls, "current_tx", None)
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


def join_imaginary_world(world: int) -> None:
    """Become rank 0 of ``world`` ranks of which the others do not exist; the backend for this is torch's own tests'."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def transports() -> str:
    """What carries the collectives of each process group, alike on all ranks that have made groups in the same way."""
    from torch.distributed.distributed_c10d import _world  # the groups of a graph are known by name only

    return ";".join(sorted({dist.get_backend_config(group) for group in _world.pg_map}))


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name, as functional collectives find it; there is no public way."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long collectives of the group may take; its options have no public reader."""
    backends = [group._get_backend(device) for device in group._device_types]
    return max(backend.options._timeout for backend in backends)  # type: ignore[attr-defined]


COMPILED_FRAME = "compile_wrapper"  # name of the function that torch.compile returns, as it is on the stack

# What fullgraph=True raises where a model cannot be in one graph; there are no public names.
NOT_ONE_GRAPH = (Unsupported, UserError)


@contextmanager
def imaginary_world(world: int) -> Iterator[None]:
    """Inside, be rank 0 of such a world."""
    join_imaginary_world(world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside, tensors have no data; a model made on the meta device before may be used."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# What an operator raises whose result cannot be known without data; there are no public names.
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


def runs_eagerly(tensor: torch.Tensor) -> bool:
    """Whether an operator on it computes now, and is not being traced; tracers work with subclasses of their own."""
    return type(tensor) is torch.Tensor


def trace(
    function: Callable[..., Any], values: Sequence[torch.Tensor | None], decompositions: Mapping[Any, Any]
) -> GraphModule:
    """The graph of ``function`` on tensors like ``values``, which are fake; there is no public tracer of operators."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*given: torch.Tensor | None) -> Any:
        with below_autograd():
            return function(*given)

    with torch.no_grad():
        return make_fx(run, decomposition_table=dict(decompositions))(*values)


def inductor_decompositions() -> Mapping[Any, Any]:
    """What Inductor has AOTAutograd replace operators by."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def nodes_of_trace() -> list[Node]:
    """The nodes of the graph that Dynamo is tracing, or has just given to its backend; else none."""
    from torch._dynamo.symbolic_convert import tls

    tx = getattr(tls, "current_tx", None)
    return list(tx.output.graph.nodes) if tx else []


def no_common_subexpressions() -> AbstractContextManager[Any]:
    """Inside, the partitioner does not merge equal nodes."""
    return functorch_config.patch(cse=False)


# -- Inductor's scheduler ---------------------------------------------------------------------------------------------


Kernel = Any  # an entry of the scheduler's list: a kernel, a call of a library, a launch or a wait


def fx_nodes_of_lowering() -> list[Node]:
    """The nodes, in order, of the FX graph that Inductor is making kernels of now."""
    from torch._inductor.virtualized import V

    return list(V.graph.graph.nodes)


def origins_of(kernel: Kernel) -> Iterator[Node]:
    """The FX nodes that a kernel computes."""
    for part in kernel.get_nodes():
        if part is not kernel:
            yield from origins_of(part)
        elif part.node is not None:
            yield from part.node.origins


def is_communication(kernel: Kernel) -> bool:
    """Whether this launches a collective or waits for one."""
    from torch._inductor.utils import contains_collective, contains_wait

    return contains_collective(kernel) or contains_wait(kernel)


def buffers_made(kernel: Kernel) -> Iterable[str]:
    """Names of what a kernel writes; each write has a name of its own, in place too."""
    return kernel.get_buffer_names()


def buffers_needed(kernel: Kernel) -> list[str]:
    """Names of what must have been written before a kernel runs, sorted."""
    return sorted(dependency.name for dependency in kernel.unmet_dependencies)


def pin_order(kernels: list[Kernel], chain: list[Kernel]) -> list[Kernel]:
    """Have each of ``chain`` run after the one before it; the kernels, sorted, as fusion expects them.

    The dependences are of the kind by which Inductor itself keeps launches in order: no buffer lives longer for them.
    """
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.virtualized import V

    for before, after in pairwise(chain):
        (earlier, *_), (later, *_) = before.get_buffer_names(), after.get_buffer_names()
        after.add_fake_dep(WeakDep(earlier, mutating_buf=later, is_fake=True))
    kernels = V.graph.scheduler.topological_sort_schedule(kernels)
    makers = {name: kernel for kernel in kernels for name in buffers_made(kernel)}
    for kernel in kernels:  # fusion reads `ancestors` to see whether it would make a cycle
        for maker in {makers[name]: None for name in buffers_needed(kernel) if name in makers}:
            kernel.ancestors = kernel.ancestors | maker.ancestors | maker.get_operation_names()
    return kernels


def graph_break_count() -> int:
    """How many graph breaks Dynamo has met since ``torch.compiler.reset``."""
    return len(torch._dynamo.utils.graph_break_reasons)


class GraphBreak(NamedTuple):
    """One graph break.

    Attributes:
        reason: in one line.
        file, line: of the code that was being traced.
        calls: file and line of each call that led there, as far as it was traced with it, and of that code itself.
    """

    reason: str
    file: str
    line: int
    calls: tuple[tuple[str, int], ...]


def graph_breaks() -> list[GraphBreak]:
    """All that Dynamo has met since ``torch.compiler.reset``."""
    found = []
    for known in torch._dynamo.utils.graph_break_reasons:
        calls = tuple((frame.filename, frame.lineno or 0) for frame in known.user_stack)
        if calls:
            found.append(GraphBreak(known.reason.split("\n")[0], *calls[-1], calls))
    return found


# -- counters ---------------------------------------------------------------------------------------------------------


def dynamo_counts() -> tuple[int, int, int]:
    """Graphs, graph breaks and recompiles since ``torch.compiler.reset``; no public API counts them."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    graph_breaks = sum(counters["graph_break"].values())
    recompiles = sum(count - 1 for count in FRAME_COMPILE_COUNTER.values())
    return counters["stats"]["unique_graphs"], graph_breaks, recompiles
