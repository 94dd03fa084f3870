"""Pages for people: links and anchors lead somewhere, the site has every page, both renderers read the same."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md"), ROOT / "tests/gpu/README.md"]
)
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2", re.S | re.M)
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
SHORT = [page for page in PAGES if page.name != "CHANGELOG.md"]


def prose(text: str) -> str:
    """The page without its code: fenced blocks, indented ones, spans."""
    lines, block = [], False
    for line in FENCE.sub("", text).split("\n"):
        block = line.startswith("    ") and (block or not lines or not lines[-1].strip())
        lines.append("" if block else line)
    return re.sub(r"`[^`\n]*`", "", "\n".join(lines))


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and GitLab name them (and mkdocs.yml's slugify)."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def broken(page: Path, text: str) -> list[str]:
    found = []
    for path, anchor in LINK.findall(prose(text)):
        target = (page.parent / path) if path else page
        if target.is_dir():
            target /= "README.md"
        if not target.exists():
            found.append(f"{path}: there is no such file")
        elif anchor and anchor not in anchors(text if target == page else target.read_text(encoding="utf-8")):
            found.append(f"{path}#{anchor}: {target.name} has no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


def test_the_check_can_fail() -> None:
    page = ROOT / "docs" / "index.md"
    wrong = "[a](none.md) [b](data.md#none) [c](#none) [d](data.md) `[e](none.md)`\n\n## Some `data.key`: text\n"
    assert [line.split(":")[0] for line in broken(page, wrong)] == ["none.md", "data.md#none", "#none"]
    assert broken(page, wrong[-29:] + "[f](#some-datakey-text)") == []


def test_the_site_has_every_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"[\w/.-]+\.md", site[site.index("\nnav:") :])
    own = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert own <= set(listed), f"mkdocs.yml lacks {sorted(own - set(listed))}"
    assert len(listed) == len(set(listed)), "a page stands twice in mkdocs.yml"
    for name in listed:
        assert (ROOT / name.removeprefix("repository/") if "/" in name else ROOT / "docs" / name).exists(), name


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lists_and_tables_begin_after_an_empty_line(page: Path) -> None:
    """The repository's host does not need it, the site's renderer takes them for text otherwise."""
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).split("\n")
    begins = re.compile(r"([-*]|\d+\.) |\|")
    inside = re.compile(r"([-*]|\d+\.) | |\|")
    wrong = [
        now
        for before, now in itertools.pairwise(lines)
        if begins.match(now) and before.strip() and not inside.match(before)
    ]
    assert wrong == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "assets").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_shown_and_fetch_nothing(picture: Path) -> None:
    assert any(f"assets/{picture.name}" in page.read_text(encoding="utf-8") for page in PAGES)
    assert re.findall(r"(?:href|src|url\()\W*http", picture.read_text()) == []


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    """A bar inside a cell ends it, in code too, unless it is written `\\|`."""
    head, wrong = 0, []
    for line in FENCE.sub("", page.read_text(encoding="utf-8")).split("\n"):
        cells = line.replace("\\|", "").count("|") if line.startswith("|") else 0
        head = (head or cells) if cells else 0
        wrong += [line] if cells != head else []
    assert wrong == []
