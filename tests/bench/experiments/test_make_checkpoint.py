"""Tests of make_checkpoint.py: the FP8 checkpoint has the same weights, in a format that compressed-tensors loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
from experiments.checkpoints import make_checkpoint

ROOT = Path(__file__).resolve().parents[3]
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 256,
}  # fmt: skip
LIBRARY = """
import sys, json
from compressed_tensors.quantization import QuantizationConfig
config = QuantizationConfig.model_validate(json.loads(sys.argv[1]))
(group,) = config.config_groups.values()
weights, inputs = group.weights, group.input_activations
assert weights.pytorch_dtype() is inputs.pytorch_dtype(), (weights, inputs)
print(json.dumps([
    config.format, config.quantization_status, config.ignore, group.targets, str(inputs.pytorch_dtype()),
    weights.strategy, weights.dynamic, inputs.strategy, inputs.dynamic, config.requires_calibration_data(),
]))
"""


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a small two-layer checkpoint, found through its index."""
    monkeypatch.setattr(make_checkpoint, "CONFIG", {**make_checkpoint.CONFIG, **SMALL})
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", str(folder), "--layers", "2", *options])
    make_checkpoint.main()
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {file: load_file(folder / file) for file in set(files.values())}
    assert sum(map(len, tensors.values())) == len(files)
    return {name: tensors[file][name] for name, file in files.items()}


def test_fp8_checkpoint_is_the_plain_one_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = made(tmp_path / "plain", monkeypatch)
    fp8 = made(tmp_path / "fp8", monkeypatch, "--quantize", "fp8")
    linears = {name for name in plain if name.endswith("_proj.weight")}
    assert len(linears) == 14 and fp8.keys() == plain.keys() | {f"{name}_scale" for name in linears}
    for name, weight in plain.items():
        if (
            name not in linears
        ):  # embeddings and the head, made after the linears, too: the draws are the same
            assert fp8[name].dtype == torch.bfloat16 and torch.equal(fp8[name], weight), name
            continue
        values, scale = fp8[name], fp8[f"{name}_scale"]
        assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.bfloat16
        assert values.shape == weight.shape and scale.shape == (weight.shape[0], 1)
        assert (values.float().abs().amax(1) == 448).all(), name
        error = (values.float() * scale.float() - weight.float()).abs()
        # 3 bits of mantissa; 2**-9 at least
        half_step = torch.maximum(weight.float().abs() / 16, scale.float() / 1024)
        assert (error <= half_step * 1.001).all() and error.max() > 0, name
    plain_config = json.loads((tmp_path / "plain/config.json").read_text())
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == plain_config and "quantization_config" not in plain_config


SMALL_EXPERTS = {
    "hidden_size": 192, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more", "where"),
    [("mixtral-8x7b", {"num_local_experts": 3}, "block_sparse_moe.experts.2.w2"),
     ("qwen3-30b-a3b", {"num_experts": 3, "moe_intermediate_size": 160, "num_experts_per_tok": 2},
      "mlp.experts.2.down_proj")],
)  # fmt: skip
def test_transformers_reads_moe_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, int], where: str
) -> None:
    from transformers import AutoModelForCausalLM

    small = {**make_checkpoint.EXPERTS[name], **SMALL_EXPERTS, **more}
    monkeypatch.setattr(make_checkpoint, "EXPERTS", {**make_checkpoint.EXPERTS, name: small})
    plain = made(tmp_path / "plain", monkeypatch, "--config", name)
    model, said = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert model(torch.arange(9)[None]).logits.isfinite().all()
    blocks = made(tmp_path / "blocks", monkeypatch, "--config", name, "--quantize", "fp8-block")
    weight = plain[key := f"model.layers.1.{where}.weight"].float()
    values, scale = blocks[key], blocks[f"{key}_scale_inv"]
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (2, 2) and scale.dtype == torch.float32
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    error = (values.float() * wide - weight).abs()
    assert (error <= torch.maximum(weight.abs() / 16, wide / 1024) * 1.001).all() and error.max() > 0
    gates = {n for n in plain if n.endswith(".gate.weight")}
    assert len(gates) == 2 and all(torch.equal(blocks[n], plain[n]) for n in gates)
    config = json.loads((tmp_path / "blocks/config.json").read_text())["quantization_config"]
    assert {f"{gate}.weight" for gate in config["modules_to_not_convert"]} == {*gates, "lm_head.weight"}


def test_given_model_is_quantized_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "plain", monkeypatch)
    fp8 = made(tmp_path / "fp8", monkeypatch, "--quantize", "fp8")
    again = made(tmp_path / "again", monkeypatch, "--model", str(tmp_path / "plain"), "--quantize", "fp8")
    assert again.keys() == fp8.keys()
    assert all(torch.equal(again[n].float(), t.float()) and again[n].dtype == t.dtype for n, t in fp8.items())
    configs = [json.loads((tmp_path / f"{n}/config.json").read_text()) for n in ("fp8", "again")]
    assert configs[0] == configs[1]


def test_model_without_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="has no"):
        made(tmp_path / "out", monkeypatch, "--model", str(tmp_path / "empty"), "--quantize", "fp8")
    with pytest.raises(SystemExit):
        made(tmp_path / "out", monkeypatch, "--model", str(tmp_path / "empty"))


@pytest.mark.parametrize(
    "host",
    [
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.slow]),  # the same library
    ],
)
@pytest.mark.slow
def test_compressed_tensors_accepts_the_configuration(host: str) -> None:
    python = ROOT / f".venv-{host}/bin/python"
    if not python.exists():
        pytest.skip(f"no .venv-{host}: run `make setup`")
    given = json.dumps(make_checkpoint.FP8_DYNAMIC)
    done = subprocess.run([python, "-c", LIBRARY, given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        "float-quantized", "compressed", ["lm_head"], ["Linear"], "torch.float8_e4m3fn",
        "channel", False, "token", True, False,
    ]  # fmt: skip
