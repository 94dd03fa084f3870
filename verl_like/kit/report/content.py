"""Content of the report besides the charts: plain values for the template, made from a run's folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verl_like.config.schema import keys
from verl_like.observe.health import Verdict
from verl_like.observe.redaction import HIDDEN, is_secret, redacted_text
from verl_like.observe.run_folder import SAMPLES, STEP_PROOF, Run, flat, records, value_at
from verl_like.observe.samples import encodable

MOST_SAMPLE_BYTES = 8_000_000  # of responses in a report; the folder holds more
_LINKS = 6  # steps that a health rule names


def title_of(run: Run) -> str:
    """Return project / experiment, or the folder's name."""
    given = flat(run.config)
    names = given.get("trainer.project_name"), given.get("trainer.experiment_name")
    return " / ".join(filter(None, names)) or run.path.name


def facts(run: Run) -> list[str]:
    """Estimator, model and place, for the line under the title."""
    given, environment = flat(run.config), run.environment
    model = str(given.get("actor_rollout_ref.model.path", ""))
    shown = [str(given.get("algorithm.adv_estimator", "")), "/".join(Path(model).parts[-2:])]
    if environment:
        processes = environment["processes"]
        shown.append(f"{processes} {environment['device']} process{'es' * (processes > 1)}")
        shown.append(f"started {environment['started'][:16].replace('T', ' ')}")
    return [text for text in shown if text]


def tiles(run: Run) -> list[dict[str, str]]:
    """The few numbers that say how a run went: label, value, and of which steps it is."""
    found = []

    def add(label: str, metric: str, form: str, unit: str = "", change: bool = False) -> None:
        values = {step: metrics[metric] for step, metrics in run.steps.items() if metric in metrics}
        if not values:
            return
        steps = list(values)[-1:] if metric.startswith("val-") else list(values)[-10:]
        value = form.format(statistics.fmean(values[step] for step in steps))
        note = f"mean of the last {len(steps)} steps" if len(steps) > 1 else f"step {steps[0]}"
        if change and len(values) > 1:
            note += f"; first {form.format(next(iter(values.values())))}"
        found.append({"label": label, "value": value, "note": f"{unit}, {note}" if unit else note, "metric": metric})

    add("Score", "critic/score/mean", "{:.3g}", change=True)
    add("Loss", "train/loss", "{:.3g}", change=True)
    add("Validation loss", "val/loss", "{:.3g}", change=True)
    core = {name for values in run.validation for name in values if name.startswith("val-core/")}
    for name in sorted(name for name in core if "/mean@" in name)[:2]:
        add(f"Validation {name.removeprefix('val-core/')}", name, "{:.3g}", change=True)
    add("Response length", "response_length/mean", "{:,.0f}", "tokens")
    add("Throughput", "perf/throughput", "{:,.0f}", "tokens/s per device")
    add("Step time", "timing_s/step", "{:,.2f}", "seconds")
    return found


def config_rows(run: Run) -> list[dict[str, Any]]:
    """List all keys with value, default and meaning; `changed` where the run's value is not the default."""
    known, given, rows = keys(), run.config, []
    for path, key in known.items():
        default = getattr(key.default, "value", key.default)
        value = value_at(given, path, default)  # a key that the run's version did not have
        unit = f"[{key.unit}] " if key.unit else ""
        rows.append(
            {
                "key": path,
                "value": shown(path, value),
                "default": shown(path, default),
                "meaning": unit + key.doc,
                "changed": value != default,
            }
        )
    return rows if given else []


def shown(path: str, value: Any) -> str:
    """A value of the configuration as YAML would write it, without secrets."""
    if is_secret(path) and value not in (None, "", {}):
        return HIDDEN
    if isinstance(value, dict):
        value = {name: HIDDEN if is_secret(name) else item for name, item in flat(value).items()}
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return redacted_text(text)


def environment_rows(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """The environment as (name, text), nested tables one row an entry; earlier starts are not among them."""
    rows = []
    for name, value in environment.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            rows += [(f"{label}: {inner}", _plain(item)) for inner, item in value.items()]
        elif name != "earlier" and value not in (None, [], ""):
            rows.append((label, _plain(value)))
    return rows


def proof_rows(folder: Path) -> list[tuple[str, str]]:
    """The outcome of trainer.prove_step, where the run has one."""
    file = folder / STEP_PROOF
    return [("step proof", file.read_text(encoding="utf-8").splitlines()[-1])] if file.is_file() else []


def _plain(value: Any) -> str:
    items = list(value.values()) if isinstance(value, dict) else value
    return ", ".join(map(str, items)) if isinstance(items, list) else str(items)


def sample_lines(run: Run, wanted: Iterable[int]) -> list[str]:
    """Records of the samples as JSON for a script, in step order, each with its `part` (training or validation).

    Up to `MOST_SAMPLE_BYTES`: whole steps first without their tokens, up to half of that; what is left gives records
    their tokens. The steps of `wanted` (numbers), the newest and the validations come first, then steps spread over the
    run.
    """
    files = sorted((run.path / SAMPLES).glob("*/*.jsonl"), key=lambda path: (int(path.stem), path.parent.name))
    linked, left = set(wanted), MOST_SAMPLE_BYTES // 2
    first = [path for path in reversed(files) if int(path.stem) in linked or path.parent.name == "validation"]
    chosen: dict[Path, list[str]] = {}
    for path in dict.fromkeys([*files[-4:], *first, *spread(files)]):
        lines = [_line(path, record, tokens=False) for record in records(path)]
        size = sum(map(_size, lines))
        if size <= left:
            chosen[path] = lines
            left -= size
    left += MOST_SAMPLE_BYTES // 2
    for path, lines in chosen.items():  # in the order of choice
        for i, record in enumerate(records(path) if left > 0 else []):
            whole = _line(path, record, tokens=True)
            more = _size(whole) - _size(lines[i])
            if more <= left:
                lines[i] = whole
                left -= more
    return [line for path in files if path in chosen for line in chosen[path]]


def _line(path: Path, record: dict[str, Any], tokens: bool) -> str:
    part = {"train": "training"}.get(path.parent.name, path.parent.name)
    values = {"part": part, **{name: value for name, value in record.items() if tokens or name != "tokens"}}
    return in_script(encodable(json.dumps(values, ensure_ascii=False, separators=(",", ":"))))


def _size(line: str) -> int:
    return len(line.encode())


def in_script(text: str) -> str:
    """JSON that may stand in a script element: what a model wrote can neither end it nor begin a comment."""
    for mark in "<>\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def spread(files: Sequence[Path]) -> list[Path]:
    """Reorder the files so that every beginning of the list is spread over the whole."""
    order, pace = [], 1 << max(0, len(files) - 1).bit_length()
    while pace >= 1:
        order += files[::pace]
        pace //= 2
    return list(dict.fromkeys(order))


def health_cards(verdicts: Sequence[Verdict], kept: Sequence[int]) -> list[dict[str, Any]]:
    """Rules that speak, the urgent ones first, each with steps that show it and the kept step nearest to each."""
    order = {"fires": 0, "fired": 1}
    cards = []
    for verdict in sorted((v for v in verdicts if v.state in order), key=lambda v: order[v.state]):
        steps = list(verdict.steps)
        count = f"{len(steps)} step{'s' * (len(steps) > 1)}"
        step_links = [
            {"step": step, "kept": min(kept, key=lambda other: abs(other - step)) if kept else None}
            for step in (steps if len(steps) <= _LINKS else [*steps[: _LINKS // 2], *steps[-_LINKS // 2 :]])
        ]
        cards.append(
            {
                "name": verdict.rule.name,
                "state": verdict.state,
                "sentence": verdict.sentence,
                "value": f"{verdict.metric} = {verdict.value:.4g} now; so far at {count}",
                "fix": verdict.rule.fix,
                "links": step_links,
                "show": json.dumps(dict(verdict.rule.show)),
            }
        )
    return cards


def wanted_steps(verdicts: Sequence[Verdict], kept: Sequence[int]) -> set[int]:
    """Collect the kept steps that the health rules link to."""
    return {link["kept"] for card in health_cards(verdicts, kept) for link in card["links"] if link["kept"] is not None}


def quiet_rules(verdicts: Sequence[Verdict]) -> list[dict[str, str]]:
    """Rules with nothing to say: name, threshold in words, newest value."""
    rows = []
    for verdict in verdicts:
        if verdict.state in ("ok", "unknown"):
            value = "no such metric" if verdict.value is None else f"{verdict.value:.4g}"
            means = verdict.rule.means.format(threshold=verdict.rule.threshold)
            rows.append({"name": verdict.rule.name, "means": means, "value": value})
    return rows
