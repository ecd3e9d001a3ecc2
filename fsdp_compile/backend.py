"""How the passes get into ``torch.compile``.

- Default backend (Inductor): while Dynamo traces a sharded module, ``install_into`` adds our passes to the options of
  the very ``torch.compile`` call that is tracing. Global configuration stays as it is, so other models never notice.
- ``backend="fsdp"``: Inductor with our passes, explicitly.
- ``backend="fsdp_eager"``: the same passes, then the graph runs operator by operator, without code generation: bit for
  bit what eager computes. For debugging and for parity tests.

Any other backend does not run the passes. The state machine then emits no free, and results are right all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from . import passes, torch_compat


class _JointPass(torch_compat.CustomGraphPass):
    """Inductor's hook on the joint graph; on graphs without backward, too."""

    def __call__(self, graph: Graph) -> None:
        passes.run_joint(graph)

    def uuid(self) -> bytes:
        return _uuid()


class _PartitionedPass(torch_compat.CustomGraphPass):
    """Inductor's hook on a forward or a backward graph."""

    def __call__(self, graph: Graph) -> None:
        passes.run_partitioned(graph)

    def uuid(self) -> bytes:
        return _uuid()


def _uuid() -> bytes:
    """Part of the key of Inductor's caches: what the passes are. What they see, tags included, is in the graph."""
    return hashlib.sha256(b"fsdp_compile" + passes.source_hash()).digest()


_INDUCTOR_HOOKS = {"joint_custom_pre_pass": _JointPass(), "post_grad_custom_post_pass": _PartitionedPass()}


def install_into(compiler_fn: Any) -> None:
    """Add our passes to a ``torch.compile(backend="inductor")`` that is about to compile; others are left alone.

    They run after any pass the user has set, in ``torch.compile(options=...)`` or in Inductor's global configuration.
    """
    wrapper = torch_compat.innermost_backend(compiler_fn)
    if not torch_compat.is_inductor(wrapper):
        return
    for hook, ours in _INDUCTOR_HOOKS.items():
        wrapper.config[hook] = _chain(wrapper.config.get(hook, torch_compat.inductor_config(hook)), ours)


def _chain(existing: Any, ours: Any) -> Any:
    users = [] if existing is None else [*existing] if isinstance(existing, (list, tuple)) else [existing]
    return [*(each for each in users if each is not ours), ours]


def passes_will_run(compiler_fn: Any) -> bool:
    """Whether graphs given to this backend go through our passes."""
    backend = torch_compat.innermost_backend(compiler_fn)
    if torch_compat.is_inductor(backend):
        return all(ours in (backend.config.get(hook) or []) for hook, ours in _INDUCTOR_HOOKS.items())
    return getattr(backend, "runs_fsdp_passes", False)


def fsdp_eager(module: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Backend ``"fsdp_eager"``: our passes on AOTAutograd's graphs, which then run without code generation."""

    def partition(joint: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        passes.run_joint(joint.graph)
        joint.recompile()
        return torch_compat.min_cut_partition(joint, joint_inputs, **kwargs)

    def infer(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        passes.run_joint(graph.graph)
        return run(graph, "inference")

    def run(graph: GraphModule, name: str) -> Callable[..., Any]:
        passes.run_partitioned(graph.graph, name)
        return torch_compat.boxed(graph)

    return torch_compat.aot_autograd(
        module,
        inputs,
        forward=lambda graph, _: run(graph, "forward"),
        backward=lambda graph, _: run(graph, "backward"),
        inference=infer,
        partition=partition,
    )


def fsdp(module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Backend ``"fsdp"``: Inductor with our passes; takes Inductor's ``options`` and ``mode``."""
    wrapper = torch_compat.inductor_backend(**kwargs)
    install_into(wrapper)
    return wrapper(module, inputs)


fsdp_eager.runs_fsdp_passes = True  # type: ignore[attr-defined]
fsdp.runs_fsdp_passes = True  # type: ignore[attr-defined]
torch_compat.register_backend("fsdp_eager", fsdp_eager)
torch_compat.register_backend("fsdp", fsdp)
