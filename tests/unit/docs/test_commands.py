"""Commands, keys and messages that the pages name exist."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.verl_settings import tables
from verl_like.cli.main import VERBS
from verl_like.config.errors import ConfigError
from verl_like.config.schema import find_key, keys, sections
from verl_like.kit.docs.configuration import ESSENTIAL
from verl_like.trainer.compose import compose

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md")])
SECTIONS = "data|actor_rollout_ref|critic|reward_model|custom_reward_function|algorithm|trainer|ray_init"
SET_KEY = re.compile(rf"(?:^|[\s`'\"(])(\+{{0,2}}(?:{SECTIONS})\.[\w.{{}},]*\w}}?)=", re.M)
SPAN_KEY = re.compile(rf"`((?:{SECTIONS})\.[\w.]+)`")
# A row's column, and keys of other programs that the page on departures says are refused.
NO_KEYS = {"reward_model.style", "algorithm.rollout_correction.bypass"}


def is_key(name: str) -> bool:
    """By the table of keys, or else by what a command line with it says: it knows spellings of other programs too."""
    if find_key(name.lstrip("+")) is not None or name in sections():
        return True
    try:
        compose(["data.custom_cls.path=mine.py", f"{name}=1"])  # whose own keys +data.<name> sets
    except ConfigError as error:
        return f"unknown key {name.lstrip('+')}" not in str(error)
    return True


def spelled_out(name: str) -> list[str]:
    """a.{b,c} -> a.b, a.c"""
    parts = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.split(r"(\{[^}]*\})", name)]
    return ["".join(choice) for choice in itertools.product(*parts)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_verbs_and_keys_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    verbs = set(re.findall(r"(?:^ *|`|&& )verl-like +([a-z][\w-]*)", text, re.M)) - {verb.name for verb in VERBS}
    assert not verbs, f"verl-like has no {sorted(verbs)}"
    own = text.partition("## Other spellings")[0]
    named = {key for name in SET_KEY.findall(own) for key in spelled_out(name)}
    # Generated: one names the modules that read a key, the others what other projects call it.
    if page.name != "configuration.md" and not page.name.startswith("coming_from_"):
        named |= set(SPAN_KEY.findall(own))
    assert not (unknown := sorted(name for name in named - NO_KEYS if not is_key(name))), f"no such keys: {unknown}"


FENCED = re.compile(r"^```(?:bash)?\n(.*?)^```", re.S | re.M)
INDENTED = re.compile(r"(?<=\n\n)(?:(?: {4}.*)?\n)+")
VERB = re.compile(r"\b(?:verl-like (\w+)|python -m verl_like\.trainer\.main_ppo)\b")
# Given already, or by files that the page describes; a run in a process of its own for one that is to be extended.
BEFORE = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=MODEL", "trainer.test_freq=20"]
OF_OTHERS = ("pip install", "tinker_cookbook", "pandas", "python benchmarks", "verl-like import")


def commands(text: str) -> list[str]:
    """Command lines that a page tells to type, and keys that stand alone: those of a block are one line."""
    found = []
    for block in [*FENCED.findall(text), *INDENTED.findall(text)]:
        lines = block.replace("\\\n", " ").strip().split("\n")
        try:
            words = [shlex.split(line, comments=True) for line in lines]
        except ValueError:  # an apostrophe: prose, or what a program prints
            continue
        if all(re.match(r"\+{0,2}[a-z_]+\.[\w.]+=", word) for line in words for word in line):
            found.append(shlex.join(itertools.chain.from_iterable(words)))
        else:
            found += [line.strip() for line in lines if VERB.search(line)]
    return [line for line in found if "=" in line and not any(each in line for each in OF_OTHERS)]


def wrong(line: str) -> str | None:
    """What a run says to the line, or that it names no validation files, which have no default that exists."""
    words = [word for word in shlex.split(line, comments=True) if re.match(r"\+{0,2}[a-z][\w.]*=", word)]
    verb = VERB.search(line)
    objective = verb[1] if verb and verb[1] in ("sft", "preference", "serve") else "rl"
    whole = verb is not None and verb[1] in (None, "train", "plan") and not re.search(r"\.\.\.|--|env\.train", line)
    if whole and "data.val_files=" not in line:
        return "names no data.val_files"
    try:
        compose([*BEFORE, f"trainer.objective={objective}", *words])
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "extending.md"], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_command_lines_compose(page: Path) -> None:
    """With values and all; those of extending.md, whose files it has to write, are run in tests/e2e."""
    lines = commands(page.read_text(encoding="utf-8"))
    assert {line: error for line in lines if (error := wrong(line))} == {}


def test_examples_of_the_verbs_compose() -> None:
    lines = [
        " ".join(text.split()) for verb in VERBS for text in verb.examples if verb.name != "import" and "=" in text
    ]
    assert len(lines) > 15 and {line: error for line in lines if (error := wrong(line))} == {}


def test_the_check_can_fail() -> None:
    assert wrong("verl-like train algorithm=grpo") == "names no data.val_files"
    assert "cannot read" in (wrong("""'reward_model.weights={a: {b: 1}, "c*": {d: 1}}'""") or "")
    assert commands("It is\n\n    x.y=1 \\\n      x.z=2\n    x.w=3\n\n```bash\nverl-like plan a.b=c\n```\n") == [
        "verl-like plan a.b=c",
        "x.y=1 x.z=2 x.w=3",
    ]
    assert SET_KEY.findall("trainer.nodes=2 'data.x.y=1' `data.{seed,train_files}=`") == [
        "trainer.nodes",
        "data.x.y",
        "data.{seed,train_files}",
    ]
    assert not is_key("trainer.nodes") and is_key("trainer.nnodes") and not is_key("data.x.y")
    assert spelled_out("data.{seed,shuffle}") == ["data.seed", "data.shuffle"]


def test_the_tutorials_settings_compose(tmp_path: Path) -> None:
    """Its real run is tests/e2e/test_tutorial.py; this one is quick, and takes the settings for GPUs too."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (tmp_path / "tens.yaml").write_text(yaml)
    last = text[text.index("## A real model") :]
    words = re.findall(r"[\w.]+=[^\s\\]+", last[: last.index("- Learning")])
    assert len(words) == 9
    small, large = (compose(more, [tmp_path / "tens.yaml"]) for more in ([], words))
    assert small.trainer.launcher == "local" and small.actor_rollout_ref.actor.optim.lr == 4e-4
    assert large.actor_rollout_ref.actor.optim.lr == 1e-6 and large.data.max_response_length == 1024


def test_whole_keys_stand_in_the_configuration_page() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert [key for key in keys() if f"\n| `{key}` |" not in text] == []
    assert len(ESSENTIAL) == len(set(ESSENTIAL)) == 25
    assert text.index(f"`{ESSENTIAL[-1]}`") < text.index("\n## data\n")


@pytest.mark.parametrize("script", sorted((ROOT / "recipes").rglob("*.s[hb]*")), ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def messages() -> str:
    """Every text of the package's sources and tables, placeholders as an ellipsis, and adjacent parts joined."""
    tables = [path.read_text(encoding="utf-8") for path in (ROOT / "verl_like").rglob("*.txt")]
    texts = [re.sub(r"\{\w+[^}]*\}", "…", table) for table in tables]
    for path in (ROOT / "verl_like").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"\{\w+[^}]*\}|%[sdr]", "…", node.value))
    return "\n".join(" ".join(text.split()) for text in texts)


def test_messages_of_the_troubleshooting_page_are_the_programs_own() -> None:
    """In the first cell of each table, code that is more than one word: each piece between ellipses is in some text."""
    text, known = (ROOT / "docs" / "troubleshooting.md").read_text(), messages()
    quoted = [code for cell in re.findall(r"^\| (.+?) \|", text, re.M) for code in re.findall(r"`([^`]+ [^`]+)`", cell)]
    assert len(quoted) > 40
    pieces = [piece.strip() for code in quoted for piece in code.split("…") if len(piece.strip()) > 3]
    assert [piece for piece in pieces if piece not in known] == []
    assert "this is said nowhere" not in known


def test_the_counted_hyper_parameters(shared_data: Path) -> None:
    text = (ROOT / "docs" / "hyper_parameters.md").read_text()
    for name, table in tables((shared_data / "verl_commands.jsonl").read_text().splitlines()).items():
        assert table in text, f"put this into docs/hyper_parameters.md ({name}):\n{table}"
