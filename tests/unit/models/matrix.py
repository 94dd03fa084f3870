"""Table of model types by what works with them; `python -m tests.unit.models.matrix` writes it into docs/models.md.

A cell says yes where a test runs the type that way, else why not: a check's own refusal, or that nobody has tried.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.unit.models import tiny_vision, zoo
from tests.unit.models.test_routes import KINDS as ROUTED
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.model import ModelConfig
from verl_like.models import exact, families, loading, stages, tensor_plan
from verl_like.models.families import Family
from verl_like.plugins.sglang import models as sglang
from verl_like.plugins.vllm.models import NOT_ON_CPU

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- table of types: begin -->", "<!-- end -->"
TYPES: dict[str, Family] = families.FAMILIES | families.VISION | families.NESTED
YES, NONE = "yes", "-"
LEGEND = "yes: a test runs it. -: it has no such part. Numbers: why not."

_STAGES = FSDPConfig(pipeline_parallel_size=2)
# Ways to spread a model over two ranks, and the check that speaks before anything is loaded
SPREAD: dict[str, Callable[[ModelConfig, object], None]] = {
    "Ulysses": lambda model, config: loading.check_ulysses(model, config, 2),  # type: ignore[arg-type]
    "context": lambda model, config: loading.check_context(model, config, 2, "context_parallel_size"),  # type: ignore[arg-type]
    "tensor": lambda model, config: tensor_plan.check_model(model, config, 2),  # type: ignore[arg-type]
    "experts": lambda model, config: tensor_plan.check_experts(model, config, 2, trained=True),  # type: ignore[arg-type]
    "pipeline": lambda _, config: stages.check_stages(config, _STAGES, ""),  # type: ignore[arg-type]
}
_REASONS = {
    r"carry state from token to token": "its layers carry state from token to token, and need whole sequences",
    r"has no tensor-parallel plan": "transformers has no tensor-parallel plan for it",
    r"leaves attention whole": "transformers' plan leaves its attention whole (multi-head latent attention)",
    r"not cut into stages": "its layers have not been cut into stages",
    r"not available for vision-language models": "not built for models that see",
}
_UNTRIED = "nobody has tried"
_TEXT_ALONE = "the text model alone is run"
_WITHOUT_SGLANG = {
    **sglang.NOT_ON_CPU,
    **dict.fromkeys(("mistral", "mixtral"), "SGLang's model of it has no windows, and is right without them"),
    **dict.fromkeys(
        sglang.WITH_ALL_HEADS,
        "SGLang's model of it keeps as many heads of keys as of queries, where the config has fewer",
    ),
}
_SCORES = "its routers do not tell their scores"


def refusals(name: str, path: str) -> dict[str, str]:
    """Reasons why the model in `path`, of this type, cannot be spread over two ranks, by way; empty where it can.

    A dense model has no experts to hand out: their way is left out.
    """
    model = ModelConfig(path=path)
    config, found = loading.load_hf_config(model), dict[str, str]()
    for way, check in SPREAD.items():
        if way == "experts" and not families.num_experts(config):
            continue
        try:
            check(model, config)
            found[way] = ""
        except ValueError as error:
            (found[way],) = [reason for pattern, reason in _REASONS.items() if re.search(pattern, str(error))]
    return found


def cells(name: str, path: str) -> dict[str, str]:
    """Cells of one type, by column."""
    family, spread = TYPES[name], refusals(name, path)
    sees, nested = name in families.VISION, name in families.NESTED

    def claimed(what: str) -> str:
        return YES if what in family.tested else _UNTRIED

    return {
        **dict.fromkeys(("packed", "shared beginnings", "fused head"), YES),
        "LoRA": claimed(families.LORA),
        "two ranks": claimed(families.RANKS),
        **{way: NONE if way not in spread else spread[way] or YES for way in SPREAD},
        "hf": claimed(families.HF),
        "vLLM": NOT_ON_CPU.get(name) or claimed(families.VLLM),
        "SGLang": _WITHOUT_SGLANG.get(name) or claimed(families.SGLANG),
        "images": YES if sees else _TEXT_ALONE if nested else NONE,
        "replay": NONE
        if "experts" not in spread
        else YES
        if name in ROUTED
        else _SCORES
        if name == "jamba"
        else _UNTRIED,
        "proof": YES,
        "parity": YES if name in exact.KNOWN_TYPES else "its sums have not been put into one order",
    }


def table(folder: Path) -> str:
    """Rows of types whose cells are equal, and the reasons by number."""
    rows: dict[tuple[str, ...], list[str]] = {}
    reasons: dict[str, int] = {}
    for name, family in TYPES.items():
        found = cells(name, _saved(folder, name))
        columns = [*found]
        shown = [
            value if value in (YES, NONE) else str(reasons.setdefault(value, len(reasons) + 1))
            for value in found.values()
        ]
        rows.setdefault((family.kind, *shown), []).append(name)
    lines = [f"| `model_type` | kind | {' | '.join(columns)} |", "| --- " * (len(columns) + 2) + "|"]
    lines += [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    lines += ["", LEGEND, "", *(f"{number}. {reason}" for reason, number in reasons.items())]
    refused: dict[str, list[str]] = {}
    for name, why in families.REFUSED.items():
        refused.setdefault(why, []).append(name)
    lines += ["", "| refused | because |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {why} |" for why, names in refused.items())])


def _saved(folder: Path, name: str) -> str:
    if name not in families.VISION:
        return zoo.folder(folder, name)
    tiny_vision.tiny_vision(name).config.save_pretrained(folder / name)
    return str(folder / name)


def page_with(shown: str) -> str:
    """Text of the page with another table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{shown}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page_with(table(Path(folder))), encoding="utf-8")
