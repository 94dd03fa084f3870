"""The games that come with the package: rules by hand, levels that can be won, and what only validation plays."""

from __future__ import annotations

import io
import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from verl_like.plugins.games.bandit import Bandit
from verl_like.plugins.games.countdown import Countdown
from verl_like.plugins.games.drawing import draw, frame_of, gif
from verl_like.plugins.games.frozen_lake import FrozenLake
from verl_like.plugins.games.games import KINDS, TAGS, make
from verl_like.plugins.games.sokoban import ACTIONS, Sokoban, read_levels
from verl_like.plugins.math_grading.countdown import is_solution

SHARED = Path(os.environ.get("VERL_LIKE_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data"))
LEVEL = "; 0\n######\n#@$. #\n#    #\n######\n"


def says(word: str) -> str:
    return f"I think <answer> {word.lower()} </answer>"


def lake(*tiles: str, start: tuple[int, int] = (0, 0), **options: Any) -> FrozenLake:
    game = FrozenLake(size=len(tiles), **options)
    game.reset(seed=0)
    game.tiles, game.place = list(tiles), start
    return game


def test_a_lake_is_crossed() -> None:
    game = lake("__", "OG")
    assert game.step(says("Up")) == ("P_\nOG", 0.0, False, False, {"action_is_valid": True, "success": False})
    assert game.step(says("Right"))[0] == "_P\nOG"
    assert game.step(says("Down")) == ("__\nO√", 1.0, True, False, {"action_is_valid": True, "success": True})


def test_a_hole_ends_the_game_and_nonsense_moves_nothing() -> None:
    game = lake("__", "OG", max_steps=2)
    picture, reward, over, cut, info = game.step("Right")  # without the tags that the pattern asks for
    assert (picture, reward, over, cut, info["action_is_valid"]) == ("P_\nOG", 0.0, False, False, False)
    assert game.step(says("Down")) == ("__\nXG", 0.0, True, True, {"action_is_valid": True, "success": False})


def test_slippery_ice_takes_a_move_aside_two_times_in_three() -> None:
    aside = 0
    for seed in range(300):
        game = lake("___", "___", "__G", start=(1, 1), is_slippery=True)
        game._rng.seed(seed)
        game.step(says("Left"))
        assert game.place in ((1, 0), (0, 1), (2, 1))
        aside += game.place != (1, 0)
    assert 160 < aside < 240


def test_places_say_what_the_picture_shows() -> None:
    game = FrozenLake(view="places")
    text, _ = game.reset(seed=3)
    things = {word[1:]: word[0] for word in text.split()}
    for row, tiles in enumerate(game._picture().split("\n")):
        for column, tile in enumerate(tiles):
            assert things.get(f"{row}{column}", "_") == tile


def test_a_seed_is_a_map_and_every_map_can_be_crossed() -> None:
    pictures = {FrozenLake(p=0.5).reset(seed=seed)[0] for seed in range(50)}
    assert len(pictures) > 45 and FrozenLake(p=0.5).reset(seed=7) == FrozenLake(p=0.5).reset(seed=7)
    for picture in pictures:
        assert picture.count("P") == picture.count("G") == 1


@pytest.mark.parametrize("game", [FrozenLake(holdout=0.2), Sokoban(holdout=0.2)])
def test_what_is_held_out_is_played_in_validation_alone(game: Any) -> None:
    train = {game.reset(seed=seed)[0] for seed in range(400)}
    val = {game.reset(seed=seed, options={"split": "val"})[0] for seed in range(400)}
    assert len(train) > 100 and len(val) > 50 and not train & val


def test_sokoban_by_hand(tmp_path: Path) -> None:
    (tmp_path / "levels.txt").write_text(LEVEL)
    game = Sokoban(levels=str(tmp_path / "levels.txt"))
    assert game.reset(seed=0)[0] == "######\n#PXO_#\n#____#\n######"
    picture, reward, over, cut, info = game.step(says("Right"))
    assert picture == "######\n#_P√_#\n#____#\n######" and reward == pytest.approx(10.9)
    assert (over, cut, info["success"]) == (True, False, True)
    game.reset(seed=0)
    assert game.step(says("left"))[:2] == ("######\n#PXO_#\n#____#\n######", -0.1)  # a wall
    assert game.step("?")[4] == {"action_is_valid": False, "success": False}
    game.boxes, game.player = {(1, 3)}, (1, 2)
    assert game.step(says("right"))[:2] == ("######\n#__SX#\n#____#\n######", pytest.approx(-1.1))
    assert game.step(says("right"))[1] == -0.1 and game.boxes == {(1, 4)}, "a box does not go through a wall"


def solves(game: Sokoban, most: int = 60_000) -> bool:
    """Breadth first, on the game's own rules."""
    start = (game.player, frozenset(game.boxes))
    seen, queue = {start}, deque([start])
    while queue and len(seen) < most:
        here = queue.popleft()
        for word in ACTIONS:
            game.player, game.boxes = here[0], set(here[1])
            if game.step(says(word))[2]:
                return True
            after = (game.player, frozenset(game.boxes))
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return False


def test_generated_levels_can_be_won() -> None:
    for boxes, room in ((1, (6, 6)), (2, (7, 8))):
        game = Sokoban(dim_room=room, num_boxes=boxes)
        for seed in range(8):
            picture, _ = game.reset(seed=seed)
            assert picture.count("X") == boxes and len(picture.split("\n")) == room[0]
            assert solves(game), picture


def test_levels_of_boxoban() -> None:
    path = SHARED / "boxoban" / "unfiltered_valid_000.txt"
    if not path.exists():
        pytest.skip(f"no {path}")
    levels = read_levels(str(path))
    assert len(levels) == 1000 and {len(level) for level in levels} == {10 * 11 - 1}
    game = Sokoban(levels=str(path))
    picture, _ = game.reset(seed=3)
    assert picture.count("X") + picture.count("√") == 4 and picture.count("P") + picture.count("S") == 1


def test_a_bad_level_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "levels.txt").write_text("; 0\n####\n#ab#\n")
    with pytest.raises(ValueError, match="'#ab#' is no row of a level"):
        Sokoban(levels=str(tmp_path / "levels.txt"))


def test_a_bandit_pays_what_it_says() -> None:
    game, paid = Bandit(), list[float]()
    for seed in range(400):
        assert sorted(game.reset(seed=seed)[0].removeprefix("Arms: ").split(" and ")) == ["Dragon", "Phoenix"]
        paid.append(game.step(says("dragon"))[1])
    assert set(paid) == {0.0, 1.0} and 0.15 < sum(paid) / 400 < 0.35
    assert game.step(says("Phoenix"))[1] == 0.1 and game.step("Phoenix")[4]["action_is_valid"] is False


def test_countdown_has_a_solution_and_counts_it() -> None:
    game = Countdown(num_numbers=3)
    for seed in range(20):
        game.reset(seed=seed)
        a, b, c = game.numbers
        found = [
            text
            for first in "+-*"
            for second in "+-*"
            if is_solution(text := f"({a} {first} {b}) {second} {c}", game.numbers, game.target)
        ]
        assert found and game.step(f"<answer>{found[0]}</answer>")[1:3] == (1.0, True)
    assert game.step("<answer>1</answer>")[1] == 0.1 and game.step("1")[1] == 0.0


@pytest.mark.parametrize("name", [*KINDS, *TAGS])
def test_every_name_is_a_game(name: str) -> None:
    game = make(name, {}, "env.custom.x.type")
    picture, info = game.reset(seed=1)
    assert isinstance(picture, str) and info == {} and game.instruction
    assert len(game.step("nonsense")) == 5


def test_a_wrong_name_or_argument_is_told() -> None:
    with pytest.raises(ValueError, match=r"env.custom.x.type='sokobann': did you mean sokoban\?"):
        make("sokobann", {}, "env.custom.x.type")
    with pytest.raises(ValueError, match=r"frozen_lake with config=.*slippery"):
        make("frozen_lake", {"slippery": True}, "env.custom.x.type")
    with pytest.raises(ValueError, match="size=1"):
        make("frozen_lake", {"size": 1}, "env.custom.x.type")
    with pytest.raises(ValueError, match="two kinds of tiles would look the same"):
        make("sokoban", {"grid_lookup": {0: "X"}}, "env.custom.x.type")


def test_a_game_becomes_a_gif() -> None:
    game = FrozenLake()
    game.reset(seed=1)
    first = frame_of(game)
    assert first is not None and first.size == (128, 128)
    game.place = next((r, row.index("G")) for r, row in enumerate(game.tiles) if "G" in row)
    second = frame_of(game)
    assert second is not None
    made = Image.open(io.BytesIO(gif([first, second])))
    assert made.format == "GIF" and made.n_frames == 2
    tiles = [draw([[name]]).getpixel((16, 16)) for name in ("wall", "ice", "hole", "goal", "player", "box")]
    assert len(set(tiles)) == 6, "each thing has a colour of its own"
    for thing in ("box", "player"):
        assert draw([[thing]]).tobytes() != draw([[f"{thing} on target"]]).tobytes()
