"""A random checkpoint with the shapes of Llama-3.1-8B, for benchmarks on machines that reach no model hub.

    python bench/scenarios/make_checkpoint.py FOLDER [--layers 32] [--tokenizer FOLDER] [--quantize fp8]
    python bench/scenarios/make_checkpoint.py FOLDER --model FOLDER --quantize fp8

Matrices are N(0, 0.02), norms are 1, from a seeded generator: logits are spread, so that greedy tokens and
log-probabilities mean something (a host's own dummy weights give nearly uniform ones). The tokenizer is
another model's, padded to the vocabulary with added tokens.
--quantize fp8 writes the same model as an FP8-dynamic checkpoint in compressed-tensors format, which vLLM and SGLang
load: the linears of the decoder layers in float8_e4m3fn with a scale for each output channel, and activations that
the host quantizes token by token. Embeddings and the head stay bfloat16. With --model the weights are not random but
that model's (safetensors), for measurements on real text.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
LINEAR = re.compile(r"\.layers\.\d+\..*_proj\.weight$")
FP8 = torch.float8_e4m3fn
FP8_VALUES = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**FP8_VALUES, "strategy": "channel", "dynamic": False},
            "input_activations": {**FP8_VALUES, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


def matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(
        rows, columns, generator=generator, device=generator.device, dtype=torch.bfloat16
    ).mul_(0.02)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] as float8_e4m3fn and its scales [N, 1] in the dtype it had; no row may be all zeros."""
    largest = torch.finfo(FP8).max
    scale = weight.abs().amax(1, keepdim=True) / largest
    return (weight.float() / scale.float()).clamp_(-largest, largest).to(FP8), scale


def layer(config: dict, index: int, generator: torch.Generator, fp8: bool) -> dict[str, torch.Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for name, shape in shapes.items():
        full = f"model.layers.{index}.{name}.weight"
        tensors[full] = matrix(*shape, generator)
        if fp8:
            tensors[full], tensors[f"{full}_scale"] = quantized(tensors[full])
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.{index}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors


def tokenizer(source: Path, folder: Path, size: int) -> None:
    from tokenizers import Tokenizer

    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    made = Tokenizer.from_file(str(source / "tokenizer.json"))
    made.add_tokens([f"<extra_{i}>" for i in range(made.get_vocab_size(), size)])
    made.save(str(folder / "tokenizer.json"))


def list_files(index: dict[str, str], folder: Path) -> None:
    listing = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))


def quantize_model(source: Path, folder: Path) -> None:
    """A real model's files, with the linears of its decoder layers in FP8."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{source} has no .safetensors: --model needs a folder with a model's weights")
    index: dict[str, str] = {}
    for file in files:
        tensors = load_file(file)
        for name in [n for n in tensors if LINEAR.search(n)]:
            tensors[name], tensors[f"{name}_scale"] = quantized(tensors[name])
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file.name))
    list_files(index, folder)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json"):
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": FP8_DYNAMIC}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer is taken")
    parser.add_argument("--quantize", choices=("fp8",), help="FP8-dynamic, in compressed-tensors format")
    parser.add_argument("--model", type=Path, help="folder of a model to quantize, instead of random weights")
    args = parser.parse_args()
    if args.model:
        if not args.quantize:
            parser.error("--model is for --quantize: as it is, the model needs no other checkpoint")
        quantize_model(args.model, args.folder)
        return
    config = {**CONFIG, "num_hidden_layers": args.layers}
    if args.quantize:
        config["quantization_config"] = FP8_DYNAMIC
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    args.folder.mkdir(parents=True, exist_ok=True)
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    shards = [{"model.embed_tokens.weight": matrix(vocab, hidden, generator)}]
    index: dict[str, str] = {}
    for number in range(args.layers + 1):
        shard = shards.pop() if number == 0 else layer(config, number - 1, generator, bool(args.quantize))
        if number == args.layers:
            shard["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
            shard["lm_head.weight"] = matrix(vocab, hidden, generator)
        file = f"model-{number + 1:05d}-of-{args.layers + 1:05d}.safetensors"
        shard = {name: tensor.cpu() for name, tensor in shard.items()}
        save_file(shard, args.folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    list_files(index, args.folder)
    (args.folder / "config.json").write_text(json.dumps(config, indent=1))
    if args.tokenizer:
        tokenizer(args.tokenizer, args.folder, vocab)


if __name__ == "__main__":
    main()
