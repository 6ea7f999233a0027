"""quality.py: the text, its requests, and a table that sends a model's shapes to our kernels."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OTHERS = ("other", "order", "again")  # further unpatched runs


def english() -> str:
    """Return Python's documentation as text: 465,000 characters, 113,000 tokens of SmolLM2 (Python 3.11)."""
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items()))


def tokens_of(model: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids


@dataclass
class Sequence:
    """`prompt` is given and `tokens` are forced in decode steps; a prefill has only tokens."""

    batch: int
    tokens: list[int]
    prompt: list[int] = field(default_factory=list)
    at: int = 0


@dataclass
class Plan:
    """decode: sequences of each batch size in order; prefill: of one batch size. Serialized as JSON."""

    decode: list[Sequence]
    prefill: list[Sequence]
    seed: int = 0

    @property
    def total(self) -> int:
        return sum(len(s.tokens) for s in self.decode)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Plan:
        raw = json.loads(path.read_text())
        return cls(
            [Sequence(**s) for s in raw["decode"]], [Sequence(**s) for s in raw["prefill"]], raw["seed"]
        )

    def batches(self, phase: str, run: str) -> list[list[int]]:
        """Return the sequence numbers that are served together in a phase ('decode', 'prefill') of a run.

        'order' permutes them in batches of the same sizes, 'other' in random smaller batches (2 to 8 instead of 1); all
        other runs keep the text's order.
        """
        sequences: list[Sequence] = getattr(self, phase)
        found = []
        for batch in dict.fromkeys(s.batch for s in sequences):
            numbers = [i for i, s in enumerate(sequences) if s.batch == batch]
            rng = random.Random(f"{self.seed} {run} {batch}")
            if run in ("other", "order"):
                rng.shuffle(numbers)
            while numbers:
                size = (
                    batch if run != "other" else rng.randrange(1, batch) if batch > 1 else rng.randint(2, 8)
                )
                found.append(numbers[:size])
                del numbers[:size]
        return found


def plan(
    tokens: list[int],
    decode: dict[int, int],
    prompts: list[int],
    new: int,
    prefill: tuple[int, int],
    length: int,
) -> Plan:
    """Cut a text into sequences. Raises ValueError if the text is too short.

    decode: {batch: least number of forced tokens}, `new` a sequence, after prompts of these lengths in turn;
    prefill: (batch, least number of tokens) in sequences of `length`.
    """
    at, slot = 0, 0
    sequences = []
    for batch, wanted in decode.items():
        for i in range(-(-wanted // new)):
            start = at + prompts[i % len(prompts)]
            sequences.append(Sequence(batch, tokens[start : start + new], tokens[at:start], slot))
            at, slot = start + new, slot + new
    count = -(-prefill[1] // (length - 1))  # the first token of a sequence has no context
    texts = [Sequence(prefill[0], tokens[i * length : (i + 1) * length]) for i in range(count)]
    needed = max(at, count * length)
    if needed > len(tokens):
        raise ValueError(
            f"the text has {len(tokens)} tokens, {needed} are needed; use a longer --text or fewer tokens"
        )
    return Plan(sequences, texts)


def table(config: dict[str, Any], chip: str, context: int) -> str:
    """Return a tuned table (JSON) that sends this model's linear layers and decode attention to our kernels.

    config: a Llama's config.json; context: the longest. The entries were not measured, and the table says so.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // heads
    run = "quality"
    ours = {"run": run, "params": {}, "speedup": 1.0001, "ci95": [1.0001, 1.0001]}
    shapes = [
        ((heads + 2 * kv_heads) * size, hidden),
        (hidden, heads * size),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    if config.get("quantization_config"):  # FP8-dynamic: scales per token and per row
        op, kind, baseline = "linear_fp8", {"block": 1, "out_dtype": "bfloat16"}, "cutlass"
        few, many = "cuda-wgmma-fp8", "cuda-wgmma-fp8"
    else:
        op, kind, baseline = "linear", {"dtype": "bfloat16"}, "cublas"
        few, many = "cuda-skinny", "cuda-wgmma"
    entries: list[dict[str, Any]] = [
        {
            "op": op, "shape": {"N": n, "K": k, **kind}, "sizes": {"M": m}, "provider": few if m <= 8 else many,
            "baseline": baseline, **ours,
        }
        for n, k in dict.fromkeys(shapes)
        for m in (1, 8, 16, 32)
    ]  # fmt: skip
    entries += [
        {
            "op": "attention_decode",
            "shape": {
                "heads": heads, "kv_heads": kv_heads, "head_size": size, "block_size": block, "window": 0,
                "dtype": "bfloat16",
            },
            "sizes": {"batch": batch, "context": length}, "provider": "triton-split", "baseline": "fa3", **ours,
        }
        for block in (16, 1)  # vLLM's and SGLang's
        for batch in (1, 8, 32)
        for length in (context // 4, context)
    ]  # fmt: skip
    runs = {
        run: {
            "measured": "nothing: made by bench/experiments/quality/quality.py to run our kernels regardless of speed"
        }
    }
    return json.dumps(
        {"schema": "fastkernels.tuned/1", "chip": chip, "runs": runs, "entries": entries}, indent=1
    )
