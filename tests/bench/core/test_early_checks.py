"""Wrong names in a command line: the message, and that it comes before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fk_bench.core import early_checks, hub
from fk_bench.core.terminal import output
from fk_bench.e2e import model_configs

# runs a command line, and prints after it whether the heavy libraries were imported
PROGRAM = """
import sys
from fk_bench import cli
try:
    cli.main(sys.argv[1:])
finally:
    print([name for name in ("torch", "transformers") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("kernels rms_nom --no-time", "unknown op 'rms_nom'. Did you mean 'rms_norm'?"),
        ("export rms_nom", "unknown op 'rms_nom'. Did you mean 'rms_norm'?"),
        ("tune linaer", "unknown op 'linaer'. Did you mean 'linear'?"),
        ("tune qwen9-8b", "unknown model 'qwen9-8b'. Did you mean 'qwen3-8b' or "),
        ("tune", "give a model, as in `fk-bench tune qwen3-8b`"),
        ("tune --model=lama", "unknown model 'lama'. Did you mean 'llama'?"),
        ("patch-compare", "give models, as in `fk-bench patch-compare qwen2.5-7b`"),
        ("patch-compare qwen9-8b", "unknown model 'qwen9-8b'"),
        ("patch-compare all --ops rms_norm,rms_nom", "unknown op 'rms_nom'"),
        ("list --definition rms_nom", "unknown op 'rms_nom'"),
        ("stubs --op rms_nom", "unknown op 'rms_nom'"),
        ("capture --ops rms_nom", "unknown op 'rms_nom'"),
        ("explain no/such-model", "no/such-model is not in the local cache"),
        ("describe no/such-model", "no/such-model is not in the local cache"),
        ("serve no/such-model", "no/such-model is not in the local cache"),
        ("serve nonsense", "model 'nonsense' is neither a folder nor a hub id"),
        ("serve-compare --model nonsense", "model 'nonsense' is neither a folder nor a hub id"),
        ("serv", "unknown command 'serv'. Did you mean 'serve'?"),
        ("report a", "no such run: a (give a folder with rows.jsonl, or that file)"),
        ("diff a b", "no such run: a (give a folder with rows.jsonl, or that file)"),
    ],
)
def test_wrong_name_is_refused_without_torch(words: str, says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PATH": ""}, check=False,
    )  # fmt: skip
    *error, imported = done.stderr.splitlines()
    assert done.returncode == 2 and error[0].startswith(f"error: {says}") and len(error) == 1
    assert imported == "[]"
    line = json.loads(done.stdout.splitlines()[-1])
    assert not line["ok"] and line["error"].startswith(says)


def test_right_names_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for command, words in (
        ("kernels", ["rms_norm", "--no-time"]), ("tune", ["all"]), ("tune", ["linear", "qwen3-8b"]),
        ("explain", [str(tmp_path)]), ("describe", ["llama"]), ("patch-compare", ["all", "--ops", "rms_norm"]),
        ("serve", [str(tmp_path)]), ("serve-compare", ["--attach", "vllm=http://h", "--model", "served"]),
        ("e2e", ["sdxl", "--hosts", "diffusers"]), ("kernels", ["rms_nom", "--help"]),
    ):  # fmt: skip
        assert early_checks.problem(command, words) is None, command


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
