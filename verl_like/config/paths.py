"""Places of a run's models, tokenizers and data, with the keys that name them."""

from collections.abc import Mapping

from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import needs_critic

Files = str | list[str] | Mapping[str, str | list[str]]
DATA_FILES = ("data.train_files", "data.val_files")


def model_paths(config: PPOConfig) -> dict[str, str]:
    """Key -> path of every model and tokenizer that this run loads; a path that follows another key counts once."""
    reward = config.reward_model
    named = {
        "actor_rollout_ref.model.path": config.actor_rollout_ref.model.path,
        "data.tokenizer": config.data.tokenizer,
        "critic.model.path": config.critic.model.path if needs_critic(config.critic, config.algorithm) else None,
        "reward_model.model.path": reward.model.path if reward.enable else None,
        "reward_model.model.input_tokenizer": reward.model.input_tokenizer if reward.enable else None,
    }
    teachers = config.distillation.teachers().values()
    named |= {f"{teacher.place}.model_path": teacher.config.model_path for teacher in teachers}
    keys_by_path: dict[str, str] = {}
    for key, path in named.items():
        if path is not None:
            keys_by_path.setdefault(path, key)
    return {key: path for path, key in keys_by_path.items()}


def data_paths(config: PPOConfig) -> list[tuple[str, str]]:
    """(key, path) of every data file that this run reads itself: a class of the user's may take other names."""
    data = config.data
    if config.env.train.tags or data.custom_cls.path is not None:
        return []
    train = [] if config.preference.rollouts else data.train_files
    return [
        (key, path)
        for key, files in zip(DATA_FILES, (train, data.val_files), strict=True)
        for _, path in named_files(files)
    ]


def named_files(files: Files, name: str = "") -> list[tuple[str, str]]:
    """(name of the set, path) of each file; the name is empty where the files are not a dictionary."""
    if isinstance(files, Mapping):
        return [each for key, paths in files.items() for each in named_files(paths, str(key))]
    return [(name, path) for path in ([files] if isinstance(files, str) else files)]
