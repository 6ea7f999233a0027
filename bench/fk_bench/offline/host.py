"""A host's engine in its own process, and what all measurements of one share: prompts and result rows."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from fk_bench.core import machine
from fk_bench.core.rows import Row, Subject

HOSTS = ("fastkernels", "vllm", "sglang")
IN_PROCESS = ("timm", "transformers", "diffusers")  # models of images, measured in this process
OMNI = "vllm-omni"  # a lane of pipelines of diffusers, in a process of its own
COMMAND = "e2e"
WITH = "+candidates"  # suffix of the lane that runs a host with candidates
OFFLINE = Path(__file__).with_name("offline.py")
LEAST = 10  # id of a token of a random prompt: lower ones are often special
_RUN = uuid4().hex[:12]


class HostFailed(RuntimeError):
    """A host's process ended, or did not answer in time."""


class HostProcess:
    """A host's engine in its own process, which runs `script`.

    candidate  folder of candidates that the engine is patched with
    log        name of the file in `folder` that gets its standard error (default: the host's)
    """

    def __init__(
        self, name: str, python: str, settings: dict[str, Any], folder: Path, candidate: str | None = None,
        script: Path = OFFLINE, env: Mapping[str, str] | None = None, log: str = "",
    ):  # fmt: skip
        self.name, self.python, self.candidate = name, python, candidate
        self.lane = name + (WITH if candidate else "")
        self.log = folder / f"{log or self.lane}.log"
        settings = {**settings, "candidate": candidate}
        self.started = time.monotonic()
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [python, str(script), json.dumps({"host": name, **settings})],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True, start_new_session=True,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next line of the process. Raises HostFailed: with the tail of its log, or why a patch was refused."""
        line, what = None, f"no answer within {timeout:g} s"
        with contextlib.suppress(queue.Empty):
            line = self._answers.get(timeout=timeout)
            if line is None:  # its output is closed: the process has ended or is about to
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5.0)
                what = f"ended with status {self.process.returncode}"
        if line is None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise HostFailed(f"{self.lane}: {what}; the end of {self.log}:\n{tail}")
        found = json.loads(line)
        if "refused" in found:
            raise HostFailed(f"{self.lane}: {found['refused']}")
        return found

    def tell(self, work: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() reports why
            self.process.stdin.write(json.dumps(work) + "\n")
            self.process.stdin.flush()

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int, timeout: float) -> dict[str, Any]:
        self.tell({"prompts": prompts, "output_len": output_len})
        return self.answer(timeout)

    def stop(self, grace_s: float = 30.0) -> None:
        """Close the input, which ends the process; after `grace_s` kill it and its remaining children."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        _, left = psutil.wait_procs(children, timeout=2.0)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()


def prompts_of(seed: str, requests: int, length: int, vocab: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(LEAST, vocab) for _ in range(length)] for _ in range(requests)]


def config_of(model: str) -> Any:
    """The config of a folder or a hub id, as transformers has it."""
    from fastkernels.models.common.checkpoints import weights
    from fastkernels.models.common.plans import build

    return build.load_config(weights.resolve(model))


def vocab_size(model: str) -> int:
    return int(config_of(model).vocab_size)


def make_row(host: str, case: dict[str, Any], metrics: dict[str, float], **more: Any) -> Row:
    return Row(
        run_id=_RUN, commit=machine.commit(), machine=machine.machine(), case=case, metrics=metrics,
        **{"command": COMMAND, "subject": Subject(host=host), **more},
    )  # fmt: skip
