"""The README and the guide: their code runs, their links lead somewhere, and the messages that they quote exist."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import runpy
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Ranks

import fsdp_compile
from fsdp_compile import backend
from fsdp_compile.passes import profile

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
SECONDS = 300

# Lines of shell that are not run, by what they contain, and why.
LEFT_OUT = {
    "pip install": "changes the environment; CI runs the tests by such a line",
    "--nproc-per-node 8": "needs two nodes of eight GPUs",
    "parity:debug_llama": "takes half a minute; test_cli.py compares this model in fewer steps",
    "parity my_model.py:factory --backend inductor": "two Inductors compile; test_cli.py compares under torchrun too",
    "calibrate machine.toml --nproc 2": "takes half a minute; test_calibrate.py measures less",
    "llama3-8b": "takes half a minute for each number of ranks; tests of these commands take smaller models",
    "--search": "plans many times; test_plan_search.py runs the command",
}


def blocks(page: Path, language: str) -> list[str]:
    """A page's code in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def is_file(block: str) -> bool:
    """Whether the block is a file of its own: its first line is a comment with the name."""
    return re.match(r"# \w+\.py\n", block) is not None


def script(page: Path) -> str:
    """The blocks that follow each other."""
    return "\n".join(block for block in blocks(page, "python") if not is_file(block))


def files(page: Path) -> dict[str, str]:
    """Those that the README names, and as train.py the page's own blocks."""
    named = {block.splitlines()[0].removeprefix("# "): block for block in filter(is_file, blocks(README, "python"))}
    return named | ({"train.py": script(page)} if script(page) else {})


def lines(page: Path) -> list[str]:
    """The page's lines of shell."""
    return [line for block in blocks(page, "sh") for line in block.splitlines()]


def why_left_out(line: str) -> str | None:
    return next((why for part, why in LEFT_OUT.items() if part in line), None)


def is_train_py(page: Path) -> bool:
    """Whether the page's own blocks are run by a line of shell."""
    return any("train.py" in line for line in lines(page))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if script(page) and not is_train_py(page)], ids=lambda page: page.stem
)
def test_python_runs(page: Path, ranks2: Ranks, tmp_path: Path) -> None:
    """The blocks of a page, one after the other, on two ranks."""
    file = tmp_path / f"{page.stem}.py"
    file.write_text(script(page))
    ranks2.run(_run, str(file))


def _run(file: str) -> None:
    with backend.configured(), contextlib.chdir(Path(file).parent):
        runpy.run_path(file, run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if lines(page)], ids=lambda page: page.stem)
def test_shell_runs(page: Path, tmp_path: Path) -> None:
    """Each line exits with 0."""
    for name, code in files(page).items():
        (tmp_path / name).write_text(code)
    profile("cpu").write(tmp_path / "machine.toml")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path_of_python()}
    for line in lines(page):
        if why_left_out(line) is None:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", line],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def path_of_python() -> str:
    """Of the package that is tested, whatever is installed."""
    return os.pathsep.join([str(Path(fsdp_compile.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])


def test_all_that_is_left_out_is_there() -> None:
    found = "\n".join(line for page in PAGES for line in lines(page))
    assert [part for part in LEFT_OUT if part not in found] == []


def test_links() -> None:
    """To files and to headings."""
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text):
            if not target.startswith("http"):
                path, _, heading = target.partition("#")
                file = (page.parent / path).resolve() if path else page
                assert file.is_file(), f"{page.name}: {target}"
                assert not heading or heading in headings(file), f"{page.name}: {target}"


def headings(page: Path) -> set[str]:
    """As links name them: in small letters, without punctuation, with hyphens for spaces."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_guide_lists_its_pages() -> None:
    listed = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/README.md").read_text())
    assert sorted(listed) == [page.name for page in PAGES if page.parent.name == "docs" and page.stem != "README"]


def test_pictures_can_be_read() -> None:
    """With a title, a description and a background of their own."""
    pictures = sorted((ROOT / "docs").glob("*.svg"))
    assert pictures
    for picture in pictures:
        root = ElementTree.parse(picture).getroot()
        names = [child.tag.split("}")[1] for child in root]
        first = root[names.index("rect")]
        assert names[:2] == ["title", "desc"] and first.get("fill") == "#ffffff"


def test_the_reference_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| `(\w+\.py)` \|$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(fsdp_compile.__all__)
    for name, file in rows:
        source = (ROOT / "fsdp_compile" / file).read_text()
        assert re.search(rf"^(class|def) {name}\b", source, re.MULTILINE), f"{name} is not in {file}"


def test_quoted_messages_exist() -> None:
    """Each is what some text in the sources gives, with values of the example put in."""
    quoted = [block.rstrip() for block in blocks(ROOT / "docs/troubleshooting.md", "text")]
    known = list(templates())
    assert len(quoted) > 15
    assert [message for message in quoted if not any(each.fullmatch(message) for each in known)] == []


def templates() -> Iterator[re.Pattern[str]]:
    """Texts of the sources that say something by themselves, with anything where values go."""
    for file in (ROOT / "fsdp_compile").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            fixed = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if len("".join(fixed).split()) >= 3:
                yield re.compile("".join(_pattern(part) for part in parts), re.DOTALL)


def _pattern(part: ast.expr) -> str:
    return re.escape(part.value) if isinstance(part, ast.Constant) else ".+"
