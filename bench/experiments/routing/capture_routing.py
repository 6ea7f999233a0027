"""Record the routing of a small mixture-of-experts model (train_moe.py) on held-out text, as a capture.

    capture_routing.py --models FOLDER --out FOLDER [--presets e8k2,e128k8] [--device cuda]

Our engine runs the checkpoint: prompts of each kind of text one by one, and decode steps of 1, 8, 32 and 128 sequences
of mixed texts. For every call of fused_experts the ids and weights (int8 and float16), layer, phase and text are kept,
as `routing` in capture.json. SETS calls of each size are also stored for the judge's replay, of fused_experts and of
its moe_align. A second capture has the same ids in the sizes of a known model with as many experts
(routing_study.shape_of).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fk_bench.core import machine, rows
from fk_bench.routing.study import shape_of

from fastkernels.capture import SCHEMA
from fastkernels.capture.calls import describe, digest
from fastkernels.capture.keep import to_json
from fastkernels.engine.llm import LLM
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.overrides.moe.fused_experts import fused_experts
from fastkernels.overrides.moe.moe_tiles import tiles
from fastkernels.overrides.moe.sparse_moe import Experts
from fastkernels.overrides.routing.moe_align import moe_align, padded_size

BATCHES = {1: 4, 8: 2, 32: 1, 128: 1}  # {sequences of a decode step: number of kept steps}
CONTEXT = 64  # tokens before a decode step
# Largest number of steps for a batch's prompts: the first sequence generates a token in each of them
AHEAD = 8
SETS = 2  # calls of each size for the judge's replay: the first and the last, from different layers and texts


@dataclass
class Steps:
    """The calls of the experts by step; a step has one call of each layer."""

    layers: int
    calls: list[dict[str, Any]] = field(default_factory=list)

    def taken(self) -> list[list[dict[str, Any]]]:
        """Return and remove the steps so far."""
        calls, self.calls = self.calls, []
        steps = [calls[i : i + self.layers] for i in range(0, len(calls), self.layers)]
        if any([c["layer"] for c in step] != list(range(self.layers)) for step in steps):
            raise RuntimeError("the layers were called out of order")
        return steps


@contextmanager
def recorded(model: torch.nn.Module) -> Iterator[Steps]:
    """Record the calls of every Experts module of `model`."""
    found = [m for m in model.modules() if isinstance(m, Experts)]
    steps, arguments = Steps(len(found)), list(fused_experts.overload._schema.arguments)

    def hook(layer: int) -> Any:
        def see(module: Experts, args: tuple[torch.Tensor, ...]) -> None:
            x, weights, ids = args
            signature = describe(
                arguments, [x, module.w13_weight, module.w2_weight, weights, ids, None, False]
            )
            call = {"layer": layer, "signature": signature}
            call["ids"] = (
                ids.to(torch.int8 if len(module.w13_weight) <= 128 else torch.int16).cpu().contiguous()
            )
            # six significant bits, so that they compress
            bits = weights.to(torch.float16).cpu().contiguous().view(torch.int16)
            call["weights"] = (bits + 16 >> 5 << 5).view(torch.float16)
            steps.calls.append(call)

        return see

    handles = [m.register_forward_pre_hook(hook(i)) for i, m in enumerate(found)]
    try:
        yield steps
    finally:
        for handle in handles:
            handle.remove()


def run(llm: LLM, texts: dict[str, list[str]], prompts: int, length: int) -> list[dict[str, Any]]:
    """Return all kept calls, each with `text`, `prompt`, `phase`, `step` and `layer`."""
    tokenizer = llm.get_tokenizer()
    ids = {
        kind: tokenizer("</s>".join(t), add_special_tokens=False)["input_ids"] for kind, t in texts.items()
    }
    kept: list[dict[str, Any]] = []
    with recorded(llm.llm_engine.runner.model) as steps:
        for kind, tokens in ids.items():
            for p in range(prompts):
                at = p * (len(tokens) - length) // max(prompts - 1, 1)
                llm.generate([tokens[at : at + length]], SamplingParams(max_tokens=1))
                (step,) = steps.taken()
                kept += [{**c, "text": kind, "prompt": p, "phase": "prefill", "step": 0} for c in step]
        kinds = list(ids)
        for batch, count in BATCHES.items():
            starts = []
            for i in range(batch):
                tokens = ids[kinds[i % len(kinds)]]
                at = (i // len(kinds) + 1) * (len(tokens) - CONTEXT) // (batch // len(kinds) + 2)
                starts.append(tokens[at : at + CONTEXT])
            params = [
                SamplingParams(max_tokens=AHEAD + count, temperature=1.0, seed=i, ignore_eos=True)
                for i in range(batch)
            ]
            llm.generate(starts, params)
            decode = [s for s in steps.taken() if len(s[0]["ids"]) == batch][-count:]
            if len(decode) < count:
                raise RuntimeError(
                    f"{len(decode)} of {count} steps had {batch} sequences decode: the prompts took over {AHEAD} steps"
                )
            for number, step in enumerate(decode):
                kept += [
                    {**c, "text": "all", "prompt": None, "phase": "decode", "step": number} for c in step
                ]
    return kept


def digests(call: dict[str, Any]) -> dict[str, str]:
    return {"topk_weights": digest(call["weights"]), "topk_ids": digest(call["ids"])}


def entry(count: int, signature: list[dict[str, Any]], chosen: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the calls of one signature for capture.json, with the values of the chosen ones."""
    wanted = {a["name"] for a in signature}
    values = [{k: v for k, v in digests(c).items() if k in wanted} for c in chosen]
    return {"count": count, "args": signature, "values": [{"count": 1, "args": v} for v in values]}


def alignment(signature: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the call of moe_align inside a call of our fused_experts with this signature on a GPU."""
    args = {a["name"]: a for a in signature}
    experts, (tokens, top_k) = args["w1"]["shape"][0], args["topk_ids"]["shape"]
    block = tiles(tokens * top_k // experts, getattr(torch, args["w1"]["dtype"]), True).block_m
    capacity = -(-padded_size(tokens * top_k, block, experts) // block) * block
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device="meta")
    return describe(list(moe_align.overload._schema.arguments), [ids, block, experts, capacity, None, False])


def resized(signature: list[dict[str, Any]], hidden: int, inner: int) -> list[dict[str, Any]]:
    """Return the call of fused_experts with the same tokens and experts in other sizes."""
    args = {a["name"]: a for a in signature}
    experts, tokens = args["w1"]["shape"][0], args["hidden_states"]["shape"][0]
    shapes = {
        "hidden_states": (tokens, hidden),
        "w1": (experts, 2 * inner, hidden),
        "w2": (experts, hidden, inner),
    }
    new = {}
    for name, shape in shapes.items():
        strides = [shape[1] * shape[2], shape[2], 1] if len(shape) == 3 else [shape[1], 1]
        new[name] = {**args[name], "shape": list(shape), "strides": strides}
    return [new.get(a["name"], a) for a in signature]


def ops_of(kept: list[dict[str, Any]], sizes: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return `ops` of capture.json; in other sizes (hidden, inner), fused_experts only with one set of values each."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for call in kept:
        groups.setdefault(json.dumps(call["signature"]), []).append(call)
    experts, aligned = [], []
    for calls in groups.values():
        signature, last = calls[0]["signature"], len(calls) - 1
        chosen = [calls[i * last // (SETS - 1)] for i in range(SETS)]
        if sizes is not None:
            experts.append(entry(len(calls), resized(signature, *sizes), chosen[-1:]))
        else:
            experts.append(entry(len(calls), signature, chosen))
            aligned.append(entry(len(calls), alignment(signature), chosen))
    found = {"fused_experts": experts, "moe_align": aligned}
    return {
        name: {
            "count": len(kept), "signatures": len(calls),
            "dropped": {
                "signatures": 0, "calls": 0, "value_sets": len(kept) - sum(len(c["values"]) for c in calls)
            },
            "calls": calls,
        }
        for name, calls in found.items() if calls
    }  # fmt: skip


def save(
    kept: list[dict[str, Any]], folder: Path, meta: dict[str, Any], sizes: tuple[int, int] | None = None
) -> int:
    """Write capture.json and values.safetensors; return their bytes. In other sizes, without `routing`."""
    from safetensors.torch import save_file

    ops = ops_of(kept, sizes)
    used = {v for op in ops.values() for c in op["calls"] for s in c["values"] for v in s["args"].values()}
    tensors: dict[str, torch.Tensor] = {}
    routing = []
    for call in kept:
        names = digests(call)
        tensors |= {names["topk_weights"]: call["weights"], names["topk_ids"]: call["ids"]}
        where = {k: call[k] for k in ("phase", "text", "prompt", "step", "layer")}
        routing.append({**where, "tokens": len(call["ids"]), **names})
    if sizes is not None:
        tensors = {name: t for name, t in tensors.items() if name in used}
    data = {"schema": SCHEMA, **meta, "calls": len(kept), "ops": ops, "modules": []}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(sorted(tensors.items())), folder / "values.safetensors")
    text = to_json(data).rstrip()
    if sizes is None:
        lines = ",\n  ".join(json.dumps(r) for r in routing)
        text = f'{text.removesuffix("}").rstrip()},\n "routing": [\n  {lines}]\n}}'
    (folder / "capture.json").write_text(f"{text}\n")
    return sum(f.stat().st_size for f in (folder / "capture.json", folder / "values.safetensors"))


def save_both(kept: list[dict[str, Any]], out: Path, meta: dict[str, Any], experts: int, top_k: int) -> None:
    """Write the capture, and one in a known model's sizes if its number of experts matches."""
    name = meta["model"]
    size = save(kept, out / name, meta)
    print(f"{name}: {len(kept)} calls, {size / 1024:.0f} KiB", flush=True)
    shape = shape_of(experts, top_k)
    if shape["known"]:
        other = f"{name}-at-{shape['model'].lower()}"
        what = f"the routing of {name} at the sizes of {shape['model']}: no model made these calls"
        size = save(kept, out / other, {**meta, "what": what}, (shape["hidden"], shape["intermediate"]))
        print(f"{other}: {size / 1024:.0f} KiB", flush=True)


def training(models: Path, preset: str) -> dict[str, float]:
    """Return how the model was trained, from train_moe.py's rows."""
    found, _ = rows.read(models / "rows.jsonl") if (models / "rows.jsonl").is_file() else ([], [])
    mine = [r for r in found if r.case.get("preset") == preset]
    facts = {k: v for r in mine if r.kind == "trained" for k, v in r.metrics.items()}
    return facts | {
        f"held_out_loss_{r.case['text']}": r.metrics["loss"] for r in mine if r.kind == "held_out"
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, help="the --out of train_moe.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--presets", default="e8k2,e128k8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=2, help="of each kind of text")
    parser.add_argument(
        "--kib", type=int, default=150, help="of the prompts' ids and weights, in each capture"
    )
    options = parser.parse_args()
    texts = {k: t for k, t in json.loads((options.models / "held_out.json").read_text()).items() if t}
    for preset in options.presets.split(","):
        model = options.models / preset
        sizes = json.loads((model / "sizes.json").read_text())
        # Bytes of a token of the prompts
        each = options.prompts * len(texts) * sizes["layers"] * sizes["top_k"] * 3
        length = min(2048, max(16, (options.kib << 10) // each // 16 * 16))
        llm = LLM(
            str(model), device=options.device, dtype="bfloat16" if options.device == "cuda" else "float32",
            enforce_eager=True, enable_prefix_caching=False, async_scheduling=False, max_model_len=4096,
            max_num_seqs=max(BATCHES), max_num_batched_tokens=max(BATCHES) * CONTEXT, num_blocks=2048,
        )  # fmt: skip
        kept = run(llm, texts, options.prompts, length)
        llm.shutdown()
        name = f"small-moe-trained-{preset}"
        facts = training(options.models, preset)
        meta = {
            "model": name, "host": "fastkernels", "commit": machine.commit(),
            "scenario": f"prompts of {length} tokens of held-out text, decode steps of {sorted(BATCHES)} sequences",
            "what": "the routing of a small router that was trained for about a minute: not production's",
            "training": facts, "sizes": sizes, "machine": machine.machine().model_dump(),
            "versions": {"torch": torch.__version__},
        }  # fmt: skip
        save_both(kept, options.out, meta, sizes["experts"], sizes["top_k"])


if __name__ == "__main__":
    main()
