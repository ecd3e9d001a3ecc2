"""Sharded checkpoints in a directory, each whole or not there at all.

    DIR/step-100        complete
    DIR/step-200        complete, the newest: what --resume takes
    DIR/step-300.tmp    being written, or cut short; never read, removed by the next save
    DIR/step-50.old     being removed; never read

A checkpoint gets its name by one rename after all ranks have written their part, so a crash at any instant leaves the
one before it untouched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

KEPT = 2
FACTS = "run.json"  # what the run must agree on with the checkpoint, readable before any rank starts


def newest(directory: Path) -> Path | None:
    """The complete checkpoint with the highest step, if there is one."""
    return max(_complete(directory), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The number of steps that the run had taken."""
    return int(checkpoint.name.removeprefix("step-"))


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What :meth:`Checkpoints.save` was given as ``facts``."""
    return json.loads((checkpoint / FACTS).read_text())


class Checkpoints:
    """Writes and reads the checkpoints of one run; every rank makes one and calls the same methods.

    Args:
        directory: where they are; made when first needed.
        facts: what tells whether a checkpoint fits a run; JSON.
    """

    def __init__(self, directory: Path, facts: dict[str, Any]) -> None:
        self.directory = directory
        self.facts = facts
        self._mine: list[Path] = []  # of this run, oldest first

    def save(self, step: int, model: Any, optimizer: Any) -> Path:
        """Write the checkpoint of ``step``, then remove all but the newest few, and those of an earlier run."""
        import torch.distributed as dist  # here, so that looking for checkpoints needs no torch and takes no time
        import torch.distributed.checkpoint as dcp

        final = self.directory / f"step-{step}"
        partial = final.with_suffix(".tmp")
        if dist.get_rank() == 0:
            for leftover in self.directory.glob("step-*.*"):
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)
        dist.barrier()
        dcp.save(_state(model, optimizer), checkpoint_id=partial)
        dist.barrier()
        if dist.get_rank() == 0:
            self._name(partial, final)
        self._mine.append(final)
        return final

    def load(self, checkpoint: Path, model: Any, optimizer: Any) -> int:
        """Bring ``model`` and ``optimizer`` to where they were; returns the step."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self._mine = sorted(_complete(self.directory), key=step_of)
        return step_of(checkpoint)

    def _name(self, partial: Path, final: Path) -> None:
        with open(partial / FACTS, "w") as file:
            json.dump(self.facts, file)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():  # of an earlier run
            _remove(final)
        partial.rename(final)
        keep = [*self._mine[-KEPT + 1 :], final]
        for checkpoint in _complete(self.directory):
            if checkpoint not in keep:
                _remove(checkpoint)


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _remove(checkpoint: Path) -> None:
    outdated = checkpoint.rename(checkpoint.with_suffix(".old"))  # first, as a removal cut short leaves half of it
    shutil.rmtree(outdated)


def _complete(directory: Path) -> list[Path]:
    return [path for path in directory.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
