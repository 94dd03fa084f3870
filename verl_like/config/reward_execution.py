"""`reward_model.sandbox.*`, `reward_model.sandbox_fusion.*`: where programs in responses are run."""

from dataclasses import dataclass
from enum import StrEnum

from verl_like.config.base import ConfigNode, above, at_least, check_pattern, key, require, such_that
from verl_like.config.endpoint import WEB_ADDRESS, EndpointConfig


class SandboxLevel(StrEnum):
    """Levels at which the sandbox locks up programs, from weakest to strongest."""

    limits = "limits"
    filtered = "filtered"
    isolated = "isolated"


@dataclass(kw_only=True, slots=True)
class SandboxConfig(ConfigNode):
    """`reward_model.sandbox.*`: programs of responses run on this machine ([what it defends against](security.md))."""

    min_level: SandboxLevel = SandboxLevel.isolated
    """Weakest protection to accept: limits, filtered (no network, processes or signals either) or isolated (nor other
    files). What this machine allows is found out when the run starts."""
    timeout: float = key(10.0, above(0), unit="s")
    """Wall-clock time of one test."""
    total_timeout: float = key(30.0, above(0), unit="s")
    """Wall-clock time of all tests of one response; tests that it leaves no time for count as failed."""
    memory_limit_mb: int = key(1024, at_least(64), unit="MB")
    """Address space of the program."""
    max_output_kb: int = key(4096, at_least(1), unit="kB")
    """Output of one test."""
    scratch_mb: int = key(64, at_least(1), unit="MB")
    """Files that a program may write, in its own /tmp."""
    max_processes: int = key(1, at_least(1), unit="processes")
    """1: a program may start threads, but no process. More than that needs namespaces."""
    python_path: list[str] = key([])
    """Folders of Python packages that programs may import, such as a site-packages with numpy; never written to."""


@dataclass(kw_only=True, slots=True)
class SandboxFusionConfig(ConfigNode):
    """`reward_model.sandbox_fusion.*`: programs of responses run in a remote sandbox with SandboxFusion's API."""

    url: str | None = key(None, WEB_ADDRESS)
    """Address of its run_code. Null: programs run on this machine, see reward_model.sandbox."""
    max_concurrent: int = key(64, at_least(1), unit="requests")
    """Most requests at a time."""
    memory_limit_mb: int = key(1024, at_least(1), unit="MB")
    """Memory of one run."""
    timeout: float = key(10.0, above(0), unit="s")
    """Compile time and run time of one test."""
    max_retries: int = key(3, at_least(0), unit="requests")
    """Further tries after a transient error (no answer, HTTP 408, 425, 429 and 5xx, no result)."""
    retry_delay: float = key(1.0, at_least(0), unit="s")
    """Pause before the first further try; doubles with each."""


_JUDGE_PROMPT = """\
Question:
{question}

Reference answer:
{reference}

Response to be graded:
{response}

Is the response's final answer correct? Think briefly, then end with the single word Yes or No."""


@dataclass(kw_only=True, slots=True)
class JudgeConfig(EndpointConfig):
    """`reward_model.judge.*`: a language model behind an OpenAI-compatible endpoint grades responses."""

    model: str = "judge"
    """Model name that is sent."""
    prompt: str = _JUDGE_PROMPT
    """What the judge is asked. {question} (last user message), {response} and {reference} (ground_truth) are filled
    in."""
    prompt_file: str | None = None
    """Text file with that, in place of `prompt`."""
    parser: str | None = None
    """What reads the score from the judge's answer, in the reward processes: a built-in grader by name, or your own,
    file.py:name, called as a reward function with the answer as solution_str, and with the response that was judged
    as extra_info["response"]. Null: score_pattern does."""
    score_pattern: str = r"(?i)score:\s*(-?[0-9.]+)"
    """Regular expression whose last match holds the score; without a match the last yes (1) or no (0) counts."""
    score_scale: float = key(10.0, such_that(bool, "must not be 0", "not 0"))
    """The matched number is divided by this."""
    max_rpm: int | None = key(None, at_least(1), unit="requests/minute")
    """Null: no limit."""
    max_tpm: int | None = key(None, at_least(1), unit="tokens/minute")
    """Prompt and answer. Null: no limit."""
    max_tokens: int = key(512, at_least(1), unit="tokens")
    """Longest answer of the judge."""
    temperature: float = key(0.0, at_least(0))
    """Of the judge."""

    def check(self) -> None:
        groups = check_pattern("score_pattern", self.score_pattern).groups
        require(groups == 1, "score_pattern", self.score_pattern, "needs exactly one group, the number")
