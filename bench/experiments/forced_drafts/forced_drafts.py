"""Time decoding with drafts that are accepted by force, against decoding without drafts, in this process.

Weights are random. A line of JSON for each lane, acceptance length and number of sequences: tokens/s, the time of a
step, and its parts in ms:

verification  the target over all tokens of the step
sampling      logits of these, sampling and the number of accepted drafts
draft         all passes of the draft model
host          the rest, in which the device waits

On a GPU, a step is one CUDA graph, and graphs of its parts are timed apart. On the CPU, calls are timed while it
decodes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastkernels import LLM, SamplingParams
from fastkernels.engine.execution.drafts import draft_costs
from fastkernels.engine.steps.step import StepInput

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]"
LANES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "chain": {"num_speculative_tokens": 3},
    "tree": {"num_speculative_tokens": 8, "speculative_token_tree": TREE},
}
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {  # Llama-3.1-8B's, Llama-3.2-1B's, and a few channels for a CPU
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "small": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "torch_dtype": "float32",
        "tie_word_embeddings": True,
    },
}  # fmt: skip
ROUNDS = 20  # of a part on a GPU


def checkpoints(folder: Path, size: str) -> tuple[Path, Path]:
    """Folders of a target and its draft model, with a config only."""
    target, small = {**COMMON, **SIZES[size]}, size == "small"
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


class Timer:
    """Seconds in the calls of methods, and the number of launched steps."""

    def __init__(self, llm: LLM):
        runner = llm.llm_engine.runner
        self.runner, self.spent, self.steps = runner, dict[str, float](), 0
        launch = runner.launch

        def counted(step: StepInput) -> Any:
            self.steps += 1
            return launch(step)

        runner.launch = counted
        if runner.device.type == "cpu":
            self._time(runner, "_forward", "verification")
            self._time(runner, "_verify", "sampling")
            self._time(runner, "sampler", "sampling")
            if runner.drafter is not None:
                for method in ("first", "chain"):
                    self._time(runner.drafter, method, "draft")

    def _time(self, owner: Any, name: str, part: str) -> None:
        run = getattr(owner, name)

        class Timed:
            """The original, with its calls timed."""

            def __getattr__(_, attribute: str) -> Any:
                return getattr(run, attribute)

            def __call__(_, *args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                made = run(*args, **kwargs)
                self.spent[part] = self.spent.get(part, 0.0) + time.perf_counter() - begin
                return made

        setattr(owner, name, Timed())

    def reset(self) -> None:
        self.spent, self.steps = {}, 0


def measure(
    llm: LLM, timer: Timer, sequences: int, tokens: int, rounds: int
) -> tuple[float, float, dict[str, float]]:
    """Of the fastest round: seconds, seconds of a step, and on a CPU those of its parts.

    A round is so many sequences with so many generated tokens each.
    """
    params, found = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False), []
    for turn in range(rounds + 1):
        prompts = [[(turn * 7 + i * 13 + j) % 500 for j in range(64)] for i in range(sequences)]
        timer.reset()
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        spent = time.perf_counter() - begin
        parts = {part: seconds / timer.steps for part, seconds in timer.spent.items()}
        found += [(spent, spent / timer.steps, parts)] if turn else []
    return min(found, key=lambda made: made[0])


def on_device(run: Callable[[], Any]) -> float:
    """Seconds of a call on the GPU, if it takes longer there than its launch."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    for _ in range(ROUNDS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / ROUNDS / 1e3


@torch.inference_mode()
def parts_of_graphs(llm: LLM, rows: int) -> dict[str, float]:
    """Seconds of the parts of a step's graph, for as many sequences. Empty for trees, which have no such graph."""
    runner, settings = llm.llm_engine.runner, llm.llm_engine.scheduler.speculation
    count, longest = settings.num_speculative_tokens if settings else 3, runner.limits.max_model_len
    plain, drafted = draft_costs.steps(rows, count, longest, settings is not None)
    graphs, drafter = runner.graphs, runner.drafter
    step = plain if settings is None else drafted
    runner.launch(step).result()
    step = replace(step, new_rows=())
    if settings is None:
        return {"verification": on_device(lambda: graphs.run(step))}  # with logits and sampling
    if settings.tree is not None or graphs.run_verify(step) is None:
        return {}
    drafter.load(step)
    whole = on_device(lambda: graphs.run_verify(step))
    target = on_device(lambda: graphs.run(step))
    draft = on_device(graphs.run_first) + on_device(lambda: graphs.run_chain(rows))
    return {"verification": target, "draft": draft, "sampling": whole - target - draft}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="8b", choices=list(SIZES))
    parser.add_argument("--lanes", default="plain,chain", help="of plain (always the first), chain, tree")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--lengths", default="1,2,3")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--two-steps",
        action="store_true",
        help="schedule a step while the previous one runs, also with drafts",
    )
    given = parser.parse_args()
    lanes, sizes = given.lanes.split(","), [int(n) for n in given.sequences.split(",")]
    if lanes[0] != "plain" or not set(lanes) <= set(LANES):
        parser.error(f"--lanes {given.lanes} must be 'plain', then some of {', '.join(list(LANES)[1:])}")
    if given.two_steps and "tree" in lanes:
        parser.error("--two-steps: trees have one step in flight")
    plain: dict[int, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = checkpoints(Path(scratch), given.size)
        for lane in lanes:
            settings = LANES[lane]
            options: dict[str, Any] = {
                "device": given.device, "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": max(sizes),
                "max_model_len": 512, "max_num_batched_tokens": 512, "enable_prefix_caching": False,
                "num_blocks": 33 * max(sizes) + 1,
            }  # fmt: skip
            if given.two_steps:
                options["async_scheduling"] = True
            if settings is not None:
                forced = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.0}
                options["speculative_config"] = {
                    "method": "eagle3",
                    "model": str(draft),
                    **settings,
                    **forced,
                }
            llm = LLM(str(target), **options)
            scheduler, timer = llm.llm_engine.scheduler, Timer(llm)
            for length in [1.0] if settings is None else map(float, given.lengths.split(",")):
                if scheduler.speculation is not None:
                    scheduler.speculation = replace(scheduler.speculation, synthetic_acceptance_length=length)
                for size in sizes:
                    spent, step, parts = measure(llm, timer, size, given.tokens, given.rounds)
                    if given.device != "cpu":
                        parts = parts_of_graphs(llm, size)
                    plain.setdefault(size, (spent, step))
                    row = {
                        "lane": lane, "sequences": size, "tokens_per_s": round(size * given.tokens / spent, 1),
                        "step_ms": round(step * 1e3, 3), **{part: round(s * 1e3, 3) for part, s in parts.items()},
                    }  # fmt: skip
                    if parts:
                        row["host"] = round((step - sum(parts.values())) * 1e3, 3)
                    if settings is not None:
                        row |= {
                            "synthetic_acceptance": length, "speedup": round(plain[size][0] / spent, 3),
                            "step_over_plain": round(step / plain[size][1], 3),
                        }  # fmt: skip
                    print(json.dumps(row), flush=True)
            llm.llm_engine.shutdown()
            del llm, scheduler, timer


if __name__ == "__main__":
    main()
