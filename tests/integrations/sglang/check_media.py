"""Models of images in SGLang: towers unpatched, patched and after undo.

SGLang 0.5.23 takes patches of 14 x 14 pixels only: others go to the language model as if they were features. It reads
Qwen2-VL's channels from `in_chans`, a name that transformers 5 does not write, and pads the MLPs of Qwen3-VL's towers.
"""

import pytest
from support.hosts.sglang_engine import make_engine
from support.tiny import IMAGE, make_tiny_vlm
from support.vlm_oracle import image

import fastkernels
from fastkernels.core.reasons import Kind

OPS = [
    "attention_dense", "gelu", "layer_norm", "patch_embedding", "quick_gelu", "rms_norm", "silu_and_mul",
]  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_QWEN2 = {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": _SECTIONS}
_QWEN3 = {"head_dim": 32, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}}
# {model: (fields, fields of the tower, its layers, its mergers)}
TOWERS = {
    "qwen2_vl": (_QWEN2, {"in_chans": 3}, 2, 1),
    "qwen2_5_vl": (_QWEN2, {"window_size": 56}, 3, 1),
    "qwen3_vl": (_QWEN3, {"intermediate_size": 64}, 3, 3),
}
PROMPTS = [("hello", []), (f"a{IMAGE}b", [(0, 84, 56)]), (f"a{IMAGE}b{IMAGE}c", [(1, 140, 84), (2, 56, 56)])]


def generate(engine):
    """[(token ids, log probability of each)], without values of an earlier pass."""
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    found = []
    for text, sizes in PROMPTS:
        engine.flush_cache()
        images = [image(*size) for size in sizes] or None
        out = engine.generate(text, sampling, image_data=images, return_logprob=True)
        found.append((out["output_ids"], [step[0] for step in out["meta_info"]["output_token_logprobs"]]))
    return found


def check_same(found, stock):
    for (tokens, logprobs), (theirs, expected) in zip(found, stock, strict=True):
        assert tokens == theirs and logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", TOWERS)
def test_vision_tower_is_patched_and_undone(kind, tmp_path, monkeypatch):
    """And its mergers alone, of which Qwen3-VL has two within the tower (deepstack)."""
    fields, tower, layers, mergers = TOWERS[kind]
    model = make_tiny_vlm(tmp_path / kind, kind, tower={"patch_size": 14, **tower}, **fields)
    monkeypatch.setenv("TINY_LLAMA", str(model))
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "0")  # no pass finds an image's features of an earlier one
    engine = make_engine(dtype="float32", context_length=256, max_total_tokens=512)
    try:
        stock = generate(engine)
        assert stock[0] != stock[1] != stock[2]
        report = fastkernels.patch(engine, ops=OPS)
        check_same(generate(engine), stock)
        rows = report.refresh().active
        print(report)
        assert not any(row.fallbacks for row in report.rows)
        assert not any(kind is Kind.UNKNOWN_VERSION for row in report.rows for kind in row.kinds)
        (attention,) = [row for row in rows if row.op == "attention_dense"]
        assert attention.modules == layers and attention.calls and attention.proof == "calls"
        report.undo()
        assert generate(engine) == stock
        report = fastkernels.patch(engine, ops=["patch_merger"])
        check_same(generate(engine), stock)
        rows = report.refresh().active
        print(report)
        assert not any(row.fallbacks for row in report.rows)
        assert sum(row.modules for row in rows) == mergers and all(row.proof == "calls" for row in rows)
        report.undo()
        assert generate(engine) == stock
    finally:
        engine.shutdown()
