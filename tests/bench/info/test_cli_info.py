"""`fk-bench list`, `doctor` and `export`, as a user runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from fk_bench import cli
from fk_bench.info import doctor, verdict
from fk_integrations.signatures import diff as signature_diff
from fk_integrations.signatures import recorder
from support.kernels import warm

from fastkernels.core import registry

# commands that need neither a GPU nor a host
PIPED = (
    "doctor", "doctor --all", "list ops", "list hosts", "list models", "list workloads", "list ops --signatures",
    "list --definition rms_norm", "describe llama", "stubs --op rms_norm --out candidates", "explain llama-3.1-8b",
    "routing", "trace export data --ops rms_norm --limit 1", "eval smoke --estimate",
    "kernels silu_and_mul --case one --no-time --device cpu --no-cage", "report a", "diff a b", "track show",
    "board a", "study a", "agents-table a", "submit-check a", "tables --check", "capture --host nope",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def parsed_once() -> Iterator[None]:
    """Each run of doctor parses the sources of all hosts, for 3 s."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorder, "Sources", cache(recorder.Sources))
        yield


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of one command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(args))
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def last(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])


def test_list_ops(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "list")
    assert status == 0 and [r["op"] for r in last(out)["ops"] if r["level"] == 1][:1]
    assert {r["op"] for r in last(out)["ops"]} == set(registry.op_modules())
    assert len(out.splitlines()) > len(registry.op_modules())


@pytest.mark.parametrize("only", [True, False])
def test_list_signatures(capsys: pytest.CaptureFixture[str], only: bool) -> None:
    status, out, _ = run(capsys, "list", "ops", "--signatures", *(["--json"] if only else []))
    rows = last(out)["signatures"]
    assert status == 0 and (len(out.splitlines()) == 1) == only
    assert all({"op", "host", "version", "class", "exact", "difference"} <= set(r) for r in rows)
    for version in ("0.26.0", "0.32.0", "0.33.0"):
        mine = [r for r in rows if (r["op"], r["host"], r["version"]) == ("rms_norm", "vllm", version)]
        assert "VllmRMSNorm" in {r["class"] for r in mine} and all(r["exact"] for r in mine)
    assert {r["version"] for r in rows if r["host"] == "sglang"} == {"0.5.16", "0.5.17", "0.5.23"}
    assert all(r["difference"] for r in rows if not r["exact"])


@pytest.mark.parametrize(
    ("what", "key", "some"),
    [
        ("ops", "op", {"fused_experts", "sampling", "qwen3_decoder_layer"}),
        ("models", "architecture", {"LlamaForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM"}),
    ],
)
def test_list_describes_entries(
    capsys: pytest.CaptureFixture[str], what: str, key: str, some: set[str]
) -> None:
    status, out, _ = run(capsys, "list", what)
    rows = last(out)[what]
    assert status == 0 and some <= {r[key] for r in rows} and all(r["about"] for r in rows)


def test_models_name_the_test_that_verified_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = last(run(capsys, "list", "models", "--json")[1])["models"]
    files = sorted({row["verified"]["test"].partition("::")[0] for row in rows})
    collect = f"import pytest; pytest.main(['--collect-only', '-q', '-o', 'addopts=', *{files}])"
    done = warm.run(["-c", collect])
    tests = {line.strip() for line in done.stdout.splitlines() if "::" in line}
    tests |= {line.partition("[")[0] for line in tests}
    assert {row["verified"]["test"] for row in rows} - tests == set()
    assert all(0 <= row["verified"]["tolerance"] < 1e-3 for row in rows)


def test_list_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = last(run(capsys, "list", "hosts")[1])["hosts"]
    assert {r["host"] for r in rows} == set(signature_diff.hosts()) >= {"vllm", "sglang"}
    assert all("rms_norm" in r["ops"] for r in rows if r["host"] in ("vllm", "sglang"))


def test_list_of_unknown_kind_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "list", "op")
    assert status == 2 and not last(out)["ok"] and "unknown list 'op'. Did you mean 'ops'?" in err
    assert run(capsys, "list", "hosts", "--signatures")[0] == 2


@pytest.mark.parametrize(
    "args, says",
    [
        (["rms_nom"], "unknown op 'rms_nom'. Did you mean 'rms_norm'?"),
        (
            ["rms_norm", "--host", "keras"],
            "unknown host 'keras'. Known: diffusers, diffusion_policy_3d, fla, gsplat, openfold3, sglang, timm,"
            " torch_geometric,"
            " torchrec, transformers, ultralytics, vllm.",
        ),
        (["gelu", "--host", "torch"], "classes of torch.nn have no fork to be put into"),
        (
            ["rms_norm", "--host-version", "9.9"],
            "unknown vllm version '9.9'. Recorded: 0.26.0, 0.32.0, 0.33.0.",
        ),
        (["parallel_linear", "--host", "transformers"], "parallel_linear has no class for transformers"),
    ],
)
def test_export_of_unknown_names_is_an_error(
    capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    status, out, err = run(capsys, "export", *args)
    assert status == 2 and says in last(out)["error"] and says in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "not_loaded"),
    [
        (["export", "gelu", "--host", "torch"], "torch"),
        (["export", "gelu", "--host", "keras"], "torch"),
        (["export", "gelu", "--host-version", "9.9"], "torch"),
        (["kernels", "rms_norm", "--case", "odd_7777"], "fastkernels.overrides.linear.linear"),
    ],
)
def test_refusal_loads_only_what_it_needs(command: list[str], not_loaded: str) -> None:
    code = (
        f"import sys; from fk_bench.cli import main; sys.argv = ['fk-bench', *{command}]\n"
        f"try: main()\nexcept SystemExit as end: print(end.code, {not_loaded!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "2 False", done


def test_export_writes_nothing_but_the_file(tmp_path: Path) -> None:
    command = ["export", "rms_norm", "--host", "sglang", "--host-version", "0.5.16"]
    done = warm.run(["-m", "fk_bench.cli", *command], cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# SPDX-License-Identifier") and "class RMSNorm(" in done.stdout
    compile(done.stdout, "rms_norm.py", "exec")


def examine(monkeypatch: pytest.MonkeyPatch, **variables: str) -> doctor.Found:
    """Doctor on this environment alone, with the given environment variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "HOST_ENVIRONMENTS", {})
    return doctor.examine([])


def test_doctor_reports_machine_and_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(monkeypatch, FASTKERNELS_DISABLE="silu_and_mul")
    assert (
        not found.problems and found.rows["machine"]["cores"] >= 1 and found.rows["machine"]["memory_gib"] > 0
    )
    assert {"python", "torch", "fastkernels"} <= set(found.rows["versions"]["this"])
    assert found.rows["environment"]["FASTKERNELS_DISABLE"] == "silu_and_mul"
    by_op = {(r["op"], r["device"], r["provider"]): r for r in found.rows["providers"]}
    assert by_op["rms_norm", "cpu", "reference"]["there"]
    assert "runs on cuda" in by_op["rms_norm", "cpu", "triton"]["reason"]


def _installed(folder: Path, source: str) -> doctor.Installed:
    file = folder / "vllm/model_executor/layers/layernorm.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    return doctor.Installed("vllm", "0.33.0", sys.executable, folder, ())


@pytest.mark.parametrize(
    "source, env, state, says",
    [
        ("class RMSNorm: ...\n", {}, "off", "which we do not know (known versions: 0.26.0, 0.32.0, 0.33.0)"),
        ("x = 1\n", {}, "off", "vllm 0.33.0 has no vllm.model_executor.layers.layernorm:RMSNorm"),
        ("class RMSNorm: ...\n", {"FASTKERNELS_DISABLE": "rms_norm"}, "off", "FASTKERNELS_DISABLE"),
        ("class RMSNorm: ...\n", {"FASTKERNELS_OPS": "silu_and_mul"}, "off", "not in FASTKERNELS_OPS"),
    ],
)
def test_doctor_reports_why_op_is_off(
    tmp_path: Path, source: str, env: dict[str, str], state: str, says: str
) -> None:
    rows = doctor.seam_rows(
        _installed(tmp_path, source), [registry.get("rms_norm")], doctor.Environment.read(env)
    )
    row, *_ = (r for r in rows if r["class"] == "RMSNorm")
    assert (row["op"], row["seam"], row["state"]) == ("rms_norm", "leaf", state) and says in row["reason"]


@pytest.mark.parametrize(
    "variables, says",
    [
        ({"FASTKERNELS_DISABLE": "rms_nom"}, "unknown op 'rms_nom'"),
        ({"FASTKERNELS_PROVIDER": "rms_norm"}, "FASTKERNELS_PROVIDER: expected OP:VALUE"),
        ({"FASTKERNELS_PROVIDER": "rms_norm:nvcc"}, "rms_norm has no provider 'nvcc'"),
        ({"FASTKERNELS_CANDIDATES": "rms_norm=/no/such.py"}, "no file /no/such.py"),
    ],
)
def test_doctor_finds_a_wrong_variable(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    monkeypatch.setattr(doctor, "HOSTS", ())
    assert any(says in problem for problem in examine(monkeypatch, **variables).problems)


def test_doctor_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HOST_ENVIRONMENTS", {})
    status, out, _ = run(capsys, "doctor", "--json")
    assert status == 0 and len(out.splitlines()) == 1 and last(out)["ok"] is True
    broken = ("--python", "vllm=/no/such/python")
    status, out, _ = run(capsys, "doctor", "--json", *broken)
    assert status == 1 and not last(out)["ok"] and "no such interpreter: /no/such/python" in out
    status, out, _ = run(capsys, "doctor", *broken)
    assert status == 1 and out.startswith("1 problem (details")
    assert re.search("^problem +--python vllm: no such interpreter: /no/such/python$", out, re.M)
    status, out, err = run(capsys, "doctor", "--python", "nonsense")
    assert status == 2 and "--python: expected LANE=VALUE" in err


def test_doctor_answers_in_ten_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "HOST_ENVIRONMENTS", {})
    monkeypatch.setenv("FASTKERNELS_DISABLE", "rms_norm")
    status, out, _ = run(capsys, "doctor")
    *said, ended = out.splitlines()
    found = {line[:12].strip(): line[12:].strip() for line in said}
    assert status == 0 and len(said) <= 10 and "{" not in "".join(said)
    assert last(ended)["ok"] is True and not last(ended)["problems"]
    assert out.startswith("ok: nothing is broken") and "cores" in found["machine"]
    assert re.search(r"\d+ ops on, .*1 off \(mostly: FASTKERNELS_DISABLE\)", found["transformers"])
    assert found["variables"] == "FASTKERNELS_DISABLE=rms_norm" and "--all" in out.splitlines()[0]
    assert re.match(r".*cpu: (\d+) of \1 ops have one", found["providers"])
    status, whole, _ = run(capsys, "doctor", "--all")
    assert status == 0 and len(whole.splitlines()) > 100 and "GELUActivation" in whole
    monkeypatch.setattr(sys, "argv", ["fk-bench", "doctor"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, shown, _ = run(capsys, "doctor")
    assert shown.splitlines() == said


def test_verdict_with_five_hosts_has_eleven_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HOST_ENVIRONMENTS", {})
    found = doctor.examine([]).rows
    hosts = [{"host": name, "version": "1", "python": "python"} for name in doctor.HOSTS]
    said = verdict.lines({**found, "hosts": hosts}, [], [])
    assert len(doctor.HOSTS) == 5 and len(said) <= 11
    assert "--all" in said[0] and "--all" not in verdict.lines(found, [], [], whole=True)[0]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (("12.9", "12.8", "12.8", ""), "NVRTC 12.9; PyTorch for CUDA 12.8; driver for CUDA 12.8"),
        ((None, None, None, "NVRTC cannot be used"), "NVRTC cannot be used; PyTorch for CPUs; no driver"),
    ],
)
def test_doctor_has_a_line_on_cuda(
    row: tuple[str | None, ...], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "HOST_ENVIRONMENTS", {})
    found = doctor.examine([]).rows
    assert found["cuda"] == doctor.cuda_row() and set(found["cuda"]) == {
        "nvrtc", "torch_cuda", "driver_cuda", "reason",
    }  # fmt: skip
    said = verdict.lines({**found, "cuda": dict(zip(found["cuda"], row, strict=True))}, [], [])
    assert f"CUDA C++     {line}" in said


def test_doctor_explains_libraries_without_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {r["library"]: r for r in doctor.library_rows()}
    assert set(rows) == {"flash-attn", "deep-gemm"}
    assert all(
        "--no-build-isolation" in r["build"] and "With vllm installed" in r["build"] for r in rows.values()
    )
    monkeypatch.setattr(doctor, "installed", lambda module: module == "vllm.vllm_flash_attn")
    rows = {r["library"]: r for r in doctor.library_rows()}
    assert rows["flash-attn"]["module"] == "vllm.vllm_flash_attn" and rows["flash-attn"]["there"]
    assert rows["deep-gemm"]["module"] is None and not rows["deep-gemm"]["there"]


def test_list_definition(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run(capsys, "list", "ops", "--definition", "rms_norm", "--json")
    found = last(out)
    assert status == 0 and len(out.splitlines()) == 1
    assert {"name", "op_type", "axes", "inputs", "outputs", "reference"} <= set(found)
    assert found["op_type"] == "rms_norm" and {"x", "weight"} <= set(found["inputs"])
    compile(found["reference"], "rms_norm", "exec")
    _, piped, _ = run(capsys, "list", "--definition", "rms_norm")
    assert piped == out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, indented, _ = run(capsys, "list", "--definition", "rms_norm")
    assert json.loads(indented) == found and len(indented.splitlines()) > 10


def test_every_command_ends_its_output_with_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others = {"export", "serve", "mcp"}  # source for a fork, servers
    flags = {
        name: {flag for option in command.params for flag in option.opts}
        for name, command in typer.main.get_command(cli.build()).commands.items()
    }
    assert {name for name in flags if "--json" not in flags[name]} == others
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "HOST_ENVIRONMENTS", {})
    for words in PIPED:
        _, out, err = run(capsys, *words.split())
        assert isinstance(last(out), dict), (words, err)
        _, out, err = run(capsys, *words.split(), "--json")
        assert len(out.splitlines()) == 1 and isinstance(last(out), dict), (words, out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ops", "--definition", "rms_nom"], "unknown op 'rms_nom'. Did you mean 'rms_norm'?"),
        (["models", "--definition", "rms_norm"], "--definition belongs to `list ops`"),
    ],
)
def test_list_definition_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    status, out, err = run(capsys, "list", *arguments)
    assert status == 2 and says in last(out)["error"] and says in err and len(err.splitlines()) == 1


def test_help_of_export_names_every_host_with_signatures() -> None:
    from fk_bench.info import export
    from fk_integrations.signatures.diff import hosts

    assert sorted(export._HOSTS) == hosts()
