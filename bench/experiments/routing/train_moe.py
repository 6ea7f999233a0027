"""Train small mixture-of-experts language models for less than a minute each, on text that this machine has.

    train_moe.py --out FOLDER [--presets e8k2,e128k8] [--seconds 60] [--device cuda]

The models provide skewed routing of trained routers, though not production's. Architecture: transformers'
MixtralForCausalLM; e8k2 has the experts and choices of Mixtral-8x7B (8, 2), e128k8 those of Qwen3-30B-A3B (128, 8). The
balancing loss is Switch Transformers' (per layer, over the batch) with the coefficient of Mixtral-8x7B's config.json,
0.02. FOLDER receives PRESET/ (a checkpoint with its tokenizer), held_out.json (texts for evaluation) and rows.jsonl
(training loss, held-out loss, and each layer's load over held-out text).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import numpy as np
import torch
from experiments.routing import moe_text
from experiments.routing.moe_model import (
    PRESETS,
    Model,
    Sizes,
    grouped_experts,
    grouped_works,
    loop_experts,
    save,
)
from fk_bench.core import machine
from fk_bench.core.rows import Row, Subject, append
from fk_bench.routing.stats import load_stats

AUX = 0.02
KEPT = 48 << 10  # held-out characters of each kind for a capture
EVALUATED = 1 << 20  # characters of each kind for loss and load


def encode(tokenizer: Any, texts: list[str]) -> np.ndarray:
    """Encode all texts as one sequence of ids, with </s> after each."""
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 4096):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 4096], add_special_tokens=False):
            parts.append(np.array([*encoding.ids, 1], dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


class Batches:
    """Random stretches of the training text; each batch is prepared during the step before it."""

    def __init__(self, tokens: np.ndarray, rows: int, length: int, device: torch.device) -> None:
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.rows, self.length = rows, length
        self.generator = torch.Generator(device).manual_seed(0)

    def next(self) -> torch.Tensor:
        high = len(self.tokens) - self.length - 1
        at = torch.randint(0, high, (self.rows, 1), generator=self.generator, device=self.tokens.device)
        return self.tokens[at + torch.arange(self.length + 1, device=self.tokens.device)].long()


def optimizer(model: Model, device: torch.device) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")


def rate(done: float, highest: float) -> float:
    """Learning rate by the share of time passed: linear warm-up over 3%, then half a cosine down to a tenth."""
    if done < 0.03:
        return highest * (0.02 + done / 0.03)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * min((done - 0.03) / 0.97, 1.0))))


def train(model: Model, batches: Batches, seconds: float, highest: float, note: Any) -> dict[str, float]:
    """Train until the time is over; call note(step, tokens, seconds, loss, balance) about twenty times."""
    device = batches.tokens.device
    opt = optimizer(model, device)
    began, step, told = time.monotonic(), 0, -1.0
    while True:
        spent = time.monotonic() - began
        if spent >= seconds and step:
            break
        for group in opt.param_groups:
            group["lr"] = rate(spent / seconds, highest)
        loss, balance, _ = model.loss(batches.next())
        (loss + AUX * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        if step % 8 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # keep clock and schedule in step with the GPU
        if spent - told >= seconds / 20:
            told = spent
            note(step, step * batches.rows * batches.length, spent, loss.item(), balance.item())
    return {
        "steps": step,
        "tokens": step * batches.rows * batches.length,
        "seconds": time.monotonic() - began,
    }


@torch.no_grad()
def evaluate(model: Model, tokens: np.ndarray, length: int, device: torch.device) -> tuple[float, np.ndarray]:
    """Return the mean loss a token, and tokens by layer and expert [layers, E], over held-out text."""
    count = max(1, (len(tokens) - 1) // length)
    counts = torch.zeros(model.s.layers, model.s.experts, device=device)
    total, seen = 0.0, 0
    for start in range(0, count, 16):
        rows = [tokens[i * length : (i + 1) * length + 1] for i in range(start, min(start + 16, count))]
        rows = [r for r in rows if len(r) == len(rows[0])]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)
        loss, _, routed = model.loss(batch)
        total, seen = total + loss.item() * len(rows), seen + len(rows)
        for layer, ids in enumerate(routed):
            counts[layer] += torch.bincount(ids.reshape(-1), minlength=model.s.experts)
    return total / seen, counts.cpu().numpy()


def one(
    name: str, sizes: Sizes, options: argparse.Namespace, data: dict[str, Any], dtype: torch.dtype
) -> None:
    """Train, save and measure one preset."""
    device = torch.device(options.device)
    problem = grouped_works(device, dtype)
    torch.manual_seed(0)
    model = Model(sizes, dtype, loop_experts if problem else grouped_experts).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{name}: {parameters / 1e6:.2f} M parameters; grouped products: {problem or 'yes'}", flush=True)
    settings = {
        "preset": name,
        "parameters": parameters,
        "dtype": str(dtype).removeprefix("torch."),
        **asdict(sizes),
    }
    settings |= {"aux": AUX, "rows": options.rows, "length": options.length, "highest_rate": options.rate}

    def row(kind: str, metrics: dict[str, float], **more: Any) -> None:
        made = Row(
            run_id="train_moe", command="train_moe", machine=machine.machine(), commit=machine.commit(),
            versions={"torch": torch.__version__}, subject=Subject(model=f"small-moe-trained-{name}"),
            case={"kind": kind, **settings, **more}, metrics=metrics,
        )  # fmt: skip
        append(options.out / "rows.jsonl", [made])
        shown = " ".join(f"{k}={v:.4g}" for k, v in metrics.items())
        print(
            f"{name} {kind} {' '.join(f'{k}={v}' for k, v in more.items() if k != 'counts')} {shown}",
            flush=True,
        )

    def note(step: int, tokens: int, spent: float, loss: float, balance: float) -> None:
        row("step", {"tokens": tokens, "seconds": spent, "loss": loss, "balance": balance}, step=step)

    batches = Batches(data["train"], options.rows, options.length, device)
    done = train(model, batches, options.seconds, options.rate, note)
    files = save(model, options.out / name, AUX)
    moe_text.save_tokenizer(data["tokenizer"], options.out / name)
    row("trained", done, training_tokens=len(data["train"]), files=len(files))
    for kind, tokens in data["held_out"].items():
        loss, counts = evaluate(model, tokens, options.length, device)
        row("held_out", {"loss": loss, "perplexity": math.exp(loss), "tokens": len(tokens)}, text=kind)
        for layer, count in enumerate(counts):
            row("load", load_stats(count), text=kind, layer=layer, counts=[int(c) for c in count])


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare text, tokenizer and ids, shared by all presets; write held_out.json."""
    began = time.monotonic()
    pieces = moe_text.collect(options.megabytes << 20, options.workers, options.text or None)
    print(
        f"text: {pieces.files} files, {pieces.nbytes() / 1e6:.1f} MB, {time.monotonic() - began:.1f} s",
        flush=True,
    )
    order = np.random.default_rng(0)
    train = [t for texts in pieces.train.values() for t in texts]
    order.shuffle(train)  # type: ignore[arg-type]
    sample, size = [], 0
    for text in train:
        sample.append(text)
        size += len(text)
        if size > options.megabytes << 17:  # an eighth
            break
    tokenizer = moe_text.train_tokenizer(sample, options.vocab)
    print(f"tokenizer: {tokenizer.get_vocab_size()} ids, {time.monotonic() - began:.1f} s", flush=True)
    held: dict[str, np.ndarray] = {}
    kept: dict[str, list[str]] = {}
    for kind, texts in pieces.held_out.items():
        order.shuffle(texts)  # type: ignore[arg-type]
        held[kind] = encode(tokenizer, _first(texts, EVALUATED))
        kept[kind] = _first([t for t in texts if len(t) > 800], KEPT)
    (options.out / "held_out.json").write_text(json.dumps(kept))
    parts = [train[i :: options.workers] for i in range(options.workers)]
    with ThreadPoolExecutor(options.workers) as pool:  # the tokenizer releases the GIL
        ids = list(pool.map(lambda texts: encode(tokenizer, texts), parts))
    tokens = np.concatenate(ids)
    if len(tokens) < 2 * options.length:
        raise SystemExit(
            f"only {len(tokens)} tokens of text found in {options.text or moe_text.roots()}: give --text FOLDER"
        )
    print(f"tokens: {len(tokens) / 1e6:.1f} M, {time.monotonic() - began:.1f} s", flush=True)
    made = {"kind": "text", "files": pieces.files, "vocab": tokenizer.get_vocab_size()}
    sizes = {f"{k}_bytes": float(sum(map(len, t))) for k, t in pieces.train.items()}
    metrics = {**sizes, "tokens": len(tokens), "seconds": time.monotonic() - began}
    metrics |= {f"held_out_{k}_tokens": float(len(t)) for k, t in held.items()}
    row = Row(run_id="train_moe", command="train_moe", machine=machine.machine(), case=made, metrics=metrics)
    append(options.out / "rows.jsonl", [row])
    return {
        "tokenizer": tokenizer,
        "train": tokens,
        "held_out": {k: t for k, t in held.items() if len(t) > 64},
    }


def _first(texts: list[str], size: int) -> list[str]:
    """Return whole texts from the front, about `size` characters; each counts with at most an eighth of that."""
    taken: list[str] = []
    for text in texts:
        if size <= 0:
            break
        taken.append(text[: max(size // 8, 4096)])
        size -= len(taken[-1])
    return taken


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--presets", default="e8k2,e128k8", help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--seconds", type=float, default=50.0, help="of training, for each preset")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=128, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--megabytes", type=int, default=64, help="of text, at most")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--text", type=Path, nargs="*", help="folders of text (default: Python's and the system's)"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    names = options.presets.split(",")
    unknown = [n for n in names if n not in PRESETS]
    if unknown:
        raise SystemExit(f"--presets: unknown preset {unknown[0]!r}, known: {', '.join(PRESETS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    data = prepare(options)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    for name in names:
        one(name, replace(PRESETS[name], vocab=data["tokenizer"].get_vocab_size()), options, data, dtype)


if __name__ == "__main__":
    main()
