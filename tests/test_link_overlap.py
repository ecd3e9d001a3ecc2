"""Compiled steps hide communication on a real link, which `benchmarks/link_overlap.py` makes and limits."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fsdp_compile.local_ranks import UsageError

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALLEST = ["--layers", "4", "--width", "128", "--rounds", "2", "--steps", "1"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one pair of processes measured where the link takes as long as the compute."""
    _skip_without_a_link()
    results = tmp_path_factory.mktemp("overlap") / "times.json"
    command = [sys.executable, str(BENCHMARKS / "link_overlap.py"), "times", *SMALLEST, "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(results.read_text())["numbers"]["times"]["pairs"][0]


def _skip_without_a_link() -> None:
    spec = importlib.util.spec_from_file_location("rate_limited_link", BENCHMARKS / "rate_limited_link.py")
    assert spec is not None and spec.loader is not None
    link = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(link)
    try:
        link.check_possible()
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["module", "auto"])
def test_a_compiled_step_hides_what_an_eager_one_of_torch_waits_for(pair: dict[str, Any], plan: str) -> None:
    ours, torch = (pair["samples"][name] for name in (plan, "torch"))
    assert median(ours["wall"]) < 0.8 * median(torch["wall"])
    assert ours["sent"][0] < 1.03 * torch["sent"][0]  # the same data; acknowledgements differ a little


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["module", "auto"])
def test_a_step_is_predicted(pair: dict[str, Any], plan: str) -> None:
    """Between the bound and twice the prediction, as the machine may be busy; figures are in the benchmarks' README."""
    measured, predicted = median(pair["samples"][plan]["wall"]), pair["predicted"][plan]
    assert predicted["bound"] <= predicted["step"] < 1.15 * measured
    assert measured < 2 * predicted["step"]
