"""The command ``fsdp-compile parity``, run as a user runs it: what it prints and what it exits with."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from fsdp_compile import cli, parity

COMMAND = [sys.executable, "-m", "fsdp_compile.cli", "parity"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", *COMMAND[2:]]

FACTORIES = """
import os
import torch
import torch.nn as nn

class Honest(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.unused = nn.Linear(3, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"out": x}

class Cheat(Honest):
    def forward(self, x):
        return super().forward(1.5 * x if torch.compiler.is_compiling() else x)

def make_batch(step, rank, world):
    return {"x": torch.randn(4, 3)}

def cheat(): return Cheat(), make_batch
def model_only(): return Honest()

def fails():
    if os.environ["RANK"] == "1":
        raise RuntimeError("no model on rank 1")
    return cheat()

number = 3
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "factories.py").write_text(FACTORIES)
    return tmp_path


def run(directory: Path, *args: str, command: list[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, *args], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )


def test_equal() -> None:
    done = run(Path.cwd(), "fsdp_compile.parity:debug_llama", "--steps", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "eager against backend fsdp_eager, 2 ranks on cpu"
    assert lines[1] == "sharded: each of the 2 modules in model.blocks, and the root"
    assert [line.split() for line in lines[3:5]] == [["1", "0", "0,", "0"], ["2", "0", "0,", "0"]]
    assert lines[5:] == ["graphs 1, graph breaks 0, recompiles 0", "bitwise equal: yes"]


def test_different(directory: Path) -> None:
    done = run(directory, "factories:cheat", "--steps", "1", "--nproc", "1")
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("bitwise equal: no\n")
    assert "layers." in done.stdout  # which gradient differs most


def test_a_rank_that_fails_ends_all(directory: Path) -> None:
    done = run(directory, "factories.py:fails")
    assert done.returncode == 1
    assert done.stderr.startswith("fsdp-compile: error: rank 1 failed\n")
    assert done.stderr.endswith("RuntimeError: no model on rank 1\n")


def test_a_factory_that_breaks_the_protocol(directory: Path) -> None:
    done = run(directory, "factories.py:model_only", "--nproc", "1")
    assert done.returncode == 2
    assert done.stderr == (
        "fsdp-compile: error: the factory must return (model, make_batch), but returned a value of type Honest\n"
    )


@pytest.mark.parametrize(("tolerance", "exit_code"), [("100", 0), ("0", 1)])
def test_tolerance_under_torchrun(directory: Path, tolerance: str, exit_code: int) -> None:
    done = run(directory, "factories.py:cheat", "--steps", "1", "--tolerance", tolerance, command=TORCHRUN)
    assert done.returncode == exit_code, done.stderr
    answer = "no" if exit_code else "yes"
    assert done.stdout.endswith(f"bitwise equal: no\nwithin tolerance {tolerance}: {answer}\n")
    assert done.stdout.count("bitwise equal") == 1  # one rank speaks for all


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["parity"], "the following arguments are required: MODULE:FACTORY"),
        (["parity", "factories"], "expected MODULE:FACTORY, got 'factories'"),
        (["parity", "missing.py:cheat"], "no such file: missing.py"),
        (["parity", "no_such_module:cheat"], "cannot import no_such_module: ModuleNotFoundError"),
        (["parity", "broken.py:cheat"], "cannot import broken.py: ZeroDivisionError: division by zero"),
        (["parity", "factories.py:missing"], "factories.py has no attribute 'missing'"),
        (["parity", "factories.py:number"], "factories.py:number is not callable but of type int"),
        (["parity", "factories.py:cheat", "--nproc", "0"], "argument --nproc: must be at least 1, not 0"),
        (["parity", "factories.py:cheat", "--steps", "few"], "argument --steps: must be a whole number, not 'few'"),
        (["parity", "factories.py:cheat", "--tolerance", "-1"], "argument --tolerance: must be a finite number"),
        (["parity", "factories.py:cheat", "--backend", "magic"], "unknown backend 'magic'; known are "),
    ],
)
def test_bad_arguments(
    args: list[str],
    complaint: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (directory / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "argv", ["fsdp-compile", *args])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    sys.modules.pop("_parity_factories", None)
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert complaint in output.err


def test_difference_tells_bits_from_values() -> None:
    zeros = torch.zeros(2)
    assert parity.difference({"a": zeros}, {"a": zeros.clone()}) == (parity.Difference(), True)
    assert parity.difference({"a": zeros}, {"a": -zeros}) == (parity.Difference(), False)
    nan = torch.tensor([math.nan, 0.0])
    assert parity.difference({"a": nan}, {"a": nan.clone()}) == (parity.Difference(), True)
    assert parity.difference({"a": nan}, {"a": zeros}) == (parity.Difference(math.inf, "a"), False)
    two = {"a": zeros, "b": zeros}
    assert parity.difference(two, {"a": zeros + 1, "b": zeros - 2}) == (parity.Difference(2.0, "b"), False)


def test_no_gradient_equals_no_gradient_only() -> None:
    assert parity.difference({"a": None}, {"a": None}) == (parity.Difference(), True)
    largest, same_bits = parity.difference({"a": None}, {"a": torch.zeros(2)})
    assert largest.value == math.inf and not same_bits


def test_loss_of_outputs() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    scalar = x.sum()
    assert parity.loss_of(scalar) is scalar
    assert parity.loss_of({"logits": x, "loss": scalar}) is scalar
    assert parity.loss_of({"logits": x, "loss": None}).item() == 5.0
    assert parity.loss_of([x, torch.tensor([2])]).item() == 5.0
    for nothing in ("text", torch.tensor([2]), x.detach()):
        with pytest.raises(parity.FactoryError):
            parity.loss_of(nothing)


def test_nothing_is_compared_without_ranks() -> None:
    with pytest.raises(RuntimeError, match="process group"):
        parity.compare_training(lambda: (nn.Linear(1, 1), lambda *_: torch.zeros(1)))
