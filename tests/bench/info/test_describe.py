"""`fk-bench describe`: the plan of a model as a table, as lines, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fk_bench.explain.cost_model import step
from fk_bench.info.describe import costs, grouped
from support.checkpoints import formats
from support.commands import fk_bench_here
from support.tiny import make_tiny
from transformers import AutoConfig

from fastkernels import plan
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.plans import build


def config_of(kind: str, architecture: str, **fields: object):
    config = AutoConfig.for_model(kind, **fields)
    config.architectures = [architecture]
    return config


def test_command_prints_costs_of_a_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "gemma", "gemma2", "float32")
    done = fk_bench_here("describe", folder, "--context", "64")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # keys and values of 2 layers, 2 KV heads of 32 channels, in float32
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 32 * 4 and found["dtype"] == "float32"
    assert "gemma_rms_norm" in found["patched"]["vllm"] and "model.layers.{0-1}.mlp.down_proj" in done.stdout


def test_command_describes_quantized_projections_that_are_packed(tmp_path: Path) -> None:
    """Phi-3's checkpoints have one matrix for queries, keys and values, and one for gate and up."""
    base = make_tiny(tmp_path / "base", "phi3", "float32", **{**formats.SIZES, "pad_token_id": 0})
    folder, _ = formats.write(tmp_path, "gptq_64", base)
    model = build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    for own_file in (False, True):
        if own_file:
            fields = json.loads((folder / "config.json").read_text())
            (folder / "quantize_config.json").write_text(json.dumps(fields.pop("quantization_config")))
            (folder / "config.json").write_text(json.dumps(fields))
        done = fk_bench_here("describe", folder, "--context", "64")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["weight_bytes"] == kept
        for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
            line = next(line for line in done.stdout.splitlines() if name in line)
            assert "linear_int4" in line and "format=gptq" in line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("llamma",), "Did you mean 'llama'"),
        (("llama", "--context", "0"), "--context 0"),
        (("llama", "--dtype", "int3"), "--dtype 'int3' is not one of"),
        (("llama", "--gpu", "abacus"), "--gpu 'abacus'"),
    ],
)
def test_bad_input_is_named(args: tuple[str, ...], said: str) -> None:
    done = fk_bench_here("describe", *args)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_windows_bound_the_keys_that_are_read() -> None:
    made = plan(config_of("gemma2", "Gemma2ForCausalLM", num_hidden_layers=2, sliding_window=16))
    each = made.kv_bytes_per_token // 2
    assert made.kv_bytes(100) == each * (100 + 16)
    assert made.flops(1, 100) < made.flops(1, 1000) < made.flops(10, 1000)


def test_experts_that_are_not_chosen_are_not_read() -> None:
    fields = {"num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 2}
    made = plan(config_of("qwen3_moe", "Qwen3MoeForCausalLM", **fields))
    (experts,) = (item for item in made if item.op == "fused_experts")
    assert experts.read == experts.parameters // 4 and costs(made, 8, "NVIDIA H200")["decode_floor_us"] > 0


def test_equal_layers_are_one_line() -> None:
    made = plan(config_of("smollm3", "SmolLM3ForCausalLM", num_hidden_layers=8))
    lines = {path: count for path, _, count in grouped(made.items)}
    assert lines["model.layers.{0-2,4-6}.self_attn.rotary_emb"] == 6  # every fourth layer has no positions
    assert lines["model.layers.{0-7}.mlp.down_proj"] == 8


def test_unsupported_field_is_named_with_its_value() -> None:
    config = config_of("olmoe", "OlmoeForCausalLM", clip_qkv=8.0)
    with pytest.raises(Unsupported, match=r"config\.clip_qkv=8\.0 is not supported, only None"):
        plan(config)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("gemma2", "Gemma2ForCausalLM"), ("olmoe", "OlmoeForCausalLM"), ("cohere2", "Cohere2ForCausalLM")],
)
def test_plan_costs_what_the_built_model_calls(kind: str, architecture: str) -> None:
    """The same sums from the ops that a step of the built model calls, on the device 'meta'."""
    config = config_of(kind, architecture, num_hidden_layers=2)
    made, built = plan(config), step(kind, config, "decode", 1, 1024)
    flops, moved = (sum(getattr(c, of) * c.count for c in built.calls) for of in ("flops", "bytes"))
    assert flops == pytest.approx(made.flops(1, 1024), rel=3e-3)
    assert moved == pytest.approx(made.read_bytes + made.kv_bytes(1024), rel=3e-3)
