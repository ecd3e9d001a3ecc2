"""A page about plans, to look at in a browser: when everything happens, what fills the memory, what travels together.

    plans ─ plan_data ─ JSON ─┐
    page.html ─ page.css ─ echarts ─ *.js ─ one file that loads nothing

The scripts read the JSON and draw: ``format`` (numbers and names for people), ``tables``, ``timeline`` (the chart) and
``page`` (which plans are shown).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..planning import Plan
from .plan_data import page_data

__all__ = ["write_report"]

HERE = Path(__file__).parent
SCRIPTS = ("format.js", "tables.js", "timeline.js", "page.js")


def write_report(
    plans: Sequence[tuple[object, Plan]], path: Path, title: str = "Plan of a training step", memory: int | None = None
) -> None:
    """Write a page of plans, of which it shows any two side by side.

    Args:
        plans: one or more, each with what tells it apart from others on the same number of ranks, like its setting.
        path: of the file, HTML.
        title: of the page.
        memory: bytes that a device has; plans that take more are marked.

    Raises:
        OSError: the file cannot be written.
        ValueError: there is no plan.
    """
    if not plans:
        raise ValueError("a report needs at least one plan")
    parts = {
        "title": escape(title),
        "css": _read("page.css"),
        "data": _for_script(page_data(plans, memory)),
        "echarts": _read("echarts/echarts.min.js"),
        "js": "\n".join(map(_read, SCRIPTS)),
    }
    # In one go: nothing that is filled in is searched again.
    page = re.sub(r"\{\{ (\w+) \}\}", lambda found: parts[found[1]], _read("page.html"))
    path.write_text(page, encoding="utf-8")


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _for_script(data: object) -> str:
    """JSON that a script element may hold, whatever names are in it: nothing in it can end the element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
