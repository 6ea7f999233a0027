"""Prompts that share prefixes, and conversations: their tokens, their labels in rows, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.serving.config import CompareConfig, Level
from fk_bench.serving.load.datasets import load
from fk_bench.serving.measure import longest


def test_prefix_groups_share_exactly_their_prefix(words_model: Path) -> None:
    data = load("random", str(words_model), 0, 8, 4)
    prompts = [p.tokens for p in data.draw("c=4", 0, 6, (8, 4), (5, 2))]
    assert [len(p) for p in prompts] == [13] * 6
    assert prompts[0][:5] == prompts[2][:5] == prompts[4][:5] != prompts[1][:5] == prompts[3][:5]
    assert len({tuple(p[5:]) for p in prompts}) == 6
    assert data.draw("c=4", 1, 1, (8, 4), (5, 2))[0].tokens[:5] != prompts[0][:5]  # fresh in each round


def test_turns_are_drawn_with_the_prompt(words_model: Path) -> None:
    (talk,) = load("random", str(words_model), 0, 8, 4).draw("c=4", 0, 1, (8, 4), turns=3)
    assert [len(turn) for turn in talk.later] == [8, 8] and talk.later[0] != talk.later[1]
    assert longest([talk]) == 128  # 3 x (8 + 4), and at least 64 more


@pytest.mark.parametrize(
    ("level", "label"),
    [
        (Level("concurrency", 8, turns=3), "c=8,turns=3"),
        (Level("rate", 2.5, 64, 8, prefix=(1024, 4)), "rate=2.5,64-8,prefix=1024x4"),
        (Level("ramp", 8.0, start=0.5), "ramp=0.5-8"),
        (Level("trace", 2.0), "trace=2"),
        (Level("max_rate", 64.0, start=1.0), "max-rate=1-64"),
        (Level("max_concurrency", 8.0, start=1.0), "max-c=1-8"),
    ],
)
def test_level_of_a_row_is_the_runs(level: Level, label: str) -> None:
    case = {"load": level.kind, "value": level.value, "own": level.to_case()}
    assert Level.from_case(case, level.input_len, level.output_len) == level
    assert level.label == label and not level.plain


def config(**more: Any) -> CompareConfig:
    return CompareConfig(**{"concurrency": (8,), "turns": 2, "prefix_len": 16, "prefix_groups": 3, **more})


def test_load_overrides_shape_of_the_run() -> None:
    made = config(loads=("c=8,turns=1,prefix=0", "rate=1,turns=4,prefix=32,groups=2"))
    run, plain, other = made.levels
    assert (made.turns_of(run), made.prefix_of(run), run.plain) == (2, (16, 3), True)
    assert (made.turns_of(plain), made.prefix_of(plain)) == (1, (0, 1)) and not made.shares_prefixes(plain)
    assert (made.turns_of(other), made.prefix_of(other)) == (4, (32, 2)) and made.shares_prefixes(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"burstiness": 0.0}, "--burstiness must be above 0, got 0"),
        ({"burstiness": 2.0}, "give --rate, a ramp or --search rate="),
        (
            {"ramp_up_end_rps": 2.0},
            "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps",
        ),
        (
            {"ramp_up_strategy": "cubic", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0},
            "unknown 'cubic'. Known: linear, exponential.",
        ),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 0.0, "ramp_up_end_rps": 2.0},
            "must be above 0",
        ),
        ({"search": ("rate=1-8",)}, "give --slo, as in ttft:500"),
        ({"search": ("speed=1-8",)}, "expected rate=LOW-HIGH or concurrency=LOW-HIGH"),
        ({"search": ("rate=8-1",)}, "the first limit must be below the second"),
        ({"search": ("concurrency=1-2.5",)}, "a concurrency is a whole number"),
        ({"search": ("rate=0-8",)}, "--search rate=0-8: rate= must be above 0, got 0"),
        ({"slo_attainment": 1.5}, "--slo-attainment must be above 0 and at most 1, got 1.5"),
        ({"turns": 0}, "--turns must be 1 or more, got 0"),
        ({"prefix_len": 0}, "--prefix-groups needs --prefix-len"),
        ({"dataset": "sharegpt"}, "--turns needs --dataset random, got --dataset sharegpt"),
        ({"loads": ("c=1,groups=2",)}, "groups= needs prefix=N"),
        ({"trace_requests": 0}, "--trace-requests must be 1 or more, got 0"),
    ],
)
def test_invalid_options_say_what_to_give(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)
