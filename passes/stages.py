"""Runs a stage of the pipeline: one pass on the graphs of a step, measured if asked, and recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from .context import Effect, Parts, PassConfig, PassContext, Report
from .machine import cost_model
from .memory import MemoryProfile
from .records import record_stage
from .simulate import simulate
from .verify import verified

PASSES = ("regather", "keep_slices", "accumulate", "bucket", "schedule", "dedup", "fuse_copies", "for_gloo", "announce")


def run_stage(
    name: str,
    parts: Parts,
    context: PassContext,
    run: Callable[[], list[Report]],
    default_budget: int | None = None,
) -> list[Report]:
    """Run a pass on ``parts``, verify what it has made if the configuration says so, and return its reports.

    Args:
        name: of the pass.
        context: with the configuration that the pass goes by.
        run: runs the pass, and returns a report for each graph that it was given.
        default_budget: that ``schedule`` is given.

    Raises:
        InvalidGraph: the pass has broken a rule.
    """
    before = effect_of(parts, context.config)
    with verified(name, parts, context.config, default_budget) if context.config.verify else nullcontext():
        reports = run()
    after = effect_of(parts, context.config)
    reports = [replace(report, step_before=before, step_after=after) for report in reports]
    context.reports.extend(reports)
    record_stage(f"{'_'.join(parts)}_{PASSES.index(name) + 1}_{name}", parts, reports, context.config)
    return reports


def effect_of(parts: Parts, config: PassConfig) -> Effect | None:
    """How the step goes by simulation, if that is to be measured."""
    if not config.measure:
        return None
    graphs = [*parts.values()]
    timeline = simulate(graphs, cost_model(graphs, config.hardware))
    return Effect(timeline.exposed_seconds, MemoryProfile.of(graphs).peak)
