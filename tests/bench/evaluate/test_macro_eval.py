"""MacroEval: examples computed by hand, properties, and the published board from its components."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fk_bench.evaluate.macro_eval import PEER, Item, ItemOutcome, macro_eval
from hypothesis import given
from hypothesis import strategies as st


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


# The board of 2026-09-26, Dr. Kernel, independent: (family, throughput, latency, C); its row says 0.9836, 0.8537, 0.75.
PUBLISHED = [
    ("Dense & MoE LLMs", 0.9642594081817066, 0.9886503733699498, 1.0),
    ("Dense & MoE LLMs", 1.0079585151182402, 0.9755510973945763, 1.0),
    ("Linear Attention & New Archs", 1.0157226124378156, 0.9885705610878835, 0.959383189979182),
    ("Linear Attention & New Archs", 1.008403537656482, 0.9675651047932304, 0.997419935874165),
    ("Linear Attention & New Archs", 0.8999697302261649, 0.8431370950403102, 0.9987219223851498),
    ("Vision / Video / Audio", 1.0101303745253134, 0.922335004255165, 0.9759412256021879),
    ("Multimodal & Encoders", 0.7951199625863997, 0.9964715549031405, 0.8819985902728336),
    ("Edge & Detection", None, None, 0.0),
    ("3D / Robotics / Science", 1.055206491858485, 1.0342109942613262, 0.9920662988251685),
    ("Recommendation & Specialized", 1.027900919938134, 1.0285382981871272, 1.0),
    ("World Models", 1.0320464856564062, 0.8427099131789393, 0.9942934325538911),
]
# The same set without dropping any kernel: two models run. The row says 1.0364, 0.2490, 0.25 and 0.0645.
AS_IS = {"3D / Robotics / Science", "Recommendation & Specialized"}


@pytest.mark.parametrize(
    ("runs", "S", "correctness", "coverage", "score"),
    [
        (None, 0.9835959806247615, 0.8536843204166975, 0.75, 0.6297603497131835),
        (AS_IS, 1.036405196212982, 0.24900828735314606, 0.25, 0.064518370728224),
    ],
)
def test_published_rows_follow_from_their_components(runs, S, correctness, coverage, score):
    items = [Item(family, str(n), "all", "peer") for n, (family, *_) in enumerate(PUBLISHED)]
    outcomes = {
        key: ItemOutcome(t, latency, c)
        for key, (family, t, latency, c) in zip(items, PUBLISHED, strict=True)
        if t is not None and (runs is None or family in runs)
    }
    board = macro_eval(items, outcomes, rules=PEER).overall
    assert (board.S, board.C, board.coverage, board.score) == pytest.approx(
        (S, correctness, coverage, score), abs=0.01
    )
    ours = macro_eval(items, outcomes).overall
    assert ours.score < board.score  # a missing model costs speed here
