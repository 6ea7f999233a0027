"""Time decoding with drafts that are accepted by force, against decoding without drafts, in this process.

Weights are random. A line of JSON for each lane, acceptance length and number of sequences.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastkernels import LLM, SamplingParams

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]"
LANES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "chain": {"num_speculative_tokens": 3},
    "tree": {"num_speculative_tokens": 8, "speculative_token_tree": TREE},
}
TARGET: dict[str, Any] = {  # Llama-3.2-1B's sizes
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "torch_dtype": "float32",
}  # fmt: skip


def checkpoints(folder: Path, small: bool) -> tuple[Path, Path]:
    """Folders of a target and its draft model, with a config only."""
    target = {**TARGET, **(SMALL if small else {})}
    draft = {
        **target, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False,
        "draft_vocab_size": 300 if small else 32000,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3] if small else None,
    }  # fmt: skip
    made = []
    for name, fields in (("target", target), ("draft", draft)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(
            json.dumps({k: v for k, v in fields.items() if v is not None})
        )
        made.append(folder / name)
    return made[0], made[1]


def measure(llm: LLM, sequences: int, tokens: int, rounds: int) -> float:
    """The least time of a round in seconds: so many sequences with so many generated tokens each."""
    params, times = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False), []
    for turn in range(rounds + 1):
        prompts = [[(turn * 7 + i * 13 + j) % 500 for j in range(64)] for i in range(sequences)]
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times += [time.perf_counter() - begin] if turn else []
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a few channels, for a CPU")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--lengths", default="1,2,3")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    sizes = [int(n) for n in given.sequences.split(",")]
    plain: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = checkpoints(Path(scratch), given.small)
        for lane, settings in LANES.items():
            options: dict[str, Any] = {
                "device": given.device, "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": max(sizes),
                "max_model_len": 512, "max_num_batched_tokens": 2048, "enable_prefix_caching": False,
                "num_blocks": 33 * max(sizes) + 1,
            }  # fmt: skip
            if settings is not None:
                forced = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.0}
                options["speculative_config"] = {
                    "method": "eagle3",
                    "model": str(draft),
                    **settings,
                    **forced,
                }
            llm = LLM(str(target), **options)
            scheduler = llm.llm_engine.scheduler
            for length in [1.0] if settings is None else map(float, given.lengths.split(",")):
                if scheduler.speculation is not None:
                    scheduler.speculation = replace(scheduler.speculation, synthetic_acceptance_length=length)
                for size in sizes:
                    spent = measure(llm, size, given.tokens, given.rounds)
                    plain.setdefault(size, spent)
                    rate, speedup = size * given.tokens / spent, plain[size] / spent
                    row = {"lane": lane, "sequences": size, "tokens_per_s": round(rate, 1)}
                    if settings is not None:
                        row |= {"synthetic_acceptance": length, "speedup": round(speedup, 3)}
                    print(json.dumps(row), flush=True)
            llm.llm_engine.shutdown()
            del llm, scheduler


if __name__ == "__main__":
    main()
