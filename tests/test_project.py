"""The project as a whole: what its documents promise holds, and importing it changes nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import fsdp_compile

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's code in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    (command,) = [line for line in README.splitlines() if "'.[test]'" in line]
    assert f"{command}\n" in blocks("sh")  # a block of its own: to be copied
    (selection,) = re.findall(r"^command=\$\((.*)\)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert run("bash", "-c", selection, cwd=ROOT).stdout == f"{command}\n"
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_example_command_names_a_script_and_an_extra_that_exist() -> None:
    (command,) = [block for block in blocks("sh") if "'.[examples]'" in block]
    (script,) = re.findall(r"python (\S+)", command)
    assert (ROOT / script).is_file()
    assert {"examples", "test"} <= project()["project"]["optional-dependencies"].keys()


def test_the_layout_is_there() -> None:
    paths = re.findall(r"^\| `([\w/]+/)` \|", README, re.MULTILINE)
    assert paths and all((ROOT / path).is_dir() for path in paths)


def test_public_names() -> None:
    for name in fsdp_compile.__all__:
        assert getattr(fsdp_compile, name).__doc__, f"{name} has no docstring"
    assert {"FSDPModule", "MixedPrecisionPolicy", "fully_shard"} <= set(fsdp_compile.__all__)


def test_import_leaves_the_compiler_alone() -> None:
    code = """
import torch, torch._dynamo.config, torch._functorch.config, torch._inductor.config
configs = torch._dynamo.config, torch._functorch.config, torch._inductor.config
before = [config.get_config_copy() for config in configs]
import fsdp_compile, fsdp_compile.models, fsdp_compile.parity
assert before == [config.get_config_copy() for config in configs]
"""
    done = run(sys.executable, "-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_all_packages_are_shipped() -> None:
    found = [path.parent for top in ("fsdp_compile", "passes") for path in ROOT.glob(f"{top}/**/__init__.py")]
    names = {str(path.relative_to(ROOT)).replace("/", ".") for path in found}
    setuptools = project()["tool"]["setuptools"]
    assert set(setuptools["packages"]) == {f"fsdp_compile.{name}" if name == "passes" else name for name in names}
    assert (ROOT / "fsdp_compile" / setuptools["package-data"]["fsdp_compile"][0]).is_file()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
