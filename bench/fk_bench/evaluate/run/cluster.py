"""Items on the machines of a Ray cluster. Ray places them, and starts them again if a machine dies.

Each item is this command with `--item` on the machine that Ray chose, where the same commit of FastKernels and the same
versions of the hosts must be installed. Its rows count when they arrive here, once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fk_bench.core.rows import Row
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.kernels.judge.cage import linux

RETRIES = 3  # after the death of a machine or of Ray's process on it
MOST_BYTES = 256 << 20  # of a set
ANSWERS_WITHIN_S = 5.0
LOOKS_S = 5.0  # between two looks at the machines while items run
FOUND_WITHIN_S = 120.0  # a machine with room for an item, which may replace a dead one


@dataclass(frozen=True)
class Job:
    """One item of one set.

    suite    the name of a shipped suite, or the text of a .toml file called `file`
    set      its name; '' for the do-nothing set
    files    {path in the set's folder: content}, or {} for a library
    library  the name of an installed library in place of a folder
    options  passed on as they are
    """

    item: str
    suite: str
    file: str
    set: str
    files: Mapping[str, bytes]
    library: str
    options: tuple[str, ...]
    cpus: int
    gpus: int


class Lost(Exception):
    """An item without rows; the message says why."""


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a set by their path in it. Raises ConfigError if they are too large to be sent."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    if (size := sum(map(len, found.values()))) > MOST_BYTES:
        raise ConfigError(
            f"{folder} has {size >> 20} MiB, and at most {MOST_BYTES >> 20} are sent to a cluster"
        )
    return found


def measured(job: Job, env: Mapping[str, str] | None = None, cores: Collection[int] = ()) -> list[str]:
    """Run an item here, and return its rows as lines of JSON. Raises Lost.

    env    variables that differ; cores: the only ones that it uses, or () for all
    """
    with tempfile.TemporaryDirectory(prefix="fk-item-") as folder:
        root = Path(folder)
        root.chmod(0o755)  # cages read the set as another user
        suite = job.suite
        if job.file:
            (root / job.file).write_text(job.suite, encoding="utf-8")
            suite = str(root / job.file)
        for name, content in job.files.items():
            path = root / "set" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        given = ("--set", f"{job.set}={job.library or root / 'set'}") if job.set else ("--selftest",)
        out = root / "run"
        command = [
            sys.executable,
            "-m",
            "fk_bench.cli",
            "eval",
            suite,
            *given,
            "--item",
            job.item,
            "--out",
            str(out),
        ]
        ends = partial(_begin, os.getpid(), cores)
        done = subprocess.run(
            [*command, "--no-kernels", "--json", *job.options],
            capture_output=True,
            text=True,
            preexec_fn=ends,
            env={**os.environ, **(env or {})},
        )
        found = out / "rows.jsonl"
        if not found.is_file():
            raise Lost(
                " ".join((done.stderr or done.stdout).split())[-500:] or f"exit status {done.returncode}"
            )
        return found.read_text(encoding="utf-8").splitlines()


def _begin(parent: int, cores: Collection[int]) -> None:
    """In the new process: it ends with its parent, which may be a worker of Ray."""
    linux.die_with_parent(parent, signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, cores)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module `ray`, connected. Raises ConfigError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--cluster needs Ray: pip install 'fastkernels[cluster]'") from error
    try:
        if address != "auto":  # Ray itself waits for minutes
            server, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((server, int(port)), ANSWERS_WITHIN_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--cluster {address}: no Ray cluster answers ({' '.join(str(error).split())[:200]}). "
            "`ray start --head` starts one; all GPUs of this machine need none: leave --cluster out"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def run(ray: Any, jobs: Sequence[Job], arrived: Callable[[Job, list[Row] | Lost], None]) -> None:
    """Run all jobs, and pass on the rows of each when it ends.

    A job for which no machine of the cluster has room, not even an idle one, is lost after FOUND_WITHIN_S.
    """
    task = ray.remote(measured)
    waiting = {
        task.options(num_cpus=job.cpus, num_gpus=job.gpus, max_retries=RETRIES, name=job.item).remote(
            job
        ): job
        for job in jobs
    }
    homeless: dict[Any, float] = {}  # since when
    while waiting:
        ended, _ = ray.wait(list(waiting), num_returns=1, timeout=LOOKS_S)
        if not ended:
            nodes, now = ray.nodes(), time.monotonic()
            homeless = {r: homeless.get(r, now) for r, job in waiting.items() if not has_room(nodes, job)}
            for reference in [r for r, since in homeless.items() if now - since >= FOUND_WITHIN_S]:
                ray.cancel(reference)
                job = waiting.pop(reference)
                arrived(job, Lost(_placeless(nodes, job)))
            continue
        (ready,) = ended
        job = waiting.pop(ready)
        try:
            lines = ray.get(ready)
        except ray.exceptions.RayTaskError as error:  # raised by `measured`
            arrived(job, Lost(str(error.cause)))
        except ray.exceptions.RayError as error:
            arrived(
                job, Lost(f"its machine was lost {RETRIES + 1} times: {' '.join(str(error).split())[:300]}")
            )
        else:
            arrived(job, [Row.model_validate_json(line) for line in lines])


def has_room(nodes: Sequence[Mapping[str, Any]], job: Job) -> bool:
    """Whether one of these machines (`ray.nodes()`) is large enough for a job if nothing else runs there."""
    needed = {"CPU": job.cpus, "GPU": job.gpus}
    alive = (node["Resources"] for node in nodes if node["Alive"])
    return any(all(found.get(name, 0) >= n for name, n in needed.items()) for found in alive)


def _placeless(nodes: Sequence[Mapping[str, Any]], job: Job) -> str:
    alive = sorted((n.get("CPU", 0), n.get("GPU", 0)) for n in (x["Resources"] for x in nodes if x["Alive"]))
    found = "; ".join(f"CPU={cpus:.0f}, GPU={gpus:.0f}" for cpus, gpus in alive) or "none alive"
    return f"it needs a machine with CPU={job.cpus}, GPU={job.gpus}, and the cluster has {found}"
