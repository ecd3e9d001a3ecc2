"""Tells what the passes do to whoever listens; where nobody does, no text is made.

who listens                             what there is of each compile
the context's observer                  the graphs before and after the passes
``PassConfig.dump``, a directory        a file for each stage: its reports, the communication skeletons, all nodes
torch's structured trace (TORCH_TRACE)  the same as artifacts, and the skeletons before and after the passes
logger of this module, INFO             a line: collectives before and after the passes, which buckets were taken
logger of this module, DEBUG            the reports of each stage
logger of ``skeleton``, DEBUG           the communication skeletons before and after the passes
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from . import skeleton
from .context import Parts, PassConfig, PassContext, Report
from .skeleton import print_skeleton
from .torch_compat import name_of_compile, trace_artifact

_log = logging.getLogger(__name__)
_skeleton_log = logging.getLogger(skeleton.__name__)


def show(when: str, parts: Parts, context: PassContext) -> None:
    """Show the graphs as they are "before" or "after" the passes."""
    for name, graph in parts.items():
        context.observe(f"{name} {when}", graph)
    if _skeleton_log.isEnabledFor(logging.DEBUG):
        _skeleton_log.debug("graph %s %s the passes\n%s", name_of_compile(), when, _skeletons(parts))
    trace_artifact(f"fsdp_{'_'.join(parts)}_{when}", lambda: _skeletons(parts))


def record_stage(stage: str, parts: Parts, reports: Sequence[Report], config: PassConfig) -> None:
    """Record what the stage of that name reports, and the graphs as it leaves them."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("graph %s, %s\n%s", name_of_compile(), stage, _lines(reports))
    if config.dump is not None:
        _dump(stage, _everything(parts, reports), Path(config.dump))
    trace_artifact(f"fsdp_{stage}", lambda: _everything(parts, reports))


def record_step(parts: Parts, first: Sequence[Report], last: Sequence[Report], bucket: str | int) -> None:
    """Record what became of each graph from the first of these reports to the last, and which buckets were taken."""
    if _log.isEnabledFor(logging.INFO):
        whole = zip(parts, first, last, strict=True)
        figures = [f"{name}: {replace(end, before=begin.before).figures}" for name, begin, end in whole]
        _log.info("graph %s, buckets: %s; %s", name_of_compile(), bucket, "; ".join(figures))


def _lines(reports: Sequence[Report]) -> str:
    return "\n".join(map(str, reports))


def _skeletons(parts: Parts) -> str:
    return "\n".join(f"== {name} ==\n\n{print_skeleton(graph)}" for name, graph in parts.items())


def _everything(parts: Parts, reports: Sequence[Report]) -> str:
    nodes = [f"== {name}, all nodes ==\n\n{graph}\n" for name, graph in parts.items()]
    return "\n".join([f"{_lines(reports)}\n", _skeletons(parts), *nodes])


def _dump(stage: str, text: str, directory: Path) -> None:
    """Write the stage into a file of this rank's own, over what the same stage of the same graph has written before."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    graph = name_of_compile().replace("/", ".")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"rank{rank}_graph{graph}_{stage}.txt").write_text(text)
