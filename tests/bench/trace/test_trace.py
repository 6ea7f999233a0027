"""FlashInfer-Trace data sets: accepted and run by flashinfer-bench's own code, and read back as the same cases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench.capture.replay import captured_cases, problems
from fk_bench.core.rows import Machine, Row, Status, Subject, append, read
from fk_bench.trace.schema import TraceError
from fk_bench.trace.solutions import solution
from safetensors.torch import save_file
from support.commands import fk_bench_here, last_json

from fastkernels.core import registry
from fastkernels.core.definition import axis_values, definition

OPS = ("rms_norm", "gelu", "attention_decode", "fused_experts", "interpolate", "rotary_emb")
RMS_NORM = """import torch

FACTOR = 1.0


def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    h = x.float() if residual is None else x.float() + residual.float()
    if residual is not None:
        residual.copy_(h)
    out = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * FACTOR
    if cast_x_before_out_mul:
        out = out.to(x.dtype)
    return (out * weight.to(out.dtype)).to(x.dtype)
"""
GELU = """import torch.nn.functional as F


def gelu(x, approximate="none"):
    return F.gelu(x.float(), approximate=approximate).to(x.dtype)
"""


def row(name: str, status: Status = Status.OK, source: str = "random", **more: Any) -> Row:
    case = {"kind": "case", "level": 1, "name": name, "source": source, "dims": {"tokens": 7, "hidden": 96},
            "dtype": "float32", "weight": 1.0}  # fmt: skip
    return Row(
        run_id="r1", command="kernels", status=status, machine=Machine(gpu="NVIDIA H200", gpus=1), baseline="vllm",
        subject=Subject(op="rms_norm", candidate="mine/rms_norm.py"), case=case, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict]:
    """(the exported data set, what its import made, the export's line of JSON)"""
    root = tmp_path_factory.mktemp("trace")
    run = root / "run"
    mine = run / "candidates"
    mine.mkdir(parents=True)
    (mine / "rms_norm.py").write_text(RMS_NORM)
    (mine / "gelu.py").write_text(GELU)
    (mine / "_gelu").mkdir()
    (mine / "_gelu" / "notes.txt").write_text("constants\n")
    metrics = {"time_us_p50": 10.0, "baseline_us_p50": 12.5, "speedup": 1.25, "error_max": 1e-6}
    captured = next(c for c in captured_cases("rms_norm"))
    append(run / "rows.jsonl", [
        row("small", metrics=metrics, ci95={"speedup": (1.2, 1.3)}),
        row(captured.case.name, Status.WRONG, "captured", metrics={"error_max": 0.5}),
        row("huge", source="extreme"), row("odd", Status.REJECTED), row("untimed"),
    ])  # fmt: skip
    out = root / "data"
    made = last_json(fk_bench_here("trace", "export", out, "--ops", ",".join(OPS), "--run", run, "--json"))
    back = last_json(fk_bench_here("trace", "import", out, "--out", root / "back", "--json"))
    assert made["ok"] and back["ok"] and not back["left_out"], (made, back)
    return out, root / "back", made


def test_their_models_accept_an_exported_data_set(dataset):
    pytest.importorskip("flashinfer_bench")
    from flashinfer_bench.data import TraceSet

    out, _, made = dataset
    found = TraceSet.from_path(str(out))
    assert made["checked_by"] and set(OPS) == {d.op_type for d in found.definitions.values()}
    assert sum(map(len, found.workloads.values())) == made["workloads"] > 60
    best = found.get_best_trace("rms_norm_hidden96_float32", max_rel_error=float("inf"))
    assert best is None  # the judge measures no relative error: none is claimed
    (timed,) = found.traces["rms_norm_hidden96_float32"]
    assert (
        timed.evaluation.performance.latency_ms == 0.01
        and timed.evaluation.performance.speedup_factor == 1.25
    )
    assert found.get_solution(timed.solution) is not None
    assert {t.evaluation.status.value for of in found.traces.values() for t in of} == {
        "PASSED",
        "INCORRECT_NUMERICAL",
    }
    assert sum(made["left_out"]["rms_norm"].values()) == 3


@pytest.mark.parametrize("op", OPS)
def test_imported_cases_are_the_exported_ones(dataset, op):
    _, back, _ = dataset
    spec = registry.get(op)
    captured = captured_cases(op)
    want = [c for c in spec.cases if "model" in c.tags] + [c.case for c in captured]
    got = captured_cases(op, back / "captures")
    assert not problems(op, back / "captures")

    scale = 1 if all(float(c.weight).is_integer() for c in want) else 1000  # a capture counts calls

    def key(case: Any, scale: int = 1) -> tuple:
        axes = {k: v for k, v in axis_values(spec, case).items() if k not in shrunk}
        return definition(spec, case)["name"], axes, round(case.weight * scale)

    shrunk = {"blocks", "max_blocks"}  # a replay makes a cache that is mostly unused smaller
    keys = [key(c.case) for c in got]
    weights_differ = [key(c, scale) for c in want if key(c, scale) not in keys]
    assert len(got) == len(want) + (op == "rms_norm") and not weights_differ  # and the case of the run


def test_captured_integers_survive_the_round_trip(dataset):
    _, back, _ = dataset
    want = [c.values["topk_ids"] for c in captured_cases("fused_experts")]
    got = [c.values["topk_ids"] for c in captured_cases("fused_experts", back / "captures")]
    assert want and all(any(torch.equal(w, g) for g in got) for w in want)


def test_imported_candidates_are_the_exported_files(dataset):
    _, back, _ = dataset
    (folder,) = (back / "candidates").iterdir()
    assert (folder / "rms_norm.py").read_text() == RMS_NORM and (folder / "gelu.py").read_text() == GELU
    assert (folder / "_gelu" / "notes.txt").read_text() == "constants\n"
    assert sorted(p.name for p in folder.iterdir()) == ["_gelu", "gelu.py", "rms_norm.py"]


def test_imported_verdicts_are_provisional_rows(dataset):
    _, back, _ = dataset
    found, warnings = read(back / "rows.jsonl")
    assert not warnings and {r.status for r in found} == {Status.OK, Status.WRONG}
    timed = next(r for r in found if r.status is Status.OK)
    assert timed.metrics["speedup"] == 1.25 and timed.baseline == "vllm" and timed.subject.op == "rms_norm"
    assert all(r.provisional for r in found) and timed.machine.gpu == "NVIDIA H200"


@pytest.mark.parametrize("name", ["rms_norm", "gelu", "rotary_emb"])
def test_their_evaluator_agrees_with_our_reference(dataset, name, monkeypatch, tmp_path):
    """Reference, inputs and Solutions go through flashinfer-bench's builder and evaluator, on the CPU."""
    pytest.importorskip("flashinfer_bench")
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    from flashinfer_bench.bench.config import BenchmarkConfig
    from flashinfer_bench.bench.evaluators import DefaultEvaluator
    from flashinfer_bench.compile import BuilderRegistry
    from flashinfer_bench.data import Solution, TraceSet

    out, _, _ = dataset
    found, spec = TraceSet.from_path(str(out)), registry.get(name)
    config = BenchmarkConfig(num_trials=1, profile_baseline=False)
    ran = 0
    for one in (d for d in found.definitions.values() if d.op_type == name):
        loads = [t.workload for t in found.workloads[one.name]]
        load = min(loads, key=lambda w: sum(w.axes.values()))
        if sum(math.prod(s) for s in one.get_input_shapes(load.axes) if s) > 1 << 20:
            continue
        base = DefaultEvaluator.build_baseline(one, load, config, "cpu", out)
        given = dict(zip(one.inputs, base.inputs[0], strict=True))
        constants = {
            t.partition(":")[2].split("=")[0]: json.loads(t.split("=", 1)[1]) for t in one.tags if "=" in t
        }
        args = [given.get(a.name, constants.get(a.name)) for a in spec.arguments]
        want = spec.reference(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
        want = [t for t in (want if isinstance(want, tuple) else (want,)) if t is not None]
        for ours, theirs in zip(want, base.outputs[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        for mine in found.solutions.get(one.name, []):
            wrong = mine.model_dump(mode="json")
            for source in wrong["sources"]:
                source["content"] = source["content"].replace("FACTOR = 1.0", "FACTOR = 1.5")
            for each, ok in ((mine, True), (Solution(**wrong), name != "rms_norm")):
                built = BuilderRegistry.get_instance().build(one, each)
                _, verdict = DefaultEvaluator.check_correctness(
                    one, built, base.inputs, base.outputs, config, str(tmp_path / "log"), "cpu"
                )
                assert (verdict is None) == ok, verdict
        ran += 1
    assert ran


def test_ops_without_an_expression_are_named():
    unsigned = {
        "fused_experts_int4", "fused_experts_nvfp4", "fused_experts_swigluoai", "linear_int4", "linear_nvfp4",
        "linear_ternary",
    }  # fmt: skip
    from fk_bench.trace.workloads import Entry, entries

    found = {op: list(entries(op, ("model",), None, 1 << 20)) for op in sorted(unsigned)}
    assert all(
        isinstance(e, str) and "uint8, which the schema does not have" in e
        for of in found.values()
        for e in of
    )
    (large,) = [e for e in entries("mla_sparse", ("model",), None, 1 << 20) if not isinstance(e, Entry)]
    assert large == "case prefill_4k: the values of indices exceed 1 MiB (--limit)"


def theirs(root: Path, name: str, op_type: str, inputs: dict, outputs: dict, axes: dict, **more: Any) -> None:
    """A definition as others write them, with workloads and solutions."""
    for kind, documents in (("definitions", [{
        "name": name, "op_type": op_type, "axes": axes, "inputs": inputs, "outputs": outputs,
        "reference": "import torch\n\ndef run(*args):\n    return args[0]\n",
    }]), ("workloads", more.get("workloads", [])), ("solutions", more.get("solutions", []))):  # fmt: skip
        (root / kind / op_type).mkdir(parents=True, exist_ok=True)
        if kind == "workloads":
            lines = [json.dumps({"definition": name, "workload": w}) for w in documents]
            (root / kind / op_type / f"{name}.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n")
            continue
        for n, one in enumerate(documents):
            (root / kind / op_type / f"{name}-{n}.json").write_text(json.dumps(one))


def test_data_set_of_others_becomes_cases_and_candidates(tmp_path):
    root = tmp_path / "their set"
    half = {"A": {"shape": ["M", "K"], "dtype": "float16"}, "B": {"shape": ["N", "K"], "dtype": "float16"}}
    axes = {"M": {"type": "var"}, "N": {"type": "const", "value": 48}, "K": {"type": "const", "value": 96}}
    result = {"C": {"shape": ["M", "N"], "dtype": "float16"}}
    run = {"path": "main.py", "content": "def run(A, B):\n    return A @ B.T\n"}
    solutions = [
        {"name": f"gemm-{author}-{n}", "definition": "gemm_n48_k96", "author": author, "sources": [
            {**run, "content": f"# {n}\n{run['content']}"}], "spec": {
            "language": language, "target_hardware": ["cuda"], "entry_point": "main.py::run",
            "destination_passing_style": False}}
        for n, (author, language) in enumerate([("some one", "python"), ("some one", "python"), ("else", "cuda")])
    ]  # fmt: skip
    random = {"A": {"type": "random"}, "B": {"type": "random"}}
    stored = {
        "A": {"type": "safetensors", "path": "blob/a.safetensors", "tensor_key": "A"},
        "B": {"type": "random"},
    }
    outside = {**stored, "A": {**stored["A"], "path": "../a.safetensors"}}
    loads = [
        {"axes": {"M": 5}, "inputs": random, "uuid": "one"}, {"axes": {"M": 9}, "inputs": stored, "uuid": "two"},
        {"axes": {"M": 9}, "inputs": outside, "uuid": "three"}, {"axes": {"M": 8}, "inputs": stored, "uuid": "four"},
        {"axes": {}, "inputs": random, "uuid": "five"},
    ]  # fmt: skip
    theirs(root, "gemm_n48_k96", "gemm", half, result, axes, workloads=loads, solutions=solutions)
    theirs(root, "gqa_paged_decode_h32", "gqa_paged", half, result, axes, workloads=loads[:1])
    (root / "blob").mkdir()
    outlier = torch.ones(9, 96, dtype=torch.float16) * 100
    save_file({"A": outlier}, root / "blob" / "a.safetensors")
    save_file({"A": outlier}, tmp_path / "a.safetensors")
    found = last_json(fk_bench_here("trace", "import", root, "--out", tmp_path / "out", "--json"))
    assert found["cases"] == {"linear": 2} and found["candidates"] == {
        "some-one": ["linear"],
        "some-one-2": ["linear"],
    }
    said = "\n".join(found["left_out"])
    for part in (
        "outside the data set", "has torch.float16 [9, 96] for A", "no value for axis M", "corresponds to no op",
        "language 'cuda'", "gemm_n48_k96.jsonl:6",
    ):  # fmt: skip
        assert part in said, said
    cases = captured_cases("linear", tmp_path / "out" / "captures")
    assert {c.arguments[0].shape[0] for c in cases} == {5, 9} and {c.case.dtype for c in cases} == {"float16"}
    kept = next(c for c in cases if "values" in c.case.tags)
    drawn = kept.make_args("cpu", torch.Generator().manual_seed(1))[0]
    assert 85 < drawn.float().mean() < 115  # values of the workload, changed by up to 10 percent
    from fastkernels.core import candidate

    call = candidate.load("linear", str(tmp_path / "out" / "candidates" / "some-one" / "linear.py")).function
    a, b = torch.randn(5, 96), torch.randn(48, 96)
    torch.testing.assert_close(call(a, b), a @ b.T)


def test_candidate_that_is_no_function_is_named(tmp_path):
    found = definition(registry.get("rms_norm"))
    file = tmp_path / "rms_norm.py"
    for text, message in (
        ("class VllmRMSNorm: pass\n", "a Solution is a function"),
        ("def rms_norm(x, weight, eps): pass\n", "takes 3 arguments, and the definition has residual too"),
        ("def rms_norm(:\n", "is not a Python file"),
        ("", "has no function rms_norm"),
    ):
        file.write_text(text)
        with pytest.raises(TraceError, match=message):
            solution("rms_norm", file, found, "me")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export"], "give `export FOLDER` or `import FOLDER`"),
        (["export", "{full}", "--ops", "rms_norm"], "choose a new folder"),
        (["export", "{new}", "--ops", "rms_nrom"], "Did you mean 'rms_norm'"),
        (["export", "{new}", "--cases", "random"], "--cases random: the sources are model and captured"),
        (["export", "{new}", "--ops", "gelu", "--run", "nowhere"], "no such run: nowhere"),
        (["import", "{full}", "--out", "{new}"], "is no data set"),
    ],
)
def test_bad_input_ends_in_one_line(tmp_path, words, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    found = fk_bench_here("trace", *(w.format(full=tmp_path / "full", new=tmp_path / "new") for w in words))
    assert found.returncode == 2 and message in found.stderr and "Traceback" not in found.stderr
