"""LongRoPE (Phi-4-mini): one set of factors for every request, chosen by max_model_len, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan

ORIGINAL = 48
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [2.0 + i for i in range(12)],
    "original_max_position_embeddings": ORIGINAL,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = [(i * 37) % 500 for i in range(ORIGINAL + 20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("longrope")
    sizes = {
        "max_position_embeddings": 256,
        "original_max_position_embeddings": ORIGINAL,
    }  # the latter's default: 4096
    return make_tiny(made, "phi3", "float32", rope_parameters=ROPE, **sizes)


@pytest.mark.parametrize(
    ("max_model_len", "prompts"), [(ORIGINAL, [[7], LONG[:30]]), (128, [LONG, LONG[3:]])]
)
def test_greedy_equals_transformers(
    folder: Path, greedy: Any, max_model_len: int, prompts: list[list[int]]
) -> None:
    """transformers chooses by the length of each request: short ones and long ones, with prompts in chunks of 16."""
    llm = LLM(
        str(folder), device="cpu", max_model_len=max_model_len, max_num_batched_tokens=16, block_size=16,
        max_num_seqs=2,
    )  # fmt: skip
    got = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    assert got == [greedy(folder, prompt, 8) for prompt in prompts]


def test_factors_of_other_lengths_are_refused(folder: Path) -> None:
    config = build.load_config(folder)
    config.rope_parameters = {**ROPE, "long_factor": [1.0] * 16}
    with pytest.raises(Unsupported, match="long_factor with 16 numbers is not supported, only 12 numbers"):
        plan(config)
