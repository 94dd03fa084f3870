"""GSM8K for multi-turn rollout with a tool: the rows name the tool and what it is created with, as verl's do.

    python -m verl_like.kit.datasets.gsm8k_multiturn_w_tool --local_dataset_path raw/gsm8k --local_save_dir OUT

extra_info.tools_kwargs {tool: {"create_kwargs": {...}}} goes to the tool when a row's conversation begins; the tool's
schema comes from rollout.multi_turn.tool_config_path. The grade is GSM8K's, on the last answer after ####.
"""

from __future__ import annotations

from typing import Any

from verl_like.kit.datasets import gsm8k, schema

TOOL = "calc_gsm8k_reward"
_SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. Reasoning step by step "
    f"before any tool call. You should use the `{TOOL}` tool after step by step solving the question, before generate "
    "final answer at least once and refine your answer if necessary. Put your final answer in the format of "
    "`#### <answer>`."
)


def to_row(record: dict[str, Any], index: int, split: str) -> dict[str, Any]:
    """One record {question, answer} as a row of the schema."""
    truth = gsm8k.final_answer(record["answer"])
    row = schema.make_row(
        data_source="openai/gsm8k",
        prompt=[
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"{record['question']} {gsm8k.INSTRUCTION}"},
        ],
        ground_truth=truth,
        ability="math",
        split=split,
        index=index,
        answer=record["answer"],
        question=record["question"],
        need_tools_kwargs=True,
        tools_kwargs={TOOL: {"create_kwargs": {"ground_truth": truth}}},
    )
    return row | {"agent_name": "tool_agent"}


def main(argv: list[str] | None = None) -> None:
    """Convert both splits."""
    arguments = schema.parser("GSM8K with a tool to parquet.", local_source="folder with train.jsonl and test.jsonl")
    options = arguments.parse_args(argv)
    where = "train.jsonl and test.jsonl from github.com/openai/grade-school-math"
    parts = schema.read_parts(options, where, ("question", "answer"))
    schema.write_splits(parts, to_row, options.local_save_dir, title="gsm8k with a tool")


if __name__ == "__main__":
    schema.run(main)
