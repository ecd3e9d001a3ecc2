"""The main example, run as a user runs it: it learns, survives kills, stops cleanly and speaks in single lines."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "train_llama.py"
TINY = ["--size", "debug", "--batch", "4", "--seq", "32", "--text", argparse.__file__, "--no-sample"]
STEPS = 30
UNBROKEN = [*TINY, "--steps", str(STEPS), "--checkpoint-every", "10", "--checkpoint-dir", "ck"]

modes = pytest.mark.parametrize("mode", ["none", "fsdp_eager", pytest.param("inductor", marks=pytest.mark.slow)])
slow_if_compiled = pytest.mark.parametrize(
    "mode", ["none", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("fsdp_eager", "inductor"))]
)


def start(cwd: Path, *args: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start the script in a session of its own, by which `assert_nothing_left` finds what it started."""
    return subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), *args],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(cwd: Path, *args: str, launcher: tuple[str, ...] = ()) -> tuple[int, str, str]:
    process = start(cwd, *args, launcher=launcher)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out, err


def losses(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def assert_nothing_left(session: int) -> None:
    deadline = time.monotonic() + 10
    while left := running(session):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def running(session: int) -> list[str]:
    """The session's processes, less those that have ended and only wait to be reaped."""
    ps = subprocess.run(["ps", "-o", "stat=,args=", "-s", str(session)], capture_output=True, text=True)
    return [line for line in ps.stdout.splitlines() if not line.startswith("Z")]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """The losses of a run that nothing disturbs, uncompiled."""
    cwd = tmp_path_factory.mktemp("unbroken")
    code, _, err = run(cwd, *UNBROKEN, "--compile", "none", "--log-losses", "log")
    assert code == 0, err
    return losses(cwd / "log")


@modes
def test_learns(mode: str, tmp_path: Path, unbroken: list[tuple[int, float]]) -> None:
    args = [arg for arg in UNBROKEN if arg != "--no-sample"]
    code, out, err = run(tmp_path, *args, "--compile", mode, "--log-losses", "log", "--prompt", "def ")
    assert code == 0, err
    before, after = (float(line.split()[3]) for line in out.splitlines() if line.startswith("held-out loss"))
    assert 5 < before < 6 and after < before - 1
    assert "sample:\ndef " in out
    assert "tokens/s" in err and "MB communicated" in err, "the bar"
    assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == ["step-20", "step-30"]
    if mode == "inductor":
        torch.testing.assert_close(torch.tensor(losses(tmp_path / "log")), torch.tensor(unbroken), rtol=1e-3, atol=0)
    else:
        assert losses(tmp_path / "log") == unbroken


@slow_if_compiled
def test_resumes_after_kill_with_the_losses_of_an_unbroken_run(mode: str, tmp_path: Path) -> None:
    common = [*TINY, "--steps", str(STEPS), "--compile", mode, "--checkpoint-every", "7"]
    code, _, err = run(tmp_path, *common, "--checkpoint-dir", "whole", "--log-losses", "whole.log")
    assert code == 0, err

    broken = [*common, "--checkpoint-dir", "ck", "--log-losses", "log"]
    process = start(tmp_path, *broken)
    wait_for(tmp_path / "ck" / "step-7", process)
    process.kill()
    process.communicate()
    assert_nothing_left(process.pid)
    assert not (tmp_path / "ck" / f"step-{STEPS}").exists(), "killed too late to show anything"

    code, out, err = run(tmp_path, *broken, "--resume")
    assert code == 0, err
    assert "resumed from ck/step-" in out
    assert losses(tmp_path / "log") == losses(tmp_path / "whole.log")


@pytest.mark.slow
def test_a_longer_run_continues_a_finished_one(tmp_path: Path, unbroken: list[tuple[int, float]]) -> None:
    args = [*TINY, "--compile", "none", "--checkpoint-dir", "ck", "--log-losses", "log"]
    assert run(tmp_path, *args, "--steps", "12")[0] == 0
    assert run(tmp_path, *args, "--steps", str(STEPS), "--resume")[0] == 0
    assert losses(tmp_path / "log") == unbroken


def test_ctrl_c_ends_all_ranks_and_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    args = [*TINY, "--compile", "none", "--checkpoint-every", "5", "--checkpoint-dir", "ck"]
    process = start(tmp_path, *args, "--steps", "100000")
    wait_for(tmp_path / "ck" / "step-10", process)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, err = process.communicate(timeout=15)
    assert process.returncode == 130
    assert_nothing_left(process.pid)
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("interrupted; last checkpoint: ck/step-")

    step = int(last.rpartition("-")[2])
    code, out, err = run(tmp_path, *args, "--steps", str(step + 1), "--resume")
    assert code == 0, err
    assert f"resumed from ck/step-{step}" in out


def test_ctrl_c_before_the_first_step(tmp_path: Path) -> None:
    process = start(tmp_path, *TINY)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert (process.returncode, err.strip()) == (130, "interrupted; last checkpoint: none")
    assert_nothing_left(process.pid)


def test_a_dead_rank_ends_the_others(tmp_path: Path) -> None:
    process = start(
        tmp_path, *TINY, "--compile", "none", "--steps", "100000", "--checkpoint-dir", "ck", "--checkpoint-every", "5"
    )
    wait_for(tmp_path / "ck" / "step-5", process)
    found = subprocess.run(["pgrep", "-f", "-P", str(process.pid), "spawn_main"], capture_output=True, text=True)
    os.kill(max(map(int, found.stdout.split())), signal.SIGKILL)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 1
    assert "was ended by SIGKILL" in err.splitlines()[-1]
    assert_nothing_left(process.pid)


def test_torchrun(tmp_path: Path, unbroken: list[tuple[int, float]]) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    args = [*UNBROKEN, "--compile", "none", "--log-losses", "log"]
    code, out, err = run(tmp_path, *args, launcher=launcher)
    assert code == 0, err
    assert "over 2 c" in out, "2 cpu or 2 cuda ranks"
    if "2 cpu ranks" in out:
        assert losses(tmp_path / "log") == unbroken


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--size huge", "unknown size 'huge'; choose from debug, small"),
        ("--steps 0", "argument --steps: must be at least 1, not 0"),
        ("--batch -3", "argument --batch: must be at least 1, not -3"),
        ("--batch two", "argument --batch: must be a whole number, not 'two'"),
        ("--nproc 0", "argument --nproc: must be at least 1, not 0"),
        ("--lr nan", "argument --lr: must be positive, not nan"),
        ("--compile magic", "argument --compile: invalid choice: 'magic'"),
        ("--tied --untied", "not allowed with argument --tied"),
        ("--what", "unrecognized arguments: --what"),
        ("--seq 100000", "--seq 100000 is longer than the 2048 that size small allows"),
        ("--text nowhere", "no such file or directory: nowhere"),
        ("--text little", "little has 6 bytes of text; a window of 128 bytes needs at least 2580"),
        ("--checkpoint-dir little", "cannot make directory little: File exists"),
        ("--log-losses .", "--log-losses . is a directory"),
        ("--resume --checkpoint-dir none", "--resume: no complete checkpoint in none"),
        ("--resume --checkpoint-dir ck --size debug", "--resume: ck/step-9 was made with dim 192, not 64"),
        ("--resume --checkpoint-dir ck --nproc 3", "--resume: ck/step-9 was made with ranks 2, not 3"),
        ("--resume --checkpoint-dir ck --steps 9", "--resume: ck/step-9 is already at step 9; raise --steps"),
    ],
)
def test_bad_arguments_get_one_line(
    args: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    example: None,
) -> None:
    import checkpoints
    import llama_training
    import train_llama

    from fsdp_compile.models import SIZES

    (tmp_path / "little").write_text("little")
    (tmp_path / "ck" / "step-9").mkdir(parents=True)
    facts = llama_training.run_facts(SIZES["small"], 2)
    (tmp_path / "ck" / "step-9" / checkpoints.FACTS).write_text(json.dumps(facts))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *args.split()])
    with pytest.raises(SystemExit) as exit:
        train_llama.main()
    out, err = capsys.readouterr()
    assert (exit.value.code, out) == (2, "")
    assert err.startswith("train_llama.py: error: ") and message in err
    assert err.count("\n") == 1


def test_bad_argument_of_the_script_itself(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "--size", "huge")
    assert (code, out, err.count("\n")) == (2, "", 1)


# -- its parts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the example as modules."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_only_complete_checkpoints_count(tmp_path: Path, example: None) -> None:
    from checkpoints import newest

    for name in ("step-9", "step-10", "step-30.tmp", "step-40.old", "other"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path) == tmp_path / "step-10"
    assert newest(tmp_path / "missing") is None


def test_held_out_text_is_apart(tmp_path: Path, example: None) -> None:
    from text_data import Text

    (tmp_path / "a").write_bytes(b"a" * 950 + b"b" * 50)
    (tmp_path / "binary").write_bytes(b"\0" * 1000)
    (tmp_path / ".hidden").write_bytes(b"c" * 1000)
    text = Text(str(tmp_path), seq=10)
    assert set(text.train) == {ord("a")} and set(text.held_out) == {ord("b")}
    first, again, other = (text.train_windows(0, step, 4) for step in (1, 1, 2))
    assert first.shape == (4, 11)
    assert (first == again).all()
    assert text.held_out_windows(3).shape == (3, 11)
    assert other.shape == (4, 11)


class CountReceived(TorchDispatchMode):
    """Adds up what gathers and reduce-scatters bring to this rank: outputs less this rank's own part of them."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.bytes = world, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.__name__
        if "allgather" in name:
            self.bytes += sum(out.nbytes for out in torch.utils._pytree.tree_leaves(args[0])) * (1 - 1 / self.world)
        elif name.startswith("_reduce_scatter"):
            self.bytes += args[0].nbytes * (self.world - 1)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_ranks() -> Iterator[int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield 3
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_communicated_are_those_of_the_collectives(
    dtype: str, tied: bool, fake_ranks: int, example: None
) -> None:
    import llama_training

    from fsdp_compile.models import SIZES

    policy = llama_training.policy_of(argparse.Namespace(dtype=dtype))
    model = llama_training.build(SIZES["debug"].with_head(tied), 0, policy, torch.device("cpu"))
    said = llama_training.bytes_per_step(model, policy)
    with CountReceived(fake_ranks) as count:
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    assert count.bytes == pytest.approx(said)
