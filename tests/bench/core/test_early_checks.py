"""Wrong names in a command line: the message, and that it comes before torch is imported."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fk_bench import cli
from fk_bench.core import hub
from fk_bench.core.checkout import REPO_ROOT
from fk_bench.core.terminal import output
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.e2e import model_configs
from fk_bench.early import cases, checks
from fk_bench.kernels.judge.correctness.cases import SOURCES, case_names
from support.commands import fk_bench_here, last_json

from fastkernels.core import registry
from fastkernels.core.registry import op_modules

# runs the command lines of standard input, a list in JSON, and prints for each [status, output, errors, heavy imports]
PROGRAM = """
import contextlib, io, json, sys
from fk_bench import cli
found = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code
    found.append([status, out.getvalue(), err.getvalue(), [n for n in ("torch", "transformers") if n in sys.modules]])
print(json.dumps(found))
"""


def run_all(lines: list[str], folder: Path, **environment: str) -> list[tuple[int, str, str, list[str]]]:
    """Run these command lines in a process of its own, without anything imported before."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, timeout=300, check=True,
        env={"HF_HUB_OFFLINE": "1", "HOME": str(folder), "PATH": "", **environment},
        input=json.dumps([line.split() for line in lines]),
    )  # fmt: skip
    return [tuple(found) for found in json.loads(done.stdout)]


BENCH = (REPO_ROOT / "pyproject.toml").read_text().partition("\nbench = [")[2]
REFUSED = {
    "kernels rms_nom --no-time": "unknown op 'rms_nom'. Did you mean 'rms_norm'?",
    "export rms_nom": "unknown op 'rms_nom'. Did you mean 'rms_norm'?",
    "tune linaer": "unknown op 'linaer'. Did you mean 'linear'?",
    "tune qwen9-8b": "unknown model 'qwen9-8b'. Did you mean 'qwen3-8b' or ",
    "tune": "give a model, as in `fk-bench tune qwen3-8b`",
    "tune --model=lama": "unknown model 'lama'. Did you mean 'llama'?",
    "patch-compare": "give models, as in `fk-bench patch-compare qwen2.5-7b`",
    "patch-compare qwen9-8b": "unknown model 'qwen9-8b'",
    "patch-compare all --ops rms_norm,rms_nom": "unknown op 'rms_nom'",
    "list --definition rms_nom": "unknown op 'rms_nom'",
    "stubs --op rms_nom": "unknown op 'rms_nom'",
    "capture --ops rms_nom": "unknown op 'rms_nom'",
    "explain no/such-model": "no/such-model is not in the local cache",
    "describe no/such-model": "no/such-model is not in the local cache",
    "serve no/such-model": "no/such-model is not in the local cache",
    "serve nonsense": "model 'nonsense' is neither a folder nor a hub id",
    "serve-compare --model nonsense": "model 'nonsense' is neither a folder nor a hub id",
    "serv": "unknown command 'serv'. Did you mean 'serve'?",
    "tune llama --batch 0": "--batch 0: 0 is less than 1",
    "tune linear --shape N=foo": "--shape 'N=foo': N is 'foo', not a number",
    "explain llama-3.1-8b --batch 1,0": "--batch 1,0: 0 is less than 1",
    "explain llama-3.1-8b --gpu FOO": "--gpu 'FOO': unknown peaks; known GPUs: ",
    "profile rms_nrom": "unknown op or model 'rms_nrom'. Did you mean 'rms_norm'?",
    "profile rms_norm --repeats=-1": "--repeats -1: -1 is less than 1",
    "scaffold nope": "unknown architecture 'nope'.",
    "scaffold lama": "unknown architecture 'lama'. Did you mean 'llama'?",
    "coverage --arch lama": "unknown architecture of transformers 'lama'. Did you mean 'llama'?",
    "eval smoke --set mine=/nope": "set mine: there is no folder /nope, and it is no library (liger, ",
    "eval nosuchsuite": "unknown suite 'nosuchsuite'. Known: ",
    "serve . --max-model-len 0": "--max-model-len 0: 0 is less than 1; give a number from 1",
    "study /nope": "no such run: /nope (give a folder with rows.jsonl, or that file)",
    "board /nope": "no such run: /nope (give a folder with rows.jsonl, or that file)",
    "agents-table /nope": "no such run: /nope (give a folder with rows.jsonl, or that file)",
    "track /nope": "no such run: /nope (give a folder with rows.jsonl, or that file)",
    "agent-loop --ops rms_norm --command true --budget 0": "--budget '0' is no duration: give 90s, 20m or 1h30m",
    "agent-loop --ops rms_norm --agent nope": "unknown agent 'nope'. Did you mean 'openai'? Known: claude, codex",
    "mcp --level 9": "--level 9: levels are 1 to 4",
    "submit-check /nope": "there is no folder /nope: give one with submission.toml",
    "quality nosuch": "model 'nosuch' is neither a folder nor a hub id",
    "quality /tmp/no/such/folder": "model '/tmp/no/such/folder' is neither a folder nor a hub id",
    "kernels rms_norm --candidate /nope": "--candidate /nope: no such file or folder",
    "kernels rms_norm --case nope": "--case: no case of rms_norm is named nope: decode_1, decode_32, ",
    "kernels rms_norm --no-time --case=one --case decode_33": "--case: no case of rms_norm is named decode_33: ",
    "kernels rms_norm --case bfloat16:nann": "--case: no case of rms_norm is named bfloat16:nann: decode_1, ",
    "kernels llama_decoder_layer --case decoed_1": "--case: no case of llama_decoder_layer is named decoed_1: in ",
    "profile rms_norm --case nope": "--case: no case of rms_norm is named nope: decode_1, ",
    "capture --host nope": "unknown host 'nope'. Known: ",
    "trace import /nope": "/nope is no data set: it has no folder definitions/",
    "report a": "no such run: a (give a folder with rows.jsonl, or that file)",
    "diff a b": "no such run: a (give a folder with rows.jsonl, or that file)",
}


def test_wrong_names_are_refused_without_torch(tmp_path: Path) -> None:
    for (line, says), (status, out, err, imported) in zip(
        REFUSED.items(), run_all([*REFUSED], tmp_path), strict=True
    ):
        assert status == 2 and err.startswith(f"error: {says}") and err.count("\n") == 1, (line, err)
        assert imported == [], line
        last = json.loads(out.splitlines()[-1])
        assert not last["ok"] and last["error"].startswith(says), line
    assert not [*tmp_path.iterdir()]  # a refused command leaves no file


def test_invalid_variable_is_refused_before_any_command(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lines = ["list ops", "serve folder", "kernels rms_norm", "kernels --help"]
    *refused, helped = run_all(lines, tmp_path, FASTKERNELS_REPORT=str(tmp_path / "file"))
    for line, (status, out, err, imported) in zip(lines, refused, strict=False):
        assert status == 2 and err.startswith("error: FASTKERNELS_REPORT: ") and imported == [], line
        assert err.endswith("is a file; name a folder\n") and json.loads(out)["ok"] is False, line
    assert helped[0] == 0


def test_stubs_fill_the_folder_of_candidates(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    line = "stubs --op rms_norm --out mine"
    ((status, _, err, _),) = run_all([line], tmp_path, FASTKERNELS_CANDIDATES=str(tmp_path / "mine"))
    assert status == 0, err
    assert (tmp_path / "mine" / "rms_norm.py").is_file()


def test_right_names_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for command, words in (
        ("kernels", ["rms_norm", "--no-time"]), ("tune", ["all"]), ("tune", ["linear", "qwen3-8b"]),
        ("explain", [str(tmp_path)]), ("describe", ["llama"]), ("patch-compare", ["all", "--ops", "rms_norm"]),
        ("serve", [str(tmp_path)]), ("serve-compare", ["--attach", "vllm=http://h", "--model", "served"]),
        ("e2e", ["sdxl", "--hosts", "diffusers"]), ("kernels", ["rms_nom", "--help"]),
        ("profile", ["rms_norm", "--batch", "2"]), ("profile", [str(tmp_path)]), ("profile", ["qwen3-8b"]),
        ("scaffold", ["llama"]), ("scaffold", ["qwen2_vl_text"]), ("coverage", ["--arch", "gpt-neox", "--arch", "vit"]),
        ("eval", ["smoke", "--set", f"mine={tmp_path}", "--set=l=liger"]), ("explain", ["llama", "--gpu", "H100"]),
        ("track", ["show"]), ("track", [str(tmp_path)]), ("agent-loop", ["--agent", "codex", "--budget=1h30m"]),
        ("mcp", ["--level", "2"]), ("quality", ["small/dp3"]), ("quality", ["llama-3.2-1b"]),
        ("quality", []), ("quality", [str(tmp_path)]), ("capture", ["--host", "vllm"]),
        ("quality", ["vit_base_patch16_224", "--hosts", "timm"]), ("tune", ["linear", "--shape", "N=64,dtype=float16"]),
    ):  # fmt: skip
        assert checks.problem(command, words) is None, command


def test_no_name_of_a_case_is_refused_early() -> None:
    options = SimpleNamespace(task=(), cases=SOURCES, captures=None)
    for op in op_modules():
        cases.check(op, case_names([registry.get(op)], options))
        with pytest.raises(ConfigError, match=f"no case of {op} is named nosuch: "):
            cases.check(op, ["nosuch"])


def test_foreign_captures_may_name_other_cases(tmp_path: Path) -> None:
    for words in (["--captures", str(tmp_path)], [f"--task={tmp_path}"]):
        assert checks.problem("kernels", ["rms_norm", "--case", "nope", *words]) is None


def test_hub_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    for name, value in (
        ("HF_HUB_OFFLINE", False), ("HF_HUB_CACHE", str(tmp_path)), ("ENDPOINT", "http://127.0.0.1:9"),
    ):  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hub, "getproxies", dict)
    with pytest.raises(hub.ModelError, match=r"no/such-model.*http://127.0.0.1:9 does not answer") as error:
        model_configs.load_config("no/such-model")
    assert "starcoder2'?" not in str(error.value)  # a name that only resembles it a little
    (tmp_path / "models--no--such-model").mkdir()
    hub.check("no/such-model@main")  # the cache may have it


def test_look_up_without_an_answer_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.socket, "create_connection", lambda address, timeout: threading.Event().wait())
    monkeypatch.setattr(hub, "getproxies", dict)
    assert not hub.answers("https://hub.invalid", seconds=0.05)


def test_message_for_a_missing_run_lists_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fk_bench.core.runs import missing

    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / "fk-bench-runs" / name).mkdir(parents=True)
        (tmp_path / "fk-bench-runs" / name / "rows.jsonl").touch()
    text = missing(Path("a"))
    assert "no such run: a " in text and "fk-bench-runs/one" in text and "fk-bench-runs/two" in text


@pytest.mark.parametrize(
    ("terminal", "words", "printed"), [(True, [], False), (True, ["--json"], True), (False, [], True)]
)
def test_json_ends_output_with_the_flag_or_in_a_pipe(
    terminal: bool,
    words: list[str],
    printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["fk-bench", "doctor", *words])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    output.last_line({"ok": True})
    assert bool(capsys.readouterr().out) == printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("explain llama --tensor-parallel -2", "--tensor-parallel: expected a number of 0 or more, got -2"),
        ("trace export folder --limit nan", "--limit: expected a number of 0 or more, got nan"),
        ("trace export folder --limit inf", "--limit: expected a number of 0 or more, got inf"),
        ("capture --timeout 0", "--timeout: expected seconds above 0, got 0"),
        ("capture --engine-args 3", "--engine-args must be an object of arguments, got 3"),
    ],
)
def test_unusable_numbers_are_refused(words: str, says: str) -> None:
    done = fk_bench_here(*words.split())
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert done.stderr.startswith((f"error: fk-bench {words.split()[0]}: ", "error: --engine-args"))
    assert not last_json(done)["ok"]


def ending_with(error: BaseException) -> Callable[[str], Callable[..., None]]:
    def command(*args: object, **options: object) -> None:
        raise error

    return lambda name: command


def test_unusable_path_of_the_command_line_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cli, "build", ending_with(IsADirectoryError(errno.EISDIR, "Is a directory", "run/rows"))
    )
    done = fk_bench_here("report", "run")
    says = "fk-bench report: run/rows: Is a directory; name another file or folder"
    assert done.returncode == 1 and done.stderr == f"error: {says}\n" and last_json(done)["error"] == says
    with pytest.raises(IsADirectoryError):  # a path that the user has not given is a fault of ours
        fk_bench_here("report", "other")


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ModuleNotFoundError("No module named 'plotly'", name="plotly")
    monkeypatch.setattr(cli, "build", ending_with(missing))
    done = fk_bench_here("report", "run")
    assert (
        done.returncode == 2
        and "fk-bench report needs plotly: pip install 'fastkernels[bench]'" in done.stderr
    )
    assert set(cli.PACKAGES) | {"typer"} == {
        re.split(r"[>=;]", text)[0] for text in re.findall(r'"([^"]+)"', BENCH.partition("]")[0])
    }


def test_interruption_and_lost_output_print_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        program = ["-c", "import sys; from fk_bench import cli; cli.main(sys.argv[1:])", "report"]
        done = subprocess.run([sys.executable, *program], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1 and done.stderr.endswith(b"error: standard output: No space left on device\n")
    assert b"Traceback" not in done.stderr
    monkeypatch.setattr(cli, "build", ending_with(KeyboardInterrupt()))
    assert fk_bench_here("report", "run").returncode == 130
    for word in ("--help", "nonsense"):
        reading, writing = os.pipe()
        os.close(reading)
        program = ["-c", "import sys; from fk_bench import cli; cli.main(sys.argv[1:])", word]
        done = subprocess.run(
            [sys.executable, *program], stdout=writing, stderr=subprocess.PIPE, check=False, timeout=300
        )
        os.close(writing)
        assert done.returncode == 1 and b"Traceback" not in done.stderr and b"ignored" not in done.stderr
