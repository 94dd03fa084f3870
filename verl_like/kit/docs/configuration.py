"""Generates docs/configuration.md, docs/coming_from_*.md and the tables of docs/algorithms.md:
`python -m verl_like.kit.docs.configuration [--check]`.

Of the first, the keys that matter most, then one table per section: whole key (so that grep finds it), meaning, unit,
range, default, which modules read it; then the rules with the keys they are about. All but the readers, which a scan of
the source finds, come from the declarations of keys and rules, so the page cannot drift; a test runs --check. Tables of
algorithms.md are the rows of config/menus.txt, between markers.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_like.config.menus import AGGREGATIONS, ESTIMATORS, KL_KINDS, LOSSES, Choice
from verl_like.config.names import PROJECTS, VERL, Row, table, written
from verl_like.config.rules import all_rules
from verl_like.config.schema import Key, keys
from verl_like.config.spellings import no_effect, not_yet
from verl_like.kit.docs.readers import PACKAGE, readers
from verl_like.trainer.compose import compose_tree

PAGE = PACKAGE.parent / "docs" / "configuration.md"

# What nearly every run sets or looks at, in the order in which one does.
ESSENTIAL = (
    "data.train_files", "data.val_files", "data.max_prompt_length", "data.max_response_length",
    "data.train_batch_size", "actor_rollout_ref.model.path", "custom_reward_function.path", "algorithm.adv_estimator",
    "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.clip_ratio", "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.total_epochs", "trainer.test_freq",
    "trainer.default_local_dir",
)  # fmt: skip

# Name of a table in docs/algorithms.md -> its menu, and what heads the cells of a row and of the keys that it reads.
_ADVICE = ("Source", "When to use", "Watch")
TABLES: dict[str, tuple[Mapping[str, Choice], tuple[str, ...], str]] = {
    "adv_estimator": (ESTIMATORS, ("Advantage of token t in row i", *_ADVICE), "Keys below `algorithm`"),
    "kl": (KL_KINDS, ("Value", "As reward penalty", "As loss"), ""),
    "loss_mode": (LOSSES, ("Loss of a token", *_ADVICE), "Keys below `actor`"),
    "loss_agg_mode": (AGGREGATIONS, ("Formula", *_ADVICE[:2]), ""),
}


def page() -> str:
    """The whole page as Markdown: its own text, then the tables."""
    read_by, tree = readers(), compose_tree([], [])[0]
    status = _status()
    sections: dict[str, list[Key]] = {}
    for path, key in keys().items():
        sections.setdefault(_section(path), []).append(key)
    parts = [PAGE.read_text().partition("\n\n\n## ")[0], f"\n\n## The {len(ESSENTIAL)} keys that matter\n"]
    parts += ["| key | meaning | unit | range | default |\n|---|---|---|---|---|"]
    parts += [_line(_cells(keys()[path], tree)) for path in ESSENTIAL]
    for section, rows in sections.items():
        parts += [f"\n## {section}\n\n| key | meaning | unit | range | default | read by |\n|---|---|---|---|---|---|"]
        parts += [_row(key, tree, read_by[key.path], status) for key in rows]
    return "\n".join([*parts, *_rules(), ""])


_AFTER = {"impossible": "what breaks it is refused", "risky": "a warning", "idle": "no effect, and a warning"}


def _rules() -> list[str]:
    """The table of rules; those of one text are one row."""
    about: dict[tuple[str, str], list[str]] = {}
    for rule in all_rules():
        names = (f"`{key.rstrip('.')}`" for key in (*rule.keys, *rule.reads))
        about.setdefault((rule.says, _AFTER[rule.kind]), []).extend(names)
    rows = [_line([*told, ", ".join(dict.fromkeys(names))]) for told, names in about.items() if names]
    return ["\n## Rules\n\n| rule, or state | what follows | keys |\n|---|---|---|", *rows]


def _status() -> dict[str, str]:
    """Reason why a key has no reader."""
    status = {key: f"no effect: {why}" for key, why in no_effect().items()}
    return status | dict.fromkeys(not_yet(), "feature not available yet")


def _section(path: str) -> str:
    parts = path.split(".")
    return ".".join(parts[:2]) if parts[0] == "actor_rollout_ref" and len(parts) > 2 else parts[0]


def _row(key: Key, tree: DictConfig, modules: list[str], status: dict[str, str]) -> str:
    by = ", ".join(f"`{module}`" for module in modules) if modules else status.get(key.path, "**nobody**")
    if modules and status.get(key.path, "").startswith("feature"):
        by += " (other values: not available yet)"
    return _line([*_cells(key, tree), by])


def _cells(key: Key, tree: DictConfig) -> list[str]:
    return [f"`{key.path}`", key.doc, key.unit, key.range, f"`{_default(key, tree)}`"]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(key: Key, tree: DictConfig) -> str:
    value: Any = OmegaConf.to_container(tree, resolve=False)
    for part in key.path.split("."):
        if not isinstance(value, dict):
            break  # a whole section follows another key
        value = value[part]
    if isinstance(value, Enum):
        return str(value.value)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\n", "\\n")  # a row of a table is one line


def with_tables(text: str) -> str:
    """docs/algorithms.md with its tables as the rows say."""
    return filled(text, {name: "\n".join(_table(*table)) for name, table in TABLES.items()})


def filled(text: str, tables: Mapping[str, str], by: str = "make docs") -> str:
    """A page with these tables between their markers. Raises ValueError where it lacks those of one.

    by: what makes them, as the markers say.
    """
    for name, rows in tables.items():
        begin, end = (f"<!-- {word} table {name} ({by}) -->" for word in ("begin", "end"))
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page lacks {begin} ... {end}")
        text = f"{before}{begin}\n\n{rows.rstrip()}\n\n{end}{after}"
    return text


def _table(menu: Mapping[str, Choice], heads: tuple[str, ...], keys_head: str) -> list[str]:
    """Lines of a table; names of one row of the menu share a line."""
    heads = ("Name", *heads, *([keys_head] if keys_head else []))
    lines = [_line(list(heads)), "|" + "---|" * len(heads)]
    for cells, rows in itertools.groupby(menu.values(), key=lambda row: row.cells):
        alike = list(rows)
        read = ", ".join(f"`{re.sub(r'[.]$', '.*', key)}`" for key in alike[0].reads)
        names = ", ".join(f"`{row.name}`" for row in alike)
        lines.append(_line([names, *cells, *([read] if keys_head else [])]))
    return lines


def pages(folder: Path) -> dict[str, str]:
    """File name -> text: that of the page in the folder of the documentation, then the tables."""
    named = {f"coming_from_{name}.md": project for project, name in (*PROJECTS.items(), (VERL, VERL))}
    return {name: (folder / name).read_text().partition("\n## ")[0] + _tables(of) for name, of in named.items()}


def _tables(project: str) -> str:
    lines = list[str]()
    section = ""
    for row in table(project):
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "", f"| {project} | here | how |", "|---|---|---|"]
        lines.append(_named_row(row, row.keys if project == VERL else row.all_keys()))
    return "\n".join(lines) + "\n"


def _named_row(row: Row, ours: Iterable[str]) -> str:
    here = ", ".join(f"`{key}`" for key in ours) or {"=": "=", "": "the same"}.get(row.kind, "none")
    here += "".join(f"{',' if place else ''} `{written(value)}`" for place, value in enumerate(row.values))
    values = {"not": "the opposite"}.get(row.rule, row.rule if row.rule.startswith("under") else "")
    if ">" in row.rule:
        values = ", ".join(f"{old} → {new}" for old, new in row.translations().items() if old != "*")
    left_out = "" if row.default is ... else f"left out: `{written(row.default)}`"
    conditions = [f"if {each}" for each in row.conditions] + ["kept"] * row.kept
    how = "; ".join(filter(None, (*conditions, values, row.note, left_out)))
    cells = (", ".join(f"`{name}`" for name in row.names), here, how)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main(argv: list[str]) -> int:
    own = PAGE.with_name("algorithms.md")
    generated = {PAGE.name: page(), **pages(PAGE.parent), own.name: with_tables(own.read_text())}
    texts = {PAGE.parent / name: text for name, text in generated.items()}
    old = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in old:
        if "--check" in argv:
            sys.stderr.write(f"{path} is out of date: run python -m verl_like.kit.docs.configuration\n")
        else:
            path.write_text(texts[path])
    return int(bool(old) and "--check" in argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
