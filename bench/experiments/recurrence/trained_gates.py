"""Train tiny hybrids for a few steps and capture the calls of their recurrences, with gates and decays: see README.md.

trained_gates.py --out FOLDER [--models mamba2,jamba] [--steps 200]
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from fk_bench.core.small_model import small_model
from safetensors.torch import load_file, save_file

from fastkernels.capture.calls import digest

ROOT = Path(__file__).resolve().parents[3]
SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TOKENS, SEQUENCES = 96, 4  # of a step
SIGNATURES, ROW_BYTES = 5, 4096  # of an op, of a tensor's sampled rows


@dataclass(frozen=True)
class Hybrid:
    """name: of transformers' classes. ops: those whose calls are kept."""

    name: str
    fields: dict[str, Any]
    ops: tuple[str, ...]


HYBRIDS = {
    "qwen3_next": Hybrid(
        "Qwen3Next",
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
            "shared_expert_intermediate_size": 64, **EXPERTS,
        },
        ("gated_delta_rule", "delta_gates", "causal_conv1d"),
    ),
    "kimi_linear": Hybrid(
        "KimiLinear",
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_heads": 4, "linear_head_dim": 32,
            "mlp_layer_types": ["dense"] * 4, "num_key_value_heads": 4,
            "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
            "v_head_dim": 32, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 64,
        },
        ("kda",),
    ),
    "jamba": Hybrid(
        "Jamba",
        {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 16, "mamba_dt_rank": 16},
        ("mamba_scan",),
    ),
    "mamba2": Hybrid(
        "Mamba2",
        {"expand": 2, "num_heads": 8, "head_dim": 32, "n_groups": 2, "state_size": 32, "chunk_size": 32},
        ("ssd",),
    ),
}  # fmt: skip


def text_ids() -> torch.Tensor:
    """The guides of this repository as ids of the byte tokenizer."""
    from transformers import AutoTokenizer

    words = "\n".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))
    return torch.tensor(AutoTokenizer.from_pretrained(small_model())(words)["input_ids"])


def trained(hybrid: Hybrid, ids: torch.Tensor, steps: int) -> tuple[Any, dict[str, float]]:
    """A model after so many steps of AdamW on the text, and its first and last losses."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{hybrid.name}Config")(**{**SIZES, **hybrid.fields})
    model = getattr(transformers, f"{hybrid.name}ForCausalLM")(config).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(ids) - TOKENS - 1, (SEQUENCES,))
        batch = torch.stack([ids[s : s + TOKENS] for s in starts.tolist()])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    last = losses[-10:]
    return model, {"steps": steps, "first_loss": losses[0], "last_loss": sum(last) / len(last)}


def capture(name: str, out: Path, steps: int, ids: torch.Tensor) -> None:
    """Write OUT/small-trained-NAME, whose description has the steps and losses of the training."""
    hybrid = HYBRIDS[name]
    model, training = trained(hybrid, ids, steps)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / f"small-trained-{name}"
        model.bfloat16().save_pretrained(folder)
        for file in small_model().glob("tokenizer*"):
            shutil.copy(file, folder)
        command = [
            sys.executable, "-m", "fk_bench.cli", "capture", str(folder), "--values", "sample", "--out", str(out),
            "--name", folder.name,
        ]  # fmt: skip
        subprocess.run(command, check=True)
    shortened(out / folder.name, hybrid.ops, training)
    print(f"{out / folder.name}: {training}", flush=True)


def shortened(folder: Path, ops: tuple[str, ...], training: dict[str, float]) -> None:
    """Leave one set of values of the most frequent signatures of these ops, with few rows of each tensor."""
    file = folder / "capture.json"
    what = "a tiny random model after a few steps of training: gates with structure, not those of a published model"
    data = {**json.loads(file.read_text()), "what": what, "training": training, "modules": []}
    data["ops"] = {op: calls for op, calls in data["ops"].items() if op in ops}
    kept: dict[str, torch.Tensor] = {}
    tensors = load_file(folder / "values.safetensors")
    for op in data["ops"].values():
        valued = [call for call in op["calls"] if call.get("values")]
        op["calls"] = valued[:SIGNATURES]
        left = op["count"] - sum(call["count"] for call in op["calls"])
        op["dropped"] |= {"signatures": op["signatures"] - len(op["calls"]), "calls": left}
        for call in op["calls"]:
            call["values"] = call["values"][:1]
            shapes = {a["name"]: a.get("shape") for a in call["args"]}
            values = call["values"][0]["args"]
            for name, found in values.items():
                if isinstance(found, str):
                    few = rows(tensors[found], shapes[name])
                    values[name] = digest(few)
                    kept[values[name]] = few
    file.write_text(json.dumps(data, separators=(",", ":")))
    save_file(kept, folder / "values.safetensors")
    for each in (file, folder / "values.safetensors"):
        each.with_name(f"{each.name}.xz").write_bytes(lzma.compress(each.read_bytes(), preset=9))
        each.unlink()


def rows(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Rows of a sample within ROW_BYTES, evenly spread; other tensors as they are."""
    room = max(ROW_BYTES // max(tensor[0].numel() * tensor.element_size(), 1), 1) if tensor.dim() == 2 else 0
    if not room or list(tensor.shape) == shape or len(tensor) <= room:
        return tensor
    return tensor[torch.linspace(0, len(tensor) - 1, room).long()].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(HYBRIDS))
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    ids = text_ids()
    for name in args.models.split(","):
        capture(name, args.out, args.steps, ids)


if __name__ == "__main__":
    main()
