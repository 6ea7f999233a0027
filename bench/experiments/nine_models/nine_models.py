"""Time of a call of nine models of 3-D, robotics, science, recommendation and worlds: ours against references.

    nine_models.py --out rows.jsonl [--only ptv3,oasis] [--seconds 570]    measure what the file does not have yet
    nine_models.py --summary rows.jsonl ...                                the table, in Markdown

See README.md. A lane of a model is a process of its own with a time limit: one that fails or hangs costs its own rows
alone. Run the same command again to go on where the time ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

from fk_bench.core import machine
from fk_bench.core.rows import Row, Status, Subject, append, read
from fk_bench.core.text import printable
from fk_bench.evaluate import checkpoints, suites

COMMAND, OURS, PLAIN = "nine_models", "fastkernels", "engine with PyTorch's ops"
LIBRARY, COMPILED, KEPT = "library", "library, compiled", "library, embeddings kept"
LEAST, MOST, SHARE = 3, 20, 0.15  # repeats of a call, and the share of the lane's time that they may take
LIMIT = 150.0  # seconds of a lane
CAP = 100_000  # rows of a table of the 26 of Criteo, as in the cases of embedding_bag
Case = dict[str, int]


@dataclass(frozen=True)
class Subjected:
    """A model of the full suite, and what is timed.

    cases   {batch, and fields of the request}
    config  fields of the configuration that differ from the suite's
    other   the suite's model of a library with the same sizes; lanes: how the library runs
    renamed {field of our request: of the library's}; fixed: further fields of the library's request
    """

    cases: Sequence[Case]
    config: Mapping[str, Any] | None = None
    other: str = ""
    lanes: tuple[str, ...] = ()
    arguments: Mapping[str, Any] | None = None
    renamed: Mapping[str, str] | None = None
    fixed: Mapping[str, int] | None = None
    published: float | None = None  # the speedup of the paper, arXiv 2605.23215


def criteo() -> list[int]:
    from fastkernels.core import registry

    case = next(c for c in registry.get("embedding_bag").cases if c.name == "dlrm_one_2048")
    return [min(int(rows), CAP) for rows in case.dims["tables"]]


def subjects() -> dict[str, Subjected]:
    """Subjects by the suite's names of the models; quick ones first."""
    rows, view = criteo(), {"width": 1920, "height": 1080}
    tables = [{"name": f"t{i}", "num_embeddings": n} for i, n in enumerate(rows)]
    return {
        "dlrmv2": Subjected(
            [{"batch": n, "bag": 1} for n in (1, 32, 2048)], {"tables": tables}, "dlrmv2-torchrec",
            (LIBRARY, COMPILED), {"rows": rows}, published=1.06,
        ),
        "lightgcn": Subjected(
            [{"batch": n, "items": 1000} for n in (1, 32, 512)], None, "lightgcn-pyg", (LIBRARY, COMPILED, KEPT),
            published=1.03,
        ),
        "gaussians": Subjected(
            [{"batch": n, **view} for n in (1, 4)], None, "gaussians-gsplat", (LIBRARY,), published=0.99
        ),
        "instant-ngp": Subjected([{"batch": 1, **view}], published=0.97),
        "ptv3": Subjected([{"batch": n, "points": 100_000} for n in (1, 8)], published=1.00),
        "oasis": Subjected(
            [{"batch": 1, "frames": 16}, {"batch": 4, "frames": 16}, {"batch": 8, "frames": 32}], published=1.29
        ),
        "openfold3": Subjected(
            [{"batch": 1, "residues": n} for n in (150, 400, 700)], None, "openfold3-library", (LIBRARY, COMPILED),
            None, {"residues": "tokens"}, {"rows": 1, "templates": 1}, published=1.03,
        ),
        "dp3": Subjected([{"batch": n} for n in (1, 8, 100)], published=1.42),
        "pi0": Subjected([{"batch": 1, "cameras": n} for n in (1, 3)], published=3.48),
    }  # fmt: skip


def declared(name: str) -> suites.Model:
    return next(e.model for e in suites.load("full").entries if e.item.model == name)


POLICIES = ("dp3", "pi0")  # experiments/policies has their references, and times ours next to them


def lanes(name: str, subject: Subjected) -> tuple[str, ...]:
    return ("policies",) if name in POLICIES else (OURS, PLAIN, *subject.lanes)


def key(row: Row) -> tuple[str, str, str]:
    return str(row.subject.model), str(row.subject.provider), json.dumps(row.case, sort_keys=True)


class Times:
    """The rows of one lane: `add` measures a call, prints it, and writes its row at once."""

    def __init__(self, out: Path, name: str, lane: str, seconds: float, cuda: bool) -> None:
        self.out, self.name, self.lane, self.cuda = out, name, lane, cuda
        self.each = SHARE * seconds
        self.done = {key(r) for r in read(out)[0]} if out.exists() else set()

    def row(self, case: Case) -> Row:
        import torch

        return Row(
            run_id=COMMAND, command=f"{COMMAND}.py", machine=machine.machine(), commit=machine.commit(),
            versions={"torch": str(torch.__version__)}, subject=Subject(model=self.name, provider=self.lane),
            case={"kind": "call", **case},
        )  # fmt: skip

    def add(self, case: Case, prepare: Callable[[], Callable[[], Any]]) -> None:
        row = self.row(case)
        if key(row) in self.done:
            return
        try:
            took = self._clock(prepare())
            row.metrics = {"call_ms_p50": statistics.median(took), "call_ms_least": min(took)}
            row.metrics |= {"calls": len(took), "per_s": 1e3 * case["batch"] / statistics.median(took)}
        except Exception as error:
            row.status, row.reason = Status.FAILED, f"{type(error).__name__}: {error}"[:500]
        append(self.out, [row])
        said = f"{row.metrics['call_ms_p50']:.3f} ms" if row.metrics else printable(row.reason[:200])
        print(f"{self.name} {case} {self.lane}: {said}", flush=True)

    def _clock(self, run: Callable[[], Any]) -> list[float]:
        """Milliseconds of each call, the device included."""
        import torch

        def once() -> float:
            began = time.perf_counter()
            run()
            if self.cuda:
                torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - began)

        for _ in range(3):  # torch.compile captures a graph in the second call, and replays it in the third
            once()
        end, took = time.monotonic() + self.each, list[float]()
        while len(took) < LEAST or (len(took) < MOST and time.monotonic() < end):
            took.append(once())
        return took


def engine(name: str, subject: Subjected, times: Times, tiny: bool) -> None:
    """Calls of our engine, from requests on the CPU to answers on the CPU."""
    import numpy as np
    from fk_bench.evaluate.run.hosts.requests import FIXED
    from fk_bench.evaluate.run.hosts.sent import SENT
    from fk_bench.evaluate.run.hosts.weights import redraw

    from fastkernels import LLM

    model = declared(name)
    model = model.small if tiny else replace(model, config={**model.config, **(subject.config or {})})
    most = max(case["batch"] for case in subject.cases)
    folder, dtype = str(checkpoints.folder(model, "requests")), "float32" if tiny else "auto"
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": most, "dtype": dtype}
    with LLM(folder, **options, **({} if times.cuda else {"device": "cpu"})) as llm:
        runner = llm.llm_engine.runner
        sent = SENT[llm.llm_engine.kind, llm.llm_engine.inputs]
        if llm.llm_engine.kind not in FIXED:
            redraw(runner.model)
        if callable(getattr(runner.model, "refresh", None)):
            runner.capture()
        for case in subject.cases:
            sizes = dict(model.request) if tiny else {**model.request, **case}

            def prepare(case: Case = case, sizes: Mapping[str, Any] = sizes) -> Callable[[], Any]:
                draw = np.random.default_rng(0)
                requests = [sent.make(llm, sizes, draw) for _ in range(case["batch"])]
                return lambda: sent.answer(llm, requests)

            times.add(case, prepare)


def library(subject: Subjected, times: Times, tiny: bool) -> None:
    """Calls of the library's model, from inputs on the CPU to outputs on the CPU."""
    import torch
    from fk_bench.evaluate.run.hosts.libraries import MODELS

    model = declared(subject.other)
    if tiny:
        model = model.small
    device = torch.device("cuda" if times.cuda else "cpu")
    for case in subject.cases:
        given = {**model.arguments, **({} if tiny else subject.arguments or {})}
        dtype = getattr(torch, str(given.pop("dtype")))
        sizes = {(subject.renamed or {}).get(k, k): v for k, v in case.items() if k != "batch"}
        sizes = dict(model.request) if tiny else {**model.request, **sizes, **(subject.fixed or {})}

        def prepare(
            case: Case = case, given: Any = given, sizes: Any = sizes, dtype: Any = dtype
        ) -> Callable[[], Any]:
            torch.manual_seed(0)
            torch._dynamo.reset()
            made = MODELS[model.library][1](given, sizes, device, dtype)
            inputs = made.make(case["batch"], torch.Generator().manual_seed(0))
            call = made.call
            if times.lane == COMPILED:
                made.target.forward = torch.compile(made.target.forward, mode="reduce-overhead")
            if times.lane == KEPT:
                call = kept(made, given, device)

            def run() -> torch.Tensor:
                with torch.no_grad():
                    return call(inputs).cpu()

            return run

        times.add(case, prepare)


def kept(made: Any, given: Mapping[str, Any], device: Any) -> Callable[[Any], Any]:
    """LightGCN with embeddings that are propagated once, as a service has them: our engine does the same."""
    import torch

    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        one = torch.randint(given["users"], (given["edges"],), generator=draw)
        other = given["users"] + torch.randint(given["items"], (given["edges"],), generator=draw)
        edges = torch.stack((torch.cat((one, other)), torch.cat((other, one)))).to(device)
        embedding = made.target.get_embedding(edges)

    def call(pairs: torch.Tensor) -> torch.Tensor:
        user, item = pairs.to(device)
        return (embedding[user] * embedding[item]).sum(-1)

    return call


def policies(name: str, subject: Subjected, times: Times) -> None:
    from experiments.policies import policies

    for case in subject.cases:
        if any(model == name and cell == json.dumps(case, sort_keys=True) for model, _, cell in times.done):
            continue
        found = policies.Found(name, case)
        if name == "dp3":
            policies.run_dp3(case["batch"], ("reduce-overhead",), found)
        else:
            policies.pi0(case["cameras"], case["batch"], ("reduce-overhead",), found)
        append(times.out, found.rows)


def small(subject: Subjected) -> Subjected:
    """Its first case; the sizes are those of the suite's small model."""
    return replace(subject, cases=[{"batch": subject.cases[0]["batch"], "tiny": 1}])


def plain_ops() -> str:
    """FASTKERNELS_PROVIDER with PyTorch's code for every op that has such a provider."""
    from fastkernels.core import registry

    chosen = []
    for name in registry.op_names():
        op = registry.get(name).op
        names = [p.name for p in op.providers if "cuda" in p.devices] if op is not None else []
        plain = next((n for n in ("torch", "sdpa", "cublas", "reference") if n in names), None)
        chosen += [f"{name}:{plain}"] if plain else []
    return ",".join(chosen)


def child(options: argparse.Namespace) -> int:
    import torch

    name, lane = options.child
    subject = subjects()[name]
    if options.tiny:
        subject = small(subject)
    cuda = torch.cuda.is_available() and not options.tiny
    times = Times(options.out, name, lane, options.seconds, cuda)
    if name in POLICIES:
        policies(name, subject, times)
    elif lane in (OURS, PLAIN):
        engine(name, subject, times, options.tiny)
    else:
        library(subject, times, options.tiny)
    return 0


def missing(out: Path, name: str, subject: Subjected, lane: str) -> list[Case]:
    """Cases without a row."""
    found = read(out)[0] if out.exists() else []
    mine = [
        r for r in found if r.subject.model == name and (lane == "policies" or r.subject.provider == lane)
    ]
    return [c for c in subject.cases if not any({**r.case, **c} == r.case for r in mine)]


def run_all(options: argparse.Namespace) -> int:
    end = time.monotonic() + options.seconds
    known = subjects()
    only = options.only.split(",") if options.only else list(known)
    if unknown := sorted({*only} - {*known}):
        print(f"--only: no model {', '.join(unknown)}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    left, failed = list[str](), 0
    for name, subject in ((n, known[n]) for n in only):
        if options.tiny:
            subject = small(subject)
        for lane in lanes(name, subject):
            if not missing(options.out, name, subject, lane):
                continue
            if options.tiny and name in POLICIES:
                left.append(f"{name} (needs a GPU)")
                continue
            whole = options.limit * (2 if name in POLICIES else 1)  # all of their lanes
            limit = min(whole, end - time.monotonic())
            if limit < 20:
                left.append(f"{name}, {lane}")
                continue
            words = [sys.executable, __file__, "--out", str(options.out), "--seconds", f"{limit:.0f}"]
            words += ["--child", name, lane, *(["--tiny"] if options.tiny else [])]
            env = {**os.environ, "FASTKERNELS_PROVIDER": plain_ops()} if lane == PLAIN else None
            try:
                status = subprocess.run(words, env=env, timeout=limit).returncode
                reason = f"the process ended with status {status}"
            except subprocess.TimeoutExpired:
                status, reason = -1, f"not done within {limit:.0f} s"
                if limit < whole:  # the next run has more time for it
                    left.append(f"{name}, {lane}")
                    continue
            if status:
                failed += 1
                times = Times(options.out, name, lane, limit, False)
                for case in missing(options.out, name, subject, lane):
                    row = times.row(case)
                    row.status, row.reason = Status.FAILED, reason
                    append(options.out, [row])
                print(f"{name} {lane}: {reason}", flush=True)
    print(summary(read(options.out)[0] if options.out.exists() else []))
    if left:
        print(f"not measured; run the same command again: {'; '.join(left)}")
    return 1 if failed else 0


def summary(rows: Iterable[Row]) -> str:
    """A table in Markdown: ours next to the fastest reference of each case."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        case = {k: v for k, v in row.case.items() if k != "kind"}
        cell = ", ".join(f"{k} {v}" for k, v in case.items())
        cases.setdefault((str(row.subject.model), cell), {})[str(row.subject.provider)] = row
    head = ("model", "case", "ours, ms", "fastest reference", "its ms", "speedup", "of the paper", "failed")
    lines, known = [head, ("---",) * len(head)], subjects()
    for (name, cell), found in cases.items():
        took = {p: r.metrics.get("call_ms_p50", r.metrics.get("chunk_ms_p50")) for p, r in found.items()}
        best = min(((t, p) for p, t in took.items() if t and p != OURS), default=None)
        ours = took.get(OURS)
        paper = known[name].published if name in known else None
        lines.append((
            name, cell, f"{ours:.3f}" if ours else "-", best[1] if best else "-", f"{best[0]:.3f}" if best else "-",
            f"{best[0] / ours:.2f}" if best and ours else "-", f"{paper:.2f}" if paper else "-",
            ", ".join(p for p, t in took.items() if not t) or "-",
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="rows; what they have is not measured again")
    parser.add_argument("--only", help="models, comma-separated")
    parser.add_argument("--seconds", type=float, default=570.0, help="of all")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a lane")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU: tries the script")
    parser.add_argument("--summary", type=Path, nargs="+", help="print the table of these rows")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.summary:
        print(summary(row for path in options.summary for row in read(path)[0]))
        return 0
    if options.out is None:
        parser.error("give --out or --summary")
    if not options.tiny and not machine.machine().gpus:
        parser.error("there is no GPU; --tiny tries the script with small models on the CPU")
    return child(options) if options.child else run_all(options)


if __name__ == "__main__":
    sys.exit(main())
