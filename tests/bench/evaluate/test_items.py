"""Items in real processes of our engine: what breaks is dropped and named, cheats gain nothing, twins pass."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fk_bench.evaluate import suites
from fk_bench.evaluate.reasons import Reason
from fk_bench.evaluate.run.items import ItemRun, Measured, options_of
from fk_bench.evaluate.run.side import Launcher, SideFailed, files_in, set_files
from fk_bench.evaluate.run.starts import Starts
from fk_bench.info.stubs import source

CHEATS = Path(__file__).parents[2] / "cheats" / "eval"
SUITE = suites.read(
    {
        "threads": 1,
        "workloads": {"w": {"kind": "text", "about": "", "throughput": 2, "rounds": 3, "lengths": [[9, 6], [3, 8]]}},
        "models": {
            "m": {
                "category": "text",
                "config": {
                    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
                    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                },
            }
        },
        "items": [{"model": "m", "workload": "w", "host": "fastkernels", "timeout": 240}],
    },
    "test",
)  # fmt: skip
STUBS = ("linear", "logits_processor", "rms_norm", "rope_store_kvcache", "silu_and_mul")
HEAD = "import os, sys, time\nimport torch\nimport torch.nn.functional as F\n\n"
CORRECT = "d = x.shape[-1] // 2\n    return F.silu(x[..., :d]) * x[..., d:]"


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    logs = tmp_path_factory.mktemp("run") / "logs"
    with Launcher({}, 3 << 30, threads=1, logs=logs) as made:
        yield made


def measure(
    launcher: Launcher, files: dict[str, Path], timeout: float = 240.0, retry: bool = True,
    host: str = "fastkernels",
) -> Measured:  # fmt: skip
    first = SUITE.entries[0]
    entry = replace(first, timeout=timeout, item=replace(first.item, host=host))
    run = ItemRun(entry, SUITE, launcher, "float32", 5, print)
    readable = set_files({path.parent for path in files.values()})
    return run.measure({op: str(path) for op, path in files.items()}, readable, retry)


def write(folder: Path, body: str, head: str = HEAD) -> dict[str, Path]:
    """A candidate silu_and_mul with this body."""
    (folder / "silu_and_mul.py").write_text(f"{head}def silu_and_mul(x):\n    {body}\n")
    return {"silu_and_mul": folder / "silu_and_mul.py"}


def test_crashing_file_of_five_is_dropped_and_named(launcher, tmp_path, capsys):
    for op in STUBS:
        (tmp_path / f"{op}.py").write_text(source(op))
    write(tmp_path, "print('in the silu of a set', file=sys.stderr)\n    raise ValueError('odd size')")
    found = measure(launcher, {op: tmp_path / f"{op}.py" for op in STUBS})
    logs = sorted(launcher.logs.iterdir())
    assert [log.name.partition("-")[2] for log in logs] == ["fastkernels.log"] * len(logs)
    assert any("in the silu of a set" in log.read_text() for log in logs)
    assert re.search(r"4 of 5 candidates kept \[\d+ s\]", capsys.readouterr().out)
    assert found.found.kept == tuple(op for op in STUBS if op != "silu_and_mul")
    (dropped,) = found.found.dropped
    assert (dropped.op, dropped.reason) == ("silu_and_mul", Reason.RUN_TIME)
    assert "ValueError: odd size" in dropped.text
    assert found.outcome is not None and found.outcome.correctness > 0.9999
    assert all(found.live[op] for op in found.found.kept)
    assert found.calibration is not None and found.calibration.sensitive and found.calibration.noise < 1e-4
    assert set(found.calibration.faults) == {"residual", "head", "scale"}
    assert len(found.rounds) == 6 and all(r.seconds["set"] > 0 for r in found.rounds)


BLOCK = """
from fastkernels.overrides.block import vllm


class VllmLlamaMLP(vllm.VllmLlamaMLP):
    pass
"""


def write_blocks(folder: Path) -> dict[str, Path]:
    """An op, a block of the item's model, one of another model, and one that the model does not have."""
    names = ("silu_and_mul", "llama.mlp", "mixtral.mixture", "llama.mixture")
    for name in names:
        (folder / f"{name}.py").write_text(BLOCK if "." in name else source(name))
    return {name: folder / f"{name}.py" for name in names}


@pytest.mark.slow
def test_blocks_of_the_model_run_in_our_engine(launcher, tmp_path):
    found = measure(launcher, write_blocks(tmp_path))
    assert found.found.kept == ("llama.mlp", "silu_and_mul") and not found.found.dropped
    assert found.found.unused == ("llama.mixture", "mixtral.mixture")
    assert found.live["llama.mlp"] > 0 and found.live["silu_and_mul"] > 0
    assert found.outcome is not None and found.outcome.correctness == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow
def test_blocks_are_not_deployed_in_another_host(launcher, tmp_path):
    found = measure(launcher, write_blocks(tmp_path), host="transformers")
    dropped = {d.op: d for d in found.found.dropped}
    assert dropped.keys() == {"llama.mlp", "llama.mixture"}
    assert all(d.reason is Reason.NOT_DEPLOYED for d in dropped.values())
    assert "transformers runs its own classes" in dropped["llama.mlp"].text
    assert "mixtral.mixture" in found.found.unused


BROKEN = {
    "exits": ("os._exit(3)", HEAD, Reason.RUN_TIME),
    "hangs": ("time.sleep(1e6)", HEAD, Reason.TIME_LIMIT),
    "takes all memory": ("keep = [torch.ones(1 << 28) for _ in range(99)]", HEAD, Reason.MEMORY_LIMIT),
    "does not import": (CORRECT, "import no_such_module\n", Reason.IMPORT),
    "exits at import": (CORRECT, "raise SystemExit(0)\n", Reason.IMPORT),
    "is wrong": ("return torch.zeros_like(x[..., : x.shape[-1] // 2])", HEAD, Reason.INCORRECT),
    "returns another shape": ("return x * 2", HEAD, Reason.INCORRECT),
    "does not compile": (
        "subprocess.run(['c++', '-fsyntax-only', '-x', 'c++', '-'], input=b'int f( {', check=True)",
        f"import subprocess\n{HEAD}", Reason.COMPILE,
    ),
    "refuses calls": ("raise NotImplementedError('no such size')", HEAD, Reason.UNSUPPORTED),
    "breaks graphs": (
        "return torch.compile(lambda y: (torch._dynamo.graph_break(), y)[1], fullgraph=True)(x)", HEAD, Reason.GRAPHS,
    ),
    "compiles while serving": (
        "return torch.compile(_f, backend='eager', dynamic=False)(x)",
        HEAD + f"def _f(x):\n    {CORRECT}\n\n\n", Reason.COMPILES_WHILE_SERVING,
    ),
}  # fmt: skip


@pytest.mark.slow
def test_image_item_sees_planted_faults(launcher, tmp_path):
    suite = suites.load("smoke")
    entry = next(e for e in suite.entries if e.item.host == "timm")
    (tmp_path / "gelu.py").write_text(source("gelu"))
    run = ItemRun(entry, suite, launcher, "float32", 5, print)
    found = run.measure({"gelu": str(tmp_path / "gelu.py")}, set_files([tmp_path]))
    assert found.outcome is not None and found.outcome.correctness == pytest.approx(1.0, abs=1e-4), found.text
    assert found.calibration is not None and set(found.calibration.faults) == {"residual", "head", "scale"}
    assert found.calibration.sensitive and found.calibration.noise < 1e-4


@pytest.mark.slow
def test_text_item_sees_an_error_of_one_percent(launcher, tmp_path):
    """The likeliest tokens stay the same, but not their log probabilities."""
    text = source("rms_norm").replace("    return out\n", "    return out.mul_(1.01)\n", 1)
    (tmp_path / "rms_norm.py").write_text(text)
    found = measure(launcher, {"rms_norm": tmp_path / "rms_norm.py"})
    (dropped,) = found.found.dropped
    assert (dropped.op, dropped.reason) == ("rms_norm", Reason.INCORRECT)
    assert "nats of log probabilities" in dropped.text


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_candidate_that_breaks_has_its_reason(launcher, tmp_path, what):
    body, head, reason = BROKEN[what]
    found = measure(launcher, write(tmp_path, body, head), timeout=8.0 if what == "hangs" else 240.0)
    assert found.outcome is None
    (dropped,) = found.found.dropped
    assert (dropped.op, dropped.reason) == ("silu_and_mul", reason), dropped.text


@pytest.mark.slow
def test_hanging_candidate_is_in_the_files_of_the_failure(launcher, tmp_path):
    """The process prints where it is before it is ended, so that `search` bisects nothing."""
    body = f"CALLS.append(1)\n    if len(CALLS) > 40:\n        time.sleep(1e6)\n    {CORRECT}"
    files = write(tmp_path, body, f"{HEAD}CALLS = []\n\n\n")
    (tmp_path / "rms_norm.py").write_text(source("rms_norm"))
    files["rms_norm"] = tmp_path / "rms_norm.py"
    entry = SUITE.entries[0]
    run = ItemRun(entry, SUITE, launcher, "float32", 5, print)
    with Starts(together=False) as starts:
        side = run.planned(starts, entry.model, set_files([tmp_path]))()
        run.put_in(side, {op: str(path) for op, path in files.items()})
        run.work.run(side, 1, "warm")
        side.timeout = 60.0
        with pytest.raises(SideFailed) as error:
            for n in range(40):
                run.work.run(side, 1, f"hang {n}")
    assert error.value.reason is Reason.TIME_LIMIT
    mine = [f for f in error.value.files if f in map(str, files.values())]
    assert mine == [str(files["silu_and_mul"])], error.value


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ('Traceback (most recent call last):\n  File "a", line 1\n  File "b", line 2\nValueError: x', ["b", "a"]),
        ('Current thread 0x1 (most recent call first):\n  File "b", line 2 in f\n  File "a", line 1 in g', ["b", "a"]),
        (
            'Traceback (most recent call last):\n  File "old", line 1\nThread 0x1 (most recent call first):\n'
            '  File "t", line 1 in f\n\nCurrent thread 0x2 (most recent call first):\n  File "b", line 2 in f\n'
            '  File "a", line 1 in g', ["b", "a", "t", "old"],
        ),
        ('  File "cut", line 1\nKeyError', ["cut"]),
    ],
)  # fmt: skip
def test_innermost_file_of_a_log_comes_first(text, files):
    assert files_in(text) == files


@pytest.mark.slow
def test_flood_of_output_changes_nothing(launcher, tmp_path):
    found = measure(launcher, write(tmp_path, f"sys.stdout.write('x' * 1000000)\n    {CORRECT}"))
    assert found.outcome is not None and found.outcome.correctness == pytest.approx(1.0, abs=1e-4)


CAGED = """import os, signal, socket
import torch
import torch.nn.functional as F

with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname(), 5).close()
signal.setitimer(signal.ITIMER_REAL, 0)
if {host!r} in os.listdir("/") or [name for name in os.environ if "SECRET" in name]:
    raise RuntimeError("files or secrets of the user are visible")
try:
    socket.create_connection(("192.0.2.1", 80), 1)
except OSError as error:
    assert error.errno == 101, error  # the network is unreachable


"""


@pytest.mark.slow
def test_cage_of_a_host_has_loopback_alone(launcher, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("without root, the cage depends on the machine")
    hidden = next(n for n in ("srv", "media", "mnt", "opt", "home") if Path(f"/{n}").is_dir())
    found = measure(launcher, write(tmp_path, CORRECT, CAGED.format(host=hidden)))
    assert launcher.cage["net"] == "on" and launcher.cage["seccomp"] == "on"
    assert found.outcome is not None and found.outcome.correctness == pytest.approx(1.0, abs=1e-4), found.text


@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_hosts_on_one_gpu_need_no_share_of_it(host):
    """Up to four processes load at once, and probes start next to two loaded models."""
    entry = replace(SUITE.entries[0], item=replace(SUITE.entries[0].item, host=host))
    given = options_of(entry, entry.model, SUITE, "bfloat16", True, 2)
    assert given["kv_tokens"] and (given["gpu_share"] <= 0.01 if host == "vllm" else given["shared"])
    assert not options_of(entry, entry.model, SUITE, "bfloat16", False, 2)["shared"]


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_processes_of_an_item_can_start_at_once(launcher, tmp_path, monkeypatch, right):
    monkeypatch.setattr(ItemRun, "together", True)  # as on a GPU
    spawned, spawn = [], launcher.spawn
    monkeypatch.setattr(launcher, "spawn", lambda *given: spawned.append(spawn(*given)) or spawned[-1])
    (tmp_path / "rms_norm.py").write_text(source("rms_norm") if right else "import no_such_module\n")
    found = measure(launcher, {"rms_norm": tmp_path / "rms_norm.py"}, host="transformers")
    assert (found.found.kept, found.found.probes) == (("rms_norm",) if right else (), 1)
    assert right is (found.outcome is not None and found.outcome.correctness > 0.999)
    assert len(spawned) == 4 and all(side.child.exit for side in spawned)


def test_process_that_starts_too_early_is_ended():
    class Slow:
        def __init__(self):
            self.child, self.closed = self, threading.Event()

        def kill(self):
            self.closed.set()

        close = kill

    def load(side):
        side.closed.wait(30)
        raise SideFailed(Reason.RUN_TIME, "ended")

    sides = [Slow(), Slow()]
    with pytest.raises(KeyError), Starts(together=True) as starts:
        takes = [starts.plan(lambda: sides[0], load), starts.plan(lambda: sides[1], load)]
        raise KeyError
    for take in takes:
        with pytest.raises(SideFailed, match="ended"):
            take()


@pytest.mark.slow
def test_without_retry_a_crash_ends_the_item(launcher, tmp_path):
    found = measure(launcher, write(tmp_path, "raise ValueError"), retry=False)
    assert (found.outcome, found.found.kept, found.reason) == (None, (), Reason.RUN_TIME)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["early_end", "patched_sampler", "skipped_layers", "detects_probe"])
def test_cheat_is_incorrect(launcher, name):
    found = measure(launcher, {"silu_and_mul": CHEATS / f"{name}.py"})
    reasons = {found.reason, *(d.reason for d in found.found.dropped)}
    assert Reason.INCORRECT in reasons
    assert found.outcome is None or found.outcome.correctness < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(p.stem for p in (CHEATS / "honest").glob("*.py")))
def test_honest_twin_is_valid(launcher, name):
    found = measure(launcher, {"silu_and_mul": CHEATS / "honest" / f"{name}.py"})
    assert found.outcome is not None and found.outcome.correctness == pytest.approx(1.0, abs=1e-4), found.text


@pytest.mark.slow
def test_replayed_answers_are_never_needed(launcher):
    """Prompts are fresh, so a candidate that keeps answers computes all of them."""
    found = measure(launcher, {"silu_and_mul": CHEATS / "replays_prompts.py"})
    assert found.outcome is not None and found.outcome.correctness == pytest.approx(1.0, abs=1e-4)
    assert found.outcome.throughput < 2
