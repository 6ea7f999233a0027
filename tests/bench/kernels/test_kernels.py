"""`fk-bench kernels` on the CPU, as a user runs it: all kinds of failing candidates, composition, wrong arguments."""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench.capture.captures import SHIPPED
from fk_bench.core.rows import Row, Status, read
from fk_bench.core.terminal.text import printable
from fk_bench.kernels.judge import Options, judge_ops
from fk_bench.kernels.judge.processes import sides
from fk_bench.kernels.judge.rows import pair
from support.commands import fk_bench, fk_bench_here, last_json

# One of each kind on an op of its own, so that one run covers all: {op: (file, status, part of the reason)}
ROUTE = "import os, time, torch\n"
BAD: dict[str, tuple[str, Status, str]] = {
    "quick_gelu": (
        "import no_such_library_here\ndef quick_gelu(x):\n    return x\n", Status.COMPILE_ERROR, "no_such_library_here",
    ),
    "relu2": ("def relu2(x:\n", Status.COMPILE_ERROR, "SyntaxError"),
    "rms_norm": ("def rms_normal(x):\n    return x\n", Status.SIGNATURE_MISMATCH, "rms_norm"),
    "gemma_rms_norm": ("def gemma_rms_norm(x):\n    return x\n", Status.SIGNATURE_MISMATCH, "weight"),
    "layer_norm": (
        "def layer_norm(x, weight, bias, eps):\n    return x.double()\n",
        Status.SIGNATURE_MISMATCH, "float64",
    ),
    "t5_layer_norm": (
        "def t5_layer_norm(x, weight, eps):\n    return x[..., 1:].clone()\n",
        Status.SIGNATURE_MISMATCH, "output 0 is",
    ),
    "topk_softmax": ("def topk_softmax(*args):\n    return args[0].clone()\n", Status.SIGNATURE_MISMATCH, "sequence"),
    "moe_sum": (
        "def moe_sum(*args):\n    raise ValueError('\\x1b[2K\\rno\\ud800\\x07 idea')\n",
        Status.RUNTIME_ERROR, "no\ufffd idea",
    ),
    "merge_state": (
        ROUTE + "def merge_state(*args):\n    for _ in range(200):\n        os.write(1, b'x' * 1000000)\n"
        "    os.write(2, b'the end of 200 megabytes')\n    os._exit(3)\n",
        Status.CRASH, "the end of 200 megabytes",
    ),
    "linear": (
        ROUTE + "def linear(*args):\n    print('here', flush=True)\n    time.sleep(600)\n",
        Status.TIMEOUT, "here",
    ),
    "geglu": ("\n\ndef geglu(x):\n    return missing(x)\n", Status.RUNTIME_ERROR, "NameError: name 'missing'"),
    "embedding": ("import ctypes\ndef embedding(*args):\n    ctypes.string_at(0)\n", Status.CRASH, "SIGSEGV"),
    "store_kvcache": (ROUTE + "def store_kvcache(*args):\n    os._exit(0)\n", Status.CRASH, "its process ended"),
    "grouped_topk": (
        ROUTE + "def grouped_topk(*args):\n    torch.empty(1 << 50, dtype=torch.uint8)\n",
        Status.OOM, "memory",
    ),
    "logits_processor": (
        "import os\nn = 0\ndef logits_processor(*args):\n    if os.fork() == 0:\n        os.abort()\n"
        "    raise SystemExit(5)\n",
        Status.RUNTIME_ERROR, "SystemExit",
    ),
}  # fmt: skip
ONE = ("--cases", "random", "--case", "odd_63", "--no-time", "--json")
FORK = """
import os, time
from fastkernels.overrides.activation.silu_and_mul import reference
def silu_and_mul(x):
    if os.fork() == 0:
        time.sleep(3600)
    return reference(x).to(x.dtype)
"""


def written(folder: Path, files: Mapping[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for op, text in files.items():
        (folder / f"{op}.py").write_text(text)
    return folder


def kernels(*args: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return fk_bench("kernels", "--device", "cpu", *args, timeout=timeout)


def cases(rows: list[Row]) -> list[Row]:
    return [r for r in rows if r.kind == "case"]


def small(**changes: Any) -> Options:
    return Options(**{"cases": ("random",), "names": ("odd_63",), "timed": False, **changes})


# Candidates that fail


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Row], int]:
    """(last line, {op: row}, exit status) of a run over all of BAD, and an op without a candidate."""
    folder = tmp_path_factory.mktemp("bad")
    candidates = written(folder / "candidates", {op: text for op, (text, *_) in BAD.items()})
    result = kernels(
        *BAD, "moe_align", "--candidate", candidates, "--no-scan", "--timeout", 8, "--out", folder / "run", *ONE
    )  # fmt: skip
    rows, warnings = read(folder / "run" / "rows.jsonl")
    assert not warnings
    return last_json(result), {str(r.subject.op): r for r in cases(rows)}, result.returncode


@pytest.mark.parametrize("op", BAD)
def test_failing_candidate_gets_status_and_reason(failed_run: Any, op: str) -> None:
    row = failed_run[1][op]
    _, status, said = BAD[op]
    assert (row.status, said in row.reason) == (status, True), (row.status, row.reason)
    assert printable(row.reason) == row.reason  # no escape sequence, no surrogate
    assert len(row.reason) < 3000 and row.subject.provider == "candidate" and row.case["name"] == "odd_63"


def test_run_continues_after_failures(failed_run: Any) -> None:
    line, rows, status = failed_run
    assert rows["moe_align"].status is Status.OK and status == 1
    assert not line["ok"] and line["failed"] == len(BAD) and line["cases"] == len(BAD) + 1
    page = Path(line["report"]).read_text()
    assert "the end of 200 megabytes" in page and "no_such_library_here" in page


def test_dying_candidate_gets_rows_and_few_restarts(tmp_path: Path) -> None:
    """And its children end with it."""
    files = written(tmp_path / "c", {"relu2": BAD["store_kvcache"][0].replace("store_kvcache", "relu2")})
    found = cases(judge_ops(["relu2"], {"relu2": files / "relu2.py"}, small(names=(), scan=False)))
    ran = [r for r in found if r.status is not Status.SKIPPED]
    assert len(ran) > pair.DEATHS and {r.status for r in ran} == {Status.CRASH}
    assert "not restarted" in ran[-1].reason and "not restarted" not in ran[0].reason


def test_memory_is_limited_and_children_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "CPU_MEMORY", 700 << 20)
    hoard = (
        "import torch\nkept = []\ndef relu2(x):\n    while True:\n        kept.append(torch.ones(1 << 24))\n"
    )
    files = written(tmp_path / "c", {"relu2": hoard, "silu_and_mul": FORK})
    candidates = {op: files / f"{op}.py" for op in ("relu2", "silu_and_mul")}
    before = children()
    names = ("odd_63", "odd_1000")
    found = {
        r.subject.op: r for r in cases(judge_ops([*candidates], candidates, small(names=names, scan=False)))
    }
    assert found["relu2"].status is Status.OOM, found["relu2"].reason
    assert found["silu_and_mul"].status in (Status.OK, Status.RUNTIME_ERROR), found["silu_and_mul"].reason
    assert children() <= before


def children() -> set[str]:
    """Living processes that the fork servers of this process have forked; a server itself lives longer."""
    found = set()
    own = str(os.getpid()).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and b"fk_bench.kernels.judge.processes.forkserver" in _read(
            entry / "cmdline"
        ):
            parent = re.search(rb"PPid:\s+(\d+)", _read(entry / "status"))
            is_server = parent is not None and parent[1] == own
            if own in _read(entry / "cmdline").split(b"\0") and not is_server:
                found.add(entry.name)
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# Composition

RIGHT = {
    "rms_norm": "from fastkernels.overrides.norm.rms_norm import reference\n"
    "def rms_norm(x, weight, eps):\n    return reference(x, weight, eps)\n",
}


@pytest.mark.slow
def test_candidates_run_in_all_ops_that_contain_them(tmp_path: Path) -> None:
    files = {op: stub(op, tmp_path) for op in ("silu_and_mul", "rms_norm")}
    folder = written(tmp_path / "candidates", files)
    result = kernels("--candidate", folder, "--out", tmp_path / "run", *ONE[:2], "--case", "odd_63", "--case",
                     "odd_1128", "--no-time", "--json")  # fmt: skip
    line = last_json(result)
    rows = cases(read(tmp_path / "run" / "rows.jsonl")[0])
    assert result.returncode == 0, [
        (r.subject.op, r.status, r.reason) for r in rows if r.status is not Status.OK
    ]
    assert {"silu_and_mul", "gated_mlp"} <= set(line["candidates"]["silu_and_mul"]["in"])
    assert "rms_norm" in line["candidates"]["rms_norm"]["in"]
    assert all(c["calls"] > 0 for c in line["candidates"].values())
    mlp = next(r for r in rows if r.subject.op == "gated_mlp")
    assert mlp.case["candidates"] == {"silu_and_mul": mlp.case["live"]["silu_and_mul"]}
    assert mlp.case["candidates"]["silu_and_mul"] >= 1 and mlp.subject.provider == "fastkernels"
    assert "Candidates that ran" in Path(line["report"]).read_text()


def stub(op: str, tmp_path: Path) -> str:
    """A candidate as written by `fk-bench stubs`."""
    made = tmp_path / "stubs"
    if not made.exists():
        assert fk_bench("stubs", "--op", "silu_and_mul", "--op", "rms_norm", "--out", made).returncode == 0
    return (made / f"{op}.py").read_text()


@pytest.mark.slow
def test_wrong_candidate_makes_callers_wrong(tmp_path: Path) -> None:
    wrong = "import torch\ndef silu_and_mul(x):\n    a, b = x.chunk(2, -1)\n    return torch.sigmoid(a) * b\n"
    folder = written(tmp_path / "candidates", {"silu_and_mul": wrong})
    result = kernels("silu_and_mul", "gated_mlp", "fused_experts", "rms_norm", "--candidate", folder, "--out",
                     tmp_path / "run", "--cases", "random", "--case", "odd_63", "--case", "odd_1000", "--case",
                     "odd_1128", "--no-time", "--json")  # fmt: skip
    said = {(r.subject.op, r.status) for r in cases(read(tmp_path / "run" / "rows.jsonl")[0])}
    ran = {s for s in said if s[1] is not Status.SKIPPED}
    assert {op for op, status in ran if status is Status.WRONG} == {
        "silu_and_mul",
        "gated_mlp",
        "fused_experts",
    }
    assert ("rms_norm", Status.OK) in ran and result.returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("levels", "ops", "least"), [((1,), 20, 150), ((2, 3), 8, 40)], ids=["1", "2,3"])
def test_all_our_ops_are_correct(levels: tuple[int, ...], ops: int, least: int, tmp_path: Path) -> None:
    """On hard values and drawn sizes; tests/overrides/test_ops.py and test_captures.py have the other cases."""
    chosen = [word for level in levels for word in ("--level", level)]
    more = ("--quick", "--no-time", "--cases", "held-out,extreme", "--json", "--device", "cpu")
    result = kernels(*chosen, *more, "--out", tmp_path / "run", timeout=1700)
    line = last_json(result)
    assert line["ok"] and line["failed"] == 0 and line["ops"] >= ops and line["cases"] >= least, result.stderr


# Cases that are not run, and damaged captures


def test_gpu_case_is_skipped_on_cpu(tmp_path: Path) -> None:
    chosen = ("--device", "cpu", "--cases", "random", "--case", "qkv_32")
    result = fk_bench_here("kernels", "linear", *chosen, "--out", tmp_path / "run", "--json")
    rows = cases(read(tmp_path / "run" / "rows.jsonl")[0])
    if not rows:
        pytest.fail(result.stderr)
    line = last_json(result)
    assert {r.status for r in rows} == {Status.SKIPPED} and "GPU only" in rows[0].reason
    assert (line["ok"], line["cases"], line["not_run"], result.returncode) == (False, 0, len(rows), 1)
    assert "need a GPU" in line["error"]


def test_case_without_output_is_checked_but_not_timed(tmp_path: Path) -> None:
    # The baseline launches a kernel all the same: it dequantizes the weight.
    chosen = ("--device", "cpu", "--case", "empty", "--rounds", 3, "--no-cage")
    fk_bench_here("kernels", "linear_int4", *chosen, "--out", tmp_path / "run", "--json")
    (row,) = cases(read(tmp_path / "run" / "rows.jsonl")[0])
    assert row.status is Status.OK and "error_max" in row.metrics and "time_us_p50" not in row.metrics


@pytest.mark.slow
def test_damaged_capture_is_reported_rest_is_used(tmp_path: Path) -> None:
    shipped = SHIPPED / "smollm2-135m-chat"
    folder = shutil.copytree(shipped, tmp_path / "captures" / shipped.name)
    file, packed = folder / "values.safetensors", folder / "values.safetensors.xz"
    data = bytearray(lzma.decompress(packed.read_bytes()))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    ops = json.loads(lzma.decompress((folder / "capture.json.xz").read_bytes()))["ops"]
    used = {v for c in ops["embedding"]["calls"] for s in c["values"] for v in s["args"].values()}
    used = {v for v in used if isinstance(v, str)}
    name = sorted(used)[0]
    start = 8 + size + header[name]["data_offsets"][0]
    data[start] ^= 0xFF
    file.write_bytes(data)
    packed.unlink()
    result = kernels("store_kvcache", "embedding", "--cases", "captured", "--no-time", "--captures",
                     tmp_path / "captures", "--out", tmp_path / "run", "--json")  # fmt: skip
    line = last_json(result)
    assert any(name in w and str(file) in w for w in line["warnings"]), line
    assert name in result.stderr and line["failed"] == 0 and line["cases"] > 0
    assert name in Path(line["report"]).read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rms_nrom",), "rms_norm"),
        (("rms_norm", "--cases", "randm"), "random"),
        (("rms_norm", "--against", "vendor"), "production"),
        (("rms_norm", "--level", 7), "the levels are 1, 2, 3 and 4"),
        (("--level", 4), "name it with --model"),
        (("--model", "gpt5"), "gpt5"),
        (("rms_norm", "--device", "tpu"), "tpu"),
        (("rms_norm", "--rounds", 1), "at least three"),
        (("rms_norm", "--timeout", 0), "seconds"),
        (("rms_norm", "--case-budget", 0), "--case-budget 0: must be more than 0 seconds"),
        (("rms_norm", "--op-budget", -1), "--op-budget: expected a number of 0 or more, got -1"),
        (("rms_norm", "--case", "no_such_case"), "no case of rms_norm is named no_such_case: decode_1, "),
        (("rms_norm", "--case", "odd_63", "--case", "od_63"), "is named od_63: decode_1, "),
        (("rms_norm", "--candidate", "no_such_file.py"), "no_such_file.py"),
        (("rms_norm", "--candidate", "."), "fk-bench stubs"),
        (("rms_norm", "--captures", "nowhere"), "nowhere"),
        (("rms_norm", "--python", "candidate=nowhere/python"), "nowhere/python"),
        (("rms_norm", "--python", "oracle=python3"), "candidate=PATH"),
        (("rms_norm", "--out", "file"), "file"),
        (("rms_norm", "--out", "used"), "already"),
    ],
)
def test_wrong_argument_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "rows.jsonl").write_text("")
    device = () if "--device" in words else ("--device", "cpu")
    result = fk_bench_here("kernels", *device, *words)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.returncode in (1, 2) and "Traceback" not in result.stderr
    assert len(errors) == 1 and said in errors[0], result.stderr
    assert (tmp_path / "used" / "rows.jsonl").read_text() == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_a_one_line_error() -> None:
    result = fk_bench_here("kernels", "rms_norm", "--device", "cuda")
    assert result.returncode == 2 and result.stderr.strip() == "error: --device cuda: torch sees no GPU here"
