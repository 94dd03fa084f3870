"""The site itself, where `make docs` has installed its tools: what the hook adds, and that no page fetches anything."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / ".venv-docs" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(
    not TOOLS.exists() and importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: make docs"
)
def test_the_site_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    python = str(TOOLS) if TOOLS.exists() else "python"
    site = tmp_path / "site"
    build = [python, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    ran = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= pages.keys()
    assert "repository/CONTRIBUTING.html" in pages
    assert 'href="repository/CONTRIBUTING.html"' in pages["index.html"]
    assert "ppo_mini_batch_size" in pages["repository/recipes/quickstart/run.sh.html"]  # linked, so quoted as a page
    fetched = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?(?:https?:)?//[^"> ]+')
    assert {name: found for name, text in pages.items() if (found := fetched.findall(text))} == {}
    assert (site / "search" / "search_index.js").exists()  # the search of pages that are opened as files
