"""The passes know graphs and tags only: nothing of the runtime is imported, so other runtimes can use them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fsdp_compile.passes as passes

SOURCES = sorted(Path(passes.__file__).parent.glob("*.py"))


def imported_modules(tree: ast.AST) -> list[str]:
    """Absolute names of all modules that a source in the package of the passes imports, anywhere in it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = "" if node.level == 0 else ".".join(passes.__name__.split(".")[: 3 - node.level])
            module = ".".join(part for part in (package, node.module) if part)
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_runtime(source: Path) -> None:
    for name in imported_modules(ast.parse(source.read_text())):
        assert not name.startswith("fsdp_compile") or name.startswith("fsdp_compile.passes."), name


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_private_torch_apis_in_one_place(source: Path) -> None:
    if source.stem == "torch_compat":
        return
    for name in imported_modules(ast.parse(source.read_text())):
        assert not any(part.startswith("_") for part in name.split(".")) or name.startswith("__future__"), name


def test_the_check_sees_relative_imports() -> None:
    found = imported_modules(ast.parse("from ..backend import x\nfrom . import y\nimport fsdp_compile.parity"))
    assert sorted(found) == ["fsdp_compile.backend.x", "fsdp_compile.parity", "fsdp_compile.passes.y"]
