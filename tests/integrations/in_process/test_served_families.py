"""Omni, Whisper, XLM-R, ColBERT and LLaDA in transformers, patched in this process: tiny and random, float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastkernels

transformers = pytest.importorskip("transformers")

Run = Callable[[], list[torch.Tensor]]
IMAGE, AUDIO = 120, 121
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TOWER = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64, "intermediate_size": 48,
    "window_size": 16, "fullatt_block_indexes": [1],
}  # fmt: skip
EAR = {
    "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "output_dim": 64, "n_window": 10, "max_source_positions": 50,
}  # fmt: skip
WHISPER = {
    "vocab_size": 128, "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "pad_token_id": 0,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_source_positions": 50, "max_target_positions": 32, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3,
}  # fmt: skip
BERT = {k: v for k, v in TEXT.items() if k != "num_key_value_heads"}


def made(name: str, config: Any) -> Any:
    """A model with random weights, in float32."""
    model, generator = getattr(transformers, name)(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.15, generator=generator)
    return model


def omni() -> tuple[torch.nn.Module, Run]:
    """A prompt with an image and a sound, and one of text alone."""
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": MROPE}, vision_config=TOWER, audio_config=EAR,
        image_token_index=IMAGE, audio_token_index=AUDIO, video_token_index=122, vision_start_token_id=123,
        vision_end_token_id=124, audio_start_token_id=125, audio_end_token_id=126, position_id_per_seconds=4,
    )  # fmt: skip
    model = made("Qwen2_5OmniThinkerForConditionalGeneration", config)
    generator = torch.Generator().manual_seed(1)
    media = {
        "pixel_values": torch.randn(32, 96, generator=generator), "image_grid_thw": torch.tensor([[1, 4, 8]]),
        "input_features": torch.randn(1, 16, 40, generator=generator),
        "feature_attention_mask": torch.ones(1, 40, dtype=torch.long),
    }  # fmt: skip
    mixed = torch.tensor([[1, 123, *[IMAGE] * 8, 124, 125, *[AUDIO] * 10, 126, 5, 7]])

    def run() -> list[torch.Tensor]:
        texts = torch.tensor([[1, 5, 6, 7, 8]])
        return [
            model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits
            for ids, more in ((mixed, media), (texts, {}))
        ]

    return model, run


def whisper() -> tuple[torch.nn.Module, Run]:
    """Three tokens of two answers: a pass over the decoder's prompt, and steps with both of its caches."""
    model = made("WhisperForConditionalGeneration", transformers.WhisperConfig(**WHISPER))
    given = {
        "input_features": torch.randn(2, 16, 100, generator=torch.Generator().manual_seed(1)),
        "decoder_input_ids": torch.tensor([[3, 7, 9], [3, 8, 10]]),
    }

    def run() -> list[torch.Tensor]:
        steps = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "use_cache": True}
        out = transformers.GenerationMixin.generate(
            model, **given, **steps, output_logits=True, return_dict_in_generate=True
        )
        return list(out.logits)

    return model, run


def encoder(model: Any, of: Callable[[Any], torch.Tensor]) -> tuple[torch.nn.Module, Run]:
    """Two texts, of which one has padding."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 1, 1, 1, 1]])
    mask = (torch.arange(7) < torch.tensor([[7], [3]])).long()
    return model, lambda: [of(model(input_ids=ids, attention_mask=mask))[mask.bool()]]


def xlm_roberta() -> tuple[torch.nn.Module, Run]:
    config = transformers.XLMRobertaConfig(**{**BERT, "pad_token_id": 1}, type_vocab_size=1)
    return encoder(made("XLMRobertaModel", config), lambda out: out.last_hidden_state)


def reranker() -> tuple[torch.nn.Module, Run]:
    config = transformers.XLMRobertaConfig(**{**BERT, "pad_token_id": 1}, type_vocab_size=1, num_labels=1)
    model = made("XLMRobertaForSequenceClassification", config)
    _, run = encoder(model, lambda out: out.logits.expand(2, 7))
    return model, run


def colbert() -> tuple[torch.nn.Module, Run]:
    """Vectors of all tokens."""
    model = torch.nn.ModuleDict({"bert": made("BertModel", transformers.BertConfig(**BERT))})
    model["linear"] = torch.nn.Linear(64, 24, bias=False)

    def vectors(out: Any) -> torch.Tensor:
        return torch.nn.functional.normalize(model["linear"](out.last_hidden_state), dim=-1)

    return model, encoder(model["bert"], vectors)[1]


def llada() -> tuple[torch.nn.Module, Run]:
    """Its algorithm on a Llama: the likeliest of four masks is filled in each step, and all tokens see all others."""
    model = made("LlamaForCausalLM", transformers.LlamaConfig(**TEXT))
    everything = torch.zeros(1, 1, 9, 9)

    def run() -> list[torch.Tensor]:
        ids, found = torch.tensor([[5, 6, 7, 8, 9, *[119] * 4]]), []
        for _ in range(4):
            logits = model(ids, attention_mask=everything).logits
            found.append(logits)
            best = torch.where(ids == 119, logits.softmax(-1).amax(-1), -1.0).argmax()
            ids[0, best] = logits[0, best, :119].argmax()
        return found

    return model, run


# {case: (what makes the model, {op: (modules, calls)})}
CASES = {
    # Both prompts have passes of the text's 5 norms, 2 MLPs and 2 rotations. The vision tower has 5 norms and 2 MLPs.
    "qwen2.5-omni": (
        omni,
        {
            "rms_norm": (10, 15),
            "layer_norm": (5, 5),
            "gelu": (3, 3),
            "gated_mlp": (4, 6),
            "rotary_emb": (2, 4),
        },
    ),
    "qwen2.5-omni-merger": (omni, {"patch_merger": (1, 1)}),
    # The encoder runs once, with 5 of the norms and 2 of the activations; the decoder three times.
    "whisper": (whisper, {"layer_norm": (15, 35), "gelu": (5, 11)}),
    "xlm-roberta": (xlm_roberta, {"layer_norm": (5, 5), "gelu": (2, 2)}),
    "bge-reranker": (reranker, {"layer_norm": (5, 5), "gelu": (2, 2)}),
    "colbert": (colbert, {"layer_norm": (5, 5), "gelu": (2, 2)}),
    "llada": (llada, {"rms_norm": (5, 20), "gated_mlp": (2, 8), "rotary_emb": (2, 8)}),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_model_is_patched_and_undone(name: str) -> None:
    make, expected = CASES[name]
    model, run = make()
    before, classes = run(), [type(m) for m in model.modules()]
    report = fastkernels.patch(model, ops=list(expected))
    for found, wanted in zip(run(), before, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5 * float(wanted.abs().max()), rtol=0)
    counted: dict[str, tuple[int, int]] = {}
    for row in report.refresh().active:
        assert not row.fallbacks, row
        modules, calls = counted.get(row.op, (0, 0))
        counted[row.op] = modules + row.modules, calls + row.calls
    assert counted == expected and report.verified
    report.undo()
    assert [type(m) for m in model.modules()] == classes and all(map(torch.equal, run(), before))
