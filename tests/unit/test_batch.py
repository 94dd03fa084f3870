"""The structs of verl_like.batch: whole-row operations, padded forms, pickling, metric merging."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.batch import (
    Episodes,
    Evaluated,
    Metric,
    PromptRow,
    RewardFailure,
    Rollouts,
    Scores,
    Sequences,
    TensorStruct,
    merge_metrics,
    pad_rows,
    whole_episodes,
)


def rollouts(lengths: list[tuple[int, int]]) -> Rollouts:
    """One row per (prompt length, response length), every entry a number that says where it belongs."""
    prompts = [100 * i + j + 1 for i, (p, _) in enumerate(lengths) for j in range(p)]
    responses = [1000 * i + j + 1 for i, (_, r) in enumerate(lengths) for j in range(r)]
    ids = torch.tensor(responses, dtype=torch.int32)
    return Rollouts(
        prompt_ids_T=torch.tensor(prompts, dtype=torch.int32),
        prompt_length_B=torch.tensor([p for p, _ in lengths]),
        response_ids_T=ids,
        response_length_B=torch.tensor([r for _, r in lengths]),
        response_mask_T=ids % 3 > 0,
        group_B=torch.arange(len(lengths)) // 2,
        rollout_log_probs_T=-ids.float() / 7,
        weight_version_T=torch.full_like(ids, 3),
        finish_reasons=[f"reason {i}" for i in range(len(lengths))],
        rows=[PromptRow(index=i, data_source="toy", messages=[]) for i in range(len(lengths))],
    )


LENGTHS = [(2, 3), (4, 1), (1, 5), (3, 2)]


def assert_same(left: TensorStruct, right: TensorStruct) -> None:
    assert type(left) is type(right)
    assert left.columns().keys() == right.columns().keys()
    for name, value in left.columns().items():
        other = getattr(right, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(value, other), name
        else:
            assert value == other, name


def test_select_moves_whole_rows() -> None:
    batch = rollouts(LENGTHS)
    chosen = batch.select([2, 0, 2])
    assert chosen.finish_reasons == ["reason 2", "reason 0", "reason 2"]
    assert chosen.group_B.tolist() == [1, 0, 1]
    chosen.check()
    for name in ("response_ids", "response_mask", "rollout_log_probs", "weight_version"):
        before, after = (rows.columns()[f"{name}_T"].split(rows.response_length_B.tolist()) for rows in (batch, chosen))  # type: ignore[union-attr]
        for place, row in enumerate([2, 0, 2]):
            assert torch.equal(after[place], before[row]), name
    assert chosen.prompt_lists() == [[201], [1, 2], [201]]
    assert batch.select(range(4)) is batch  # nothing is copied


def test_padded_forms_are_read_and_taken() -> None:
    batch = rollouts(LENGTHS)
    assert batch.response_ids_BR.tolist()[:2] == [[1, 2, 3, 0, 0], [1001, 0, 0, 0, 0]]
    assert batch.prompt_ids_BP.tolist() == [[0, 0, 1, 2], [101, 102, 103, 104], [0, 0, 0, 201], [0, 301, 302, 303]]
    assert batch.step_BR is None
    names = {f.name[:-2] for f in dataclasses.fields(Sequences) if f.name.endswith("_T")} - {"routes"}
    padded = {f"{n}_BP" if n == "prompt_ids" else f"{n}_BR" for n in names}
    again = Sequences(
        prompt_length_B=batch.prompt_length_B,
        response_length_B=batch.response_length_B,
        **{name: getattr(batch, name) for name in padded},
    )
    for name in names:
        assert torch.equal(getattr(again, f"{name}_T"), getattr(batch, f"{name}_T"))
    wider = torch.nn.functional.pad(batch.response_ids_BR, (0, 3), value=77)  # what padding holds is nobody's
    assert torch.equal(batch.replace(response_ids_BR=wider).response_ids_T, batch.response_ids_T)
    assert torch.equal(dataclasses.replace(batch, response_ids_BR=wider).response_ids_T, batch.response_ids_T)
    assert torch.equal(batch.flat(wider), batch.response_ids_T)
    for wrong in ("response_ids_BP", "prompt_ids_BR", "no_such_BR", "group_BR"):
        with pytest.raises(AttributeError, match=wrong):
            getattr(batch, wrong)
    with pytest.raises(TypeError, match="no_such_BR"):
        batch.replace(no_such_BR=wider)


def test_padding_of_turns_says_that_there_is_none() -> None:
    batch = rollouts(LENGTHS)
    step = torch.zeros_like(batch.response_ids_T)
    assert batch.replace(step_T=step).step_BR[1].tolist() == [0, -1, -1, -1, -1]


def test_forms_are_kept_where_that_is_asked_for() -> None:
    batch = rollouts(LENGTHS)
    micro = batch.with_forms()
    assert micro.response_ids_BR is micro.response_ids_BR and batch.response_ids_BR is not batch.response_ids_BR
    assert micro.padded(micro.response_ids_T, fill=7)[1].tolist() == [1001, 7, 7, 7, 7]
    assert micro.replace(group_B=batch.group_B).response_ids_BR is not micro.response_ids_BR
    assert_same(micro, batch)


def test_select_by_mask_and_by_nothing() -> None:
    batch = rollouts(LENGTHS)
    assert_same(batch.select(torch.tensor([True, False, False, True])), batch.select([0, 3]))
    assert len(batch.select([])) == 0
    assert len(batch.select(torch.zeros(4, dtype=torch.bool)).rows) == 0


def test_positions_from_the_end_and_few_rows_hold_no_whole_batch() -> None:
    batch = rollouts(LENGTHS)
    assert_same(batch.select([-1, 0]), batch.select([3, 0]))
    few = batch.select([2])
    assert few.response_ids_T.untyped_storage().nbytes() == 4 * len(few.response_ids_T)


def test_padded_columns_need_lengths_that_they_have_room_for() -> None:
    batch = rollouts(LENGTHS)
    with pytest.raises(TypeError, match="response_ids_BR needs response_length_B"):
        Sequences(
            prompt_ids_T=batch.prompt_ids_T,
            prompt_length_B=batch.prompt_length_B,
            response_ids_BR=batch.response_ids_BR,
            response_mask_T=batch.response_mask_T,
        )
    with pytest.raises(ValueError, match="has 4 places in a row, but the longest row has 5"):
        batch.replace(response_ids_BR=batch.response_ids_BR[:, :4])
    with pytest.raises(ValueError, match="response_length_B is exchanged, but response_ids_T is not"):
        batch.replace(response_length_B=batch.response_length_B.flip(0))


def test_split_and_concat_are_inverse() -> None:
    batch = rollouts(LENGTHS)
    parts = batch.split([1, 0, 3])
    assert [len(part) for part in parts] == [1, 0, 3]
    assert_same(Rollouts.concat(parts), batch)
    with pytest.raises(ValueError, match="add up to 3, but there are 4 rows"):
        batch.split([1, 2])


def test_concat_refuses_parts_that_do_not_fit() -> None:
    batch = rollouts(LENGTHS)
    with pytest.raises(ValueError, match="rollout_log_probs_T is present in some parts and missing in others"):
        Rollouts.concat([batch, batch.replace(rollout_log_probs_T=None)])
    with pytest.raises(ValueError, match="zero Rollouts"):
        Rollouts.concat([])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6),
    data=st.data(),
)
def test_pickle_round_trip(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    """Also of any selection, of rows without a token."""
    batch = rollouts(lengths)
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    for struct in (batch, batch.select(index), batch.with_forms()):
        assert_same(pickle.loads(pickle.dumps(struct)), struct)


def test_pickle_keeps_types_and_none() -> None:
    said = Evaluated(response_length_B=torch.tensor([1, 2]), values_T=torch.tensor([1.0, 2.0, 3.0]))
    copy = pickle.loads(pickle.dumps(said))
    assert copy.old_log_probs_T is None
    assert_same(copy, said)


def test_pickle_sends_no_padding() -> None:
    """A row of 4,000 tokens among 63 of one token: about 16 kB of ids, not a megabyte."""
    ids = pad_rows([[1] * 4000, *[[1]] * 63], side="right", dtype=torch.int32)
    batch = Sequences(
        prompt_ids_BP=torch.ones(64, 1, dtype=torch.int32),
        prompt_length_B=torch.ones(64, dtype=torch.int64),
        response_ids_BR=ids,
        response_length_B=torch.tensor([4000, *[1] * 63]),
        response_mask_BR=ids > 0,
    )
    assert len(pickle.dumps(batch)) < 40_000 < ids.numel() * 4


def test_prompt_lists() -> None:
    assert rollouts(LENGTHS).prompt_lists() == [[1, 2], [101, 102, 103, 104], [201], [301, 302, 303]]


def test_num_tokens() -> None:
    assert rollouts(LENGTHS).num_tokens_B().tolist() == [5, 5, 6, 5]


def test_check_finds_columns_that_do_not_fit() -> None:
    batch = rollouts(LENGTHS)
    batch.check()
    with pytest.raises(ValueError, match="columns differ in length"):
        batch.replace(finish_reasons=["stop"]).check()
    with pytest.raises(ValueError, match=r"response_length_B adds up to 11, but there are .*'response_mask_T': 7"):
        batch.replace(response_mask_T=batch.response_mask_T[:7]).check()


def test_structs_are_frozen_and_have_no_further_fields() -> None:
    batch = rollouts(LENGTHS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.group_B = torch.zeros(4)  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        object.__setattr__(batch, "no_such_field", 1)


def test_operations_leave_the_original_alone() -> None:
    batch = rollouts(LENGTHS)
    copy = pickle.loads(pickle.dumps(batch))
    batch.select([1])
    batch.replace(group_B=torch.zeros(4))
    Rollouts.concat([batch, batch])
    assert_same(batch, copy)


def test_scores_keep_rows_and_failures_together() -> None:
    failure = RewardFailure(row=1, data_source="toy", kind="timeout", message="60 s")
    scores = Scores(
        score_B=torch.tensor([1.0, float("nan")]),
        valid_B=torch.tensor([True, False]),
        extras=[{"acc": 1}, {}],
        failures=[None, failure],
    )
    kept = scores.select(~scores.valid_B)
    assert kept.failures == [failure] and kept.extras == [{}]


def test_pad_rows() -> None:
    rows = [[1, 2, 3], [], [4]]
    assert pad_rows(rows, side="right", dtype=torch.int32, fill=9).tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    assert pad_rows(rows, side="left", dtype=torch.int32, fill=9).tolist() == [[1, 2, 3], [9, 9, 9], [9, 9, 4]]


# ---- metrics


def test_merge_by_reduction() -> None:
    merged = merge_metrics(
        [
            {
                "mean": Metric(value=1.0, weight=3.0),
                "sum": Metric(value=1.0, reduction="sum"),
                "only": Metric(value=7.0),
            },
            {"mean": Metric(value=5.0, weight=1.0), "sum": Metric(value=2.0, reduction="sum")},
            {"max": Metric(value=-1.0, reduction="max"), "min": Metric(value=2.0, reduction="min")},
            {"max": Metric(value=2.0, reduction="max"), "min": Metric(value=-1.0, reduction="min")},
        ]
    )
    values = {name: metric.value for name, metric in merged.items()}
    assert values == {"mean": 2.0, "sum": 3.0, "only": 7.0, "max": 2.0, "min": -1.0}
    assert merged["mean"].weight == 4.0


def test_a_metric_without_weight_does_not_count() -> None:
    parts = [{"x": Metric(value=float("nan"), weight=0.0)}, {"x": Metric(value=3.0, weight=2.0)}]
    assert merge_metrics(parts)["x"].value == 3.0
    assert merge_metrics(parts[:1])["x"].value == 0.0


def test_merge_refuses_mixed_reductions() -> None:
    with pytest.raises(ValueError, match="metric x is reported with different reductions"):
        merge_metrics([{"x": Metric(value=1.0)}, {"x": Metric(value=1.0, reduction="sum")}])


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 5)), min_size=2, max_size=8),
    cut=st.integers(1, 7),
    reduction=st.sampled_from(["mean", "sum", "max", "min"]),
)
def test_merging_in_two_stages_is_merging_at_once(parts: list[tuple[float, float]], cut: int, reduction: str) -> None:
    """First micro-batches of a rank, then ranks: the same number."""
    metrics = [{"x": Metric(value=v, reduction=reduction, weight=w)} for v, w in parts]
    stages = [merge_metrics(metrics[:cut]), merge_metrics(metrics[cut:])]
    assert merge_metrics(stages)["x"].value == pytest.approx(merge_metrics(metrics)["x"].value)


# ---- episodes of several rows


def numbered(numbers: list[int] | None = None) -> Rollouts:
    """Rows 0 and 1 in group 0, 2 and 3 in group 1."""
    return rollouts(LENGTHS).replace(episode_B=torch.tensor(numbers or [9, 9, 4, 7]))


def test_episode_numbers_travel_with_their_rows() -> None:
    batch = numbered()
    assert batch.select([3, 0]).episode_B.tolist() == [7, 9]  # type: ignore[union-attr]
    assert_same(Rollouts.concat(batch.split([1, 3])), batch)
    assert_same(pickle.loads(pickle.dumps(batch)), batch)
    with pytest.raises(ValueError, match="episode_B is present in some parts and missing in others"):
        Rollouts.concat([batch, rollouts(LENGTHS)])


def test_an_episode_is_joined_by_hand() -> None:
    batch = numbered([9, 9, 4, 4]).select([2, 0, 3, 1])
    graded = Scores(
        score_B=torch.tensor([0.5, 1.0, 0.5, float("nan")]),
        valid_B=torch.tensor([True, True, True, False]),
        extras=[{"row": i} for i in range(4)],
        failures=[None, None, None, RewardFailure(row=3, data_source="toy", kind="timeout", message="")],
    )
    whole, scores = whole_episodes(batch, graded)
    assert whole.response_ids_BR.tolist() == [[2001, 2002, 2003, 2004, 2005, 3001, 3002], [1, 2, 3, 1001, 0, 0, 0]]
    assert (whole.response_length_B.tolist(), whole.group_B.tolist()) == ([7, 4], [1, 0])
    assert whole.prompt_ids_BP.tolist() == batch.select([0, 1]).prompt_ids_BP.tolist()
    assert whole.finish_reasons == ["reason 3", "reason 1"]  # of the last row, all else of the first ...
    assert [row.index for row in whole.rows] == [2, 0]
    assert scores.valid_B.tolist() == [True, False] and scores.extras == [{"row": 0}, {"row": 3}]  # ... that failed
    assert scores.failures[1] is not None and scores.score_B.isnan().tolist() == [False, True]
    assert_same(whole_episodes(whole, scores)[0], whole)


def test_without_numbers_nothing_is_touched() -> None:
    batch = rollouts(LENGTHS)
    episodes, values = Episodes.of(batch), torch.arange(4.0)
    assert episodes.join(batch) is batch and episodes.once(values) is values and episodes.of_rows(values) is values
    assert episodes.sums(values) is values and len(episodes) == 4
    assert episodes.cut(batch.response_ids_T) is batch.response_ids_T
    assert [rows.tolist() for rows in episodes.rows()] == [[0], [1], [2], [3]]
    nothing = numbered().select([])
    assert len(Episodes.of(nothing)) == 0 == len(Episodes.of(nothing).join(nothing))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=9))
def test_cut_is_the_inverse_of_join_and_sums_stay(rows: list[tuple[int, int]]) -> None:
    batch = rollouts([(1, length) for length, _ in rows])
    batch = batch.replace(group_B=torch.zeros(len(rows)), episode_B=torch.tensor([number for _, number in rows]))
    episodes, ids = Episodes.of(batch), batch.response_ids_T
    joined = episodes.join_tokens(ids)
    assert joined is not None and torch.equal(episodes.cut(joined), ids)
    by_number: dict[int, list[int]] = {}
    for (_, number), row in zip(rows, ids.split([length for length, _ in rows]), strict=True):
        by_number.setdefault(number, []).extend(row.tolist())
    assert [row.tolist() for row in joined.split(episodes.sums(episodes.length_B).tolist())] == [*by_number.values()]
    first = [next(i for i, (_, other) in enumerate(rows) if other == number) for number in by_number]
    assert episodes.once(torch.arange(len(rows))).tolist() == first
    assert episodes.of_rows(torch.tensor([*by_number])).tolist() == [number for _, number in rows]
