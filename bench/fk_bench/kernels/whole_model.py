"""Level 4: the logits of a whole model in our engine with candidates against those without, and the engine's speed.

Three phases: `prefill` has the logits of each prompt, `decode` those of the tokens after it, and in `mixed` half of the
sequences arrive while the others decode. Tokens are forced, so that all runs see the same context. The bound is that of
`fk-bench quality`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch

from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs import shrunk
from fastkernels.models.common.plans import block_tasks
from fk_bench.core import machine
from fk_bench.core.hub import ModelError
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.core.stats import paired_ratio
from fk_bench.offline.host import HostFailed, HostProcess, prompts_of, vocab_size
from fk_bench.quality import structured
from fk_bench.quality.calibration import THRESHOLD, Calibration
from fk_bench.quality.measure import Item, Running, Settings
from fk_bench.quality.metrics.metric import metrics
from fk_bench.quality.metrics.outputs import Scores
from fk_bench.quality.text import Extent, batches

HOST = "fastkernels"
PHASES = ("prefill", "decode", "mixed")
LOADS = {
    "cpu": ((1, 64, 16), (8, 64, 16)),
    "cuda": ((1, 512, 128), (32, 512, 128)),
}  # requests, input, output
# Of a small model with random weights, whose attention over long prompts is a mean that hides wrong heads
SMALL, SMALL_EXTENT = (
    "a small model's with the same structure, with random weights",
    Extent(8, 4, (5, 24, 11, 17), 8),
)
CPU_ONLY = "measured on a CPU: no claim of speed"


@dataclass(frozen=True)
class Place:
    """One row of logits. token: its place in the sequence, which is the next token's."""

    phase: str
    sequence: int
    token: int


@dataclass(frozen=True)
class Found:
    """The comparison of one phase. `first`: the first place beyond the limit, as text; '' if there is none."""

    phase: str
    value: float
    c: float
    first: str


def compare(
    want: Mapping[str, Scores], got: Mapping[str, Scores], places: Mapping[str, Sequence[Place]], scale: Calibration
) -> list[Found]:  # fmt: skip
    """Compare the logits of each phase. want, got: {phase: logits}, places: of their rows."""
    metric, found = metrics()["kl"], []
    limit = scale.noise + (1 - THRESHOLD) * (scale.bound - scale.noise)  # where c is THRESHOLD
    for phase in want:
        value = metric.measure(got[phase], want[phase])
        c = scale.correctness(value.discrepancy)
        first = "" if c >= THRESHOLD else _first(want[phase].logits, got[phase].logits, places[phase], limit)
        found.append(Found(phase, value.value, c, first))
    return found


def _first(want: torch.Tensor, got: torch.Tensor, places: Sequence[Place], limit: float) -> str:
    """The first row whose discrepancy is beyond the limit, with expected and got."""
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    gaps = torch.where(p.isneginf(), 0.0, p - q)
    apart = ((p.exp() * gaps).sum(-1).clamp_min(0) / 2).sqrt()
    beyond = (~(apart <= limit)).nonzero().flatten().tolist()  # NaN, too
    if not beyond:
        return ""
    row, place = beyond[0], places[beyond[0]]
    token, other = int(want[row].argmax()), int(got[row].argmax())
    also = "" if other == token else f", and prefers token {other}"
    return (
        f"{place.phase}: sequence {place.sequence}, token {place.token}: expected token {token} with logit"
        f" {float(want[row, token]):.4f} (p {float(p[row, token].exp()):.4f}), got {float(got[row, token]):.4f}"
        f" (p {float(q[row, token].exp()):.4f}){also}; {len(beyond)} of {len(places)} places differ"
    )


def judge(
    text: str, model: str, files: Mapping[str, Path], device: str, rounds: int, timed: bool, timeout: float,
    on_row: Callable[[Row], None], extent: Extent | None = None,
) -> list[Row]:  # fmt: skip
    """Rows of the phases, and with `timed` of the engine with candidates against without; `on_row` gets each.

    text    of the model whose blocks are known; see models.common.plans.blocks
    model   a checkpoint's folder. Another name gets random weights: of its sizes on a GPU, of a small model with the
            same structure on a CPU
    files   {op or block: file}
    """
    made: list[Row] = []
    run_id, name = uuid4().hex[:12], json.loads(text)["name"]

    def add(
        status: Status, reason: str, case: dict[str, Any], numbers: dict[str, float], **more: Any
    ) -> None:
        finite = {n: v for n, v in numbers.items() if v == v and abs(v) != float("inf")}
        row = Row(
            run_id=run_id, command="kernels", commit=machine.commit(), machine=machine.machine(), baseline=HOST,
            versions=machine.interpreter(sys.executable).versions, status=status, reason=reason, metrics=finite,
            case={"level": 4, **case}, subject=Subject(model=name, host=HOST, candidate=", ".join(files)), **more,
        )  # fmt: skip
        made.append(row)
        on_row(row)

    with TemporaryDirectory(prefix="fk-level-4-") as scratch:
        folder = Path(scratch)
        try:
            path, sizes = _checkpoint(text, model, device, folder)
            extent = extent or (SMALL_EXTENT if sizes == SMALL else Extent())
            item = Item(
                path, HOST, Settings(device=device, timeout=max(timeout, 600.0), extent=extent), folder
            )
            if item.family_name != "text":
                reason = f"level 4 compares logits of models that generate text; {name} is {item.family_name}"
                add(Status.SKIPPED, reason, {"kind": "logits"}, {})
                return made
            scale = item.calibration()
            found, calls, left = _logits(item, files, scale)
        except (CheckpointError, HostFailed, ModelError, ValueError) as error:
            add(Status.FAILED, str(error), {"kind": "logits"}, {})
            return made
        case = {"kind": "logits", "sizes": sizes, "calls": calls, "left": left, "sensitive": scale.sensitive}
        ran = any(calls.values())
        for one in found:
            status, reason = _verdict(one, scale, ran, left)
            numbers = {"c": one.c, "kl": one.value, "noise": scale.noise, "bound": scale.bound}
            add(status, reason, {**case, "phase": one.phase}, numbers)
        if timed and ran:
            try:
                for requests, n, new, seconds in _speeds(item.model, files, device, folder, rounds, timeout):
                    ratio, interval = paired_ratio(seconds[0], seconds[1])
                    numbers = {
                        "output_tokens_per_s": requests * new / statistics.median(seconds[1]),
                        "baseline_output_tokens_per_s": requests * new / statistics.median(seconds[0]),
                        "speedup": ratio,
                    }
                    add(
                        Status.OK, "",
                        {"kind": "engine", "sizes": sizes, "requests": requests, "input_len": n, "output_len": new},
                        numbers, ci95={"speedup": interval} if interval else {},
                        provisional=CPU_ONLY if device == "cpu" else "",
                    )  # fmt: skip
            except HostFailed as error:
                add(Status.FAILED, str(error), {"kind": "engine"}, {})
    return made


def _verdict(found: Found, scale: Calibration, ran: bool, left: Mapping[str, str]) -> tuple[Status, str]:
    if not ran:
        why = "; ".join(dict.fromkeys(f"{op}: {reason}" for op, reason in left.items()))
        return Status.FAILED, f"no candidate ran{f' ({why})' if why else ''}"
    if found.c < THRESHOLD:
        where = found.first or "the mean over all places differs"
        return Status.WRONG, f"c is {found.c:.3f}, at least {THRESHOLD} is needed. First difference: {where}"
    if not scale.sensitive:
        unseen = ", ".join((*scale.unseen, *scale.unplanted)) or "noise above the bound"
        return Status.INVALID, f"insensitive: the logits do not show {unseen}"
    return Status.OK, ""


def _checkpoint(text: str, model: str, device: str, folder: Path) -> tuple[str, str]:
    """(the folder of the model that is run, which sizes it has)."""
    path = Path(model).expanduser()
    if any(path.glob("*.safetensors")):
        return str(path), "the checkpoint's"
    given, sizes = json.loads(text), "the model's, with random weights"
    config = given["config"]
    if device == "cpu":
        sizes = SMALL
        whole = f"{given['name']}.model"
        known = whole in block_tasks.register(text)
        config = (
            shrunk.fields(block_tasks.block(whole).small.config) if known else shrunk.small(given["config"])
        )
    made = folder / "config"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config, default=str))
    if sizes == SMALL:
        made = structured.checkpoint(made, folder / "random", strong=True)
    return str(made), sizes


def _logits(
    item: Item, files: Mapping[str, Path], scale: Calibration
) -> tuple[list[Found], dict[str, int], dict[str, str]]:
    """(the phases, {candidate: calls}, {op: why it was left out}). Raises HostFailed."""
    inputs = json.loads((item.folder / "inputs.json").read_text())
    with item.started(item.model, "candidates") as running:
        want = _runs(running, item, "reference")
        named = {op: str(Path(file).resolve()) for op, file in files.items()}
        rows = running.ask({"patch": list(named), "candidates": named})["rows"]
        got = _runs(running, item, "candidates")
        calls = running.ask({"calls": True})["calls"]
    left = {op: why for op, state, why in rows if state != "active"}
    whole = [
        Place("", i, len(s["prompt"]) + n) for i, s in enumerate(inputs) for n in range(len(s["tokens"]))
    ]
    starts = {s["at"] for s in inputs}
    rows_of = {
        "prefill": sorted(starts),
        "decode": [i for i in range(len(whole)) if i not in starts],
        "mixed": list(range(len(whole))),
    }
    places = {p: [replace(whole[i], phase=p) for i in rows_of[p]] for p in PHASES}

    def parts(runs: tuple[Scores, Scores]) -> dict[str, Scores]:
        return {p: _only(runs[p == "mixed"], rows_of[p]) for p in PHASES}

    return compare(parts(want), parts(got), places, scale), calls, left


def _runs(running: Running, item: Item, run: str) -> tuple[Scores, Scores]:
    """The logits of all sequences together, and with half of them arriving later."""
    together = running.outputs(run)
    groups = batches(item.count, item.settings.extent.batch)
    running.ask({"run": f"{run}-mixed", "batches": groups, "staggered": True})
    return together, item.read(f"{run}-mixed")


def _only(scores: Scores, rows: Sequence[int]) -> Scores:
    return Scores(scores.logits[list(rows)], scores.targets[list(rows)], [1] * len(rows))


def _speeds(
    model: str, files: Mapping[str, Path], device: str, folder: Path, rounds: int, timeout: float
) -> list[tuple[int, int, int, tuple[list[float], list[float]]]]:
    """(requests, input, output, (seconds without, seconds with)) of each load, in interleaved rounds.

    Raises HostFailed.
    """
    loads = LOADS[device]
    most, longest = max(n for n, _, _ in loads), max(a + b for _, a, b in loads) + 16
    dtype = machine.fast_dtype()
    settings = {
        "model": model, "dtype": dtype, "load_format": "auto", "max_model_len": longest, "max_num_seqs": most,
        "kv_tokens": -(-most * longest * 33 // 32 // 16) * 16, "gpu": device == "cuda", "gpu_share": 0.45,
        "tensor_parallel": 1, "engine_args": {"device": device},
    }  # fmt: skip
    own = folder / "files"
    own.mkdir()
    for op, file in files.items():
        (own / f"{op}.py").symlink_to(Path(file).resolve())
    vocab, found, started = vocab_size(model), [], list[HostProcess]()
    try:
        for lane in (None, str(own)):
            started.append(HostProcess(HOST, sys.executable, settings, folder, lane))
            started[-1].answer(timeout)
        for count, n, new in loads:
            seconds: tuple[list[float], list[float]] = [], []
            for r in range(-1, max(rounds, 3)):  # round -1 is the warm-up
                prompts = prompts_of(f"{count} {r}", count, n, vocab)
                order = (0, 1) if r % 2 else (1, 0)
                for side in order:
                    answer = started[side].generate(prompts, new, timeout)
                    if r >= 0:
                        seconds[side].append(answer["seconds"])
            found.append((count, n, new, seconds))
    finally:
        for process in started:
            process.stop()
    return found


def shown(made: Sequence[Row]) -> list[str]:
    """A line for each row."""
    lines = []
    for row in made:
        m, phase = row.metrics, row.case.get("phase", row.kind)
        if row.kind == "engine" and "speedup" in m:
            low, high = row.ci95.get("speedup", (m["speedup"], m["speedup"]))
            lines.append(
                f"engine, {row.case['requests']} requests: {m['output_tokens_per_s']:.1f} tokens/s, "
                f"{m['baseline_output_tokens_per_s']:.1f} without candidates, {m['speedup']:.3f} ({low:.3f} to"
                f" {high:.3f}){f'; {row.provisional}' if row.provisional else ''}"
            )
            continue
        numbers = f", c {m['c']:.3f}" if "c" in m else ""
        lines.append(f"logits, {phase}: {row.status.value}{numbers}{f': {row.reason}' if row.reason else ''}")
    return lines
