"""Measure how far a bfloat16 model is from itself when only sums are taken in another order: a floor for any kernel.

    quality_noise.py SmolLM2-135M-Instruct --out rows.jsonl [--fp8]

Runs the model of transformers on the text of `fk-bench quality` on a CPU: bfloat16 between ops; every norm and linear
layer computes in float32 and rounds once. The variants split each sum into two halves: of the squares in norms, of
the products in linear layers, or both; nothing else differs. Rows: KL(unchanged || changed) and KL(float32 || changed)
in nats a token, and the perplexity relative to the unchanged model with a standard error as if tokens were independent.
The unchanged model runs twice; a divergence there is a bug of the script, and the exit status is 1. --fp8: linear
layers of the decoder in float8 with a scale a row, inputs with a scale a token; float32 uses the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
import torch.nn.functional as F
from experiments.checkpoints.make_checkpoint import FP8, LINEAR, quantized
from experiments.common.results import Results
from fk_bench.quality.text import english, tokens_of
from safetensors.torch import load_file

WHOLE = "nothing"
CHANGES = {WHOLE: (), "norms": ("norms",), "linears": ("linears",), "both": ("norms", "linears")}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights in float32; quantized weights are multiplied by their scales."""
    found = {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}
    scales = {n: found.pop(n).float() for n in list(found) if n.endswith(".weight_scale")}
    return {n: t.float() * scales.get(f"{n}_scale", 1.0) for n, t in found.items()}


def exact_model(folder: Path) -> Any:
    """Return the model in float32. Raises ValueError for weights that do not fit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unknown = model.load_state_dict(weights(folder), strict=False)
    if unknown or not set(missing) <= {"lm_head.weight"}:
        raise ValueError(f"{folder}: the model has no {unknown or 'weights for'} {missing}")
    model.tie_weights()
    return model.eval()


def cut(tokens: list[int], least: int, length: int) -> list[list[int]]:
    """Return sequences of `length` tokens with `least` that have a context. Raises ValueError for a short text."""
    count = -(-least // (length - 1))
    if count * length > len(tokens):
        raise ValueError(
            f"the text has {len(tokens)} tokens, {count * length} are needed; use a longer --text"
        )
    return [tokens[i * length : (i + 1) * length] for i in range(count)]


def compare(
    logits: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KL(reference || logits) in nats, and each token's log-probability by `logits`, in float64.

    logits, reference: [n, vocabulary]; tokens: [n].
    """
    q, p = (torch.log_softmax(x.double(), -1) for x in (logits, reference))
    return (p.exp() * (p - q)).sum(-1), q.gather(-1, tokens[:, None])[:, 0]


def summed(x: torch.Tensor, halves: bool) -> torch.Tensor:
    """Sum [..., n] to [..., 1] in float32."""
    parts = x.chunk(2, -1) if halves else (x,)
    return torch.stack([part.sum(-1, keepdim=True) for part in parts]).sum(0)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, halves: bool) -> torch.Tensor:
    """RMS norm of [..., n] in float32, rounded once to x's dtype."""
    exact = x.float()
    scale = torch.rsqrt(summed(exact.square(), halves) / x.shape[-1] + eps)
    return (exact * scale * weight.float()).to(x.dtype)


def linear(
    x: torch.Tensor, weight: torch.Tensor, halves: bool, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., K] times [N, K] transposed, in float32, rounded once to x's dtype. scale: [N, 1] of float8 weights."""
    count, inner = 2 if halves else 1, x.float()
    if scale is not None:
        largest = torch.finfo(FP8).max
        own = inner.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
        inner = (inner / own).clamp(-largest, largest).to(FP8).float()
    parts = zip(inner.chunk(count, -1), weight.float().chunk(count, -1), strict=True)
    found = sum(F.linear(a, b) for a, b in parts)
    if scale is not None:
        found = found * own * scale.float().t()
    return found.to(x.dtype)  # type: ignore[union-attr]


def quantize(model: torch.nn.Module, exact: torch.nn.Module) -> None:
    """Give a model's decoder linear layers float8 weights, and `exact` the same values in float32."""
    others = dict(exact.named_modules())
    for name, module in model.named_modules():
        if LINEAR.search(f"{name}.weight") and isinstance(module, torch.nn.Linear):
            values, module.scale = quantized(module.weight.data)  # type: ignore[assignment]
            module.values = values.float()  # type: ignore[assignment]
            others[name].weight.data = module.values * module.scale.float()  # type: ignore[operator, assignment]


def change(model: torch.nn.Module, parts: tuple[str, ...]) -> None:
    """Replace every RMS norm and linear layer of a model; those of `parts` ("norms", "linears") sum in two halves.

    Raises ValueError if the model has no RMS norm, or a linear layer with a bias.
    """
    norms = 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if module.bias is not None:
                raise ValueError(f"{name} has a bias; use a model without, such as Llama")
            held = getattr(module, "values", module.weight), getattr(module, "scale", None)
            module.forward = lambda x, h=held: linear(x, h[0], "linears" in parts, h[1])
        elif hasattr(module, "variance_epsilon"):
            norms += 1
            module.forward = lambda x, m=module: norm(x, m.weight, m.variance_epsilon, "norms" in parts)
    if not norms:
        raise ValueError("the model has no RMS norm with variance_epsilon; use a Llama")


@torch.inference_mode()
def divergences(
    folder: Path, sequences: list[list[int]], fp8: bool = False
) -> dict[str, dict[str, list[float]]]:
    """Return, for each variant and each token but a sequence's first: KL from the unchanged model and from float32, and
    how much less probable the token is than in the unchanged model, in nats.
    """
    from transformers import AutoModelForCausalLM

    exact = exact_model(folder)
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if fp8:
        quantize(rounded, exact)
    kinds = ("kl", "kl_exact", "loss")
    found: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name in CHANGES}

    def logits(model: Any, sequence: list[int]) -> torch.Tensor:
        return model(torch.tensor([sequence[:-1]])).logits[0].float()

    for sequence in sequences:
        tokens = torch.tensor(sequence[1:])
        wanted = logits(exact, sequence)
        change(rounded, CHANGES[WHOLE])
        host = logits(rounded, sequence)
        for name, parts in CHANGES.items():
            change(rounded, parts)
            own = logits(rounded, sequence)
            kl, of_token = compare(own, host, tokens)
            found[name]["kl"] += kl.tolist()
            found[name]["kl_exact"] += compare(own, wanted, tokens)[0].tolist()
            found[name]["loss"] += (compare(host, host, tokens)[1] - of_token).tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder: a Llama's config.json, weights, tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="rows are appended (JSONL)")
    parser.add_argument("--text", type=Path, help="default: Python's documentation")
    parser.add_argument("--tokens", type=int, default=2044, help="least number of tokens to compare")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--fp8", action="store_true", help="linears in float8, quantized here")
    args = parser.parse_args()
    if args.tokens < 1 or args.length < 2:
        parser.error(f"--tokens {args.tokens} and --length {args.length}: at least 1 and 2")
    text = args.text.read_text() if args.text else english()
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    sequences = cut(tokens_of(args.model, vocabulary, text), args.tokens, args.length)
    results = Results("quality-noise", args.out, baseline=WHOLE)
    results.versions["transformers"] = version("transformers")
    for name, found in divergences(args.model, sequences, args.fp8).items():
        count = len(found["kl"])
        metrics = {kind: math.fsum(values) / count for kind, values in found.items()}
        metrics["perplexity_rel"] = math.expm1(metrics.pop("loss"))
        metrics["perplexity_rel_se"] = statistics.pstdev(found["loss"]) / math.sqrt(count)
        wrong = f"KL from itself is {metrics['kl']:.3g}" if name == WHOLE and metrics["kl"] != 0 else ""
        case = {"halves": name, "model": args.model.name, "text": str(args.text or "pydoc_data.topics")}
        case |= {"weights": "fp8"} if args.fp8 else {}
        results.say("model", "torch", case, wrong, tokens=count, **metrics)
    raise SystemExit(1 if results.wrong else 0)


if __name__ == "__main__":
    main()
