"""The fastkernels lane end to end: our own server on a tiny model, measured, resumed and compared with itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from fk_bench.core.rows import read
from support.commands import fk_bench, last_json


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def test_fastkernels_lane(tiny: Path, tmp_path: Path) -> None:
    done = fk_bench(
        "serve-compare", "--model", tiny, "--lanes", "fastkernels", "--rounds", "2", "--concurrency", "1,4",
        "--num-prompts", "2,8", "--input-len", "33", "--output-len", "9", "--agreement-prompts", "3",
        "--out", tmp_path / "run", "--ready-timeout", "90", timeout=200,
    )  # fmt: skip
    line = last_json(done)
    assert done.returncode == 0 and line["ok"], done.stderr
    lane = line["lanes"][0]
    assert lane["lane"] == "fastkernels" and lane["output_tokens_per_s"] > 0
    assert lane["self_agreement"] == lane["token_agreement"] == 1.0
    rows, _ = read(Path(line["rows"]))
    rounds = [r for r in rows if r.kind == "round"]
    assert len(rounds) == 4
    for row in rounds:
        assert row.metrics["requests_failed"] == 0
        assert row.metrics["prompt_tokens"] == 33 * row.metrics["requests"]
        assert row.metrics["output_tokens"] == 9 * row.metrics["requests"]
        assert row.metrics["tokens_per_chunk_mean"] >= 1
    agreement = next(r for r in rows if r.kind == "agreement")
    assert agreement.case["unit"] == "tokens"
    done = fk_bench("diff", tmp_path / "run", tmp_path / "run", "--fail-under", "0.98")
    assert done.returncode == 0 and last_json(done)["ok"]


def test_our_server_has_same_size_as_hosts() -> None:
    from fk_bench.serving.lanes import Lane, Sizing, command

    sizing = Sizing(max_model_len=256, max_num_seqs=9, kv_tokens=1024, residents=1, tensor_parallel=2)
    made = command(Lane("fastkernels", "fastkernels", False, "python"), "MODEL", "name", 1, sizing)
    given = dict(itertools.pairwise(made))
    assert given["--num-blocks"] == "65"  # 64 of 16 tokens, and the one that is kept for padding
    assert (given["--max-num-seqs"], given["--tensor-parallel-size"]) == ("9", "2")


def test_joint_start_ignores_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fk_bench.core.machine import machine
    from fk_bench.serving import lanes

    found = machine()
    monkeypatch.setattr(lanes.machine, "machine", lambda: found.model_copy(update={"gpus": 2}))
    config = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    }
    assert lanes.kv_bytes(config) == 131072 and lanes.kv_bytes({}) is None
    sizing = lanes.Sizing(2048, 64, kv_tokens=65536, residents=3, tensor_parallel=2)
    for together in (False, True):
        sizing = replace(sizing, together=together, kv_bytes=131072)
        given = {
            host: dict(
                itertools.pairwise(
                    lanes.command(lanes.Lane(host, host, False, "python"), "M", "m", 1, sizing)
                )
            )
            for host in ("vllm", "sglang")
        }
        assert given["vllm"].get("--kv-cache-memory-bytes") == (str(4 << 30) if together else None)
        assert given["vllm"]["--num-gpu-blocks-override"] == "4096"
        assert given["sglang"]["--mem-fraction-static"] == ("0.85" if together else "0.29")
        env = lanes.environment(lanes.Lane("sglang", "sglang", False), "M", Path("r"), together)
        assert ("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK" in env) == together
