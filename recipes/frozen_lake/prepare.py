"""Prepare the recipe: a small model that moves about on frozen lakes, mostly in the wrong direction.

    python recipes/frozen_lake/prepare.py --output-dir outputs/frozen_lake --seed 1

writes OUTPUT/model (a Hugging Face folder). The warm start imitates a teacher who takes a step of a shortest path now
and then and otherwise any step, so that the model can read maps, and loses most games.
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

from verl_like.environments.frozen_lake import ACTIONS, FrozenLake

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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what is prepared. knows: how often the teacher takes a step of a shortest path, in the
    lessons in which maps are learnt, then in those in which it plays badly."""

    seed: int = 1
    knows: tuple[float, float] = (0.95, 0.25)
    steps: tuple[int, int] = (450, 120)
    batch: int = 32
    learning_rate: float = 1e-3
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


def shortest(game: FrozenLake) -> list[int]:
    """The moves that begin a shortest path to the goal."""
    steps = ((0, -1), (1, 0), (0, 1), (-1, 0))
    size = len(game.tiles)
    goal = next((r, row.index("G")) for r, row in enumerate(game.tiles) if "G" in row)
    distance, queue = {goal: 0}, deque([goal])
    while queue:
        here = queue.popleft()
        for down, right in steps:
            near = here[0] + down, here[1] + right
            inside = 0 <= near[0] < size and 0 <= near[1] < size
            if inside and near not in distance and game.tiles[near[0]][near[1]] != "O":
                distance[near] = distance[here] + 1
                queue.append(near)
    ahead = [distance.get((game.place[0] + down, game.place[1] + right), math.inf) for down, right in steps]
    return [move for move, far in enumerate(ahead) if far == min(ahead)]


def play(
    game: FrozenLake, seed: int, split: str, knows: float, rng: random.Random
) -> tuple[list[str], list[list[float]], list[str], bool]:
    """A game of the teacher: what it saw, the probabilities of its moves, what it said, whether it won."""
    seen, moves, said = [game.reset(seed=seed, options={"split": split})[0]], list[list[float]](), list[str]()
    while True:
        best = shortest(game)
        moves.append([(1 - knows) / 4 + knows * (move in best) / len(best) for move in range(4)])
        said.append(rng.choices(ACTIONS, moves[-1])[0])
        picture, _, terminated, truncated, info = game.step(said[-1])
        if terminated or truncated:
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


def warm_start(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """AdamW, 20 steps of warm-up, the last 50 with a falling rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng, vocabulary, game = random.Random(recipe.seed), tokenizer.get_vocab(), lake()
    words = torch.tensor([vocabulary[word] for word in (*ACTIONS, END)])
    total = sum(recipe.steps)
    for step in range(1, total + 1):
        knows = recipe.knows[step > recipe.steps[0]]
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * min(1.0, step / 20, (total - step + 1) / 50)
        games = [play(game, rng.randrange(2**40), "train", knows, rng) for _ in range(recipe.batch)]
        loss = loss_of(model, [encode(*played, vocabulary) for *played, _ in games], words)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"  step {step}/{total}  loss {loss.item():.3f}", flush=True)


def prepare(output_dir: Path, recipe: Recipe) -> None:
    """Write the warm-started model. Reuses a finished folder."""
    chances = {knows: success_of(knows, "val") for knows in (0.0, recipe.knows[-1], 1.0)}
    print("Share of games won on maps that nobody trains on, by how often a shortest path is taken:")
    print("  " + ", ".join(f"{knows:g}: {won:.3f}" for knows, won in chances.items()))
    done = output_dir / "prepared.json"
    if done.exists() and json.loads(done.read_text()) == asdict(recipe):
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
