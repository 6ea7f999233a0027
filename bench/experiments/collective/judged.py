"""Judge collectives on several GPUs, and check the judge itself with wrong, late and dead ranks: see README.md.

judged.py --out DIR [--ranks 2] [--ops all_reduce,...] [--most 33554432] [--only times|judge]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "integrations")]

import torch  # noqa: E402
from fk_bench.core.gpus import check_ranks  # noqa: E402
from fk_bench.core.rows import Row, append  # noqa: E402
from fk_bench.core.terminal.flags import ConfigError  # noqa: E402
from fk_bench.kernels.judge import Options  # noqa: E402
from fk_bench.kernels.judge.rows.judging import judge_ops  # noqa: E402

from fastkernels.core import registry  # noqa: E402
from fastkernels.core.spec import Case  # noqa: E402

HIDDEN = 4096
TOKENS = (1, 8, 32, 64, 128, 256, 1024, 4096)  # messages of 8 KiB to 32 MiB in bfloat16
OPS = ("all_reduce", "all_reduce_rms_norm", "reduce_scatter", "all_gather")
CHEATS = ROOT / "tests" / "cheats"
BROKEN = {  # {name: (what a rank does before its call, statuses that name it)}
    "dead": ("    if comm.rank == 1:\n        os._exit(7)\n", ("crash",)),
    "raises": ("    if comm.rank == 1:\n        raise IndexError('out of range')\n", ("runtime_error",)),
    "hangs": ("    if comm.rank == 1:\n        time.sleep(1e4)\n", ("timeout",)),
    "silent": ("    if comm.rank == 1:\n        return x.clone()\n", ("timeout", "wrong", "crash", "runtime_error")),
}  # fmt: skip
BODY = """
import os, time
import torch.distributed as dist
from fastkernels.core import parallel


def all_reduce(x, group="tp"):
    comm = parallel.communicator(group)
{}    out = x.clone()
    dist.all_reduce(out, group=comm.process_group)
    return out
"""


def sizes(name: str, most: int) -> tuple[Case, ...]:
    """Messages of 4 KiB to `most` bytes."""
    more = {"residual": True} if name == "all_reduce_rms_norm" else {}
    found = [(1, HIDDEN // 2), *((t, HIDDEN) for t in TOKENS if t * HIDDEN * 2 <= most)]
    return tuple(
        Case(f"{t}x{h}", {"tokens": t, "hidden": h, **more}, weight=1, tags=("model",))
        for t, h in found
        if name == "all_reduce" or t > 1
    )


def shown(row: Row) -> str:
    m, words = row.metrics, [row.status.value]
    if m.get("time_us_p50"):
        words.append(f"{m['time_us_p50']:.2f} us, {row.baseline} {m['baseline_us_p50']:.2f} us")
    if "speedup" in m:
        low, high = row.ci95["speedup"]
        words.append(f"{m['speedup']:.2f} [{low:.2f}, {high:.2f}]")
    if "link_gb_per_s" in m:
        words.append(f"{m['bus_gb_per_s']:.0f} of {m['link_gb_per_s']:.0f} GB/s")
    if "baselines_us" in row.case:
        words.append(str(row.case["baselines_us"]))
    return "; ".join([*words, row.reason[:300]])


def judged(
    name: str, options: Options, out: Path, provider: str = "", candidate: Path | None = None
) -> list[Row]:
    """The rows of the cases. provider: of ours, instead of the default one."""
    os.environ.pop("FASTKERNELS_PROVIDER", None)
    if provider:
        os.environ["FASTKERNELS_PROVIDER"] = f"{name}:{provider}"
    begin = time.time()
    found = judge_ops([name], {name: candidate} if candidate else None, options)
    append(out / "rows.jsonl", found)
    rows = [r for r in found if r.kind == "case"]
    for row in rows:
        label = candidate.stem if candidate else provider or "default"
        print(f"{name} {label} {row.case['name']}: {shown(row)}", flush=True)
    print(f"    {time.time() - begin:.1f} s", flush=True)
    return rows


def check_judge(options: Options, out: Path) -> list[str]:
    """Problems of the judge: a cheat that it misses, an honest twin that it refuses, a rank that it does not name."""
    problems = []
    for cheat in json.loads((CHEATS / "catalogue.json").read_text()):
        name = cheat["name"]
        if cheat.get("ranks", 0) != options.ranks or "exchange(" in (CHEATS / f"{name}.py").read_text():
            continue
        each = Options(**{**vars(options), "names": (cheat["case"],), "cases": ("random",), "timed": True})
        caught = {*cheat["caught"], "compile_error"}  # a graph cannot read a tensor's values on the host
        for folder, wanted in ((CHEATS, caught), (CHEATS / "honest", {"ok"})):
            for row in judged(
                cheat["op"], each, out, candidate=renamed(folder / f"{name}.py", cheat["op"], out)
            ):
                if row.status.value not in wanted:
                    problems.append(f"{folder.name}/{name}: {row.status.value}, not {wanted}: {row.reason}")
    for name, (what, wanted) in BROKEN.items():
        file = out / "candidates" / name / "all_reduce.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(BODY.format(what))
        each = Options(
            **{**vars(options), "names": ("decode_32",), "cases": ("random",), "scan": False, "timeout": 30.0}
        )
        for row in judged("all_reduce", each, out, candidate=file):
            if row.status.value not in wanted or not ("rank 1" in row.reason or name == "silent"):
                problems.append(f"{name}: {row.status.value}: {row.reason}")
    return problems


def renamed(file: Path, op: str, out: Path) -> Path:
    """A copy whose name is the op's."""
    folder = out / "candidates" / f"{file.parent.name}-{file.stem}"
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / f"{op}.py"
    copy.write_text(file.read_text())
    return copy


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--most", type=int, default=32 << 20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=("times", "judge"))
    given = parser.parse_args()
    try:
        check_ranks("--ranks", given.ranks, torch.cuda.device_count(), on_gpus=given.device == "cuda")
    except ConfigError as error:
        parser.error(str(error))
    given.out.mkdir(parents=True, exist_ok=True)
    options = Options(device=given.device, ranks=given.ranks, timeout=120.0)
    problems = []
    if given.only != "judge":
        for name in given.ops.split(","):
            task = Options(**{**vars(options), "task": sizes(name, given.most), "cases": ()})
            for provider in [p.name for p in registry.get(name).op.providers if p.name == "triton"]:
                rows = judged(name, task, given.out, provider)
                problems += [
                    f"{name} {provider}: {r.reason}" for r in rows if r.status.value not in ("ok", "skipped")
                ]
    if given.only != "times":
        problems += check_judge(options, given.out)
    for problem in problems:
        print(f"PROBLEM {problem}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
