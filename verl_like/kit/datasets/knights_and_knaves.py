"""Knights and knaves, generated: who tells the truth? Each puzzle has exactly one solution, which a search proves.

    python -m verl_like.kit.datasets.knights_and_knaves --num_people 2 3 4 --local_save_dir ~/data/kk

Every inhabitant is a knight, who tells the truth, or a knave, who lies, and says one thing about the others (Smullyan's
puzzles; as a training task: Logic-RL, arXiv 2502.14768). All assignments of roles are tried: a puzzle is kept if one
of them alone makes every statement true where a knight and false where a knave says it. No puzzle is in both splits.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from verl_like.kit.datasets import schema

DATA_SOURCE = "knights_and_knaves"
_NAMES = (
    "Abigail Benjamin Charlotte Daniel Emma Felix Grace Henry Isla Jack Karen Luke Mia "
    "Noah Olivia Penelope Quentin Riley Samuel Theresa Ulrich Victoria William Xenia Yara Zoey"
)
_QUESTION = (
    "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and knaves always "
    "lie. You meet {count} inhabitants: {names}. {statements} So who is a knight and who is a knave?\n\n"
    "Reason between <think> and </think>, and give the role of each of them between <answer> and </answer>, for "
    "example: <answer> {example} </answer>."
)

Roles = tuple[bool, ...]  # of each person: true for a knight


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement: `kind` of one person's role, or of two such parts."""

    kind: str  # knight, knave, and, or, if, iff
    person: int = -1
    parts: tuple[Claim, ...] = ()

    def holds(self, roles: Roles) -> bool:
        """Evaluate the claim, given the roles of all people."""
        if self.kind in ("knight", "knave"):
            return roles[self.person] == (self.kind == "knight")
        first, second = (part.holds(roles) for part in self.parts)
        return {"and": first and second, "or": first or second, "if": not first or second, "iff": first == second}[
            self.kind
        ]

    def text(self, names: list[str]) -> str:
        """Write the claim in words."""
        if self.kind in ("knight", "knave"):
            return f"{names[self.person]} is a {self.kind}"
        first, second = (part.text(names) for part in self.parts)
        return {
            "and": f"{first} and {second}",
            "or": f"{first} or {second}",
            "if": f"if {first} then {second}",
            "iff": f"{first} if and only if {second}",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class Puzzle:
    """People, what each of them says, and the one assignment of roles that fits."""

    names: tuple[str, ...]
    claims: tuple[Claim, ...]
    solution: Roles


def solutions(claims: tuple[Claim, ...]) -> list[Roles]:
    """Find all assignments in which exactly the knights' statements are true."""
    return [
        roles
        for roles in itertools.product((True, False), repeat=len(claims))
        if all(claim.holds(roles) == role for claim, role in zip(claims, roles, strict=True))
    ]


def random_puzzle(num_people: int, generator: random.Random) -> Puzzle:
    """A puzzle with exactly one solution."""
    while True:
        claims = tuple(_random_claim(speaker, num_people, generator) for speaker in range(num_people))
        found = solutions(claims)
        if len(found) == 1:
            return Puzzle(tuple(generator.sample(_NAMES.split(), num_people)), claims, found[0])


def _random_claim(speaker: int, num_people: int, generator: random.Random) -> Claim:
    """About others alone, or about the speaker and another: nobody just calls himself a knight or a knave."""
    others = [person for person in range(num_people) if person != speaker]
    kind = generator.choice(("one", "and", "or", "if", "iff"))
    if kind == "one":
        return Claim(generator.choice(("knight", "knave")), generator.choice(others))
    first = generator.choice(others)
    second = generator.choice([person for person in range(num_people) if person != first])
    parts = tuple(Claim(generator.choice(("knight", "knave")), person) for person in (first, second))
    return Claim(kind, parts=parts)


def generate(count: int, num_people: list[int], seed: int) -> list[Puzzle]:
    """Generate `count` puzzles whose statements all differ, of `num_people` in turn.

    Raises ValueError if so many are not found.
    """
    generator, seen, puzzles = random.Random(seed), set(), []
    for attempt in range(100 * count):
        if len(puzzles) == count:
            break
        puzzle = random_puzzle(num_people[attempt % len(num_people)], generator)
        if puzzle.claims not in seen:
            seen.add(puzzle.claims)
            puzzles.append(puzzle)
    if len(puzzles) < count:
        raise ValueError(f"only {len(puzzles)} of {count} different puzzles found; raise --num_people")
    return puzzles


def roles_text(names: tuple[str, ...], roles: Roles) -> str:
    """Write an answer: `Zoey is a knave, Noah is a knight`."""
    return ", ".join(f"{name} is a {'knight' if role else 'knave'}" for name, role in zip(names, roles, strict=True))


def to_row(puzzle: Puzzle, index: int, split: str) -> dict[str, Any]:
    """One puzzle as a row of the schema."""
    names = list(puzzle.names)
    said = " ".join(
        f'{name} says: "{claim.text(names)[0].upper()}{claim.text(names)[1:]}."'
        for name, claim in zip(names, puzzle.claims, strict=True)
    )
    question = _QUESTION.format(
        count=len(names),
        names=f"{', '.join(names[:-1])} and {names[-1]}",
        statements=said,
        example="Ann is a knight, Bob is a knave",
    )
    return schema.make_row(
        data_source=DATA_SOURCE,
        prompt=question,
        ground_truth=roles_text(puzzle.names, puzzle.solution),
        ability="logic",
        split=split,
        index=index,
        num_people=len(names),
    )


def main(argv: list[str] | None = None) -> None:
    """Write train.parquet and test.parquet."""
    arguments = schema.parser("Generate knights-and-knaves puzzles.")
    arguments.add_argument("--num_train", type=int, default=4500, help="training rows")
    arguments.add_argument("--num_test", type=int, default=500, help="test rows")
    arguments.add_argument("--num_people", type=int, nargs="+", default=[3, 4, 5], help="people of a puzzle, 2 to 8")
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args(argv)
    if not all(2 <= people <= 8 for people in options.num_people):
        raise ValueError(f"--num_people {options.num_people}: must lie between 2 and 8")
    puzzles = generate(options.num_train + options.num_test, options.num_people, options.seed)
    parts = {"train": puzzles[options.num_test :], "test": puzzles[: options.num_test]}
    schema.write_splits(parts, to_row, options.local_save_dir, title=DATA_SOURCE)


if __name__ == "__main__":
    schema.run(main)
