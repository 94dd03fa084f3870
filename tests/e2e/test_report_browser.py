"""The report as people use it, in a headless Chromium: clicks, search, both themes, phone and desk, no console error.

Left out where playwright or a Chromium is missing. `VERL_LIKE_SHOTS=folder` keeps pictures.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.observe.run_factory import write_run
from verl_like.observe.report.charts import CHARTS, PHASES
from verl_like.observe.report.page import write_comparison, write_report

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("bokeh")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]


def planted(step: int) -> dict[str, float]:
    return {"training/rollout_probs_diff_mean": 0.08} if step > 30 else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "a", planted=planted)
    write_report(folder)
    return folder


def crowded(step: int) -> dict[str, float]:
    """Every line of every chart, eight validation sets with long names, more phases than there are chosen colours."""
    names = [name for chart in CHARTS for name, _ in chart.metrics]
    names += [f"timing_s/{phase}" for phase in (*PHASES, "of_a_subclass", "and_another")]
    names += [f"val-core/{'a_long_name_of_a_benchmark/' * 3}{i}/acc/mean@8" for i in range(8) if step % 10 == 0]
    return {name: 1.0 + (step * i) % 7 for i, name in enumerate(names)} | {"timing_s/step": 60.0}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all that a page can hold: the command lines of many starts too."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "crowd", planted=crowded)
    environment = json.loads((folder / "environment.json").read_text())
    command = " ".join(f"a.long.key.number_{i}=its_value_{i}" for i in range(150))
    start = {"started": "2026-01-01T00:00:00", "command": command}
    (folder / "environment.json").write_text(json.dumps(environment | {"command": command, "earlier": [start] * 12}))
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page in the browser, with everything that its console complained of."""

    def __init__(self, browser: Any, path: Path, width: int = 1440, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.errors: list[str] = []
        self.requests: list[str] = []
        wrong = ("error", "warning")
        self.page.on("console", lambda told: self.errors.append(told.text) if told.type in wrong else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        start = time.perf_counter()
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("#charts canvas", state="attached", timeout=60_000)
        self.seconds = time.perf_counter() - start

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def through(self) -> None:
        """Scroll from top to bottom, so that everything is drawn."""
        for top in range(0, self.page.evaluate("document.documentElement.scrollHeight"), 700):
            self.page.evaluate("top => window.scrollTo({top, behavior: 'instant'})", top)
            self.page.wait_for_timeout(60)

    def shot(self, name: str) -> None:
        if os.environ.get("VERL_LIKE_SHOTS"):
            self.page.evaluate("window.scrollTo({top: 0, behavior: 'instant'})")
            self.page.wait_for_timeout(400)
            self.page.screenshot(path=Path(os.environ["VERL_LIKE_SHOTS"]) / f"{name}.png", full_page=True)

    def close(self, path: Path) -> None:
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
        self.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_every_chart_is_drawn_and_nothing_is_wider_than_the_window(
    browser: Any, folder: Path, width: int, scheme: str
) -> None:
    opened = Opened(browser, folder / "report.html", width, scheme)
    opened.through()
    page = opened.page
    page.wait_for_function("[...document.querySelectorAll('.plot')].every(plot => plot.children.length > 0)")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert opened.count("#charts figure") > 10 and opened.count("#phase-table tbody tr") == 3
    opened.shot(f"report_{width}_{scheme}")
    opened.close(folder / "report.html")


DRAWN = "[...document.querySelectorAll('.plot')].every(plot => plot.children.length > 0)"
OUTSIDE = """() => [...document.querySelectorAll("main *")].filter(box => box.clientWidth > 0
  && box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).display !== "inline" && !box.matches("td.text"))
  .map(box => box.id || box.className || box.tagName)"""
SAME_COLOUR = """() => [...document.querySelectorAll("figure")].filter(figure => {
  const colours = [...figure.querySelectorAll(".legend i")].map(sign => getComputedStyle(sign).backgroundColor);
  return new Set(colours).size < colours.length || colours.includes("rgba(0, 0, 0, 0)");
}).map(figure => figure.innerText)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_crowded_page_is_whole_without_scrolling(browser: Any, crowd: Path, width: int, scheme: str) -> None:
    opened = Opened(browser, crowd / "report.html", width, scheme)
    page = opened.page
    page.wait_for_function(DRAWN, timeout=60_000)  # though nobody scrolls: pictures of the whole page show them
    assert page.evaluate(SAME_COLOUR) == []
    outside = page.evaluate(OUTSIDE)
    assert outside == [] if width == 1440 else set(outside) <= {"scroll", "list scroll"}, outside
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    bar = (
        "[...document.querySelectorAll('.bar a')].every(link => link.getBoundingClientRect().right <= innerWidth - 60)"
    )
    assert page.evaluate(bar)
    assert page.evaluate("document.querySelector('#environment').offsetHeight") < 2500
    opened.shot(f"crowd_{width}_{scheme}")
    opened.close(crowd / "report.html")


def painted(page: Any) -> None:
    page.wait_for_function("[...plots.values()].every(plot => plot.view)", timeout=60_000)
    page.wait_for_timeout(1500)  # Bokeh paints soon after it has laid out


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper_charts_are_there_and_text_is_dark(browser: Any, crowd: Path, scheme: str) -> None:
    opened = Opened(browser, crowd / "report.html", 390, scheme)
    page = opened.page
    painted(page)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme=scheme)
    inked = """() => [...document.querySelectorAll(".plot img")].map(async (image) => {
      await image.decode();
      const pen = new OffscreenCanvas(image.naturalWidth, image.naturalHeight).getContext("2d");
      pen.drawImage(image, 0, 0);
      const values = pen.getImageData(0, 0, image.naturalWidth, image.naturalHeight).data;
      return values.filter((value, i) => i % 4 === 3 && value > 128).length;
    })"""
    counts = page.evaluate(f"async () => Promise.all(({inked})())")
    assert len(counts) == page.locator(".plot").count() and min(counts) > 1000, counts
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(31, 35, 40)"
    for box in (".list", "#environment code"):
        assert page.evaluate(f"getComputedStyle(document.querySelector('{box}')).maxHeight") == "none"
    different = page.evaluate("new Set([...document.querySelectorAll('.plot img')].map(image => image.src)).size")
    page.emulate_media(media="screen", color_scheme=scheme)
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    painted(page)
    assert opened.count(".plot img") == 0
    assert page.pdf(format="A4").count(b"/Subtype /Image") >= different  # the browser's own print says both events
    opened.close(crowd / "report.html")


def test_the_rollout_browser_filters_sorts_searches_and_colours(browser: Any, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html")
    page, rows = opened.page, "#list tbody tr"
    assert page.inner_text("#count") == "148 of 148 responses, from 9 steps"
    page.fill("#search", "poem")
    assert 0 < opened.count(rows) < 148
    page.locator(rows).first.click()
    assert "Write a poem" in page.inner_text("#detail")
    page.click("#clear")
    page.select_option("#outcome", "grader_error")
    assert opened.count(rows) == 16
    page.locator(rows).first.click()
    assert "timeout: over 60 s" in page.inner_text("#detail .bad")
    page.click("#clear")
    page.fill("#score-min", "1")
    page.fill("#step-min", "35")
    assert set(page.locator(f"{rows} td:nth-child(2)").all_inner_texts()) == {"1"}
    page.click("#clear")
    page.click("#list th[data-name=response_tokens] button")
    lengths = [int(text) for text in page.locator(f"{rows} td:nth-child(3)").all_inner_texts()]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]
    page.fill("#length-max", "7")
    page.keyboard.press("Escape")
    page.locator(rows).first.click()
    page.keyboard.press("ArrowDown")
    assert page.get_attribute(f"{rows}:nth-child(2)", "aria-selected") == "true"
    opened.close(folder / "report.html")


def test_tokens_turns_and_the_group_of_a_response(browser: Any, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html")
    page = opened.page
    page.fill("#step-min", "40")
    page.select_option("#part", "training")
    coloured = {}
    page.locator("#list tbody tr").nth(3).click()  # its middle is a tool's
    for mode in page.locator(".modes button").all():
        mode.click()
        coloured[mode.get_attribute("data-mode")] = opened.count("#detail .t.high, #detail .t.low")
    assert list(coloured) == ["gap", "entropy", "advantage", "surprise", "weight_version", "mask", "plain"]
    sampled = opened.count("#detail .spoken .t")
    assert coloured["mask"] == coloured["entropy"] == sampled and coloured["plain"] == 0
    assert "not sampled" in page.inner_text("#detail") and opened.count("#detail .tool .t") > 0
    page.hover("#detail .spoken .t >> nth=0")
    assert "rollout log probs: -" in (page.get_attribute("#detail .spoken .t >> nth=0", "title") or "")
    assert opened.count("#detail .side .answer") == 8
    page.locator("#detail .side .answer").nth(5).click()
    assert page.get_attribute("#detail .side .answer >> nth=5", "class") == "answer here"
    assert page.evaluate("document.querySelectorAll('#detail b').length") == 1  # a model's <b> is text
    opened.close(folder / "report.html")


def test_a_health_link_leads_to_the_responses_that_show_it(browser: Any, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html")
    opened.page.click("text=step 33 (responses of 35)")
    assert opened.page.inner_text("#count") == "16 of 148 responses, from 1 step"
    assert opened.page.get_attribute("#list th[data-name=gap]", "aria-sort") == "descending"
    assert opened.page.get_attribute("[data-mode=gap]", "aria-pressed") == "true"
    opened.close(folder / "report.html")


def test_zoom_theme_metric_and_keys(browser: Any, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html")
    page = opened.page
    plot = page.locator("#charts .plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, middle, steps=4)
    page.mouse.up()
    page.wait_for_function("shownSteps[0] > 10 && ranges.every(range => range.start === shownSteps[0])")
    plot.dblclick()
    page.wait_for_function("shownSteps[0] < 0")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.fill("#metric", "actor/lr")
    page.keyboard.press("Enter")
    page.wait_for_selector("#picked figure canvas", state="attached")
    page.fill("#waterfall-step", "10")
    assert page.inner_text("#waterfall-title") == "Step 10"
    changed = page.locator("#keys tbody tr:visible").count()
    page.fill("#key-search", "ppo_mini_batch_size")
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in page.inner_text("#keys")
    page.fill("#key-search", "")
    page.uncheck("#only-changed")
    assert page.locator("#keys tbody tr:visible").count() > 10 * changed > 0
    opened.close(folder / "report.html")


def test_runs_side_by_side(browser: Any, folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "b", overrides=("data.seed=3",))
    path = write_comparison([folder, other], tmp_path / "compare.html")
    opened = Opened(browser, path)
    opened.through()
    assert opened.count("article.same") == 4 and "data.seed" in opened.page.inner_text("#configuration")
    assert opened.page.locator("#charts .legend").first.inner_text().count("toy/acc") == 2
    opened.shot("compare_1440_light")
    opened.close(path)


def test_a_thousand_steps_stay_small_and_open_soon(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", steps=1000, sample_every=10, tokens=400)
    path = write_report(folder)
    size = path.stat().st_size / 1e6
    opened = Opened(browser, path)
    print(f"1,000 steps: {size:.1f} MB, opened in {opened.seconds:.2f} s")
    assert 5 < size < 15
    opened.through()
    opened.close(path)
