"""Adapters of known agents: their commands, their reports of tokens, and the endpoint loop against stub servers."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from bench.agents.conftest import BLOCKS, OP
from fk_bench.agents import adapters
from fk_bench.agents.adapters import claude, codex, drkernel, openevolve, task_folder
from support.live import live_server

# Stands for the judge: right if the candidate has BLOCK, and a speedup that grows with it.
CHECK = f'''#!{sys.executable}
import json, re, sys
words = sys.argv[1:]
with open("asked.jsonl", "a") as file:
    file.write(json.dumps(words) + "\\n")
asked = [json.loads(line) for line in open("asked.jsonl")]
left = {{"left": {{"attempts": 4 - sum(w[:1] != ["--usage"] for w in asked)}}}}
if words[:1] == ["--lost"]:
    print(json.dumps({{"verdict": "no source", "reason": words[1], **left}}))
elif words[:1] == ["--usage"]:
    print(json.dumps(left))
else:
    found = re.search(r"BLOCK = (\\d+)", open("{OP}.py").read())
    print(json.dumps({{"verdict": "ok" if found else "wrong", "speedup": int(found[1]) if found else None, **left}}))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.json").write_text(json.dumps({"op": OP}))
    (tmp_path / "TASK.md").write_text("# Task\n")
    (tmp_path / "reference.py").write_text("def reference(x):\n    return x\n")
    (tmp_path / f"{OP}.py").write_text(
        f"import torch\n\n\ndef {OP}(x: torch.Tensor, scale: float = 1.0):\n    return x\n"
    )
    (tmp_path / "check").write_text(CHECK)
    (tmp_path / "check").chmod(0o755)
    return tmp_path


def asked(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]


def start(name: str, folder: Path, path: str = "", **options: str) -> subprocess.CompletedProcess[str]:
    """Run an agent's command as the loop does: by a shell, in the task folder."""
    env = {
        **os.environ,
        "PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"],
        "OPENAI_API_KEY": "k",
    }
    text = adapters.find(name).command(options)
    return subprocess.run(
        ["/bin/sh", "-c", text], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def endpoint() -> Iterator[Callable[[list[Any]], tuple[str, list[Any]]]]:
    """A server with these answers in turn: text, a dict (JSON), bytes, a status, or a float of seconds to wait."""
    servers: list[ThreadingHTTPServer] = []

    def make(answers: list[Any]) -> tuple[str, list[Any]]:
        seen: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answer = answers[min(len(seen), len(answers)) - 1]
                status = 200
                if isinstance(answer, float):
                    time.sleep(answer)
                    answer = "late"
                if isinstance(answer, int):
                    status, answer = answer, b"overloaded"
                if isinstance(answer, str):
                    answer = {"choices": [{"message": {"content": answer}}], "usage": {"total_tokens": 7}}
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1", seen

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def answer(block: int) -> str:
    return f"Faster:\n```python\n{BLOCKS.format(block=block)}```\n"


def test_endpoint_loop_improves_with_feedback(folder: Path, endpoint: Any) -> None:
    url, seen = endpoint([answer(1), answer(8), answer(64), answer(512), "unused"])
    done = start("openai", folder, model="m", url=url)
    assert done.returncode == 0, done.stderr
    assert "BLOCK = 512" in (folder / f"{OP}.py").read_text()
    assert len(seen) == 4 and seen[0]["model"] == "m"
    assert "def reference" in seen[0]["messages"][1]["content"]
    assert "'speedup': 1" in seen[1]["messages"][-1]["content"]
    assert len(seen[3]["messages"]) == 2 + 2 * 2  # two earlier turns
    assert asked(folder).count(["--usage", "7", "0.0"]) == 4


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("I cannot do this.", "no code block"),
        ("```python\nx = 1\n```", "no code block with a function or class"),
        (b"<html>not JSON</html>", "no chat completion"),
        ({"choices": []}, "no chat completion"),
        ({"choices": [{"message": {"content": None}}]}, "has no text"),
        (503, "status 503: overloaded"),
        (30.0, "no answer within 0.5 s"),
    ],
)
def test_bad_answer_is_a_lost_attempt_with_its_reason(
    folder: Path, endpoint: Any, bad: Any, said: str
) -> None:
    url, seen = endpoint([bad, answer(8)])
    done = start("openai", folder, model="m", url=url, timeout="0.5", attempts="2")
    assert done.returncode == 0, done.stderr
    lost = [words for words in asked(folder) if words[:1] == ["--lost"]]
    assert len(lost) == 1 and said in lost[0][1]
    assert len(seen) == 2 and "BLOCK = 8" in (folder / f"{OP}.py").read_text()


@pytest.mark.parametrize(
    ("name", "options", "code", "said"),
    [
        ("codex", {"program": "no-such-codex"}, 127, "no-such-codex: no such program or file"),
        ("claude", {"program": "no-such-claude"}, 127, "no-such-claude: no such program or file"),
        ("openai", {"model": "m", "timeout": "soon"}, 1, "ValueError: could not convert string to float"),
    ],
)
def test_adapter_that_cannot_run_fails_in_one_line(
    folder: Path, name: str, options: dict[str, str], code: int, said: str
) -> None:
    done = start(name, folder, **options)
    assert done.returncode == code and said in done.stdout.splitlines()[-1] and not done.stderr


def test_endpoint_that_is_not_there_spends_attempts(folder: Path) -> None:
    done = start("openai", folder, model="m", url="http://127.0.0.1:9/v1", attempts="9")
    assert done.returncode == 0
    assert [w[0] for w in asked(folder)] == ["--lost"] * 4  # then the budget is used up


def test_endpoint_loop_talks_with_our_own_server(folder: Path, tiny: Path) -> None:
    """Random weights write no source: each answer is a lost attempt, and its tokens are reported."""
    with live_server(tiny, max_model_len=2048, num_blocks=300) as (url, _):
        done = start("openai", folder, model="tiny", url=f"{url}/v1", max_tokens="8", attempts="2")
    assert done.returncode == 0, done.stderr
    words = asked(folder)
    lost = [w[1] for w in words if w[0] == "--lost"]
    assert len(lost) == 2 and all("no code block" in reason for reason in lost)
    used = [int(w[1]) for w in words if w[0] == "--usage"]
    assert len(used) == 2 and min(used) > 8


def test_drkernel_gets_a_model_and_returns_a_function(folder: Path, endpoint: Any) -> None:
    source = (
        "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    BLOCK = 8\n\n"
        "    def forward(self, x, scale=1.0):\n        return x * scale\n"
    )
    url, seen = endpoint([f"```python\n{source}```"])
    assert start("drkernel", folder, model="m", url=url, attempts="1").returncode == 0
    prompt = seen[0]["messages"][1]["content"]
    assert "class Model(nn.Module)" in prompt and "def forward(self, x, scale=1.0):" in prompt
    space: dict[str, Any] = {}
    exec((folder / f"{OP}.py").read_text(), space)
    assert space[OP](3.0, 2.0) == 6.0


def test_kernelagent_wraps_the_kernel(folder: Path, tmp_path: Path) -> None:
    package = tmp_path / "lib" / "triton_kernel_agent"
    package.mkdir(parents=True)
    (tmp_path / "kernel.py").write_text(
        "BLOCK = 8\n\n\ndef kernel_function(x, scale):\n    return x * scale\n"
    )
    (package / "__init__.py").write_text(
        "class TritonKernelAgent:\n"
        "    def __init__(self, num_workers, max_rounds, model_name=None):\n"
        "        assert (num_workers, max_rounds, model_name) == (2, 10, 'm')\n"
        "    def generate_kernel(self, problem_description, test_code=None):\n"
        "        assert 'def reference' in problem_description\n"
        f"        return {{'success': True, 'kernel_path': {str(tmp_path / 'kernel.py')!r}}}\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/lib exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = start("kernelagent", folder, python=str(python), workers="2", model="m")
    assert done.returncode == 0, done.stderr
    space: dict[str, Any] = {}
    exec((folder / f"{OP}.py").read_text(), space)
    assert space[OP](3.0) == 3.0 and asked(folder) == [[]]


def test_openevolve_evaluates_with_the_check(folder: Path, tmp_path: Path) -> None:
    """A program that stands for openevolve.cli: it evaluates a better program, as the evolution does."""
    better = tmp_path / "better.py"
    better.write_text(BLOCKS.format(block=32))
    package = tmp_path / "lib" / "openevolve"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text(
        "import json, runpy, sys\n"
        "config = json.load(open(sys.argv[sys.argv.index('--config') + 1]))\n"
        "assert config['evaluator']['parallel_evaluations'] == 1 and config['prompt']['system_message']\n"
        "evaluate = runpy.run_path(sys.argv[2])['evaluate']\n"
        f"print(evaluate(sys.argv[1]), evaluate({str(better)!r}))\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/lib exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = start("openevolve", folder, python=str(python), model="m", url="http://here/v1")
    assert done.returncode == 0, done.stderr
    first, second = (
        ast.literal_eval(part + "}") for part in done.stdout.strip().removesuffix("}").split("} ")
    )
    assert (first["combined_score"], second["combined_score"]) == (0.0, 32.0)
    assert openevolve.OPTIONS["model"] is None


@pytest.mark.parametrize(("name", "tokens"), [("codex", "150"), ("claude", "42")])
def test_program_gets_the_prompt_and_reports_tokens(
    folder: Path, tmp_path: Path, name: str, tokens: str
) -> None:
    said = {
        "codex": '{"type":"turn.completed","usage":{"input_tokens":100,"cached_input_tokens":90,"output_tokens":50}}',
        "claude": '{"type":"result","usage":{"input_tokens":40,"output_tokens":2},"total_cost_usd":0.25}',
    }[name]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / name).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" > words\necho noise\n" * (name == "codex")
                                 + "#!/bin/sh\nprintf '%s\\n' \"$@\" > words\n" * (name == "claude")
                                 + f"echo '{said}'\n./check > /dev/null\nexit 3\n")  # fmt: skip
    (programs / name).chmod(0o755)
    done = start(name, folder, str(programs), model="big")
    assert done.returncode == 3, done.stderr
    words = (folder / "words").read_text().splitlines()
    assert task_folder.PROMPT in words and words[words.index("--model") + 1] == "big"
    assert [tokens, "0.25" if name == "claude" else "0.0"] in [w[1:] for w in asked(folder)]


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", "3", '{"type": "other"}', "null"])
def test_output_without_usage_counts_nothing(text: str) -> None:
    assert codex.tokens([text]) == 0
    assert claude.used(text) == (0, 0.0)


def test_stub_without_function_has_no_kernelbench_form() -> None:
    with pytest.raises(ValueError, match="has no function"):
        drkernel.signature("class A: pass", "rms_norm")


def test_unknown_option_is_an_error() -> None:
    with pytest.raises(task_folder.OptionError, match=r"modle.*model"):
        adapters.find("codex").command({"modle": "x"})
