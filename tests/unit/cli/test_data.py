"""`verl-like data`: what can be prepared, a download from a hub, and a file as tokens."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.factory import SHARED_DATA
from verl_like.cli.main import main
from verl_like.kit.datasets.catalogue import RECIPES, prepare

ROOT = Path(__file__).resolve().parents[3]


def parquet(rows: list[dict[str, str]]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return stream.getvalue()


COMMIT = "a" * 40
FILES = {
    "README.md": b"not wanted",
    "main/train-00000-of-00001.parquet": parquet([{"question": "1+1?", "answer": "so #### 2"}] * 3),
    "main/test-00000-of-00001.parquet": parquet([{"question": "2+2?", "answer": "#### 4"}]),
    "socratic/train-00000-of-00001.parquet": b"not wanted",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as the hub library asks for."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        type(self).asked.append(self.path)
        base = "/datasets/openai/gsm8k/resolve/"
        if self.path.startswith("/api/datasets/openai/gsm8k/tree/"):
            content = json.dumps(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in FILES.items()
                ]
            ).encode()
        elif self.path.startswith("/api/datasets/openai/gsm8k"):
            siblings = [{"rfilename": name} for name in FILES]
            content = json.dumps({"id": "openai/gsm8k", "sha": COMMIT, "siblings": siblings}).encode()
        elif self.path.startswith(base):
            content = FILES[self.path.removeprefix(base).partition("/")[2]]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_can_be_prepared_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["data"], ["data", "list"]):
        main(argv)
        told = capsys.readouterr().out
        assert all(f"\n{each.name} " in told for each in RECIPES)
        assert "hub: openai/gsm8k" in told and "generated" in told


def test_a_data_set_is_downloaded_and_converted(hub: str, tmp_path: Path) -> None:
    """In a process of its own: the hub library reads its address once."""
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "verl_like.cli", "data", "prepare", "gsm8k", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert len(rows) == 3 and rows[0]["reward_model"]["ground_truth"] == "2"
    assert pq.read_table(tmp_path / "out" / "test.parquet").num_rows == 1
    assert f"data.train_files={tmp_path / 'out' / 'train.parquet'}" in done.stdout.splitlines()[-2]
    assert not [path for path in Hub.asked if "socratic" in path or "README" in path]


def test_without_a_hub_the_remedy_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"openai/gsm8k cannot be downloaded \(HF_HUB_OFFLINE is set\).*--source"):
        main(["data", "prepare", "gsm8k", "--out", str(tmp_path)])


def test_generated_and_local_ones_and_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "prepare", "countdown", "--out", str(tmp_path / "c"), "--", "--num_train", "5", "--num_test", "2"])
    assert pq.read_table(tmp_path / "c" / "train.parquet").num_rows == 5
    raw = tmp_path / "raw.jsonl"
    raw.write_text(json.dumps({"problem": "x?", "answer": "007"}) + "\n")
    main(["data", "prepare", "aime2024", "--out", str(tmp_path / "a"), "--source", str(raw)])
    assert f"data.val_files={tmp_path / 'a' / 'test.parquet'}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no data set gms8k; did you mean gsm8k"):
        main(["data", "prepare", "gms8k"])
    with pytest.raises(SystemExit, match="tool_calls needs its raw files: give --source"):
        main(["data", "prepare", "tool_calls", "--out", str(tmp_path / "t")])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_script_takes_what_it_is_given(recipe: object, tmp_path: Path) -> None:
    """A source that is not there is the script's own complaint; one without a source is generated from options."""
    assert isinstance(recipe, type(RECIPES[0]))
    if recipe.hub is None and not recipe.needs and recipe.name != "countdown":
        with pytest.raises(SystemExit):
            prepare(recipe, tmp_path, None, ["--no-such-option"])
    else:
        with pytest.raises(ValueError, match="nowhere"):
            prepare(recipe, tmp_path, tmp_path / "nowhere")


def test_a_row_is_shown_as_the_trainer_reads_it(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "12+3="}],
        "reward_model": {"ground_truth": "15"},
    }
    long = row | {"prompt": [{"role": "user", "content": "1" * 30}]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (row, row, long)))
    file = str(tmp_path / "rows.jsonl")
    main(["data", "show", file, "--model", str(tiny_model), "--row", "1", "data.max_prompt_length=20"])
    told = capsys.readouterr().out
    assert "3 rows (sums 3)" in told and "5 to 30, median 5; 1 longer than data.max_prompt_length=20" in told
    assert "row 1, sums, 5 tokens\n1|2|+|3|=\nground truth: 15" in told
    main(["data", "show", file, "--model", str(tiny_model), "--ids", "data.system_prompt=7*"])
    assert "row 0, sums, 7 tokens\n7[" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has 3 rows, from 0: there is no row 3"):
        main(["data", "show", file, "--model", str(tiny_model), "--row", "3"])
    with pytest.raises(SystemExit, match=r"unknown key data\.max_prompt_lengt"):
        main(["data", "show", file, "--model", str(tiny_model), "data.max_prompt_lengt=3"])


def test_a_file_that_a_run_refuses_is_shown_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (SHARED_DATA / "tok_minimind").is_dir():
        pytest.skip(f"needs {SHARED_DATA / 'tok_minimind'}")
    rows = [{"prompt": [{"role": role, "content": "a<|im_end|>b"}]} for role in ("user", "usr")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    with pytest.raises(SystemExit, match=r"a run refuses this file: .*row 1: message 0 has the role 'usr'"):
        main(["data", "show", str(tmp_path / "rows.jsonl"), "--model", str(SHARED_DATA / "tok_minimind")])
    assert "a|<|" in capsys.readouterr().out  # pieces, where the token would be one
