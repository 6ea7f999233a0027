"""Captures on this GPU: record each host (eager, live patch), then every captured call by every provider that is here.

    python bench/scenarios/capture_check.py --out rows.jsonl [--hosts fastkernels,vllm,sglang] [--python vllm=PATH]
        [--model FOLDER] [--captures FOLDER]

Without --model a random Llama of four layers with heads of 128 is made. Nothing is timed. With --hosts '' only the
captures in --captures (default: those that are shipped) are replayed. One line a host, then one an (op, provider).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from common import check, mapped, outputs
from fk_bench.capture import captures, replay
from fk_bench.core import machine
from fk_bench.core.rows import Row, Status, Subject, append

from fastkernels.core import registry

EXACT = 1 << 24  # numbers of a call that is computed in float64; larger ones in float32


def row(problem: str, **more: Any) -> Row:
    return Row(
        run_id="capture_check", command="capture_check", machine=machine.machine(), commit=machine.commit(),
        versions={"torch": torch.__version__}, status=Status.WRONG if problem else Status.OK, reason=problem, **more,
    )  # fmt: skip


def make_model(folder: Path) -> Path:
    from fk_bench.serving.small_model import VOCAB, small_model
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(small_model()).save_pretrained(folder)
    return folder


def record(host: str, python: str, model: Path, folder: Path) -> tuple[Row, Path | None]:
    """The capture of one host, by the command that users have."""
    command = [
        sys.executable,
        "-m",
        "fk_bench.cli",
        "capture",
        str(model),
        "--host",
        host,
        "--python",
        python,
    ]
    command += ["--out", str(folder), "--name", host, "--json", "--timeout", "300"]
    done = subprocess.run(command, capture_output=True, text=True)
    subject = Subject(host=host, model=model.name)
    if done.returncode != 0:
        return row(done.stderr[-2000:] or f"exit status {done.returncode}", subject=subject), None
    answer = json.loads(done.stdout.splitlines()[-1])
    metrics = {k: float(answer[k]) for k in ("ops", "signatures", "calls", "bytes")}
    names = sorted(captures.load(folder / host).ops)
    made = row("", subject=subject, case={"kind": "capture", "ops": names}, metrics=metrics)
    return made, folder / host


def replayed(name: str, folder: Path | None) -> list[Row]:
    """A row for each provider that is here: how many of the op's captured calls it has right."""
    spec = registry.get(name)
    found: dict[str, list[str]] = {}
    generator = torch.Generator("cuda").manual_seed(0)
    for captured in replay.captured_cases(name, folder):
        args = captured.make_args("cuda", generator)
        exact = torch.float64 if sum(a.numel() for a in args if torch.is_tensor(a)) < EXACT else torch.float32
        want = outputs(spec, mapped(args, lambda t, d=exact: t.to(d) if t.is_floating_point() else t.clone()))
        for provider, reason in spec.op.order("cuda"):
            if reason is not None or (provider.supports is not None and provider.supports(*args)):
                continue
            try:
                problem = check(spec, captured.case, provider, args, want)
            except Exception:
                problem = traceback.format_exc(limit=-2)
            found.setdefault(provider.name, []).append(f"{captured.case.name}: {problem}" if problem else "")
    return [
        row(
            next(filter(None, problems), ""), subject=Subject(op=name, provider=provider),
            case={"kind": "replay", "captures": str(folder or "shipped")},
            metrics={"cases": len(problems), "wrong": sum(map(bool, problems))},
        )
        for provider, problems in found.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hosts", default="fastkernels,vllm,sglang")
    parser.add_argument("--python", action="append", default=[], help="HOST=PATH")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--captures", type=Path)
    options = parser.parse_args()
    pythons = dict(item.split("=", 1) for item in options.python)
    made: list[Row] = []
    folders: list[Path | None] = [options.captures]
    with tempfile.TemporaryDirectory() as scratch:
        hosts = [h for h in options.hosts.split(",") if h]
        model = options.model or (make_model(Path(scratch) / "model") if hosts else Path())
        for host in hosts:
            result, folder = record(
                host, pythons.get(host, sys.executable), model, Path(scratch) / "captures"
            )
            made.append(result)
            folders += [folder] if folder else []
            print(f"{host:<12} {result.status.value} {result.metrics} {result.reason}", flush=True)
        for folder in folders:
            for name in registry.op_names():
                for result in replayed(name, folder):
                    made.append(result)
                    where = f"{folder.name if folder else 'shipped':<12} {name:<18} {result.subject.provider or '':<11}"
                    print(f"{where} {result.status.value} {result.metrics} {result.reason}", flush=True)
    append(options.out, made)
    wrong = sum(r.status is not Status.OK for r in made)
    print(f"{len(made)} rows, {wrong} wrong")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
