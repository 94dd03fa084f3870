"""Checkpoints, runs and sessions of a tenant. What is another's is as unknown as what is nobody's."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

from verl_like.plugins.tinker_server import bodies
from verl_like.plugins.tinker_server.bodies import AdapterSpec, Refused
from verl_like.plugins.tinker_server.prompts import Limits
from verl_like.plugins.tinker_server.store import Record, Store


class Catalogue:
    """Reads the store for a tenant. Methods raise Refused for names that are not the tenant's."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self.store, self.limits = store, limits

    def owned(self, table: str, tenant: str, name: str, what: str) -> Record:
        """A record of this tenant."""
        key = "path" if table == "checkpoints" else "id"
        found = self.store.row(f"SELECT * FROM {table} WHERE {key} = ? AND tenant = ?", name, tenant)
        if found is None:
            raise Refused(f"there is no {what} {name!r}", 404)
        return found

    def spec(self, model: str) -> AdapterSpec:
        """Rank, seed and targets of a model's adapter."""
        return AdapterSpec.model_validate_json(self.store.value("SELECT spec FROM models WHERE id = ?", model))

    def checkpoint(self, tenant: str, path: str) -> Record:
        """A checkpoint of this tenant, by its path."""
        found = self.owned("checkpoints", tenant, path, "checkpoint")
        if found["expires"] is not None and found["expires"] < time.time():
            raise Refused(f"checkpoint {path!r} has expired", 404)
        return found

    def weights_info(self, tenant: str, path: str) -> Record:
        found = self.checkpoint(tenant, path)
        spec = self.spec(found["model"])
        targets = spec.model_dump(include={"train_attn", "train_mlp", "train_unembed"})
        return {"base_model": self.limits.model, "is_lora": True, "lora_rank": spec.rank, **targets}

    def delete_checkpoint(self, tenant: str, path: str) -> None:
        self.store.remove_checkpoint(self.checkpoint(tenant, path)["path"])

    def set_ttl(self, tenant: str, path: str, body: bytes) -> None:
        seconds = bodies.read(bodies.Ttl, body).ttl_seconds
        expires = None if seconds is None else time.time() + seconds
        self.store.change(
            "UPDATE checkpoints SET expires = ? WHERE path = ?", expires, self.checkpoint(tenant, path)["path"]
        )

    def checkpoints(self, tenant: str, model: str | None, limit: int, offset: int) -> Record:
        """List a model's checkpoints, or a tenant's, the newest first."""
        if model is not None:
            self.owned("models", tenant, model, "model")
        rows = self.store.rows(
            "SELECT * FROM checkpoints WHERE tenant = ? AND (? IS NULL OR model = ?) AND coalesce(expires, 1e12) > ? "
            "ORDER BY created DESC",
            *(tenant, model, model, time.time()),
        )
        page = [_told_checkpoint(row) for row in rows[offset : offset + limit]]
        return {"checkpoints": page, "cursor": {"offset": offset, "limit": limit, "total_count": len(rows)}}

    def runs(self, tenant: str, limit: int, offset: int) -> Record:
        """List a tenant's models, the newest first."""
        rows = self.store.rows("SELECT * FROM models WHERE tenant = ? ORDER BY created DESC", tenant)
        page = [self._told_run(row) for row in rows[offset : offset + limit]]
        return {"training_runs": page, "cursor": {"offset": offset, "limit": limit, "total_count": len(rows)}}

    def run(self, tenant: str, model: str) -> Record:
        return self._told_run(self.owned("models", tenant, model, "model"))

    def _told_run(self, row: Record) -> Record:
        newest = "SELECT * FROM checkpoints WHERE model = ? AND kind = ? ORDER BY created DESC LIMIT 1"
        kinds = {"last_checkpoint": "training", "last_sampler_checkpoint": "sampler"}
        found = {name: self.store.row(newest, row["id"], kind) for name, kind in kinds.items()}
        told = {"training_run_id": row["id"], "base_model": self.limits.model, "model_owner": row["tenant"]}
        told |= {"is_lora": True, "lora_rank": json.loads(row["spec"])["rank"], "last_request_time": _time(row["used"])}
        told |= {name: each and _told_checkpoint(each) for name, each in found.items()}
        return told | {"user_metadata": json.loads(row["told"])["user_metadata"]}

    def sessions(self, tenant: str, limit: int, offset: int) -> Record:
        query = "SELECT id FROM sessions WHERE tenant = ? ORDER BY created DESC LIMIT ? OFFSET ?"
        return {"sessions": [row["id"] for row in self.store.rows(query, tenant, limit, offset)]}

    def session(self, tenant: str, session: str) -> Record:
        """Tell what a session has made."""
        told = json.loads(self.owned("sessions", tenant, session, "session")["told"])
        of = {
            table: [row["id"] for row in self.store.rows(f"SELECT id FROM {table} WHERE session = ?", session)]
            for table in ("models", "samplers")
        }
        return {"training_run_ids": of["models"], "sampler_ids": of["samplers"], **told}


def _told_checkpoint(row: Record) -> Record:
    told = {"checkpoint_id": row["path"].removeprefix(f"tinker://{row['model']}/"), "checkpoint_type": row["kind"]}
    told |= {"time": _time(row["created"]), "tinker_path": row["path"], "size_bytes": row["bytes"]}
    told |= {"expires_at": row["expires"] and _time(row["expires"])}
    return told | {"user_metadata": json.loads(row["told"])["user_metadata"]}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
