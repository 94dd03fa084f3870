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
from verl_like.kit.report.page import write_comparison, write_report

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("bokeh")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]


NAME = "a_data_source_with_a_long_name"
MODEL = "actor_rollout_ref.model.path=/models/" + "Qwen2.5-Coder-32B-Instruct-GPTQ-Int4-" * 3
PHASES = ("reward", "old_log_prob", "ref", "values", "adv", "samples", "update_critic", "update_weights", "my_own")


def planted(step: int) -> dict[str, float]:
    return {"training/rollout_probs_diff_mean": 0.08} if step > 30 else {}


def crowded(step: int) -> dict[str, float]:
    """Charts with as many series as they can have, and names that are long."""
    phases = {f"timing_s/{name}": 0.2 for name in (*PHASES, "save_checkpoint")}
    memory = {f"perf/memory_{kind}/{name}": 40.0 for kind in ("peak", "forecast") for name in ("gen", "update_actor")}
    scores = {f"val-core/{NAME}_{i}/reward/mean@{2**i}": i / 10 for i in range(6)} if step % 10 == 0 else {}
    return {**planted(step), **phases, **memory, **scores, "actor/kl_loss": 1e-3, "critic/kl": 2e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "a", planted=planted)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with long commands and variables, resumed six times."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "full", planted=crowded, overrides=(MODEL,))
    facts = json.loads((folder / "environment.json").read_text())
    facts["command"] += " a.long.key=/data/files/some/where" * 100
    facts["variables"] = {f"VLLM_A_VARIABLE_WITH_A_LONG_NAME_{i}": "v" * 10 * i for i in range(20)}
    facts["code"] = {"agent.agent_loop_config_path": {"path": "loops.yaml", "sha256": "0" * 64}}
    facts["earlier"] = [{**facts, "earlier": []}] * 6
    (folder / "environment.json").write_text(json.dumps(facts))
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, full: Path) -> dict[str, Path]:
    """Pages beside the usual: runs side by side, a run that only validated, and one that logged nothing."""
    runs = tmp_path_factory.mktemp("others")
    second = write_run(runs / "second", planted=crowded, overrides=(f"{MODEL}b", "data.seed=3"))
    pages = {"compare": write_comparison([full, second, write_run(runs / "third")], runs / "compare.html")}
    for name, metrics in (("validated", {"val-core/toy/acc/mean@1": 0.3}), ("empty", {})):
        shutil.copytree(full, runs / name, ignore=shutil.ignore_patterns("samples", "metrics.jsonl", "*.html"))
        (runs / name / "metrics.jsonl").write_text(json.dumps({"step": 0, "data": metrics}) + "\n" if metrics else "")
        pages[name] = write_report(runs / name)
    return pages


OUTSIDE = """() => [...document.querySelectorAll('section, section *')].filter((node) =>
  node.getBoundingClientRect().width && (node.getBoundingClientRect().right > document.documentElement.clientWidth + 1
  || /auto|scroll/.test(getComputedStyle(node).overflowX) && node.scrollWidth > node.clientWidth + 1)
).map((node) => `${node.tagName} ${node.id} ${node.className} ${node.textContent.slice(0, 30)}`)"""
LEGENDS = """() => [...document.querySelectorAll('.legend')].map((legend) => [...legend.children].map((entry) => {
  const sign = entry.firstChild, { color, borderTopStyle, backgroundColor, backgroundImage } = getComputedStyle(sign);
  return [sign.className, color, borderTopStyle, backgroundColor, backgroundImage].join();
}))"""
FAINT = """() => {
  const numbers = (color) => [...color.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const part = (x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
  const light = (c) => 0.2126 * part(c[0]) + 0.7152 * part(c[1]) + 0.0722 * part(c[2]) + 0.05;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = [];
  while (texts.nextNode()) {
    const text = texts.currentNode.data, node = texts.currentNode.parentElement;
    if (!text.trim() || node.matches('script, style, option') || !node.getClientRects().length) continue;
    let under = [255, 255, 255, 1];
    const grounds = []; for (let at = node; at; at = at.parentElement) grounds.unshift(at);
    for (const at of grounds) under = over(numbers(getComputedStyle(at).backgroundColor), under);
    const [low, high] = [light(over(numbers(getComputedStyle(node).color), under)), light(under)].sort((a, b) => a - b);
    if (high / low < 4.5) faint.push(`${text.slice(0, 20)} ${high / low}`);
  }
  return faint;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page in the browser, with everything that its console complained of."""

    def __init__(self, browser: Any, path: Path, width: int = 1440, scheme: str = "light", charts: bool = True) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.errors: list[str] = []
        self.requests: list[str] = []
        wrong = ("error", "warning")
        self.page.on("console", lambda told: self.errors.append(told.text) if told.type in wrong else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        start = time.perf_counter()
        self.page.goto(path.as_uri())
        if charts:
            self.page.wait_for_selector("#charts canvas", state="attached", timeout=60_000)
        self.seconds = time.perf_counter() - start

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

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
    page = opened.page
    assert page.evaluate(
        "[...document.querySelectorAll('.plot')].every(plot => plot.children.length > 0)"
    )  # unscrolled
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert opened.count("#charts figure") > 10 and opened.count("#phase-table tbody tr") == 3
    opened.shot(f"report_{width}_{scheme}")
    opened.close(folder / "report.html")


@pytest.mark.parametrize("width", [390, 1024, 1440])
@pytest.mark.parametrize("name", ["report", "compare", "validated", "empty"])
def test_all_of_a_page_can_be_seen(browser: Any, full: Path, others: dict[str, Path], name: str, width: int) -> None:
    path = others.get(name, full / "report.html")
    opened = Opened(browser, path, width, charts=name != "empty")
    page = opened.page
    assert page.evaluate(OUTSIDE) == []
    sections = page.evaluate("[...document.querySelectorAll('section')].map(section => '#' + section.id)")
    links = page.locator(".bar nav a")
    assert [link.get_attribute("href") for link in links.all()] == sections
    boxes = [link.bounding_box() for link in links.all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width - 60 for box in boxes)
    if name == "report":
        assert page.locator("#environment").bounding_box()["height"] < (4000 if width == 390 else 2500)
    opened.shot(f"{name}_{width}_light_full")
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert page.evaluate(OUTSIDE) == []
    for _ in ("light", "dark"):
        assert page.evaluate(FAINT) == []
        for mode in page.locator(".modes button").all():
            mode.click()
            assert page.evaluate(FAINT) == []
        page.click("#theme")
    opened.close(path)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_series_of_a_chart_differ_and_say_what_their_number_is(browser: Any, full: Path, scheme: str) -> None:
    opened = Opened(browser, full / "report.html", scheme=scheme)
    legends = opened.page.evaluate(LEGENDS)
    assert max(map(len, legends)) == 13 and 6 in map(len, legends) and 4 in map(len, legends)
    assert all(len(set(signs)) == len(signs) for signs in legends)
    texts = opened.page.locator("#charts .legend span").all_inner_texts()
    assert "training, last 0.6967" in texts and all(", last " in text for text in texts)
    assert "mean of the last 10 steps; first 0.183" in opened.page.inner_text("#overview .tile >> nth=0")
    opened.close(full / "report.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper_each_chart_is_there_and_light(browser: Any, full: Path, scheme: str, tmp_path: Path) -> None:
    opened = Opened(browser, full / "report.html", scheme=scheme)
    page = opened.page
    counted = "[...document.querySelectorAll('.plot')].map((plot) => plot.querySelectorAll('.picture path').length)"
    page.evaluate(f"() => addEventListener('beforeprint', () => {{ window.pictures = {counted}; }})")
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert len(page.evaluate("pictures")) > 10 and min(page.evaluate("pictures")) > 5
    assert opened.count(".picture") == 0  # after printing the page is as it was
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme=scheme)
    assert page.evaluate("getComputedStyle(document.querySelector('main')).color") == "rgb(31, 35, 40)"
    lines = page.evaluate(
        "[...document.querySelectorAll('.picture [style]')].map((node) => getComputedStyle(node).stroke)"
    )
    assert "rgb(63, 116, 209)" in lines and "rgb(109, 155, 238)" not in lines
    seen = "[...document.querySelectorAll('.plot > *')].filter((node) => node.getBoundingClientRect().height > 100)"
    assert page.evaluate(f"{seen}.map((node) => node.tagName)") == ["svg"] * opened.count(".plot")
    opened.close(full / "report.html")


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
    opened.close(path)
