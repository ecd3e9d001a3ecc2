"""Explains a step of a model before a run: as ``planning``, on ranks that do not exist and tensors without data."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import torch_compat
from .explain import Explanation, explain
from .factory import Factory
from .last_run import is_of_torch
from .passes import PassConfig
from .planning import model_without_data, run_step


@dataclass(frozen=True)
class ExplainedStep:
    """What compiling a step does on one number of ranks.

    Attributes:
        sharding: what was sharded, in words.
        stopped: where and why the step could not go on without data, between two graphs; else empty.
    """

    world_size: int
    replicas: int
    sharding: str
    explanation: Explanation
    stopped: str

    def __str__(self) -> str:
        ranks = f"{self.world_size:,} ranks" + (f", {self.replicas} replicas" if self.replicas > 1 else "")
        stopped = (
            ["", f"The step stopped at {self.stopped}. What comes after that is not shown."] if self.stopped else []
        )
        return "\n".join([f"{ranks}, sharded: {self.sharding}", "", str(self.explanation), *stopped])

    def as_json(self) -> dict[str, Any]:
        """All that is known, with each collective and its members. Times are seconds, sizes bytes of one rank."""
        return asdict(self)


def explain_step(
    factory: Factory,
    world_size: int,
    config: PassConfig | None = None,
    replicas: int = 1,
    allow_graph_breaks: bool = True,
    **how: Any,
) -> ExplainedStep:
    """Compile a step of a model on ``world_size`` ranks, and explain it, each pass measured.

    Args:
        factory, config, replicas, how: as of ``planning.make_plan``.
        allow_graph_breaks: go on after one, where the code between the graphs does not need data.

    Raises:
        FactoryError, RuntimeError, ValueError: as ``planning.make_plan``.
        torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError: there is a graph break, and none is allowed.
    """
    hardware = (config and config.hardware) or "h100"
    config = replace(config or PassConfig(), hardware=hardware, measure=True)
    stopped = ""
    with model_without_data(factory, world_size, config, replicas, **how) as (model, batch, sharding):
        try:
            run_step(model, batch, fullgraph=not allow_graph_breaks)
        except torch_compat.NEEDS_DATA as error:
            stopped = f"{_place(error)}, which needs data: {error}"
        return ExplainedStep(world_size, replicas, sharding, explain(model), stopped)


def _place(error: BaseException) -> str:
    """The last line of code on the way to the error that is not torch's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_of_torch(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}"
