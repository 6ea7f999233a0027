"""Count the Triton kernels that vLLM compiles after a patch, while it serves prompts of many lengths (README.md)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

MODES = ("stock", "live", "start", "eager")
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257, 500, 511, 512, 513, 777, 1000, 1024, 1025,
           1500, 1777, 2000, 2041)  # fmt: skip
BATCHES = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64)
MAX_LEN = 2048  # of the checkpoint


class Heard:
    """The names of kernels that Triton has compiled since `start`."""

    def __init__(self) -> None:
        self.ours: Counter[str] = Counter()
        self.theirs: Counter[str] = Counter()

    def start(self) -> None:
        from triton import knobs

        before = knobs.runtime.jit_post_compile_hook

        def hook(**found: Any) -> Any:
            self.note(found["fn"])
            return before(**found) if before is not None else None

        knobs.runtime.jit_post_compile_hook = hook

    def note(self, fn: Any) -> None:
        module = str(getattr(fn, "module", ""))
        (self.ours if module.startswith("fastkernels") else self.theirs)[f"{module}.{fn.name}"] += 1


def serve(engine: Any, lengths: tuple[int, ...] = LENGTHS, batches: tuple[int, ...] = BATCHES) -> int:
    """Run each length alone, and batches of mixed lengths; return the number of requests."""
    from vllm import SamplingParams

    requests = 0
    for run in [*((n,) for n in lengths), *(tuple(lengths[i % 12] for i in range(b)) for b in batches)]:
        prompts: Any = [
            {"prompt_token_ids": [(7 * i + j) % 500 + 3 for i in range(n)]} for j, n in enumerate(run)
        ]
        chosen = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
        outputs = engine.generate(prompts, chosen, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == 6 for o in outputs)
        requests += len(run)
    return requests


def cell(mode: str, model: str, ops: list[str] | None) -> dict[str, Any]:
    """Measure one mode in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import fastkernels

    patched = fastkernels.patch("vllm", ops=ops) if mode == "start" else None
    from vllm import LLM

    engine = LLM(
        model, max_model_len=MAX_LEN, max_num_batched_tokens=MAX_LEN, max_num_seqs=64, seed=0,
        enable_prefix_caching=False, gpu_memory_utilization=0.3, enforce_eager=mode == "eager",
    )  # fmt: skip
    report = fastkernels.patch(engine, ops=ops) if mode in ("live", "eager") else None
    heard = Heard()
    heard.start()
    requests = serve(engine)
    active = sorted({row.op for row in report.active}) if report else []
    if patched is not None:
        (reply,) = engine.collective_rpc(
            "fastkernels_rpc", args=(fastkernels.patch.Request("report").to_json(),)
        )
        active = sorted({row["op"] for row in json.loads(reply)["rows"] if row["state"] == "active"})
    return {"mode": mode, "requests": requests, "active": active, "ours": heard.ours, "theirs": heard.theirs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for rows.jsonl")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--ops", help="op names; default: what a patch replaces by itself")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    ops = given.ops.split(",") if given.ops else None
    given.out.mkdir(parents=True, exist_ok=True)
    rows = given.out / "rows.jsonl"
    if given.cell:
        with open(rows, "a") as file:
            file.write(json.dumps(cell(given.cell, given.model, ops)) + "\n")
        return 0
    if unknown := [mode for mode in given.modes.split(",") if mode not in MODES]:
        parser.error(f"unknown mode {unknown[0]!r}; known: {', '.join(MODES)}")
    from experiments.works_with.works_hosts import checkpoint

    rows.unlink(missing_ok=True)
    model = str(checkpoint(Path(tempfile.gettempdir()) / "serving-compilations", "llama"))
    failed = 0
    for mode in given.modes.split(","):
        again = [sys.executable, __file__, str(given.out), "--cell", mode, "--model", model]
        failed += subprocess.run([*again, *(["--ops", given.ops] if given.ops else [])]).returncode != 0
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    print(f"{'mode':8} {'requests':>8} {'ours':>5} {'vLLM':>5}  active ops; kernels of ours")
    for row in found:
        names = ", ".join(f"{name} {n}" for name, n in row["ours"].items()) or "none"
        counts = f"{sum(row['ours'].values()):>5} {sum(row['theirs'].values()):>5}"
        print(f"{row['mode']:8} {row['requests']:>8} {counts}  {', '.join(row['active'])}; {names}")
    return int(bool(failed) or any(row["ours"] for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
