"""Heads for multi-token prediction: drafts are those of transformers' layers, and tokens are those without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.drafts import ALWAYS, SMALL, counts, params, prompts, propose, results
from support.mtp import make_mtp
from support.tiny import make_tiny

from fastkernels import LLM
from fastkernels.engine.execution.drafts.drafting import Drafter

MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3, **ALWAYS}
KINDS = ["deepseek_v3", "qwen3_next"]


class Oracle:
    """The head in transformers: a model of its one layer, and the equations around it."""

    def __init__(self, folder: Path, kind: str):
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        self.deepseek = kind == "deepseek_v3"
        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = AutoConfig.from_pretrained(folder)
        self.eps = config.rms_norm_eps
        config.num_hidden_layers = 1
        if self.deepseek:
            config.first_k_dense_replace = 0
            config.mlp_layer_types = ["sparse"]
        else:
            config.layer_types = ["full_attention"]
        self.model = AutoModel.from_config(config, dtype=torch.float32).eval()
        raw = load_file(folder / "model.safetensors")
        prefix = "model.layers.2." if self.deepseek else "mtp."
        self.w = {k.removeprefix(prefix): v for k, v in raw.items() if k.startswith(prefix)}
        stacked = make_like(self.model, folder, self.w if self.deepseek else {
            k.removeprefix("layers.0."): v for k, v in self.w.items() if k.startswith("layers.0.")
        })  # fmt: skip
        norm = self.w["shared_head.norm.weight" if self.deepseek else "norm.weight"]
        self.model.load_state_dict({**stacked, "norm.weight": norm}, strict=False)
        self.embedding = self.w.get("embed_tokens.weight", raw["model.embed_tokens.weight"])
        self.head = self.w.get("shared_head.head.weight", raw["lm_head.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.w[f"{name}.weight"] + (0.0 if self.deepseek else 1.0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    @torch.inference_mode()
    def draft(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts behind `tokens`."""
        hidden = self.target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        ids, found = tokens[1:], []
        names = ("enorm", "hnorm") if self.deepseek else ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
        for _ in range(count):
            embedded = self.embedding[torch.tensor(ids)].clone()
            if self.deepseek:
                embedded[0] = 0.0
            x = torch.cat([self._norm(embedded, names[0]), self._norm(hidden, names[1])], -1)
            x = x @ self.w["eh_proj.weight" if self.deepseek else "fc.weight"].T
            kept: list[torch.Tensor] = []
            hook = self.model.layers[0].register_forward_hook(
                lambda _, a, out, kept=kept: kept.append(out[0] if isinstance(out, tuple) else out)
            )
            normed = self.model(inputs_embeds=x[None]).last_hidden_state[0]
            hook.remove()
            found.append(int((normed[-1] @ self.head.T).argmax()))
            state = kept[0].reshape(len(ids), -1)[-1:] if self.deepseek else normed[-1:]
            hidden, ids = torch.cat([hidden, state]), [*ids, found[-1]]
        return found


def make_like(model: Any, folder: Path, layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layer's weights by transformers' names, whose experts are in one matrix."""
    made = {f"layers.0.{k}": v for k, v in layer.items() if ".experts." not in k}
    count = 1 + max(int(k.split(".")[2]) for k in layer if k.startswith("mlp.experts."))
    experts = [
        [layer[f"mlp.experts.{i}.{n}_proj.weight"] for n in ("gate", "up", "down")] for i in range(count)
    ]
    made["layers.0.mlp.experts.gate_up_proj"] = torch.stack([torch.cat(e[:2]) for e in experts])
    made["layers.0.mlp.experts.down_proj"] = torch.stack([e[2] for e in experts])
    assert set(made) >= {k for k in model.state_dict() if k.startswith("layers.0.")}
    return made


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_transformers(
    kind: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of a prompt, after rejected and accepted drafts, and next to other sequences."""
    if kind == "qwen3_next" and not own:
        pytest.skip("it has no embedding of its own")
    folder = make_mtp(tmp_path, kind, own)
    found: list[tuple[list[int], list[list[int]]]] = []
    original = Drafter.chain

    def chain(self: Drafter, rows: int, longest: int, most: int = 0) -> torch.Tensor:
        drafts = original(self, rows, longest, most)
        own = self._rows
        places = [(int(own.at[i]), int(own.token[i])) for i in range(rows)]
        found.append((places, drafts.tolist()))  # type: ignore[arg-type]
        return drafts

    plain = LLM(str(folder), **SMALL)
    given, each = [p[:30] for p in prompts(3, seed=5)], params(0, max_tokens=10)
    want = results(plain, given, each)
    texts = [[*g, *w[0][0]] for g, w in zip(given, want, strict=True)]
    monkeypatch.setattr(Drafter, "chain", chain)
    llm = LLM(str(folder), **{**SMALL, "max_num_batched_tokens": 20}, speculative_config=MTP)
    assert results(llm, given, each) == want
    oracle, checked = Oracle(folder, kind), 0
    for places, drafts in found:
        for (at, token), mine in zip(places, drafts, strict=True):
            fits = [
                t
                for t, g in zip(texts, given, strict=True)
                if len(g) <= at + 1 < len(t) and t[at + 1] == token
            ]
            if len(fits) == 1:
                count = min(3, len(fits[0]) - at - 1)  # later ones have no keys, and no use
                assert mine[:count] == oracle.draft(fits[0][: at + 2], count)
                checked += 1
    assert checked >= 12


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_drafts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is too small for all; the second time, prefixes hit."""
    folder = make_mtp(tmp_path, kind)
    more = {**SMALL, "num_blocks": 30, **({"num_snapshots": 20} if kind == "qwen3_next" else {})}
    given, each = prompts(6), [params(i, max_tokens=16) for i in range(6)]
    want = results(LLM(str(folder), **more), given, each)
    propose(monkeypatch, [[*g, *w[0][0]] for g, w in zip(given, want, strict=True)])
    llm = LLM(str(folder), **more, speculative_config=MTP)
    for _ in range(2):
        assert results(llm, given, each) == want
    assert counts(llm).by_place[2] > 5 and counts(llm).accepted < counts(llm).drafts - 20


def test_models_without_a_head_are_refused(tmp_path: Path) -> None:
    llama = make_tiny(tmp_path / "llama", "llama", "float32")
    with pytest.raises(
        ValueError, match="method 'mtp' is for DeepseekV3ForCausalLM, Qwen3NextForCausalLM, and"
    ):
        LLM(str(llama), **SMALL, speculative_config=MTP)
    plain = make_tiny(tmp_path / "plain", "deepseek_v3", "float32")
    with pytest.raises(ValueError, match=r"has no head for multi-token prediction, model\.layers\.2\.\*"):
        LLM(str(plain), **SMALL, speculative_config=MTP)
    two = make_mtp(tmp_path / "two", "deepseek_v3")
    config = json.loads((two / "config.json").read_text())
    (two / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 2}))
    with pytest.raises(ValueError, match="num_nextn_predict_layers=2 is not supported, only 1"):
        LLM(str(two), **SMALL, speculative_config=MTP)
    for wrong in ("1", [1], -1):
        (two / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": wrong}))
        for settings in (None, MTP):
            with pytest.raises(
                ValueError, match="num_nextn_predict_layers must be an integer of at least 0, got"
            ):
                LLM(str(two), **SMALL, speculative_config=settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_keep_tokens(kind: str, tmp_path: Path) -> None:
    folder = make_mtp(tmp_path, kind)
    given, each = prompts(4), [params(i, max_tokens=10) for i in range(4)]
    want = results(LLM(str(folder), **SMALL), given, each)
    with LLM(str(folder), **SMALL, tensor_parallel_size=2, speculative_config=MTP) as llm:
        assert results(llm, given, each) == want


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_heads_on_the_gpu_keep_tokens(kind: str, tmp_path: Path) -> None:
    folder = make_mtp(tmp_path, kind)
    more = {**SMALL, "num_blocks": 200, "device": "cuda", "dtype": "float32"}
    given, each = prompts(6), params(0)
    want = results(LLM(str(folder), **more), given, each)
    llm = LLM(str(folder), **more, speculative_config=MTP)
    assert results(llm, given, each) == want and counts(llm).drafts > 50
