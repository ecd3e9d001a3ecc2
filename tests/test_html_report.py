"""The page about plans: what it is given adds up to what the plans say, and a browser shows it to everybody."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_planning import net

from fsdp_compile import cli
from fsdp_compile.passes import PassConfig
from fsdp_compile.planning import Plan, make_plan
from fsdp_compile.report import plan_data, write_report
from fsdp_compile.report.plan_data import page_data

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = 'w</script><script>window.taken = 1</script><img src="x" onerror="window.taken = 1">'
DESKTOP, PHONE = (1280, 800), (360, 740)
MEMORY = 250_000  # bytes: some of the plans take more


@pytest.fixture(scope="module")
def plans() -> list[tuple[object, Plan]]:
    made = [
        (HOSTILE, make_plan(net, 2)),
        ("whole", make_plan(net, 8)),
        ("apart", make_plan(net, 8, PassConfig(bucket="none"))),
    ]
    first = made[0][1].result.timeline.transfers[0]
    first.start.meta["custom"]["fsdp"]["params"] = ("blocks.0.weight", f"blocks.0.{HOSTILE}")
    made[1][1].result.timeline.transfers[1].exposed = 0.0  # so small a model hides none by itself
    return made


@pytest.fixture(scope="module")
def data(plans: list[tuple[object, Plan]]) -> list[dict[str, Any]]:
    return page_data(plans, MEMORY)["plans"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def file(plans: list[tuple[object, Plan]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(plans, path, f"net {HOSTILE}", MEMORY)
    return path


# -- what the page is given -------------------------------------------------------------------------------------------


def test_times_add_up(plans: list[tuple[object, Plan]], data: list[dict[str, Any]]) -> None:
    for (_, plan), shown in zip(plans, data, strict=True):
        timeline = plan.result.timeline
        for name, seconds in (
            ("compute", timeline.compute_seconds),
            ("collectives", sum(timeline.lane_seconds.values())),
        ):
            assert sum(bar["end"] - bar["begin"] for bar in shown[name]) == pytest.approx(seconds * 1e6, abs=0.1), name
        assert sum(each["exposed"] for each in shown["collectives"]) == pytest.approx(shown["exposed"], abs=0.1)
        assert all(bool(each["reason"]) == (each["exposed"] > 0) for each in shown["collectives"])


def test_compute_is_merged_between_launches_and_waits(
    plans: list[tuple[object, Plan]], data: list[dict[str, Any]]
) -> None:
    for (_, plan), shown in zip(plans, data, strict=True):
        kernels = [event for event in plan.result.timeline.events() if event.lane == "compute"]
        assert sum(span["kernels"] for span in shown["compute"]) == len(kernels) > len(shown["compute"])
        moments = [each[when] for each in shown["collectives"] for when in ("launched", "waited")]
        for span in shown["compute"]:
            assert not any(span["begin"] + 0.01 < moment < span["end"] - 0.01 for moment in moments)
            assert span["longest"][0][1] == max(time for _, time in span["longest"]) > 0


@pytest.mark.parametrize("moments", [plan_data.MOMENTS, 7])
def test_memory_keeps_its_peak(plans: list[tuple[object, Plan]], moments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_data, "MOMENTS", moments)
    for (_, plan), shown in zip(plans, page_data(plans, None)["plans"], strict=True):
        times, held = shown["live"]["times"], shown["live"]["bytes"]
        whole = [sum(of_category[moment] for of_category in held.values()) for moment in range(len(times))]
        assert max(whole) == plan.peak and times[whole.index(plan.peak)] == shown["peakAt"]
        assert times == sorted(set(times)) and len(times) <= moments + 1
        assert {name: held[name][whole.index(plan.peak)] for name in held} == shown["composition"] == plan.composition


def test_names_cannot_leave_their_place(file: Path, plans: list[tuple[object, Plan]]) -> None:
    page = file.read_text()
    template = (Path(plan_data.__file__).parent / "page.html").read_text()
    assert page.count("</script") == template.count("</script") and HOSTILE not in page
    (inlined,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    read = json.loads(inlined)
    assert read == json.loads(json.dumps(page_data(plans, MEMORY)))
    assert read["plans"][0]["collectives"][0]["params"][1] == f"blocks.0.{HOSTILE}"


def test_a_report_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one plan"):
        write_report([], tmp_path / "report.html")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(path: Path, *more: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["fsdp-compile", "plan", "test_planning:net", "--html", str(path), *more])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code

    path = tmp_path / "report.html"
    for more, names in (
        (["--world-size", "2,4"], ["2 ranks, --bucket module", "4 ranks, --bucket module"]),
        (["--search"], ["8 ranks, --bucket module", "8 ranks, --bucket auto"]),
    ):
        assert plan(path, *more) == 0
        assert all(f'"name":"{name}"' in path.read_text() for name in names)
    assert plan(tmp_path / "none" / "report.html") == 2 and "cannot write to directory" in capsys.readouterr().err


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # for root
        yield browser
        browser.close()


@contextmanager
def shown(browser: Any, file: Path, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> Iterator[Any]:
    """The page; it must complain of nothing and load nothing."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page.set_default_timeout(5000)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: request.url == file.as_uri() or said.append(f"asked for {request.url}"))
    page.goto(file.as_uri())
    yield page
    assert page.evaluate("window.taken") is None
    page.close()
    assert said == []


def middle_of(page: Any, chart: int, lane: int, number: int) -> tuple[float, float]:
    """Where in the window a bar of a lane is."""
    return page.evaluate(  # type: ignore[no-any-return]
        """([chart, lane, number]) => {
            const { canvas, chart: drawn, bars } = charts[chart];
            const bar = bars.filter((each) => each.lane === lane)[number];
            const [x, y] = drawn.convertToPixel({ gridIndex: 0 }, [(bar.begin + bar.end) / 2, lane]);
            canvas.scrollIntoView({ block: "center" });
            const frame = canvas.getBoundingClientRect();
            return [frame.x + x, frame.y + y];
        }""",
        [chart, lane, number],
    )


def colour_at(page: Any, chart: int, lane: int, number: int) -> list[int]:
    """Of the middle of a bar: red, green, blue."""
    x, y = middle_of(page, chart, lane, number)
    return page.evaluate(  # type: ignore[no-any-return]
        """([chart, x, y]) => {
            const drawn = charts[chart].canvas.querySelector("canvas"), frame = drawn.getBoundingClientRect();
            const copy = new OffscreenCanvas(1, 1).getContext("2d");
            copy.drawImage(drawn, frame.x - x, frame.y - y);
            return [...copy.getImageData(0, 0, 1, 1).data.slice(0, 3)];
        }""",
        [chart, x, y],
    )


def colour(page: Any, name: str) -> list[int]:
    value = page.evaluate("(name) => colour(name)", name)
    return [int(value[at : at + 2], 16) for at in (1, 3, 5)]


def windows(page: Any) -> list[list[float]]:
    return page.evaluate("charts.map((each) => each.window)")  # type: ignore[no-any-return]


def tooltip(page: Any) -> Any:
    return page.locator(".tip:visible")


def test_the_timeline_is_drawn(browser: Any, file: Path, data: list[dict[str, Any]]) -> None:
    with shown(browser, file) as page:
        for number, plan in enumerate(data[:2]):
            stalls = sum(each["exposed"] > 0 for each in plan["collectives"])
            bars = page.evaluate(
                "(number) => charts[number].chart.getModel().getSeriesByIndex(0).getData().count()", number
            )
            assert bars == len(plan["compute"]) + stalls + len(plan["collectives"])
            assert colour_at(page, number, 1, 0) == colour(page, "all-gather")
            assert colour_at(page, number, 1, len(plan["collectives"]) - 1) == colour(page, "reduce-scatter")
            assert colour_at(page, number, 0, 0) == colour(page, "stall"), "the first gather is waited for"


def test_memory_is_drawn(browser: Any, file: Path, data: list[dict[str, Any]]) -> None:
    with shown(browser, file) as page:
        held = [name for name, size in data[0]["live"]["bytes"].items() if any(size)]
        assert page.locator("#memory-legend li").all_inner_texts() == held
        x, y = middle_of(page, 0, 1, 0)
        page.mouse.move(x, y + 120)
        whole, *parts = tooltip(page).inner_text().splitlines()
        sizes = {name: float(size.removesuffix(" KiB")) for name, size in (part.split(": ") for part in parts)}
        assert {"sharded parameters and inputs", "optimizer state"} < set(sizes) <= set(held)
        assert whole.split(" KiB at ")[0] == str(round(sum(sizes.values()), 1))


def test_hovering_tells_what_and_why(browser: Any, file: Path, data: list[dict[str, Any]]) -> None:
    with shown(browser, file) as page:
        page.mouse.move(*middle_of(page, 0, 1, 1))
        text = tooltip(page).inner_text()
        gather = data[0]["collectives"][1]
        assert "all_gather [blocks.1]" in text and "parameters of blocks.1: weight, bias" in text
        assert gather["reason"] in text and "KiB" in text
        page.mouse.move(*middle_of(page, 0, 0, 0))
        text = tooltip(page).inner_text()
        assert "compute stands still, " in text and "why: first of the forward" in text
        page.mouse.move(*middle_of(page, 0, 0, 1))
        assert "compute, " in tooltip(page).inner_text() and "kernel" in tooltip(page).inner_text()


def test_the_keyboard_reaches_everything(browser: Any, file: Path, data: list[dict[str, Any]]) -> None:
    with shown(browser, file) as page:
        chart, details = page.locator(".chart").first, page.locator(".details").first
        assert data[0]["name"] in chart.get_attribute("aria-label")
        for _ in range(30):
            page.keyboard.press("Tab")
            if chart.evaluate("(it) => it === document.activeElement"):
                break
        page.keyboard.press("ArrowRight")
        assert details.inner_text().startswith("compute")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowRight")
        collective = data[0]["collectives"][1]
        assert collective["title"] in details.inner_text() and collective["reason"] in details.inner_text()
        assert details.get_attribute("aria-live") == "polite" and collective["title"] in tooltip(page).inner_text()
        page.keyboard.press("ArrowLeft")
        assert HOSTILE in details.inner_text(), "names are text"
        page.keyboard.press("Escape")
        assert details.inner_text() == "No bar is chosen."


def test_zoom(browser: Any, file: Path, data: list[dict[str, Any]]) -> None:
    until = max(plan["step"] for plan in data[:2])
    with shown(browser, file) as page:
        assert windows(page) == [[0, until]] * 2, "one axis for both"
        page.get_by_role("button", name="Zoom in").click()
        assert windows(page) == [pytest.approx([until / 4, 3 * until / 4])] * 2
        page.locator(".chart").nth(1).focus()
        page.keyboard.press("+")
        assert windows(page) == [pytest.approx([3 * until / 8, 5 * until / 8])] * 2, "either leads"
        page.keyboard.press("0")
        assert windows(page) == [[0, until]] * 2
        page.mouse.move(*middle_of(page, 0, 1, 0))
        page.keyboard.down("Control")
        page.mouse.wheel(0, -300)
        page.wait_for_function("(until) => charts.every(({ window: [from, to] }) => to - from < until)", arg=until)


def test_two_plans_beside_each_other(browser: Any, file: Path, data: list[dict[str, Any]]) -> None:
    with shown(browser, file) as page:
        assert page.locator("#overview-table tbody tr").count() == 3
        page.get_by_label("Show").select_option("1")
        page.get_by_label("beside").select_option("2")
        heads = page.locator("#summary-table thead th").all_inner_texts()
        assert heads[1:] == [data[1]["name"], data[2]["name"], "difference"]
        rows = {row.split("\t")[0]: row.split("\t")[1:] for row in page.locator("#summary-table tr").all_inner_texts()}
        counts = [sum(each["kind"] == "all_gather" for each in plan["collectives"]) for plan in data[1:]]
        assert [int(each) for each in rows["gathers"][:2]] == counts
        assert rows["gathers"][2].startswith(f"+{counts[1] - counts[0]} ")
        fits = [plan["peak"] <= MEMORY for plan in data[1:]]
        assert [each.startswith("yes") for each in rows["fits into 244.1 KiB"][:2]] == fits
        assert page.locator(".chart").count() == page.locator("#buckets table").count() == 2
        page.get_by_label("beside").select_option("")
        assert page.locator(".chart").count() == page.locator("#buckets table").count() == 1
        assert page.locator("#summary-table thead th").count() == 2


def test_buckets(browser: Any, file: Path, data: list[dict[str, Any]]) -> None:
    with shown(browser, file) as page:
        table = page.locator("#buckets table").nth(1)
        names = table.locator("tbody th[scope=row]")
        assert names.all_inner_texts() == [each["title"] for each in data[1]["collectives"]]
        table.get_by_text("2 parameters").first.click()
        assert table.locator("li:visible").all_inner_texts() == ["weight", "bias"]
        last = data[1]["collectives"][-1]
        names.last.get_by_role("button").click()
        assert last["title"] in page.locator(".details").nth(1).inner_text()
        assert windows(page)[1][0] <= last["begin"] and windows(page)[1][0] > 0
        page.get_by_label("exposed only").check()
        assert names.count() == sum(each["exposed"] > 0 for each in data[1]["collectives"])


def test_colours_follow_the_system(browser: Any, file: Path) -> None:
    with shown(browser, file) as page:
        light = colour_at(page, 0, 1, 0)
        page.emulate_media(color_scheme="dark")
        for _ in range(50):  # the page is told of it a little later
            dark = colour_at(page, 0, 1, 0)
            if dark != light:
                break
            page.wait_for_timeout(100)
        assert light != dark == colour(page, "all-gather")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_accessible(browser: Any, file: Path, size: tuple[int, int], scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with shown(browser, file, size, scheme) as page:
        page.locator(".chart").first.focus()
        page.keyboard.press("ArrowRight")
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], "the page does not scroll sideways"
