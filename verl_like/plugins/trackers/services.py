"""Trackers that are packages of their own: wandb, mlflow, swanlab, trackio, and TensorBoard's event files.

trainer.project_name and trainer.experiment_name name project and run, the configuration goes along without secrets, and
trainer.logger_kwargs.<name> are further arguments of the package's own `init`. A resumed run continues its curves: the
service's id of the run is kept in `<folder>/<name>_run_id`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl_like.config import TrainerConfig
from verl_like.observe.run_folder import flat
from verl_like.observe.samples import Sample
from verl_like.small_files import read_text

COLUMNS = ["input", "output", "gts", "score"]
TABLE = "val/generations"
_TABLES = "mlflow.loggedArtifacts"  # the tag by which MLflow's pages and load_table know tables
_MOST_TABLES = 75  # in that tag: a server cuts it at 8,000 characters, some at 5,000
# What a tracker imports, where that is not its name.
_MODULES = {"tensorboard": "torch.utils.tensorboard"}
_HINTS = {
    "wandb": "Log in with `wandb login`, or set WANDB_MODE=offline",
    "mlflow": "Set MLFLOW_TRACKING_URI or trainer.logger_kwargs.mlflow.tracking_uri to your server or to "
    "sqlite:///mlflow.db",
    "swanlab": "Log in with `swanlab login`, or set SWANLAB_MODE=offline",
    "trackio": "Metrics go to TRACKIO_DIR on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set",
}


def require(name: str) -> Any:
    """The module of a tracker. Raises ValueError, with the command that installs it, where it cannot be imported."""
    try:
        return importlib.import_module(_MODULES.get(name, name))
    except ImportError as error:
        raise ValueError(
            f"trainer.logger contains {name}, but its package cannot be imported ({error}). "
            f"Install it with: pip install 'verl_like[{name}]', or take it out of trainer.logger"
        ) from error


class ServiceTracker:
    """Base of the four trackers. Raises ValueError, which says what to do, where the service cannot be started."""

    name = ""

    def __init__(
        self, trainer: TrainerConfig, config: Mapping[str, Any], folder: Path, *, resumed_at: int | None
    ) -> None:
        self._module = self.require()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._config = folder, dict(config)
        id_file = folder / f"{self.name}_run_id"
        run_id = read_text(id_file, 1000).strip() if resumed_at is not None and id_file.exists() else None
        options = dict(trainer.logger_kwargs.get(self.name, {}))
        try:
            self._run = self._start(trainer.project_name, trainer.experiment_name, run_id, options)
        except Exception as error:
            given = f" with trainer.logger_kwargs.{self.name}={sorted(options)}" if options else ""
            raise ValueError(
                f"trainer.logger contains {self.name}, but it cannot be started{given}: {error}. "
                f"{_HINTS[self.name]}, or take {self.name} out of trainer.logger."
            ) from error
        id_file.write_text(f"{self._run_id()}\n")

    @classmethod
    def require(cls) -> Any:
        """Import the package of the service; raises ValueError where it is not installed."""
        return require(cls.name)

    def _start(self, project: str, run: str, run_id: str | None, options: dict[str, Any]) -> Any:
        """The service's run, continued where run_id is given."""
        raise NotImplementedError

    def _run_id(self) -> str:
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._run.log({TABLE: self._table(rows_of(step, samples))}, step=step)

    def _table(self, rows: list[list[Any]]) -> Any:
        return self._module.Table(columns=["step", *COLUMNS], data=rows)

    def finish(self) -> None:
        self._run.finish()


def rows_of(step: int, samples: Sequence[Sample]) -> list[list[Any]]:
    """Rows of a table with the columns step and COLUMNS."""
    return [[step, *(str(sample[key]) for key in COLUMNS)] for sample in samples]


class WandbTracker(ServiceTracker):
    """Weights & Biases. The x axis is training/global_step: wandb's own counter drops steps that a resume repeats."""

    name = "wandb"

    def _start(self, project: str, run: str, run_id: str | None, options: dict[str, Any]) -> Any:
        given = {"project": project, "name": run, "dir": str(self._folder), "id": run_id, "resume": "allow"} | options
        started = self._module.init(config=self._config, **given)
        started.define_metric("training/global_step")
        started.define_metric("*", step_metric="training/global_step")
        return started

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "training/global_step": step})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._run.log({TABLE: self._table(rows_of(step, samples)), "training/global_step": step})


class SwanlabTracker(ServiceTracker):
    """SwanLab; files below SWANLAB_LOG_DIR, or <folder>/swanlog."""

    name = "swanlab"

    def _start(self, project: str, run: str, run_id: str | None, options: dict[str, Any]) -> Any:
        place = os.environ.get("SWANLAB_LOG_DIR", str(self._folder / "swanlog"))
        given: dict[str, Any] = {"project": project, "name": run, "log_dir": place}
        given |= {} if run_id is None else {"id": run_id, "resume": "allow"}
        return self._module.init(config=self._config, **given | options)

    def _table(self, rows: list[list[Any]]) -> Any:
        table = self._module.echarts.Table()
        table.add(headers=["step", *COLUMNS], rows=rows)
        return table


class TrackioTracker(ServiceTracker):
    """Trackio. It continues runs by their name, in this project."""

    name = "trackio"

    def _start(self, project: str, run: str, run_id: str | None, options: dict[str, Any]) -> Any:
        resume = "never" if run_id is None else "allow"
        given = {"project": project, "name": run, "resume": resume, "embed": False} | options
        return self._module.init(config=self._config, **given)


class MlflowTracker(ServiceTracker):
    """MLflow: trainer.project_name is its experiment. In names "@" becomes "_at_", as in verl: MLflow has no "@".

    Through the client, so that a run that the surrounding program has open stays its own. The configuration becomes
    parameters (cut at the 500 characters that every server takes) and the artifact config.yaml.
    """

    name = "mlflow"

    def _start(self, project: str, run: str, run_id: str | None, options: dict[str, Any]) -> Any:
        self._client = self._module.MlflowClient(tracking_uri=options.pop("tracking_uri", None))
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            return self._client.get_run(run_id)
        experiment = self._client.get_experiment_by_name(project)
        of = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
        started = self._client.create_run(of, **{"run_name": run} | options)
        params = {_mlflow_name(key): str(value)[:500] for key, value in flat(self._config).items()}
        entities = [self._module.entities.Param(key, value) for key, value in params.items()]
        for first in range(0, len(entities), 100):  # the most that a server takes at once
            self._client.log_batch(started.info.run_id, params=entities[first : first + 100])
        self._client.log_dict(started.info.run_id, self._config, "config.yaml")
        return started

    def _run_id(self) -> str:
        return self._run.info.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._module.entities.Metric
        values = [metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id(), metrics=values)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        # Not log_table: it reads a table again to add rows, and then takes the answer "007" for the number 7.
        table = {"columns": ["step", *COLUMNS], "data": rows_of(step, samples)}
        entry = {"path": f"{TABLE}/{step:06d}.json", "type": "table"}
        self._client.log_dict(self._run_id(), table, entry["path"])
        listed = json.loads(self._client.get_run(self._run_id()).data.tags.get(_TABLES, "[]"))
        newest = [*(other for other in listed if other != entry), entry][-_MOST_TABLES:]
        self._client.set_tag(self._run_id(), _TABLES, json.dumps(newest))

    def finish(self) -> None:
        self._client.set_terminated(self._run_id())


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


class TensorboardTracker:
    """Event files under <folder>/tensorboard. A resumed run hides the steps that it repeats."""

    name = "tensorboard"

    def __init__(
        self, trainer: TrainerConfig, config: Mapping[str, Any], folder: Path, *, resumed_at: int | None
    ) -> None:
        options = {"log_dir": str(folder / "tensorboard")} | trainer.logger_kwargs.get("tensorboard", {})
        self._writer_class = partial(self.require().SummaryWriter, **options)
        self._resumed_at = resumed_at
        self._writer: Any = None

    @staticmethod
    def require() -> Any:
        """Import the package of the service; raises ValueError where it is not installed."""
        return require("tensorboard")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [[_verbatim(str(sample[key])) for key in COLUMNS] for sample in samples]
        table = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        text = "\n".join("| " + " | ".join(row) + " |" for row in table)
        self._open(step).add_text("val/generations", text, step)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        if self._writer is None:
            first = step if self._resumed_at is None else self._resumed_at + 1  # a validation may come before it
            self._writer = self._writer_class(purge_step=first)
        return self._writer


def _verbatim(text: str) -> str:
    """A cell of a Markdown table that shows the text as it is: 2*3*4 keeps its stars, a | ends no column."""
    escaped = re.sub(r"[!-/:-@\[-`{-~]", lambda found: f"&#{ord(found[0])};", text)
    return "<br>".join(re.split(r"\r\n?|\n", escaped))
