"""How the passes get into ``torch.compile``.

- Default backend (Inductor): while Dynamo traces a sharded module, ``install_into`` adds our passes to the options of
  the very ``torch.compile`` call that is tracing. Global configuration stays as it is, so other models never notice.
- ``backend="fsdp"``: Inductor with our passes, explicitly.
- ``backend="fsdp_eager"``: the same passes, then the graph runs operator by operator, without code generation: bit for
  bit what eager computes. For debugging and for parity tests.

Any other backend does not run the passes. The state machine then emits no free, and results are right all the same.

    Dynamo ─ graph ─ AOTAutograd ─┬─ joint graph ─ JointPass ─ Partitioner ─┬─ forward graph ── compile
                                  │                                         └─ backward graph ─ compile
                                  └─ graph without backward ─ JointPass ──────────────────────── compile
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.fx import Graph, GraphModule

from . import (
    compiled_graphs,
    passes,
    rank_agreement,
    torch_compat,
)
from .inductor_order import FxOrder, pinned_after
from .lowering import Decompositions, lower
from .passes import PassContext

_context = PassContext(reports=deque(maxlen=0))  # a process may compile for long; only `observed` has readers of them


def configure(**choices: Any) -> None:
    """Change the configuration of the passes for what is compiled from now on; see ``PassConfig`` for the choices.

    What Dynamo has compiled already goes on serving, also equal modules; ``torch.compiler.reset()`` drops it.
    """
    _context.config = replace(_context.config, **choices)


def configuration() -> passes.PassConfig:
    """What ``configure`` has chosen."""
    return _context.config


@contextmanager
def configured(**choices: Any) -> Iterator[None]:
    """Inside, the passes run with these choices; afterwards as before, however the choices were changed."""
    before = configuration()
    try:
        configure(**choices)
        yield
    finally:
        _context.config = before


@contextmanager
def observed(observer: passes.Observer) -> Iterator[list[passes.Report]]:
    """Show every graph to ``observer`` (its stage, the graph), before and after the passes, while inside; for tests.

    A compile that is served from a cache runs no passes. Yields the list of the reports of all passes.
    """
    reports: list[passes.Report] = []
    outer = _context.observer, _context.reports
    _context.observer, _context.reports = observer, reports
    try:
        yield reports
    finally:
        _context.observer, _context.reports = outer


@contextmanager
def _noted() -> Iterator[PassContext]:
    """What the passes are told; what they do inside is noted with the graph that is being compiled."""
    compiled, config = compiled_graphs.of_trace(), _context.config
    sum_up = compiled.observer(config.hardware) if compiled else None

    def observe(stage: str, graph: Graph) -> None:
        _context.observe(stage, graph)
        if sum_up is not None:
            sum_up(stage, graph)

    context = PassContext(config, observe)
    yield context
    _context.reports.extend(context.reports)
    if compiled:
        compiled.note_passes(context.reports)


def run_joint_hook(graph: Graph, decompositions: Decompositions) -> None:
    """Run the passes on what AOTAutograd traced, be it a joint graph or one without backward."""
    lower(graph, decompositions)
    with _noted() as context:
        if passes.has_backward(graph):
            passes.run_joint(graph, context)
        else:
            passes.run_inference(graph, context)
    assert graph.owning_module is not None
    _note_tags(graph.owning_module)


def partition(
    partitioner: Callable[..., Any],
    decompositions: Decompositions,
    joint: GraphModule,
    inputs: Sequence[Any],
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph, and run the passes on both parts."""
    lower(joint.graph, decompositions)
    with _noted() as context:
        passes.run_joint(joint.graph, context)  # again under Inductor, whose own passes may have made unmarked views
        # A module that runs twice gathers twice, with a free in between. Merged, the parameters would be held so long.
        with torch_compat.no_common_subexpressions() if passes.gathers_repeat(joint.graph) else nullcontext():
            forward, backward = partitioner(joint, inputs, **kwargs)
        passes.run_parts(forward.graph, backward.graph, context)
    for part in (forward, backward):
        _note_tags(part)
    return forward, backward


def _note_tags(module: GraphModule) -> None:
    """Inductor's cache key covers a graph's text and its module's ``meta``, but not the tags in the nodes' ``meta``."""
    module.meta["fsdp_tags"] = passes.tag_digest(module.graph.nodes)


# -- Inductor ---------------------------------------------------------------------------------------------------------


class JointPass(torch_compat.CustomGraphPass):
    """Inductor's hook on what AOTAutograd traced."""

    def __call__(self, graph: Graph) -> None:
        run_joint_hook(graph, torch_compat.inductor_decompositions())

    def uuid(self) -> bytes:
        return _cache_key()


class Partitioner(torch_compat.CustomPartitionerFn):
    """Inductor's hook that splits a joint graph; wraps the user's own, or Inductor's."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        inner = self.inner or torch_compat.min_cut_partition
        return partition(inner, torch_compat.inductor_decompositions(), gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return _cache_key(), self.inner.uuid() if self.inner else None


def _cache_key() -> bytes:
    """What a compiled graph depends on beside its own text, as keys of compile caches need it."""
    tags = passes.tag_digest(torch_compat.nodes_of_trace())
    return configuration().digest() + tags + torch_compat.transports().encode()


_joint_pass = JointPass()


def install_into(compiler_fn: Any) -> None:
    """Add our passes to a ``torch.compile(backend="inductor")`` that is about to compile; others are left alone.

    They run after any pass the user has set, in ``torch.compile(options=...)`` or in Inductor's global configuration.
    May be called again.
    """
    backend = torch_compat.innermost_backend(compiler_fn)
    if not torch_compat.is_inductor(backend) or passes_will_run(backend):
        return
    passes.teach_inductor()
    before = _setting(backend, "joint_custom_pre_pass")
    users = [] if before is None else [*before] if isinstance(before, (list, tuple)) else [before]
    backend.config["joint_custom_pre_pass"] = [*users, _joint_pass]
    backend.config["custom_partitioner_fn"] = Partitioner(_setting(backend, "custom_partitioner_fn"))
    _keep_fx_order(backend)
    _mark_as_cacheable(backend)


def _mark_as_cacheable(backend: Any) -> None:
    """Have AOTAutograd cache graphs that call our functions: all that these depend on is in the graph and the key."""
    ours = dict.fromkeys(torch_compat.one_node_functions, passes.source_digest(Path(__file__).parent).hex())
    users = _setting(backend, "unsafe_marked_cacheable_functions")
    backend.config["unsafe_marked_cacheable_functions"] = {**users, **ours}


def _keep_fx_order(backend: Any) -> None:
    """Have the emitted code launch and wait where our passes planned it."""
    backend.config["_pre_fusion_custom_pass"] = pinned_after(_setting(backend, "_pre_fusion_custom_pass"))
    enabled = _setting(backend, "reorder_for_compute_comm_overlap")  # unless it is set, Inductor ignores the list
    users = _setting(backend, "reorder_for_compute_comm_overlap_passes") if enabled else ()
    backend.config["reorder_for_compute_comm_overlap_passes"] = [*users, FxOrder()]
    backend.config["reorder_for_compute_comm_overlap"] = True


def passes_will_run(compiler_fn: Any) -> bool:
    """Whether graphs given to this backend go through our passes."""
    backend = torch_compat.innermost_backend(compiler_fn)
    if torch_compat.is_inductor(backend):
        return isinstance(backend.config.get("custom_partitioner_fn"), Partitioner)
    return backend in (fsdp_eager, fsdp)


def _setting(backend: Any, name: str) -> Any:
    """The user's setting: an option of this ``torch.compile`` call, else Inductor's global one."""
    return backend.config.get(name, torch_compat.inductor_config(name))


# -- registered backends ----------------------------------------------------------------------------------------------


@contextmanager
def collector_paused() -> Iterator[None]:
    """Have Python's garbage collector rest: graphs are millions of objects, which it would visit again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def fsdp_eager(module: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Backend ``"fsdp_eager"``: our passes on AOTAutograd's graphs, which then run without code generation."""
    with collector_paused():
        return torch_compat.aot_autograd(
            module,
            inputs,
            compiler=lambda graph, _: torch_compat.boxed(graph),
            inference_compiler=_infer,
            partitioner=partial(partition, torch_compat.min_cut_partition, {}),
        )


def _infer(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    run_joint_hook(graph.graph, {})
    return torch_compat.boxed(graph)


def fsdp(module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Backend ``"fsdp"``: Inductor with our passes; takes Inductor's ``options`` and ``mode``."""
    backend = torch_compat.inductor_backend(**kwargs)
    install_into(backend)
    with collector_paused():
        return backend(module, inputs)


passes.listen(rank_agreement.agree)
torch_compat.register_backend("fsdp_eager", fsdp_eager)
torch_compat.register_backend("fsdp", fsdp)
