"""Prepare the recipe: a small model that moves about on frozen lakes, mostly in the wrong direction.

    python recipes/frozen_lake/prepare.py --output-dir outputs/frozen_lake --seed 1

writes OUTPUT/model (a Hugging Face folder). The warm start imitates a teacher who knows the way, then one who takes a
step of a shortest path now and then and otherwise any step, so that the model can read maps, and loses most games.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from verl_like.plugins.games.frozen_lake import ACTIONS, FrozenLake

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from model import build_model, save_checkpoint

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
    """So many optimizer steps of so many games, the first moves of each. knows: how often the teacher takes a step of a
    shortest path; else it takes any. plain: share that is kept of maps whose right moves are those towards the goal."""

    steps: int
    games: int
    knows: float
    moves: int = MAX_STEPS
    plain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what is prepared. reading: a game repeats its map in every turn, so that many maps with
    one move each teach more in the same time; seven maps in ten are plain, and teach nothing about holes. losing
    changes the last MLP and norm alone: what the others know of maps stays, for training to bring it out again."""

    seed: int = 1
    reading: Lessons = Lessons(steps=1500, games=192, knows=0.95, moves=1, plain=0.1)
    playing: Lessons = Lessons(steps=250, games=32, knows=0.95)
    losing: Lessons = Lessons(steps=60, games=32, knows=0.25)
    learning_rates: tuple[float, float] = (2e-3, 1e-3)  # the second: of losing
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
) -> tuple[list[str], list[list[float]], list[str], bool]:
    """A game of the teacher, or its first moves: what it saw, the probabilities of its moves, what it said, whether it
    won."""
    seen, moves, said = [game.reset(seed=seed, options={"split": split})[0]], list[list[float]](), list[str]()
    while True:
        best = shortest(game)
        moves.append([(1 - knows) / 4 + knows * (move in best) / len(best) for move in range(4)])
        said.append(rng.choices(ACTIONS, moves[-1])[0])
        picture, _, terminated, truncated, info = game.step(said[-1])
        if terminated or truncated or len(said) == most:
            return seen, moves, said, info["success"]
        seen.append(picture)


def success_of(knows: float, split: str, games: int = 2000) -> float:
    """How often such a player wins."""
    game, rng = lake(), random.Random(0)
    return sum(play(game, seed, split, knows, rng)[-1] for seed in range(games)) / games


def encode(
    seen: list[str], moves: list[list[float]], said: list[str], vocabulary: dict[str, int]
) -> tuple[list[int], list[tuple[int, list[float]]]]:
    """Token ids of a game, and what should follow at some places of them: probabilities of the moves, or of the end."""
    ids, taught = list[int](), list[tuple[int, list[float]]]()
    for picture, chances, word in zip(seen, moves, said, strict=True):
        head = f"{START}user\n{picture}{END}\n{START}assistant\n"
        ids += [vocabulary[piece] for piece in re.findall(PATTERN, head)]
        taught += [(len(ids) - 1, [*chances, 0.0]), (len(ids), [0.0] * 4 + [1.0])]
        ids += [vocabulary[piece] for piece in (word, END, "\n")]
    return ids, taught


def loss_of(
    model: Qwen2ForCausalLM, games: list[tuple[list[int], list[tuple[int, list[float]]]]], words: Tensor
) -> Tensor:
    """Cross entropy with the teacher's probabilities. words: ids of the moves and of the end."""
    width = max(len(ids) for ids, _ in games)
    ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in games])
    places = [(row, place) for row, (_, taught) in enumerate(games) for place, _ in taught]
    wanted_NW = torch.tensor([chances for _, taught in games for _, chances in taught])
    rows_N, places_N = torch.tensor(places).T
    log_probs_NV = model(input_ids=ids_BT).logits[rows_N, places_N].log_softmax(-1)
    return -(wanted_NW * log_probs_NV[:, words]).sum(-1).mean()


def study(
    model: Qwen2ForCausalLM,
    parameters: list[Tensor],
    lessons: list[Lessons],
    learning_rate: float,
    rng: random.Random,
    vocabulary: dict[str, int],
) -> None:
    """Imitate the teacher. AdamW, 20 steps of warm-up, after a third a rate that falls to nothing."""
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    words, game = torch.tensor([vocabulary[word] for word in (*ACTIONS, END)]), lake()
    steps = [kind for kind in lessons for _ in range(kind.steps)]
    for step, kind in enumerate(steps, start=1):
        left = (len(steps) - step + 1) / len(steps)
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, step / 20, 1.5 * left)
        seeds = [map_of(game, kind.plain, rng) for _ in range(kind.games)]
        games = [play(game, seed, "train", kind.knows, rng, kind.moves) for seed in seeds]
        loss = loss_of(model, [encode(*played, vocabulary) for *played, _ in games], words)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        model.zero_grad()
        if step % 100 == 0 or step == len(steps):
            print(f"  step {step}/{len(steps)}  loss {loss.item():.3f}", flush=True)


def warm_start(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Learn to read maps and to play, then to lose."""
    rng, vocabulary = random.Random(recipe.seed), tokenizer.get_vocab()
    well, badly = recipe.learning_rates
    study(model, [*model.parameters()], [recipe.reading, recipe.playing], well, rng, vocabulary)
    last = [*model.model.layers[-1].mlp.parameters(), *model.model.norm.parameters()]
    study(model, last, [recipe.losing], badly, rng, vocabulary)


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
    warm_start(model, tokenizer, recipe)
    save_checkpoint(output_dir / "model", model, tokenizer)
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
