"""MacroEval: examples computed by hand, properties, and the published board from its components."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from fk_bench.evaluate.macro_eval import PEER, Item, ItemOutcome, macro_eval
from hypothesis import given
from hypothesis import strategies as st

# Throughput, latency and correctness of each model with each published set (leaderboard.json of 2026-09-26, rounded),
# and whether the model runs without a dropped kernel
BOARD = Path(__file__).with_name("published_board.tsv")


def item(category: str, model: str = "m", host: str = "vllm") -> Item:
    return Item(category, model, "mixed", host)


A, B, C = item("text", "a"), item("text", "b"), item("image", "c", "diffusers")


def test_one_item_of_each_category():
    score = macro_eval([A, C], {A: ItemOutcome(1.44, 1.0, 1.0), C: ItemOutcome(1.0, 1.0, 0.95)}).overall
    assert pytest.approx(math.sqrt(1.2)) == score.S  # b: 1.2 and 1.0
    assert (score.C, score.coverage) == (pytest.approx(0.975), 1.0)
    assert score.score == pytest.approx(math.sqrt(1.2) * 0.975)
    assert not score.ci95  # no category has two items to draw from


def test_item_not_run_enters_with_the_floor():
    score = macro_eval([A, B], {A: ItemOutcome(1.21, 1.21, 1.0)}).overall
    assert pytest.approx(math.sqrt(1.21 * 0.5)) == score.S
    assert (score.C, score.coverage, score.S_valid) == (0.5, 0.5, pytest.approx(1.21))


def test_invalid_item_loses_speed_and_correctness():
    score = macro_eval([A], {A: ItemOutcome(3.0, 3.0, 0.89)}).overall
    assert (score.S, score.C, score.coverage, score.score, score.S_valid) == (0.5, 0.0, 0.0, 0.0, None)


def test_slow_item_is_floored():
    assert macro_eval([A], {A: ItemOutcome(0.1, 0.1, 1.0)}).overall.score == pytest.approx(0.5)


def test_declared_category_without_items_lowers_every_part():
    score = macro_eval([A], {A: ItemOutcome(1.0, 1.0, 1.0)}, categories=["text", "image"]).overall
    assert (score.S, score.C, score.coverage) == (pytest.approx(math.sqrt(0.5)), 0.5, 0.5)


def test_empty_set_scores_zero_at_the_floor():
    score = macro_eval([A, B, C], {}).overall
    assert (score.S, score.score, score.declared, score.valid) == (pytest.approx(0.5), 0.0, 3, 0)


def test_groups_have_parts_of_their_own():
    scores = macro_eval([A, B, C], {A: ItemOutcome(1.1, 1.1, 1.0), C: ItemOutcome(1.3, 1.3, 1.0)})
    assert pytest.approx(1.3) == scores.by["host"]["diffusers"].S
    assert scores.by["host"]["vllm"].coverage == 0.5
    assert scores.by["model"]["a"].score == pytest.approx(1.1)
    assert scores.by["level"]["4"].declared == 3


def test_interval_contains_the_score():
    items = [item("text", str(n)) for n in range(12)]
    outcomes = {i: ItemOutcome(1 + n / 10, 1.0, 1.0) for n, i in enumerate(items)}
    score = macro_eval(items, outcomes).overall
    low, high = score.ci95["score"]
    assert low < score.score < high


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: macro_eval([], {}),
        lambda: macro_eval([A, A], {}),
        lambda: macro_eval([A], {B: ItemOutcome(1.0, 1.0, 1.0)}),
        lambda: ItemOutcome(0.0, 1.0, 1.0),
        lambda: ItemOutcome(1.0, math.nan, 1.0),
        lambda: ItemOutcome(1.0, 1.0, 1.01),
    ],
)
def test_impossible_input_is_refused(wrong):
    with pytest.raises(ValueError):
        wrong()


speeds = st.floats(0.05, 20)
results = st.builds(ItemOutcome, speeds, speeds, st.floats(0, 1))
KEYS = [item(c, m, h) for c in ("text", "image", "audio") for m in "ab" for h in ("vllm", "sglang")]
boards = st.dictionaries(st.sampled_from(KEYS), results)


def score_of(outcomes: dict[Item, ItemOutcome], declared: list[Item] = KEYS) -> float:
    return macro_eval(declared, outcomes, draws=0).overall.score


@given(boards, st.sampled_from(KEYS), st.floats(1, 4), st.floats(0, 1))
def test_more_speed_or_correctness_never_lowers_the_score(outcomes, key, faster, better):
    if key not in outcomes:
        return
    old = outcomes[key]
    for new in (
        replace(old, throughput=old.throughput * faster),
        replace(old, latency=old.latency * faster),
        replace(old, correctness=max(old.correctness, better)),
    ):
        assert score_of({**outcomes, key: new}) >= score_of(outcomes) - 1e-12


@given(boards, st.sampled_from(KEYS))
def test_leaving_an_item_out_never_raises_the_score(outcomes, key):
    without = {k: v for k, v in outcomes.items() if k != key}
    assert score_of(without) <= score_of(outcomes) + 1e-12


@given(boards, st.permutations(KEYS))
def test_order_of_items_does_not_matter(outcomes, order):
    shuffled = {k: outcomes[k] for k in order if k in outcomes}
    assert score_of(shuffled, list(order)) == pytest.approx(score_of(outcomes), abs=1e-12)


FAMILIES = {  # of the models of the published board of 2026-09-26
    "llama": "llm", "gpt_oss": "llm", "qwen3_next": "linear_attn", "kimi_linear": "linear_attn", "gla": "linear_attn",
    "flux": "vision", "qwen3_vl": "multimodal", "yolov10": "edge", "openfold3": "3d_robotics", "bge_m3": "recsys",
    "oasis": "world_models",
}  # fmt: skip
# {set: (S, C, coverage, score) of its row, and those of its row without a dropped kernel}
ROWS = {
    "drkernel-ind": ((0.98360, 0.85368, 0.75000, 0.62976), (1.03641, 0.24901, 0.25000, 0.06452)),
    "drkernel-seq": ((0.98963, 0.74651, 0.75000, 0.55408), (1.02529, 0.24901, 0.25000, 0.06383)),
    "claude-ind": ((1.09217, 0.61238, 0.52083, 0.34835), (1.01936, 0.24159, 0.25000, 0.06157)),
    "claude-seq": ((1.11325, 0.54725, 0.56250, 0.34269), (1.06824, 0.12500, 0.12500, 0.01669)),
    "kda-ind": ((1.13381, 0.98254, 1.00000, 1.11402), (1.20822, 0.41291, 0.41667, 0.20787)),
    "kda-seq": ((1.04417, 0.98281, 1.00000, 1.02623), (1.04162, 0.56834, 0.58333, 0.34533)),
    "ako-ind": ((1.14602, 0.65252, 0.56250, 0.42064), (0.91130, 0.21743, 0.12500, 0.02477)),
    "ako-seq": ((1.24557, 0.81672, 0.83333, 0.84773), (1.49000, 0.24938, 0.25000, 0.09290)),
    "codex-ind": ((0.95678, 0.33006, 0.33333, 0.10526), (1.06965, 0.12391, 0.12500, 0.01657)),
    "codex-seq": ((1.09611, 0.71238, 0.70833, 0.55310), (1.07652, 0.12390, 0.12500, 0.01667)),
}


def published(name: str, whole: bool) -> tuple[list[Item], dict[Item, ItemOutcome]]:
    """The declared items and the outcomes of a published set. whole: only where no kernel was dropped."""
    items, outcomes = [], {}
    with BOARD.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if row["set"] == name:
                key = Item(FAMILIES[row["model"]], row["model"], "all", "peer")
                items.append(key)
                if row["throughput"] and (not whole or row["as_is"]):
                    values = (float(row[what]) for what in ("throughput", "latency", "correctness"))
                    outcomes[key] = ItemOutcome(*values)
    return items, outcomes


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_published_rows_follow_from_their_components(name, whole):
    items, outcomes = published(name, whole)
    assert len(items) == 11
    board = macro_eval(items, outcomes, rules=PEER, draws=0).overall
    assert (board.S, board.C, board.coverage, board.score) == pytest.approx(ROWS[name][whole], abs=0.01)
    ours = macro_eval(items, outcomes, draws=0).overall  # a missing model costs speed here
    if board.coverage < 1:
        assert ours.score < board.score
    else:
        assert ours.score == pytest.approx(board.score)
