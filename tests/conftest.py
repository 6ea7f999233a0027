"""Long files first, above all the real hosts': two workers share the tests file by file. One thread for each process:
threads of two workers that wait for each other on two cores take ten times as long.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # without a network, the hub's client tries for 25 s
# Tests start hundreds of processes, each of which would compile our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest

sys.dont_write_bytecode = False

# Models and syntax trees make many objects that stay: the usual 700 new ones start a collection far too often.
gc.set_threshold(10_000, 10, 10)

# Each client of httpx reads all certificates again, for 40 ms; no test needs them.
ssl.create_default_context = cache(ssl.create_default_context)

if TYPE_CHECKING:
    from support.oracle import Oracle

try:
    from hypothesis import settings
except ImportError:  # the hosts' environments, which run the checks of tests/integrations, do not have it
    pass
else:
    settings.register_profile("busy", deadline=None)  # an example may wait for the other worker
    settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = (
        "tests/integrations/test_engines.py", "tests/integrations/", "tests/overrides/test_ops.py",
        "tests/export/test_export.py", "tests/bench/kernels/test_cheats.py",
    )  # fmt: skip
    items.sort(key=lambda item: next((i for i, f in enumerate(first) if f in item.nodeid), len(first)))


# Of a test with its fixtures and child processes. The summary names those above it that are not slow.
CPU_S = 40.0  # another limit: @pytest.mark.cpu(seconds)
started = pytest.StashKey[float]()
files: Counter[str] = Counter()  # seconds of CPU
tests: dict[str, float] = {}
expensive: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-json", metavar="FILE", help="write the CPU time of each file and test, largest first"
    )


def cpu_seconds() -> float:
    """CPU time of this process and its children, and of theirs that have ended, such as the forks of a fork server.

    Waiting for another worker costs none.
    """
    total, ticks = sum(os.times()[:4]), 0
    for thread in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        # A thread or a child may have just ended.
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as children:
            for child in children.read().split():
                with contextlib.suppress(OSError), open(f"/proc/{child}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
                    ticks += sum(map(int, fields[11:15]))  # of itself and of its children, user and system
    return total + ticks / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[started] = cpu_seconds()
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        # It measures the latency of the guards for a log, with flushed caches: 40 ms of CPU or more for each graph.
        guards.profile_guard_manager = lambda *given: 0.0  # type: ignore[attr-defined]
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Without the teardown itself, in which processes may end that have served many tests."""
    seconds = cpu_seconds() - item.stash[started] if started in item.stash else 0.0
    marker = item.get_closest_marker("cpu")
    limit = marker.args[0] if marker is not None else CPU_S
    over = item.get_closest_marker("slow") is None and seconds > limit
    item.user_properties += [("cpu_s", seconds), ("over", over and limit)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        found = dict(report.user_properties)
        tests[report.nodeid] = found.get("cpu_s", 0.0)
        files[report.nodeid.partition("::")[0]] += tests[report.nodeid]
        if found.get("over"):
            expensive.append(f"{report.nodeid}: {found['cpu_s']:.0f} s of CPU, {found['over']:.0f} allowed")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if path := terminalreporter.config.getoption("--cpu-json"):
        found = {"files": files, "tests": Counter(tests)}
        Path(path).write_text(json.dumps({k: dict(v.most_common()) for k, v in found.items()}, indent=1))
    if sum(files.values()) > 60:
        terminalreporter.section(f"{sum(files.values()):.0f} s of CPU in tests, most in these files")
        for file, seconds in files.most_common(10):
            terminalreporter.line(f"{seconds:6.0f} s  {file}")
    if expensive:
        terminalreporter.section("tests that are too expensive: mark them slow or make them cheaper")
        for line in expensive:
            terminalreporter.line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes a file at a time, of test_engines.py a check: its tests share nothing, and take minutes."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if "/test_engines.py::" in nodeid else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the tests and imported modules from garbage collection: one of them all takes 0.9 s."""
    capture_logs_for_caplog_alone(session.config)
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let a worker of xdist send only what the summary shows: no news of tests that begin and of setups that passed.

    The process that gets them takes 1 ms for the six messages of a test. With workers, `--durations` has no setups.
    """
    for worker in session.config.pluginmanager.get_plugins():
        if type(worker).__name__ == "WorkerInteractor":
            worker.sendevent = partial(send_shown, worker.sendevent)


def send_shown(send: Callable[..., None], name: str, **given: Any) -> None:
    report = given.get("data", {})
    passed = name == "testreport" and (report["when"], report["outcome"]) == ("setup", "passed")
    if name not in ("logstart", "logfinish") and not passed:
        send(name, **given)


def capture_logs_for_caplog_alone(config: pytest.Config) -> None:
    """Leave the loggers as they are for tests without `caplog`, whose failures then show no log.

    pytest attaches two handlers to each of the hosts' 40 loggers in each phase of each test, for 1 ms.
    """
    from _pytest.logging import caplog_handler_key

    plugin = config.pluginmanager.get_plugin("logging-plugin")
    if plugin is None:
        return
    attached = plugin._runtest_for

    def runtest_for(item: pytest.Item, when: str) -> contextlib.AbstractContextManager[None]:
        if "caplog" in getattr(item, "fixturenames", ()):
            return attached(item, when)
        item.stash[caplog_handler_key] = plugin.caplog_handler
        return contextlib.nullcontext()

    plugin._runtest_for = runtest_for
    logging.getLogger().addHandler(logging.NullHandler())  # else Python prints warnings to standard error


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Collections take longer the more objects other tests have left."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tiny_models():
    """tests/support/tiny.py, imported on use: it imports transformers."""
    from support import tiny

    return tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32, so that a batch of another shape gives the same tokens."""
    return tiny_models().make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama", dtype="float32")


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tied"
    return tiny_models().make_tiny_llama(
        folder, dtype="float32", tie_word_embeddings=True, rope_parameters=None, seed=1
    )


@pytest.fixture(scope="session")
def tiny_of(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_of(kind): a float32 checkpoint of that kind, made once."""
    folder = tmp_path_factory.mktemp("kinds")
    return lambda kind: tiny if kind == "llama" else tiny_models().make_tiny(folder / kind, kind, "float32")


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    from support.oracle import Oracle

    return Oracle()


@pytest.fixture(scope="session")
def greedy(oracle: Oracle) -> Callable[[Path, list[int], int], list[int]]:
    """greedy(folder, prompt token ids, n): transformers' next n tokens, in float32, EOS ignored."""
    return oracle.greedy
