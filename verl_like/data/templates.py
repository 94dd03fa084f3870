"""Chat templates and system prompts that can be named in the configuration, for models that bring none.

`data.chat_template`: native (the tokenizer's own), none (the text of a single user message as it is), a name below, or
the path of a Jinja file. `data.system_prompt`: any text, or a name of SYSTEM_PROMPTS, which says how the grader of the
same name wants the answer (Colossal-RL has one default prompt per reward type; the wording here is our own).
"""

from __future__ import annotations

from pathlib import Path

# Formats are those of the models' own cards; checked against the Qwen2.5 tokenizer's template in the tests. r1_zero is
# a conversation written out for base models, in the manner of DeepSeek-R1-Zero (arXiv 2501.12948, table 1).
TEMPLATES: dict[str, str] = {
    path.stem: path.read_text(encoding="utf-8").rstrip("\n") for path in Path(__file__).with_suffix("").glob("*.jinja")
}

SYSTEM_PROMPTS: dict[str, str] = {
    "think_answer_tags": (
        "First think about the problem, then give the answer. Put your reasoning between <think> and </think> and "
        "nothing but the final answer between <answer> and </answer>, for example: <think> two and two make four "
        "</think><answer> 4 </answer>."
    ),
    "boxed": "Reason step by step, and put your final answer in \\boxed{}.",
    "code": (
        "Solve the programming problem. Reason first, then give the whole program in one block that begins with "
        "```python and ends with ```."
    ),
}


def find_template(name: str) -> str | None:
    """Jinja text of data.chat_template; None for native. Raises ValueError for a file that is not there."""
    if name in ("native", "none"):
        return None
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"data.chat_template={name}: there is no file {path.resolve()}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"data.chat_template={name}: the file cannot be read as text ({error})") from error
    if not text.strip():
        raise ValueError(f"data.chat_template={name}: the file is empty; native is the tokenizer's own template")
    return text


def find_system_prompt(name: str | None) -> str | None:
    """The text of data.system_prompt.

    Raises ValueError for auto, which only a run with reward_model.rule can resolve.
    """
    if name == "auto":
        raise ValueError("data.system_prompt=auto is the prompt of reward_model.rule, which is not known here")
    return None if name is None else SYSTEM_PROMPTS.get(name, name)
