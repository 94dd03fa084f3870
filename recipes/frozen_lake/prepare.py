"""Prepare the recipe: a small model that moves about on frozen lakes, mostly in the wrong direction.

    python recipes/frozen_lake/prepare.py --output-dir outputs/frozen_lake --seed 1

writes OUTPUT/model (a Hugging Face folder). The warm start is two supervised runs (`verl-like sft`, in
OUTPUT/warm_start): on moves and games of a teacher who knows the way, then on games of one who takes a step of a
shortest path now and then and otherwise any step, so that the model can read maps, and loses most games.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from verl_like.plugins.games.frozen_lake import ACTIONS, FrozenLake

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from model import build_model, save_checkpoint
from warm_start import supervised

Conversation = list[dict[str, str]]
PAD, UNKNOWN, START, END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
PLACES = [f"{thing}{row}{column}" for thing in "PGO" for row in range(4) for column in range(4)]
PIECES = (START, END, "user\n", "assistant\n", *ACTIONS, *PLACES, "\n", " ")
PATTERN = "|".join(re.escape(piece) for piece in sorted(PIECES, key=len, reverse=True))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_STEPS, HOLDOUT = 8, 0.1
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # row and column, in the order of ACTIONS


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """So many games, the first moves of each. knows: how often the teacher takes a step of a shortest path; else it
    takes any. plain: share that is kept of maps whose right moves are those towards the goal."""

    games: int
    knows: float
    moves: int = MAX_STEPS
    plain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what is prepared. reading: a game repeats its map in every turn, so that many maps with
    one move each teach more in the same time; seven maps in ten are plain, and teach nothing about holes. losing
    changes the last MLP alone, by LoRA: what the others know of maps stays, for training to bring it out again."""

    seed: int = 1
    reading: Lessons = Lessons(games=96_000, knows=0.95, moves=1, plain=0.1)
    playing: Lessons = Lessons(games=4_000, knows=0.95)
    losing: Lessons = Lessons(games=23_040, knows=0.25)  # many, each once: their luck is not to be learnt
    steps: tuple[int, int] = (1600, 60)  # of reading and playing; of losing
    batch_sizes: tuple[int, int] = (192, 384)
    learning_rates: tuple[float, float] = (2e-3, 2e-3)
    hidden_size: int = 64
    num_layers: int = 3


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of PIECES."""
    vocabulary = {token: number for number, token in enumerate([PAD, UNKNOWN, *PIECES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)
    fast.add_special_tokens({"additional_special_tokens": [START]})
    # Added tokens are found first: transformers gives every tokenizer of a Qwen2 model that family's word splitting.
    fast.add_tokens([AddedToken(piece, normalized=False) for piece in PIECES[2:]])
    fast.chat_template = TEMPLATE
    return fast


def lake() -> FrozenLake:
    return FrozenLake(size=4, max_steps=MAX_STEPS, action_pattern="^(.*)$", holdout=HOLDOUT, view="places")


def goal_of(game: FrozenLake) -> tuple[int, int]:
    return next((row, tiles.index("G")) for row, tiles in enumerate(game.tiles) if "G" in tiles)


def shortest(game: FrozenLake) -> list[int]:
    """The moves that begin a shortest path to the goal."""
    size, goal = len(game.tiles), goal_of(game)
    distance, queue = {goal: 0}, deque([goal])
    while queue:
        here = queue.popleft()
        for down, right in STEPS:
            near = here[0] + down, here[1] + right
            inside = 0 <= near[0] < size and 0 <= near[1] < size
            if inside and near not in distance and game.tiles[near[0]][near[1]] != "O":
                distance[near] = distance[here] + 1
                queue.append(near)
    ahead = [distance.get((game.place[0] + down, game.place[1] + right), math.inf) for down, right in STEPS]
    return [move for move, far in enumerate(ahead) if far == min(ahead)]


def is_plain(game: FrozenLake) -> bool:
    """Whether the right moves are those towards the goal, as if there were no holes."""
    (row, column), (goal_row, goal_column) = game.place, goal_of(game)
    nearer = [down * (goal_row - row) + right * (goal_column - column) > 0 for down, right in STEPS]
    return shortest(game) == [move for move, is_nearer in enumerate(nearer) if is_nearer]


def map_of(game: FrozenLake, plain: float, rng: random.Random) -> int:
    """The seed of a map to train on."""
    while True:
        seed = rng.randrange(2**40)
        if plain == 1.0:
            return seed
        game.reset(seed=seed, options={"split": "train"})
        if not is_plain(game) or rng.random() < plain:
            return seed


def play(
    game: FrozenLake, seed: int, split: str, knows: float, rng: random.Random, most: int = MAX_STEPS
) -> tuple[Conversation, bool]:
    """A game of the teacher, or its first moves, as a conversation; whether it won."""
    picture, said = game.reset(seed=seed, options={"split": split})[0], Conversation()
    while True:
        word = ACTIONS[rng.choice(shortest(game) if rng.random() < knows else range(4))]
        said += [{"role": "user", "content": picture}, {"role": "assistant", "content": word}]
        picture, _, terminated, truncated, info = game.step(word)
        if terminated or truncated or len(said) == 2 * most:
            return said, info["success"]


def success_of(knows: float, split: str, games: int = 2000) -> float:
    """How often such a player wins."""
    game, rng = lake(), random.Random(0)
    return sum(play(game, seed, split, knows, rng)[-1] for seed in range(games)) / games


def shown(lessons: Lessons, rng: random.Random) -> list[dict[str, Conversation]]:
    """Rows of what the teacher plays."""
    game = lake()
    seeds = [map_of(game, lessons.plain, rng) for _ in range(lessons.games)]
    return [{"messages": play(game, seed, "train", lessons.knows, rng, lessons.moves)[0]} for seed in seeds]


def warm_start(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Path:
    """Learn to read maps and to play, then to lose. The model's folder."""
    rng, known = random.Random(recipe.seed), folder / "new_model"
    save_checkpoint(known, model, tokenizer)
    last = {
        "actor_rollout_ref__model__lora_rank": recipe.hidden_size // 2,
        "actor_rollout_ref__model__target_modules": rf".*\.{recipe.num_layers - 1}\.mlp\..*",
    }
    lessons = {"playing": ([recipe.reading, recipe.playing], {}), "losing": ([recipe.losing], last)}
    for number, (name, (kinds, more)) in enumerate(lessons.items()):
        known = supervised(
            known,
            [row for kind in kinds for row in shown(kind, rng)],
            folder / name,
            steps=recipe.steps[number],
            batch_size=recipe.batch_sizes[number],
            seed=recipe.seed,
            optim__lr=recipe.learning_rates[number],
            sft__max_length=256,
            **more,
        )
    return known


def prepare(output_dir: Path, recipe: Recipe) -> None:
    """Write the warm-started model. Reuses a finished folder."""
    chances = {knows: success_of(knows, "val") for knows in (0.0, recipe.losing.knows, 1.0)}
    print("Share of games won on maps that nobody trains on, by how often a shortest path is taken:")
    print("  " + ", ".join(f"{knows:g}: {won:.3f}" for knows, won in chances.items()))
    done = output_dir / "prepared.json"
    if done.exists() and json.loads(done.read_text()) == json.loads(json.dumps(asdict(recipe))):
        print(f"Using the model prepared earlier in {output_dir} (delete the folder to start over).")
        return
    done.unlink(missing_ok=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden_size=recipe.hidden_size, num_layers=recipe.num_layers, seed=recipe.seed)
    print(f"Warm start of a new {model.num_parameters() / 1e6:.2f}M-parameter Qwen2 model, a few minutes:", flush=True)
    started = time.time()
    for folder in ("warm_start", "model"):
        shutil.rmtree(output_dir / folder, ignore_errors=True)
    shutil.copytree(warm_start(output_dir / "warm_start", model, tokenizer, recipe), output_dir / "model")
    done.write_text(json.dumps(asdict(recipe)))
    print(f"Warm start took {time.time() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/frozen_lake"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    prepare(arguments.output_dir, Recipe(seed=arguments.seed))


if __name__ == "__main__":
    main()
