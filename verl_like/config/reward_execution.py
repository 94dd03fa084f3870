"""`reward_model.sandbox.*`, `reward_model.sandbox_fusion.*`: where programs in responses are run."""

from dataclasses import dataclass, field

from verl_like.config.base import ConfigNode, above, at_least, check_pattern, require
from verl_like.config.endpoint import EndpointConfig, check_address
from verl_like.config.enums import SandboxLevel


@dataclass(kw_only=True, slots=True)
class SandboxConfig(ConfigNode):
    """`reward_model.sandbox.*`: programs of responses run on this machine ([what it defends against](security.md))."""

    min_level: SandboxLevel = SandboxLevel.isolated
    """Weakest protection to accept: limits, filtered (no network, processes or signals either) or isolated (nor other
    files). What this machine allows is found out when the run starts."""
    timeout: float = 10.0
    """[s] Wall-clock time of one test."""
    total_timeout: float = 30.0
    """[s] Wall-clock time of all tests of one response; tests that it leaves no time for count as failed."""
    memory_limit_mb: int = 1024
    """[MB] Address space of the program."""
    max_output_kb: int = 4096
    """[kB] Output of one test."""
    scratch_mb: int = 64
    """[MB] Files that a program may write, in its own /tmp."""
    max_processes: int = 1
    """[processes] 1: a program may start threads, but no process. More than that needs namespaces."""
    python_path: list[str] = field(default_factory=list)
    """Folders of Python packages that programs may import, such as a site-packages with numpy; never written to."""

    def check(self) -> None:
        above(self, 0, "timeout", "total_timeout")
        at_least(self, 64, "memory_limit_mb")
        at_least(self, 1, "max_output_kb", "scratch_mb", "max_processes")


@dataclass(kw_only=True, slots=True)
class SandboxFusionConfig(ConfigNode):
    """`reward_model.sandbox_fusion.*`: programs of responses run in a remote sandbox with SandboxFusion's API."""

    url: str | None = None
    """Address of its run_code. Null: programs run on this machine, see reward_model.sandbox."""
    max_concurrent: int = 64
    """[requests] Most requests at a time."""
    memory_limit_mb: int = 1024
    """[MB] Memory of one run."""
    timeout: float = 10.0
    """[s] Compile time and run time of one test."""
    max_retries: int = 3
    """[requests] Further tries after a transient error (no answer, HTTP 408, 425, 429 and 5xx, no result)."""
    retry_delay: float = 1.0
    """[s] Pause before the first further try; doubles with each."""

    def check(self) -> None:
        check_address(self.url)
        above(self, 0, "timeout")
        at_least(self, 1, "max_concurrent", "memory_limit_mb")
        at_least(self, 0, "max_retries", "retry_delay")


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
    score_scale: float = 10.0
    """The matched number is divided by this."""
    max_rpm: int | None = None
    """[requests/minute] Null: no limit."""
    max_tpm: int | None = None
    """[tokens/minute] Prompt and answer. Null: no limit."""
    max_tokens: int = 512
    """[tokens] Longest answer of the judge."""
    temperature: float = 0.0
    """Of the judge."""

    def check(self) -> None:
        EndpointConfig.check(self)
        at_least(self, 1, "max_rpm", "max_tpm", "max_tokens")
        at_least(self, 0, "temperature")
        require(self.score_scale != 0, "score_scale", self.score_scale, "must not be 0")
        groups = check_pattern("score_pattern", self.score_pattern).groups
        require(groups == 1, "score_pattern", self.score_pattern, "needs exactly one group, the number")
