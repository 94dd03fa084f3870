"""State of the server that survives a kill: one SQLite file, beside the folders with adapters.

A request is written before it is acknowledged, and its result together with what it changed. So a server that begins
again knows, of every request id, whether it was done: a result is given again, anything else is computed, once.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, tenant TEXT, created REAL, ended REAL, told TEXT);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, tenant TEXT, session TEXT, spec TEXT, created REAL, used REAL, told TEXT,
    state TEXT, state_seq INTEGER);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, tenant TEXT, session TEXT, model TEXT, seq INTEGER, kind TEXT, digest BLOB, body BLOB,
    status TEXT, result BLOB, told REAL, arrived INTEGER, cost INTEGER, tries INTEGER DEFAULT 0);
CREATE INDEX IF NOT EXISTS requests_of_models ON requests (model, seq);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, tenant TEXT, model TEXT, kind TEXT, folder TEXT, bytes INTEGER, created REAL, expires REAL,
    told TEXT);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, tenant TEXT, session TEXT, path TEXT, folder TEXT, clients INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS answers (call TEXT PRIMARY KEY, answer TEXT, told REAL);
"""
KEPT_S = 3600.0  # a result may be asked for again: an answer can be lost on its way
_AGAIN = "('forward_backward', 'optim_step')"  # kinds that are computed again where a model is built again
Record = dict[str, Any]


class Store:
    """SQLite file of a folder. One thread uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "server.sqlite").touch(mode=0o600)  # it has the prompts of all tenants
        self._file = sqlite3.connect(folder / "server.sqlite", isolation_level=None)
        self._file.row_factory = sqlite3.Row
        self._gone = list[str]()  # folders that are deleted behind what is written together
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=FULL")
        self._file.executescript(_TABLES)
        if self.value("PRAGMA user_version") == 0:  # a server before this one: its digests of snapshots are others
            unnamed = "kind = 'save_weights_for_sampler' AND json_extract(coalesce(result, '{}'), '$.path') IS NULL"
            self.change(f"UPDATE requests SET digest = NULL WHERE {unnamed}")
            self.change("PRAGMA user_version = 1")
        self._arrived = self.value("SELECT coalesce(max(arrived), 0) FROM requests")

    def close(self) -> None:
        self._file.close()

    def differing(self, facts: Record) -> list[str]:
        """Name the facts that another server wrote down otherwise; they are written where there are none."""
        with self.together():
            for name, value in facts.items():
                self.change("INSERT OR IGNORE INTO facts VALUES (?, ?)", name, json.dumps(value))
        known = {row["name"]: json.loads(row["value"]) for row in self.rows("SELECT * FROM facts")}
        return [f"{name}={known[name]!r}" for name, value in facts.items() if known[name] != value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write all that is written inside, or nothing."""
        self._file.execute("BEGIN IMMEDIATE")
        self._gone.clear()
        with self._file:  # which also undoes what cannot be committed: on a full disk, say
            yield
        for folder in self._gone:
            shutil.rmtree(folder, ignore_errors=True)
        self._gone.clear()

    def rows(self, query: str, *values: Any) -> list[Record]:
        return [dict(row) for row in self._file.execute(query, values)]

    def row(self, query: str, *values: Any) -> Record | None:
        return next(iter(self.rows(query, *values)), None)

    def value(self, query: str, *values: Any) -> Any:
        return self._file.execute(query, values).fetchone()[0]

    def change(self, query: str, *values: Any) -> None:
        self._file.execute(query, values)

    def add(self, table: str, *, replace: bool = False, **columns: Any) -> None:
        """Insert a record; dictionaries become JSON."""
        values = [json.dumps(value) if isinstance(value, dict) else value for value in columns.values()]
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        self.change(f"INSERT {'OR REPLACE ' if replace else ''}INTO {table} ({names}) VALUES ({marks})", *values)

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, **columns: Any) -> None:
        """Write a request down, in the order of arrival."""
        self._arrived += 1
        self.add("requests", **{"status": "waiting", **columns}, arrived=self._arrived)

    def finish(self, request: str, result: bytes, *, failed: bool = False) -> None:
        """Write down what came of a request; the body of one that changes no model is not needed again."""
        status = "failed" if failed else "done"
        self.change(
            "UPDATE requests SET status = ?, result = ?, told = ?, "
            f"body = CASE WHEN ? = 'done' AND kind IN {_AGAIN} THEN body END WHERE id = ?",
            *(status, result, time.time(), status, request),
        )

    def tell(self, request: str) -> None:
        """Note when a result was given; until then it is when it was there."""
        self.change("UPDATE requests SET told = ? WHERE id = ?", time.time(), request)

    def keep_state(self, model: str, seq: int, folder: Path) -> str | None:
        """Make a folder the model's state after request `seq`, and forget bodies up to there; return the old one."""
        old = self.value("SELECT state FROM models WHERE id = ?", model)
        self.change("UPDATE models SET state = ?, state_seq = ? WHERE id = ?", str(folder), seq, model)
        self.change(
            "UPDATE requests SET body = NULL WHERE model = ? AND seq <= ? AND body IS NOT NULL AND status != 'waiting'",
            *(model, seq),
        )
        return old if old != str(folder) else None

    def sweep(self) -> None:
        """Drop old results, what ended sessions leave, and checkpoints whose time is over, with their folders."""
        now = time.time()
        ended = "session IN (SELECT id FROM sessions WHERE ended IS NOT NULL)"
        self.change(f"UPDATE requests SET body = NULL WHERE {ended} AND body IS NOT NULL AND status != 'waiting'")
        for model in self.rows(f"SELECT id, state FROM models WHERE {ended} AND state IS NOT NULL"):
            shutil.rmtree(model["state"], ignore_errors=True)
            self.change("UPDATE models SET state = NULL WHERE id = ?", model["id"])
        self.change("UPDATE requests SET result = NULL WHERE told < ? AND result IS NOT NULL", now - KEPT_S)
        self.change("DELETE FROM requests WHERE told < ? AND kind = 'sample'", now - KEPT_S)
        self.change("DELETE FROM answers WHERE told < ?", now - KEPT_S)
        for each in self.rows("SELECT path FROM checkpoints WHERE expires < ?", now):
            self.remove_checkpoint(each["path"])

    def remove_checkpoint(self, path: str) -> None:
        """Delete a checkpoint; its folder stays while a sampling client uses it."""
        found = self.row("DELETE FROM checkpoints WHERE path = ? RETURNING folder", path)
        if found is not None:
            self.remove_folder(found["folder"])

    def remove_folder(self, folder: str) -> None:
        """Delete a folder that neither a checkpoint nor a sampler of a session that goes on has."""
        users = self.value(
            "SELECT (SELECT count(*) FROM checkpoints WHERE folder = ?) + (SELECT count(*) FROM samplers JOIN sessions "
            "ON sessions.id = samplers.session WHERE folder = ? AND ended IS NULL)",
            *(folder, folder),
        )
        if not users and self._file.in_transaction:
            self._gone.append(folder)  # until it is committed that nobody has it
        elif not users:
            shutil.rmtree(folder, ignore_errors=True)
