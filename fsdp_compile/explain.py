"""Says how each sharded module's last forward ran, and what the graphs do that it ran in.

>>> print(fsdp_compile.explain(model))
module                ran
(root)                in several graphs: graph break at train.py:44: Call to `torch._dynamo.graph_break()`
blocks.0              eagerly: set_all_reduce_hook has no traced form
blocks.1 … blocks.31  in a graph

Then for each graph what was captured, its collectives, when they are launched and waited for, which are exposed and
why, and what each pass did.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn as nn

from . import compiled_graphs, torch_compat
from .last_run import EAGERLY, SPLIT, code_of, is_of_torch, is_ours
from .passes import Report, Summary

ALL_CACHES_OFF = "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"


@dataclass(frozen=True)
class ModuleRun:
    """How one module's last forward ran.

    Attributes:
        name: of the module, from the root; empty for the root. From the model that was explained, if that has several
            roots.
        how: ``"in a graph"``; ``"in several graphs"``, between which a graph break has split it, so that its parameters
            were kept until the backward; ``"eagerly"``; or ``"not yet"``.
        why: why not in one graph; or empty.
    """

    name: str
    how: str
    why: str

    def __str__(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


@dataclass(frozen=True)
class GraphRun:
    """One graph of Dynamo's, its backward included, that some module's last forward ran in.

    Attributes:
        number: in order of tracing, in this process.
        modules: names of those that ran in it. Equal modules may share one, which carries the names of the first.
        passes: what each did, of forward and backward together.
        summary: what came out, for any transport, and how it goes by simulation; ``None`` if that is not known.
        note: why something is not known; or empty.
    """

    number: int
    modules: tuple[str, ...]
    passes: tuple[Report, ...]
    summary: Summary | None
    note: str


@dataclass(frozen=True)
class BreakPlace:
    """A graph break in the code of a module.

    Attributes:
        reason: in one line.
        file, line: where; in code of torch's, the call of it.
        modules: of the class in whose code it is; Dynamo does not say which of them.
    """

    reason: str
    file: str
    line: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """How the last forward ran; prints as tables in which what is alike is folded.

    Attributes:
        modules: all that are sharded, the root first.
        graphs: in which they ran.
        breaks: in the code of the model since ``torch.compiler.reset()``.
    """

    modules: tuple[ModuleRun, ...]
    graphs: tuple[GraphRun, ...] = ()
    breaks: tuple[BreakPlace, ...] = ()

    @property
    def eager(self) -> tuple[ModuleRun, ...]:
        """Those that did not run in one graph."""
        return tuple(run for run in self.modules if run.how in (EAGERLY, SPLIT))

    @property
    def details(self) -> str:
        """The tables with each collective and all its members."""
        from .explain_text import as_text

        return as_text(self, folds=False)

    def __str__(self) -> str:
        from .explain_text import as_text

        return as_text(self, folds=True)


def explain(model: nn.Module) -> Explanation:
    """How the last forward of each sharded module in ``model`` ran, and what the graphs do.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` has no sharded module.
    """
    from .fsdp_module import states_under

    if not isinstance(model, nn.Module):
        raise TypeError(f"explain expects a module, not {model!r:.100}")
    states = list(states_under(model.modules()))
    if not states:
        raise ValueError(f"{type(model).__name__} has no module under fully_shard")
    paths = _paths(model)
    names = [state.name for state in states]
    if len(set(names)) < len(names):  # several roots, or modules without parameters
        names = [next(paths[module] for module in state.modules if module in paths) for state in states]
    runs = [state.last_run for state in states]
    served: dict[int, list[str]] = {}
    for name, run in zip(names, runs, strict=True):
        if run.in_graph:
            served.setdefault(run.graph, []).append(name)
    return Explanation(
        tuple(ModuleRun(name, run.how, run.why(state)) for name, run, state in zip(names, runs, states, strict=True)),
        tuple(_graph(number, tuple(modules)) for number, modules in sorted(served.items())),
        _breaks(paths),
    )


def _paths(model: nn.Module) -> dict[nn.Module, str]:
    """All modules and their names, without what ``torch.compile`` wraps around them."""
    return {
        module: ".".join(part for part in name.split(".") if part != "_orig_mod")
        for name, module in model.named_modules()
    }


def _graph(number: int, modules: tuple[str, ...]) -> GraphRun:
    graph = compiled_graphs.known(number)
    if graph is None:
        note = f"more than {compiled_graphs.KEPT} graphs were compiled since, and what this one does is forgotten"
        return GraphRun(number, modules, (), None, note)
    return GraphRun(number, modules, tuple(graph.passes), graph.summary, _note(graph))


def _note(graph: compiled_graphs.CompiledGraph) -> str:
    if graph.summary is not None:
        return ""
    if not graph.runs_passes:
        return "its backend does not run the passes"
    if graph.not_simulated:
        return f"it could not be simulated: {graph.not_simulated}"
    return f"it came from a compile cache, so no pass has run; with {ALL_CACHES_OFF} they run, and all is shown"


def _breaks(paths: dict[nn.Module, str]) -> tuple[BreakPlace, ...]:
    classes: dict[type, list[str]] = {}
    for module, name in paths.items():
        classes.setdefault(type(module), []).append(name)
    code = [(part, names) for cls, names in classes.items() for part in code_of(cls) if not is_ours(part[0])]
    found: dict[BreakPlace, None] = {}
    for known in torch_compat.graph_breaks():
        calls = [call for call in reversed(known.calls) if not is_of_torch(call[0])]
        inside = (names for file, line in calls for (spans, lines), names in code if file == spans and line in lines)
        names = next(inside, None)
        if names is not None and not is_ours(known.file):
            found[BreakPlace(known.reason, *calls[0], tuple(names))] = None
    return tuple(found)
