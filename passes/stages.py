"""Runs a stage of the pipeline: one pass on the graphs of a step, which it measures and dumps as far as asked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from .context import Effect, Parts, PassConfig, PassContext, Report
from .machine import cost_model
from .memory import MemoryProfile
from .simulate import simulate
from .skeleton import print_skeleton
from .torch_compat import name_of_compile
from .verify import verified

PASSES = ("regather", "keep_slices", "accumulate", "bucket", "schedule", "dedup", "fuse_copies", "for_gloo")  # in order


def run_stage(
    number: int,
    parts: Parts,
    context: PassContext,
    run: Callable[[], list[Report]],
    default_budget: int | None = None,
) -> None:
    """Run a pass on ``parts``, note its reports, and verify what it has made if the configuration says so.

    Args:
        number: of the pass in the pipeline.
        context: with the configuration that the pass goes by.
        run: runs the pass, and returns a report for each graph that it was given.
        default_budget: that ``schedule`` is given.

    Raises:
        InvalidGraph: the pass has broken a rule.
    """
    before = effect_of(parts, context.config)
    name = PASSES[number - 1]
    with verified(name, parts, context.config, default_budget) if context.config.verify else nullcontext():
        reports = run()
    after = effect_of(parts, context.config)
    reports = [replace(report, step_before=before, step_after=after) for report in reports]
    context.reports.extend(reports)
    if context.config.dump is not None:
        _dump(f"{'_'.join(parts)}_{number}_{reports[0].name}", parts, reports, Path(context.config.dump))


def effect_of(parts: Parts, config: PassConfig) -> Effect | None:
    """How the step goes by simulation, if that is to be measured."""
    if not config.measure:
        return None
    graphs = [*parts.values()]
    timeline = simulate(graphs, cost_model(graphs, config.hardware))
    return Effect(timeline.exposed_seconds, MemoryProfile.of(graphs).peak)


def _dump(stage: str, parts: Parts, reports: list[Report], directory: Path) -> None:
    """Write the stage into a file of this rank's own, over what the same stage of the same graph has written before."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    text = [*map(str, reports)]
    text += [f"\n== {name} ==\n\n{print_skeleton(graph)}" for name, graph in parts.items()]
    text += [f"\n== {name}, all nodes ==\n\n{graph}" for name, graph in parts.items()]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"rank{rank}_graph{name_of_compile()}_{stage}.txt").write_text("\n".join(text) + "\n")
