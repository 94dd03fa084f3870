"""A hook of mkdocs: what the pages link to in the repository becomes part of the site.

docs/*.md link to ../CONTRIBUTING.md, ../recipes/gsm8k/README.md or ../recipes/quickstart/run.sh as the repository's
host wants it. On the site those files stand below repository/: Markdown as pages, anything else as a page that quotes
it, and folders as their README.md. Links are rewritten to match, from the pages of docs/ and from those.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
BELOW = "repository"
LINK = re.compile(r"\]\((?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".txt": "text"}


def on_files(files: Files, config: Any) -> Files:
    """Add every repository file that a page links to, and what those link to in turn."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        origin = waiting.pop()
        if not origin.endswith(".md"):
            continue
        for path, _ in LINK.findall((ROOT / origin).read_text(encoding="utf-8")):
            target = in_repository(origin, path)
            if target and not target.startswith("docs/") and target not in seen:
                seen.add(target)
                waiting.append(target)
                files.append(File.generated(config, site_path(target), content=content(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that leave docs/, and bars in code cells, which Python-Markdown takes as they are."""
    here = page.file.src_uri
    origin = repository_path(here)

    def relink(match: re.Match[str]) -> str:
        target = in_repository(origin, match[1])
        if target is None:
            return match[0]  # mkdocs says what is wrong with it
        return f"]({os.path.relpath(site_path(target), PurePosixPath(here).parent)}{match[2] or ''})"

    lines = LINK.sub(relink, markdown).split("\n")
    return "\n".join(
        re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in lines
    )


def on_post_page(output: str, **_: Any) -> str:
    """Names in the cells of tables may break after a dot or an underscore; cells with long ones get some room."""

    def breakable(match: re.Match[str]) -> str:
        kind = ' class="long"' if len(match[1]) > 20 else ""
        return f"<td{kind}><code>" + re.sub(r"([._])", r"\1<wbr>", match[1])

    return re.sub(r"<td><code>([^<\s]+)(?=</code>)", breakable, output)


def in_repository(origin: str, path: str) -> str | None:
    """The linked file's path in the repository; a folder's README.md. None where there is none."""
    target = (ROOT / origin).parent.joinpath(path).resolve()
    if target.is_dir():
        target /= "README.md"
    return target.relative_to(ROOT).as_posix() if target.is_file() and target.is_relative_to(ROOT) else None


def site_path(path: str) -> str:
    """The site's name of a repository file: those of docs/ without it, sources as pages."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{BELOW}/{path}" if path.endswith(".md") else f"{BELOW}/{path}.md"


def repository_path(uri: str) -> str:
    """The opposite of site_path."""
    if not uri.startswith(f"{BELOW}/"):
        return f"docs/{uri}"
    path = uri.removeprefix(f"{BELOW}/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def content(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n~~~~~{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}~~~~~\n"
