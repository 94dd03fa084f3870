"""Entry point: `python -m verl_like.trainer.main_ppo data.train_files=... actor_rollout_ref.rollout.n=8`.

Light on purpose: a wrong key is refused, and `--cfg job` answers, before torch is imported; and processes that are
spawned import this file again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from verl_like.ending import orderly_end

if TYPE_CHECKING:
    from verl_like.config import PPOConfig


def train(config: PPOConfig) -> None:
    """Run the checked configuration."""
    from verl_like.trainer.run import run

    run(config)


def quiet_tokenizers() -> None:
    """Switch off the tokenizers' own threads: workers are processes, and threads would only get in their way."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> None:
    """Compose the configuration from the command line and train."""
    quiet_tokenizers()
    with orderly_end():
        from verl_like.trainer.command_line import run_main

        run_main(train)


if __name__ == "__main__":
    main()
