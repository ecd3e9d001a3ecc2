"""``fsdp-compile calibrate``: exact fits on exact times, the slowest rank's times, one profile on all ranks, a file."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import Ranks

from fsdp_compile import calibrate, cli
from fsdp_compile.passes import HardwareProfile, profile
from fsdp_compile.passes.alpha_beta import Line, Link, line_across, line_within

COMMAND = [sys.executable, "-m", "fsdp_compile.cli", "calibrate"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", *COMMAND[2:]]
SIZES = [4096, 16384, 65536, 1 << 20, 1 << 24]
close = pytest.approx


# -- fits -------------------------------------------------------------------------------------------------------------


def test_an_exact_line_is_found() -> None:
    line = calibrate.fit_line(SIZES, [3e-4 + size * 2e-9 for size in SIZES])
    assert (line.fixed, line.per_byte) == close((3e-4, 2e-9), rel=1e-9)


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """Ten percent more on the largest size would shift the latency by hundreds of percent if errors were absolute."""
    seconds = [3e-4 + size * 2e-9 for size in SIZES]
    line = calibrate.fit_line(SIZES, [*seconds[:-1], 1.1 * seconds[-1]])
    assert line.fixed == close(3e-4, rel=0.05) and 2e-9 < line.per_byte < 2.2e-9


def test_no_line_is_negative() -> None:
    steeper = calibrate.fit_line([1000, 2000], [1e-3, 3e-3])
    assert steeper.fixed == 0 and 1e-6 < steeper.per_byte < 1.5e-6
    falling = calibrate.fit_line([1000, 2000], [2e-3, 1e-3])
    assert falling == Line(0.0, 1e-3 / 2000)


@pytest.mark.parametrize("kind", calibrate.KINDS)
def test_links_take_what_was_measured(kind: str) -> None:
    measured = Line(5e-4, 3e-9)
    link = calibrate._link_within(kind, 6, measured)
    again = line_within(kind, 6, link, "ring")
    assert (again.fixed, again.per_byte) == close((measured.fixed, measured.per_byte), rel=1e-9)
    near = Link(1e-5, 1e11)
    far = calibrate._link_across(kind, 12, 4, near, measured)
    again = line_across(kind, 12, 4, near, far, "ring")
    assert (again.fixed, again.per_byte) == close((measured.fixed, measured.per_byte), rel=1e-9)


def test_what_is_spent_inside_nodes_is_at_most_all() -> None:
    assert calibrate._link_across("all_gather", 12, 4, Link(1.0, 1e11), Line(1e-3, 1e-9)).latency == 0


@pytest.mark.parametrize("world", [2, 3, 6])
def test_sizes_can_be_shared_out(world: int) -> None:
    sizes = calibrate._sizes(1 << 20, world)
    assert sizes == sorted(sizes) and len(sizes) == 5
    assert all(size % (4 * world) == 0 for size in sizes)
    assert sizes[0] == close(4096, rel=0.01) and sizes[-1] == close(1 << 20, rel=0.01)


# -- on ranks ---------------------------------------------------------------------------------------------------------


def test_the_slowest_rank_counts(ranks2: Ranks) -> None:
    assert ranks2.run(_slowest) == [6.0, 6.0]


def _slowest() -> float:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "_block_seconds", lambda *_: [1.0, 5.0 + rank, 100.0])
        return calibrate._seconds(lambda: None, "cpu")


def test_all_ranks_agree_and_tell_two_nodes_apart(ranks4: Ranks) -> None:
    first, *others = ranks4.run(_two_nodes)
    assert all(other == first for other in others)
    assert first.ranks_in_node == 2 and first.name == "by rank 0"
    assert first.across != first.within
    assert dict(first.peak_flops).keys() == {"float32", "float16", "bfloat16"}


def _two_nodes() -> HardwareProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setattr(calibrate, "LARGEST_MATRIX", {"cpu": 256})
        return calibrate.calibrate(f"by rank {dist.get_rank()}", largest=1 << 16)


def test_a_measured_link_is_the_one_that_is_there(ranks2: Ranks) -> None:
    """Times made up from a latency and a bandwidth give that latency and that bandwidth, for each kind."""
    (within, across), _ = ranks2.run(_made_up)
    assert across == within
    assert (within.latency, within.bandwidth) == close((1e-3, 1e8), rel=1e-6)
    for kind, times in (("reduce_scatter", 2), ("all_reduce", 1)):
        link = within.link(kind)
        assert (link.latency, link.bandwidth) == close((times * 1e-3, 1e8 / times), rel=1e-6)


def _made_up() -> object:
    def seconds(kind: str, size: int, device: str, group: dist.ProcessGroup) -> float:
        slower = 2 if kind == "reduce_scatter" else 1
        return slower * line_within(kind, group.size(), Link(1e-3, 1e8), "ring").seconds(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        patch.setattr(calibrate, "_collective_seconds", seconds)
        return calibrate.networks(1 << 20)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "suffix"), [(COMMAND, "toml"), (TORCHRUN, "json")], ids=["local", "torchrun"])
def test_the_command_writes_a_profile(command: list[str], suffix: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments = [f"here.{suffix}", "--largest", "1"]
    done = subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"here.{suffix}: profile here of 2 ranks\n"
    here = profile(str(tmp_path / f"here.{suffix}"))
    assert here.ranks_in_node == 2 and here.within == here.across
    for seconds in (here.line(kind, 2).seconds(1 << 20) for kind in calibrate.KINDS):
        assert 1e-5 < seconds < 10 and math.isfinite(seconds)
    assert 1e8 < dict(here.peak_flops)["float32"] < 1e14 and 1e8 < here.memory_bandwidth < 1e13
    assert 1e-8 < here.kernel_launch < 1e-2


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "the following arguments are required: FILE"),
        (["here.yaml"], "a hardware profile is a .toml or a .json file, not 'here.yaml'"),
        (["missing/here.toml"], "cannot write to directory missing"),
        (["here.toml", "--nproc", "1"], "argument --nproc: must be at least 2, not 1"),
        (["here.toml", "--largest", "0"], "argument --largest: must be at least 1, not 0"),
    ],
)
def test_bad_arguments(
    args: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert complaint in refusal(args, tmp_path, monkeypatch, capsys)


def test_one_rank_of_torchrun_is_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert "needs 2 ranks or more; torchrun started 1" in refusal(["here.toml"], tmp_path, monkeypatch, capsys)


def refusal(
    args: list[str], directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """The one line that a command with bad arguments prints."""
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "argv", ["fsdp-compile", "calibrate", *args])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert output.out == "" and re.fullmatch(r"fsdp-compile: error: .*\n", output.err)
    return output.err
