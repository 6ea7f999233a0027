"""Mixtral's sliding window, wrong expert shapes, and its block on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from support.tiny import make_tiny

from fastkernels.core import parallel
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.models.common.checkpoints.weights import CheckpointError
from fastkernels.models.common.plans.build import build, load_config
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.moe import sparse_moe
from fastkernels.overrides.moe.sglang import SGLangMixtralMoE
from fastkernels.overrides.moe.vllm import VllmMixtralMoE

PROMPT = list(range(10, 73))


@pytest.fixture(scope="session")
def tiny_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "mixtral", "mixtral", "float32")


@pytest.fixture(scope="session")
def tiny_window(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "window", "mixtral", "float32", sliding_window=9)


def logits(folder: Path, prompt: list[int]) -> torch.Tensor:
    """Logits at every position of a prompt, in one prefill."""
    model = build(folder, load_config(folder), torch.device("cpu"), torch.float32)
    n, block = len(prompt), 16
    blocks = -(-n // block) + 1
    for m in model.modules():
        if isinstance(m, PagedAttention):
            cache = torch.zeros(2, blocks, block, m.num_kv_heads, m.head_size)
            m.kv_cache = (cache[0], cache[1])
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, n], [n], [list(range(1, blocks))])]
    metadata = AttentionMetadata(torch.arange(n) + block, *ints, n, n)
    with forward_context(metadata), torch.inference_mode():
        return model.compute_logits(model(torch.tensor(prompt), torch.arange(n)))


def test_window_changes_late_positions_only(tiny_mixtral: Path, tiny_window: Path) -> None:
    """With the same weights, the first nine positions are equal and the last ones differ."""
    full, windowed = logits(tiny_mixtral, PROMPT), logits(tiny_window, PROMPT)
    torch.testing.assert_close(full[:9], windowed[:9])
    assert (full[20:] - windowed[20:]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("drop", r"missing from it: model\.layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight"),
        ("extra", r"does not have: model\.layers\.0\.block_sparse_moe\.experts\.4\.w1\.weight"),
        ("shape", r"experts\.0\.w3\.weight of shape \(95, 128\) does not fit.*expected \(96, 128\)"),
    ],
)
def test_wrong_expert_shape_is_named(change: str, says: str, tiny_mixtral: Path, tmp_path: Path) -> None:
    found = load_file(tiny_mixtral / "model.safetensors")
    if change == "drop":
        del found["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    elif change == "extra":
        found["model.layers.0.block_sparse_moe.experts.4.w1.weight"] = torch.zeros(96, 128)
    else:
        key = "model.layers.0.block_sparse_moe.experts.0.w3.weight"
        found[key] = found[key][:-1].clone()
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_mixtral / "config.json").read_text())
    with pytest.raises(CheckpointError, match=says):
        build(tmp_path, load_config(tmp_path), torch.device("cpu"), torch.float32)


def test_other_activation_than_silu_is_refused(tiny_mixtral: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_mixtral / "config.json").read_text()) | {"hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="hidden_act='gelu' is not supported, only 'silu'"):
        build(tmp_path, load_config(tmp_path), torch.device("cpu"), torch.float32, "dummy")


def randn(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    parallel.init(rank, 2, f"file://{store}")
    e, h, i = 5, 24, 14
    gate, w1, w2 = randn(e, h, seed=1), randn(e, 2 * i, h, seed=2), randn(e, h, i, seed=3)
    x = randn(7, h, seed=4)
    want = sparse_moe.reference(x, gate, w1, w2, 2)
    for cls, layer in ((VllmMixtralMoE, ()), (SGLangMixtralMoE, (0,))):
        moe = cls(e, 2, h, i, *layer)
        assert moe.experts.w13_weight.shape == (e, i, h) and moe.experts.w2_weight.shape == (e, h, i // 2)
        w13, down = moe.experts.w13_weight, moe.experts.w2_weight
        moe.gate.weight.weight_loader(moe.gate.weight, gate)
        for expert in range(e):
            w13.weight_loader(w13, w1[expert, :i], "", "w1", expert)
            w13.weight_loader(w13, w1[expert, i:], "", "w3", expert)
            down.weight_loader(down, w2[expert], "", "w2", expert)
        mine = slice(rank * i // 2, (rank + 1) * i // 2)
        assert torch.equal(w13, torch.cat((w1[:, :i][:, mine], w1[:, i:][:, mine]), dim=1))
        assert torch.equal(down, w2[:, :, mine])
        torch.testing.assert_close(moe(x), want, atol=2e-4, rtol=2e-5)
        for parameter, whole in ((w13, w1), (down, w2)):
            before = parameter.clone()
            parameter.data.zero_()
            parameter.weight_loader(parameter, whole)
            assert torch.equal(parameter, before)
    alone = VllmMixtralMoE(e, 2, h, i, tp_size=1)
    assert alone.experts.w2_weight.shape == (e, h, i)
    with pytest.raises(ValueError, match="intermediate size 15 cannot be divided over 2 ranks"):
        VllmMixtralMoE(e, 2, h, 15)
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    mp.spawn(worker, args=(str(tmp_path / "store"),), nprocs=2)
