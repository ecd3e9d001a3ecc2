"""Compares a text with the one kept in ``expected/``; run with ``EXPECTTEST_ACCEPT=1`` to keep the new one."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parent.parent / "expected"


def assert_snapshot(name: str, text: str) -> None:
    """Fail with a diff if ``text`` is not what ``expected/<name>.txt`` holds.

    Files and not ``expecttest``'s inline strings: these texts are long and are reviewed on their own.
    """
    path = DIRECTORY / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return
    kept = path.read_text() if path.exists() else ""
    if kept != text:
        diff = difflib.unified_diff(kept.splitlines(), text.splitlines(), f"{path.name}, kept", "now", lineterm="")
        pytest.fail("\n".join(["EXPECTTEST_ACCEPT=1 accepts:", *diff]), pytrace=False)
