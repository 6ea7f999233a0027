"""Time a whole decode step in one CUDA graph, as the engine captures it, with several sets of kernels.

    decode_step.py --rows skinny.jsonl --out rows.jsonl [--batch 1,8,16,32] [--context 512] [--until logits]
        [--longest 131072]
    decode_step.py --tables shipped,trial=table.json --attention table --free silu_and_mul ...

The step starts with token ids and block tables and ends with greedy tokens. The model is ours (fastkernels.models),
with random weights in Llama-3.1-8B's shapes; its small ops run their first provider. --rows of skinny_linear.py become
a tuned table with the fastest right set for each layer and number of tokens. --tables are other tables; attention
`table` uses their choice. --free replaces each of these ops by nothing, and then all together: results are wrong, and
the saving is the most that a fusion of the op could save. Each variant's logits are compared with cuBLAS's, then all
are timed in interleaved rounds. Needs torch, triton and transformers. --device cpu --quick runs a tiny model; its
times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import numpy as np
import torch
from experiments.common.graph_clock import Clock, Run, against, rounds
from experiments.linear.linear_kernels import label as label_of
from fk_bench.core.rows import read_text
from transformers import LlamaConfig

from fastkernels.core import tuning as tuned
from fastkernels.core.dispatch import OPS
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.sampling.sampler import Sampler
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.steps.input_batch import InputBatch
from fastkernels.engine.steps.step import StepInput
from fastkernels.engine.steps.step_kernels import begin, finish
from fastkernels.models.common.layers.decoder import Decoder
from fastkernels.models.common.plans import build
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.kit import overlap as _overlap
from fastkernels.overrides.sampling.sampling import sampling

SIZES = {
    False: {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128},
    True: {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 16},
}  # fmt: skip
PAGE = 16


def table_of(rows: Path, path: Path, chip: str) -> Path:
    """Return a tuned table of the fastest sets in the rows; cuBLAS where it is faster."""
    times: dict[tuple[int, int, int], dict[tuple[str, str], float]] = {}
    for line in read_text(rows).splitlines():
        row = json.loads(line)
        case = row["case"]
        if case["kind"] == "time" and row["status"] == "ok" and "params" in case:
            place = times.setdefault((case["out"], case["in"], case["tokens"]), {})
            place[row["subject"]["provider"], case["params"]] = row["metrics"]["us"]
    providers = {p.name: p for p in OPS["linear"].providers}
    entries = []
    for (n, k, m), found in times.items():
        (provider, label), us = min(found.items(), key=lambda item: item[1])
        entry: dict[str, Any] = {
            "op": "linear", "shape": {"N": n, "K": k, "dtype": "bfloat16"}, "sizes": {"M": m}, "provider": None,
            "baseline": "cublas", "run": "sweep",
        }  # fmt: skip
        if provider != "cublas":
            params = next(p for p in providers[provider].params if label_of(p) == label)
            # only for the variants of one sweep
            speedup = found["cublas", ""] / us
            entry |= {
                "provider": provider,
                "params": params,
                "speedup": speedup,
                "ci95": [(1 + speedup) / 2, speedup],
            }
        entries.append(entry)
    path.write_text(
        json.dumps({"schema": tuned.SCHEMA, "chip": chip, "runs": {"sweep": {}}, "entries": entries})
    )
    return path


def make_model(run: Run) -> tuple[Decoder, LlamaConfig]:
    config = LlamaConfig(**SIZES[run.quick], rope_theta=500000.0, tie_word_embeddings=False)
    config.architectures = ["LlamaForCausalLM"]
    with build._defaults(torch.bfloat16, torch.device(run.device)), torch.no_grad():
        model = Decoder(config)
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.02, generator=run.generator)
            if "norm" in name:
                parameter.add_(1.0)
    return model.eval().requires_grad_(False), config


def step_of(run: Run, model: Decoder, config: LlamaConfig, batch: int, options: argparse.Namespace) -> Any:
    """Return a function that runs a decode step at options.context and returns the logits [batch, V]."""
    context, longest = options.context, max(options.longest, options.context)
    pages = -(-context // PAGE)
    shape = (batch * pages + 1, PAGE, config.num_key_value_heads, config.head_dim)
    for layer in model.modules():
        if isinstance(layer, PagedAttention):
            layer.kv_cache = (run.randn(*shape), run.randn(*shape))
    device, rows = torch.device(run.device), np.arange(batch)
    state, sampler = InputBatch(device, batch, longest, PAGE), Sampler(device, config.vocab_size, batch)
    sampler.set_rows([NewRow(i, SamplingParams(temperature=0), 0) for i in range(batch)])
    places = np.stack([np.repeat(rows, pages), np.tile(np.arange(pages), batch)], axis=1)
    updates = np.column_stack([places, 1 + np.arange(batch * pages)]).astype(np.int32)
    state.update(updates)
    ids = np.random.default_rng(1).integers(config.vocab_size, size=batch)
    one = np.ones(batch, dtype=np.int32)
    inputs = state.load(StepInput(rows, one, one * context, np.zeros_like(rows), ids, batch, updates[:0]))
    table = torch.zeros(batch, state.width, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        inputs.slot_mapping, inputs.cu_seqlens_q, inputs.seq_lens, table, 1, longest, batch, longest
    )

    def step() -> torch.Tensor:
        input_ids, drawing = begin(inputs, table[None], state, sampler)
        with forward_context(metadata):
            logits = model.compute_logits(model(input_ids, inputs.positions))
        if options.until == "tokens":
            finish(sampling(logits, *drawing, inputs.offsets), inputs, state)
        return logits

    return step


# {op: stand-in for --free, which launches nothing and returns the right shape}
FREE: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, *_: x,
    "silu_and_mul": lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
    "rope_store_kvcache": lambda *_: None,
    "attention_decode": lambda q, *_: q,
}


class Variant:
    """A variant of the step: its tuned table (None: none for linear layers; '': the shipped one), attention provider,
    whether kernels start early, and the ops that are replaced by nothing.
    """

    current: Variant | None = None

    def __init__(
        self, name: str, table: Path | str | None, overlap: bool, attention: str, free: tuple[str, ...] = ()
    ) -> None:
        self.name, self.table, self.overlap, self.attention = name, table, overlap, attention
        self.free = free

    def call(self, step: Any) -> torch.Tensor:
        if Variant.current is not self:
            os.environ.pop("FASTKERNELS_TUNED", None)
            if self.table:
                os.environ["FASTKERNELS_TUNED"] = str(self.table)
            requested = [] if self.attention == "table" else [f"attention_decode:{self.attention}"]
            requested += (
                [] if self.table is not None else ["linear:cublas"]
            )  # otherwise a shipped table would choose
            os.environ["FASTKERNELS_PROVIDER"] = ",".join(requested)
            os.environ["FASTKERNELS_OVERLAP"] = str(int(self.overlap))
            _overlap.overlaps.cache_clear()
            for name, op in OPS.items():
                op.reset()
                if name in FREE:
                    op.set_candidate(FREE[name] if name in self.free else None)
            tuned._by_op.cache_clear()
            Variant.current = self
            step()  # compiles
        return step()


def kernels(run: Run, calls: list[Any], case: dict[str, Any]) -> None:
    """Write a row for each kernel of the step: launches and total microseconds from CUPTI."""
    if not run.cuda:
        return
    graph, replays = Clock(run, calls).graph, 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    for found in sorted(profile.key_averages(), key=lambda e: -e.device_time_total):
        if found.device_time_total:
            us = found.device_time_total / replays
            name = found.key[:90]
            run.row("kernel", name, case, launches=found.count / replays, us=us)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path, help="of skinny_linear.py on this GPU")
    parser.add_argument("--batch", default="1,8,16,32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--longest", type=int, default=0, help="context that kernels are prepared for")
    parser.add_argument("--until", default="tokens", choices=("logits", "tokens"), help="where the step ends")
    parser.add_argument(
        "--attention", default="triton,triton-split,fa3,flashinfer", help="providers, or `table`"
    )
    parser.add_argument("--tables", default="", help="`shipped` or NAME=FILE, in addition to --rows")
    parser.add_argument("--free", default="", help=f"ops to replace by nothing: of {', '.join(FREE)}")
    parser.add_argument("--ways", default="in turn,early", help="early, in turn, or both")
    parser.add_argument(
        "--profile",
        default="cublas, triton, in turn;skinny, triton-split, early",
        help="variants whose kernels are listed",
    )
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args()
    free, ways = tuple(filter(None, options.free.split(","))), options.ways.split(",")
    for option, names, known in (("free", free, tuple(FREE)), ("ways", ways, ("in turn", "early"))):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--{option} {unknown[0]}: known: {', '.join(known)}")
    requested = [table.partition("=") for table in filter(None, options.tables.split(","))]
    for name, _, file in requested:
        if not (Path(file).is_file() if file else name == "shipped"):
            parser.error(
                f"--tables {name}{file and '='}{file}: expected `shipped` or NAME=FILE with an existing file"
            )
    run = Run("decode_step", "linear", options)
    chip = torch.cuda.get_device_name() if run.cuda else "cpu"
    tables: dict[str, Path | str | None] = {"cublas": None}
    if options.rows is not None:
        tables["skinny"] = table_of(options.rows, options.out.with_suffix(".table.json"), chip)
    tables |= {name: file for name, _, file in requested}
    found = {p.name: p.unavailable(run.device) for p in OPS["attention_decode"].providers} | {"table": None}
    attention = [a for a in options.attention.split(",") if found.get(a, "") is None] or ["reference"]
    variants = [
        Variant(f"{linear}, {a}, {how}", table, how == "early", a)
        for linear, table in tables.items() for a in attention for how in ways
    ]  # fmt: skip
    variants += [
        Variant(f"{v.name}, without {' and '.join(ops)}", v.table, v.overlap, v.attention, ops)
        for v in variants[-1:] for ops in dict.fromkeys([*((op,) for op in free), free]) if ops
    ]  # fmt: skip
    with torch.inference_mode():
        model, config = make_model(run)
        for batch in (int(b) for b in options.batch.split(",")):
            if run.left() <= 0:
                run.row("time", "all", {"batch": batch}, "out of time", "skipped")
                continue
            case = {"batch": batch, "context": options.context, "until": options.until}
            if options.longest:
                case["longest"] = options.longest
            step = step_of(run, model, config, batch, options)
            want, good = None, {}
            for variant in variants:
                got = variant.call(step).float()
                want = got if want is None else want
                gap = (got - want).abs().max().item() / want.abs().max().item()
                wrong = "" if gap < 0.05 or variant.free else f"logits differ by {gap:.3g} of the largest"
                run.row("check", variant.name, case, wrong, quiet=True, gap=gap)
                if not wrong:
                    good[variant.name] = [partial(variant.call, step)]
            samples = rounds(run, good)
            for name, each in samples.items():
                gain, ci95 = against(each, samples[variants[0].name])
                ms = 1e-3 * statistics.median(each)
                run.row("time", name, case, ci95={"speedup": ci95}, ms=ms, speedup=gain)
            for name in options.profile.split(";"):
                if name in good:
                    kernels(run, good[name], {**case, "variant": name})
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
