"""Sizes of a mesh are multiplied and divided in one file, and groups of ranks for training come from another."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source import package_sources

ARITHMETIC = "verl_like/config/mesh.py"
GROUPS = "verl_like/parallel/mesh.py"
SIZES = {"ulysses", "ulysses_sequence_parallel_size", "expert_parallel_size", "fsdp_size", "ranks_per_row"}
OF_ROLES = {"tensor", "tensor_parallel_size", "copies"}
OWN_GROUPS = {  # not the mesh's: the ranks of a rollout engine, and a background thread's messages between all ranks
    "verl_like/rollout/orders.py",
    "verl_like/engine/state.py",
}


def hand_made_sizes(tree: ast.Module) -> Iterator[int]:
    """Lines with a product, quotient or remainder of a size of the mesh."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.FloorDiv | ast.Div | ast.Mod):
            for side in (node.left, node.right):
                name = side.attr if isinstance(side, ast.Attribute) else side.id if isinstance(side, ast.Name) else ""
                if name not in SIZES | OF_ROLES:
                    continue
                owner = ast.unparse(side.value) if isinstance(side, ast.Attribute) else ""
                of_role = owner in ("self", "role") or owner.endswith(("fsdp", "fsdp_config"))
                if name in SIZES or (name in OF_ROLES and of_role):
                    yield node.lineno


def test_nobody_multiplies_the_sizes_of_a_mesh_by_hand() -> None:
    core = [source for source in package_sources() if source.package.partition(".")[0] not in ("kit", "plugins")]
    found = [f"{source.name}:{line}" for source in core for line in hand_made_sizes(source.tree)]
    assert [place for place in found if not place.startswith(ARITHMETIC)] == []


def test_the_rule_sees_what_was_there_before() -> None:
    for line in (
        "a = self.ulysses * self.tensor",
        "b = processes // role.tensor",
        "c = world % fsdp_size",
        "d = world // role.ranks_per_row",
        "e = budget * actor.ulysses_sequence_parallel_size",
        "f = weights / fsdp.tensor_parallel_size",
    ):
        assert {*hand_made_sizes(ast.parse(line))} == {1}, line
    assert [*hand_made_sizes(ast.parse("a = torch.tensor * 2; b = plan.tensor_parallel_size * 3"))] == []


def test_groups_of_ranks_come_from_the_mesh() -> None:
    makers = {"new_group", "init_device_mesh"}
    found = {
        source.name
        for source in package_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in makers
    }
    assert found == {GROUPS, *OWN_GROUPS}
