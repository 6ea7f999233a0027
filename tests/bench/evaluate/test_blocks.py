"""Candidates for blocks of a model in an item's host: which have a place, and why the others have none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fk_bench.evaluate.reasons import Reason
from fk_bench.evaluate.run import composition
from fk_bench.evaluate.run.hosts import patched
from fk_bench.evaluate.run.hosts.patched import Patched

from fastkernels.patch import PatchError

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32,
}  # fmt: skip
FILES = {"llama.mlp": "a.py", "mixtral.mixture": "b.py", "llama.mixture": "c.py"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def reasons(answer: dict[str, Any]) -> dict[str, Reason]:
    return {op: Reason(why["reason"]) for op, why in answer["failed"].items()}


def test_other_hosts_deploy_no_block_and_import_none(model: str) -> None:
    host = Patched({"host": "vllm", "model": model})
    answer = host.check(FILES)
    assert reasons(answer) == dict.fromkeys(("llama.mlp", "llama.mixture"), Reason.NOT_DEPLOYED)
    assert "vllm runs its own classes" in answer["failed"]["llama.mlp"]["text"]


def test_our_engine_takes_the_blocks_of_its_model(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def patch(target: Any, ops: list[str], candidates: dict[str, str]) -> Any:
        given.update(candidates)
        return SimpleNamespace(
            rows=[SimpleNamespace(op=op, state="active", candidate="c", reasons=[]) for op in ops]
        )

    monkeypatch.setattr(patched.fastkernels, "patch", patch)
    monkeypatch.setattr(patched, "find_host", lambda target: None)
    host = Patched({"host": "fastkernels", "model": model})
    host.target = None
    answer = host.patch(FILES)
    assert given == {"llama.mlp": "a.py"} and answer["patched"]
    assert reasons(answer) == dict.fromkeys(("mixtral.mixture", "llama.mixture"), Reason.UNUSED)
    assert "this item runs llama" in answer["failed"]["mixtral.mixture"]["text"]
    assert "llama.decoder_layer" in answer["failed"]["llama.mixture"]["text"]


def test_candidates_are_not_unused_where_nothing_can_be_patched() -> None:
    """As in a process that sees no entry points: no host knows the model."""
    host = Patched({"host": "timm", "model": "vit_tiny_patch16_224"})
    host.target = object()
    with pytest.raises(PatchError, match="object"):
        host.patch({"layer_norm": "layer_norm.py"})


def test_model_without_blocks_of_ours_uses_none(tmp_path: Path) -> None:
    host = Patched({"host": "timm", "model": "vit_tiny_patch16_224"})
    assert host.check(FILES) == {"failed": {}}
    assert set(reasons(host.patch(FILES)).values()) == {Reason.UNUSED}


def test_block_is_judged_with_the_sizes_of_the_suites_model(model: str) -> None:
    text = composition._text_of("llama.mlp", model)
    assert json.loads(str(text))["config"]["hidden_size"] == 128
    assert json.loads(str(composition._text_of("qwen3.mlp", model)))["name"] == "qwen3"
    assert composition._text_of("llama.mixture", model) is None
