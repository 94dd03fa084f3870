"""The report as a file: what stands in it, that it needs no network, that it stays small, and who writes it when."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.observe.run_factory import write_run
from verl_like.kit.report import content, page
from verl_like.kit.report.writer import ReportWriter


def planted(step: int) -> Mapping[str, float]:
    return {"training/rollout_probs_diff_mean": 0.08} if step > 30 else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    secret = ("trainer.experiment_name=first", "data.seed=3")
    return write_run(tmp_path_factory.mktemp("runs") / "a", planted=planted, overrides=secret)


@pytest.fixture(scope="module")
def report(folder: Path) -> str:
    return page.write_report(folder).read_text(encoding="utf-8")


def embedded(text: str, name: str) -> Any:
    (found,) = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_the_file_needs_nothing_outside(report: str) -> None:
    assert not re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=", report)
    assert not re.findall(r"<link\b[^>]*href=", report)
    assert "@import" not in re.findall(r"<style>(.*?)</style>", report, re.DOTALL)[0]


def test_numbers_texts_and_configuration_are_in_it(report: str) -> None:
    data = embedded(report, "data")
    assert data["runs"][0]["steps"] == list(range(41)) and len(data["runs"][0]["metrics"]["actor/entropy"]) == 41
    score = next(chart for chart in data["charts"] if chart["title"] == "Score")
    assert [line["metric"] for line in score["points"]] == ["val-core/toy/acc/mean@1"]
    assert data["phases"]["names"] == ["gen", "update_actor", "testing"]
    assert data["phases"]["floors"]["gen"][0] == pytest.approx(data["phases"]["seconds"]["gen"][0] / 8, rel=1e-4)
    samples = embedded(report, "samples")
    assert len(samples) == 8 * 2 * 8 + 5 * 4 and {sample["part"] for sample in samples} == {"training", "validation"}
    changed = re.findall(r'<tr class="changed"><td><code>([\w.]+)</code>', report)
    assert {"data.train_files", "trainer.experiment_name", "data.seed"} <= set(
        changed
    ) and "trainer.seed" not in changed
    assert "git commit" in report and "2 cpu processes" in report


def test_what_a_model_wrote_cannot_become_markup(report: str) -> None:
    samples = embedded(report, "samples")
    assert any("</script>" in sample["output"] for sample in samples)
    (raw,) = re.findall(r'id="samples">(.*?)</script>', report, re.DOTALL)
    assert "<" not in raw


def test_a_rule_that_speaks_is_linked_to_the_nearest_kept_step(report: str) -> None:
    links = re.findall(r'data-show="([^"]*)" data-step="(\d+)">step (\d+)', report)
    assert {show for show, _, _ in links} == {"{&#34;sort&#34;: &#34;gap&#34;}"}
    assert [(step, kept) for _, kept, step in links] == [
        ("31", "30"), ("32", "30"), ("33", "35"), ("38", "40"), ("39", "40"), ("40", "40"),
    ]  # fmt: skip


def test_without_the_chart_library_numbers_stand_in_their_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "chart_library", lambda: None)
    text = page.write_report(folder, folder / "plain.html").read_text(encoding="utf-8")
    assert "pip install" in text and 'id="charts"' not in text and len(text) < 1_000_000
    row = re.findall(r"<code>critic/score/mean</code></td>(.*?)</tr>", text)[0]
    assert len(re.findall(r"<td class=\"number\">[\d.]+</td>", row)) == 4


def test_responses_that_do_not_fit_lose_their_tokens_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = page.read_run(folder)
    whole = content.sample_lines(run, ())
    monkeypatch.setattr(content, "MOST_SAMPLE_BYTES", sum(map(len, whole)) // 2)
    records = [json.loads(line) for line in content.sample_lines(run, {10})]
    assert sum(len(json.dumps(record)) for record in records) < sum(map(len, whole)) * 0.6
    bare = {record["step"] for record in records if "tokens" not in record}
    assert bare and not bare & {10, 40}  # what was asked for, and the newest, come first
    assert [record["step"] for record in records] == sorted(record["step"] for record in records)


def test_runs_side_by_side(folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "b", overrides=("trainer.experiment_name=second", "data.seed=3"))
    path = page.write_comparison([folder, other], tmp_path / "compare.html")
    text = path.read_text(encoding="utf-8")
    keys = re.findall(r"<tr><td><code>([\w.]+)</code><div", text)
    assert "trainer.experiment_name" in keys and "data.seed" not in keys
    assert text.count('<article class="same">') == 4 and len(embedded(text, "data")["runs"]) == 2
    assert "&lt;b&gt;bold&lt;/b&gt;" in text


def test_names_of_runs_are_as_short_as_they_can_be(folder: Path, tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name / "a", steps=2) for name in ("x", "y"))
    names = page.run_names([page.read_run(first), page.read_run(second)])
    assert names == ["x/a", "y/a"]


@pytest.mark.parametrize("name", ["report", "compare"])
def test_each_section_has_its_entry_in_the_bar(folder: Path, report: str, tmp_path: Path, name: str) -> None:
    text = report if name == "report" else page.write_comparison([folder, folder], tmp_path / "c.html").read_text()
    entries = re.findall(r'<a href="#(\w+)">', re.findall(r"<nav.*?</nav>", text, re.DOTALL)[0])
    assert entries == re.findall(r'<section id="(\w+)"', text) and len(entries) >= 4


def test_a_tile_says_of_which_steps_its_number_is(folder: Path, tmp_path: Path) -> None:
    notes = {tile["label"]: tile["note"] for tile in content.tiles(page.read_run(folder))}
    assert notes["Score"] == "mean of the last 10 steps; first 0.183"
    assert notes["Validation toy/acc/mean@1"] == "step 40; first 0.3"
    assert notes["Throughput"] == "tokens/s per device, mean of the last 10 steps"
    short = {tile["label"]: tile["note"] for tile in content.tiles(page.read_run(write_run(tmp_path / "s", steps=1)))}
    assert short["Score"] == "step 1" and short["Step time"] == "seconds, step 1"


def test_earlier_starts_are_folded_and_nested_values_read_plainly(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "r")
    facts = json.loads((folder / "environment.json").read_text())
    facts |= {"code": {"a.path": {"path": "/f.py", "sha256": "0f"}}, "gpus_of_the_driver": ["A", "B"], "empty": []}
    facts["earlier"] = [{"started": "yesterday", "command": "verl-like train a.path=/f.py"}] * 2
    (tmp_path / "r" / "environment.json").write_text(json.dumps(facts))
    text = page.write_report(tmp_path / "r").read_text()
    rows = dict(content.environment_rows(facts))
    assert rows["code: a.path"] == "/f.py, 0f" and rows["gpus of the driver"] == "A, B" and "empty" not in rows
    assert text.count("verl-like train a.path=/f.py") == 2 and "Started 2 times before" in text


def test_a_run_without_steps_says_so(folder: Path, tmp_path: Path) -> None:
    for metrics, said in (
        ({}, "No metric has been logged yet."),
        ({"val-core/a/b/mean@1": 0.5}, "No step has finished"),
    ):
        run = tmp_path / f"r{len(metrics)}"
        run.mkdir()
        (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "data": metrics}) + "\n" if metrics else "")
        text = page.write_report(run).read_text()
        assert said in text and 'id="phase-table"' not in text and ('id="charts"' in text) == bool(metrics)


# What people with a missing kind of cone see (Machado, Oliveira and Fernandes 2009), of linear red, green and blue.
SIGHT = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_CONES = [
    [0.41222147, 0.53633254, 0.05144599],
    [0.2119035, 0.68069955, 0.10739696],
    [0.08830246, 0.28171884, 0.6299787],
]
TO_LAB = [
    [0.21045426, 0.79361779, -0.00407205],
    [1.9779985, -2.4285922, 0.45059371],
    [0.02590404, 0.78277177, -0.80867577],
]


@pytest.mark.parametrize("theme", [0, 1])
def test_series_are_told_apart_by_any_eye(theme: int) -> None:
    style = (Path(page.__file__).parent / "report.css").read_text(encoding="utf-8")
    found = [re.findall(rf"--{name}: #(\w{{6}})", style)[theme] for name in ("surface", *(f"c{i}" for i in range(12)))]
    coded = np.array([[int(text[i : i + 2], 16) / 255 for i in (0, 2, 4)] for text in found])
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    light = linear @ [0.2126, 0.7152, 0.0722] + 0.05
    contrast = np.maximum(light[1:], light[0]) / np.minimum(light[1:], light[0])
    assert contrast.min() >= 3  # as WCAG asks of graphics
    first, second = np.triu_indices(12, 1)
    for eye, matrix in SIGHT.items():
        cones = np.cbrt(np.clip(np.clip(linear[1:] @ np.transpose(matrix), 0, 1) @ np.transpose(TO_CONES), 0, None))
        lab = cones @ np.transpose(TO_LAB)
        apart = np.linalg.norm(lab[first] - lab[second], axis=1)
        same_dash = first % 3 == second % 3  # as styleOf in charts.js gives them out
        assert apart[same_dash if eye != "normal" else slice(None)].min() > 0.1, eye


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_writer_works_every_k_steps_and_at_the_end(tmp_path: Path) -> None:
    code = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); n = len(list(p.glob('n*'))); (p / f'n{n}').touch()"
    writer = ReportWriter(tmp_path, 2, (sys.executable, "-c", code, str(tmp_path)))
    writer.step_finished(1)
    assert writer._process is None
    writer.step_finished(2)
    wait_for(tmp_path / "n0")
    writer.step_finished(3)
    writer.finish()
    writer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n0", "n1"]


def test_a_report_that_fails_is_warned_of_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = ReportWriter(tmp_path, 1, (sys.executable, "-c", "raise ValueError('no disk')"))
    writer.step_finished(1)
    writer.finish()
    assert [record.getMessage() for record in caplog.records if "no disk" in record.getMessage()] != []
    assert len(caplog.records) == 1


def test_a_run_that_made_no_step_writes_no_report(tmp_path: Path) -> None:
    ReportWriter(tmp_path, 1).finish()
    off = ReportWriter(tmp_path, -1)
    off.step_finished(1)
    off.finish()
    assert list(tmp_path.iterdir()) == []
