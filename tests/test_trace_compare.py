"""``fsdp-compile compare``: how far a simulated step is from a measured one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hand_written_traces import by_gloo, simulated, step_on_gloo, write

from fsdp_compile import cli
from fsdp_compile.measured_trace import TraceError
from fsdp_compile.trace_compare import as_table, compare

A = ("forward", "all_gather [a]", 5.0, 5.0), ("backward", "reduce_scatter [a]", 30.0, 0.0)
TABLE = """\
ms; median of 3 measured steps; error: how much too long (+) or short (-) predicted
                              predicted  measured  error  exposed: predicted  measured
forward  all_gather [a]           0.005     0.010  -50 %               0.005     0.004
backward  reduce_scatter [a]      0.030     0.020  +50 %               0.000     0.008
all collectives                   0.035     0.030  +17 %               0.005     0.012
step                              0.040     0.050  -20 %
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write(tmp_path / "plan.json", [*simulated(4, *A[:1]), *simulated(2, *A)], None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps, of which the median takes 50 us."""
    steps = [*step_on_gloo(0, longer=1), *step_on_gloo(100, longer=30), *step_on_gloo(200)]
    return write(tmp_path / "run.json", steps)


def call(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fsdp-compile", "compare", *map(str, args)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_table(plan: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, plan, run) == 0
    assert capsys.readouterr().out == TABLE


def test_another_model(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "other.json", step_on_gloo(0, groups="b"))
    assert call(monkeypatch, plan, other) == 1
    said = capsys.readouterr().out
    assert "NOT THE SAME: " in said
    assert "  only simulated: forward  all_gather [a]\n" in said
    assert "  only measured: backward  reduce_scatter [b]\n" in said


def test_what_is_in_both_is_compared_beside_what_is_not(tmp_path: Path) -> None:
    """As where eager gathers again what a graph need not."""
    plan = write(tmp_path / "plan.json", simulated(2, *A, ("backward", "all_reduce [a]", 1.0, 0.0)), None)
    comparison = compare(plan, write(tmp_path / "run.json", step_on_gloo(0)))
    assert [row.seconds for row in comparison.rows] == pytest.approx([10e-6, 20e-6])
    assert not comparison.same_model and "only simulated: backward  all_reduce [a]" in as_table(comparison)


def test_steps_with_other_collectives_are_left_out(plan: Path, tmp_path: Path) -> None:
    run = write(tmp_path / "run.json", [*step_on_gloo(0), *step_on_gloo(100, groups="b")])
    comparison = compare(plan, run)
    assert (comparison.counted, comparison.measured) == (1, 2)
    assert comparison.same_model and "LEFT OUT: 1 measured steps" in as_table(comparison)


def test_collectives_alike_are_matched_by_order(tmp_path: Path) -> None:
    """A module that runs twice gathers twice."""
    twice = step_on_gloo(0)
    twice[0]["name"] = "fsdp_compile forward: all_gather [a]; all_gather [a]"
    plan = write(tmp_path / "plan.json", simulated(2, A[0], A[0], A[1]), None)
    rows = compare(plan, write(tmp_path / "run.json", twice)).rows
    assert [row.seconds for row in rows] == pytest.approx([6e-6, 4e-6, 20e-6])


def test_transfers_that_are_not_in_the_trace(plan: Path, tmp_path: Path) -> None:
    """As on a GPU whose kernels were not recorded."""
    blind = [entry for entry in step_on_gloo(0) if not entry["name"].startswith("gloo:all_reduce")]
    said = as_table(compare(plan, write(tmp_path / "run.json", [*blind, by_gloo("send", 0, 1)])))
    assert "NOT SEEN: 1 collectives" in said
    assert "backward  reduce_scatter [a]      0.030  not seen" in said


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        (3, "plan.json is for 4, 2 ranks, but the measured trace is of 3 ranks"),
        (None, "plan.json is for 4, 2 ranks, but the measured trace is of unknown ranks"),
    ],
)
def test_other_ranks(
    ranks: int | None,
    complaint: str,
    plan: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, plan, write(tmp_path / "run.json", step_on_gloo(0), ranks)) == 2
    assert complaint in capsys.readouterr().err


def test_several_plans_for_the_same_ranks(tmp_path: Path) -> None:
    """As of meshes side by side."""
    second = [{**entry, "pid": 99} for entry in simulated(2, *A)]
    plan = write(tmp_path / "plan.json", [*simulated(2, *A), *second], None)
    with pytest.raises(TraceError, match="several plans"):
        compare(plan, write(tmp_path / "run.json", step_on_gloo(0)))


def test_the_only_simulated_ranks_are_taken_where_the_trace_says_nothing(tmp_path: Path) -> None:
    plan = write(tmp_path / "plan.json", simulated(2, *A), None)
    assert compare(plan, write(tmp_path / "run.json", step_on_gloo(0), None)).same_model


def test_files_that_are_none(
    plan: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, complaint in (
        ((tmp_path / "missing.json", run), "missing.json: No such file or directory"),
        ((plan, tmp_path), "Is a directory"),
        ((run, run), "run.json is no trace that fsdp-compile plan --trace wrote"),
        ((plan, plan), "plan.json has no step"),
    ):
        assert call(monkeypatch, *args) == 2
        output = capsys.readouterr()
        assert complaint in output.err and output.err.count("\n") == 1 and not output.out
