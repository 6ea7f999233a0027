"""Write a random checkpoint in the shapes of Llama-3.1-8B or Mixtral, for machines without a model hub.

    make_checkpoint.py FOLDER [--layers 32] [--tokenizer FOLDER] [--quantize fp8]
    make_checkpoint.py FOLDER --config mixtral-8x7b --layers 8 [--quantize fp8-block]
    make_checkpoint.py FOLDER --model FOLDER --quantize fp8

Matrices are N(0, 0.02) and norms are 1, from a seeded generator. Logits are spread, so that greedy tokens and
log-probabilities are meaningful; a host's own dummy weights give nearly uniform ones. The tokenizer is copied from
another model and padded to the vocabulary with added tokens.

--quantize fp8 writes an FP8-dynamic checkpoint in compressed-tensors format, which vLLM and SGLang load: the linear
layers of the decoder in float8_e4m3fn with one scale per output channel, and activations quantized per token by the
host. Embeddings, the head and routers stay bfloat16. --quantize fp8-block has one scale per 128 x 128 weights, the
format of DeepSeek's and Qwen's FP8 checkpoints. With --model the weights are that model's (safetensors).
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
_GPT = {
    "num_attention_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "router_aux_loss_coef": 0.001, "output_router_logits": False, "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = {
    "mixtral-8x7b": {
        **_GPT, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None,
    },
    "qwen3-30b-a3b": {
        **_GPT, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960, "use_sliding_window": False,
    },
}  # fmt: skip
LINEAR = re.compile(r"\.layers\.\d+\..*(_proj|\.w[123])\.weight$")
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
BLOCK = 128


def matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(
        rows, columns, generator=generator, device=generator.device, dtype=torch.bfloat16
    ).mul_(0.02)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [N, K] to float8_e4m3fn with scales [N, 1] in the input's dtype; no row may be all zeros."""
    largest = torch.finfo(FP8).max
    scale = weight.abs().amax(1, keepdim=True) / largest
    return (weight.float() / scale.float()).clamp_(-largest, largest).to(FP8), scale


def quantized_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [N, K] to float8_e4m3fn with float32 scales per block, rounded up; no block may be all zeros."""
    (n, k), largest = weight.shape, torch.finfo(FP8).max
    padded = torch.nn.functional.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / largest
    values = (blocks / scale[:, None, :, None]).clamp_(-largest, largest).to(FP8)
    return values.flatten(2).flatten(0, 1)[:n, :k].contiguous(), scale


def in_float8(name: str, weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear layer for a kind of --quantize."""
    if kind == "fp8-block":
        values, scale = quantized_blocks(weight)
        return {name: values, f"{name}_scale_inv": scale}
    values, scale = quantized(weight)
    return {name: values, f"{name}_scale": scale}


def quantization(config: dict, kind: str) -> dict:
    """Return the checkpoint's quantization_config."""
    gates = [f"model.layers.{i}.{moe_name(config)}.gate" for i in range(config["num_hidden_layers"])]
    ignored = ["lm_head", *(gates if expert_shapes(config) else [])]
    if kind == "fp8":
        return {**FP8_DYNAMIC, "ignore": ignored}
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ignored,
    }  # fmt: skip


def moe_name(config: dict) -> str:
    return "block_sparse_moe" if config["model_type"] == "mixtral" else "mlp"


def expert_shapes(config: dict) -> dict[str, tuple[int, int]]:
    """Return {name: shape} of a layer's experts and router; {} for a dense model."""
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts is None:
        return {}
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    mixtral = config["model_type"] == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    name = moe_name(config)
    shapes = {f"{name}.gate": (experts, hidden)}
    for i in range(experts):
        parts = {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
        shapes |= {f"{name}.experts.{i}.{part}": shape for part, shape in parts.items()}
    return shapes


def layer(
    config: dict, index: int, generator: torch.Generator, kind: str | None = None
) -> dict[str, torch.Tensor]:
    """kind: of --quantize."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    dense = {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        **(expert_shapes(config) or dense),
    }
    tensors = {}
    for name, shape in shapes.items():
        full = f"model.layers.{index}.{name}.weight"
        weight = matrix(*shape, generator)
        tensors |= in_float8(full, weight, kind) if kind and LINEAR.search(full) else {full: weight}
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "qwen3_moe":
        norms |= {"self_attn.q_norm": config["head_dim"], "self_attn.k_norm": config["head_dim"]}
    for norm, width in norms.items():
        tensors[f"model.layers.{index}.{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    return tensors


def tokens_of(source: Path) -> int:
    """Return the number of tokens of the tokenizer in a folder."""
    from tokenizers import Tokenizer

    return int(Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab_size())


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


def quantize_model(source: Path, folder: Path, kind: str) -> None:
    """Copy a real model with the linear layers of its decoder in FP8."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{source} has no .safetensors: --model needs a folder with a model's weights")
    index: dict[str, str] = {}
    for file in files:
        tensors = load_file(file)
        for name in [n for n in tensors if LINEAR.search(n)]:
            tensors |= in_float8(name, tensors.pop(name), kind)
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file.name))
    list_files(index, folder)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json"):
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization(config, kind)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", choices=("llama-3.1-8b", *EXPERTS), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="default: the model's number")
    parser.add_argument("--tokenizer", type=Path, help="folder to copy the tokenizer from")
    parser.add_argument("--quantize", choices=("fp8", "fp8-block"), help="see above")
    parser.add_argument("--model", type=Path, help="folder of a model to quantize, instead of random weights")
    args = parser.parse_args()
    if args.model:
        if not args.quantize:
            parser.error("--model needs --quantize")
        quantize_model(args.model, args.folder, args.quantize)
        return
    config = dict({"llama-3.1-8b": CONFIG, **EXPERTS}[args.config])
    layers = config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    if args.tokenizer:  # a larger tokenizer enlarges the vocabulary
        config["vocab_size"] = max(config["vocab_size"], -(-tokens_of(args.tokenizer) // 64) * 64)
    if args.quantize:
        config["quantization_config"] = quantization(config, args.quantize)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    args.folder.mkdir(parents=True, exist_ok=True)
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    shards = [{"model.embed_tokens.weight": matrix(vocab, hidden, generator)}]
    index: dict[str, str] = {}
    for number in range(layers + 1):
        shard = shards.pop() if number == 0 else layer(config, number - 1, generator, args.quantize)
        if number == layers:
            shard["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
            shard["lm_head.weight"] = matrix(vocab, hidden, generator)
        file = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        shard = {name: tensor.cpu() for name, tensor in shard.items()}
        save_file(shard, args.folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    list_files(index, args.folder)
    (args.folder / "config.json").write_text(json.dumps(config, indent=1))
    if args.tokenizer:
        tokenizer(args.tokenizer, args.folder, vocab)


if __name__ == "__main__":
    main()
