"""A node of an engine that is not node 0: it starts its ranks, connects them to node 0, and ends with the engine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from hashlib import sha256
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import triton
from torch.cuda import nccl

import fastkernels
from fastkernels.core.env import Environment
from fastkernels.engine.execution import nodes
from fastkernels.engine.execution.nodes import Channel, Patience, proof
from fastkernels.engine.execution.ranks import GRACE, WorkerDied, ended, how_ended, start
from fastkernels.engine.execution.worker import interfaces
from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.checkpoints import weights
from fastkernels.models.common.checkpoints.checkpoint import INDEX, SINGLE

log = logging.getLogger("fastkernels")
LOOK_S = 0.1  # between looks at processes
RETRY_S = 0.2  # between attempts to connect
OWN = {  # options that may differ between nodes
    "model", "tokenizer", "voices", "device", "node_rank", "master_addr", "dist_timeout", "skip_tokenizer_init",
}  # fmt: skip
# That change results or the calls of collectives.
VARIABLES = "FASTKERNELS_PROVIDER", "FASTKERNELS_VERIFY", "TRITON_INTERPRET"
DRIVER = Path("/proc/driver/nvidia/version")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
SAMPLES, SAMPLE = 16, 4096  # blocks of a file of weights that are compared, and bytes of each


def about(config: EngineConfig, folder: Path) -> dict[str, Any]:
    """The facts that the nodes of an engine must have in common."""
    given, draft = dict(config.speculative_config or {}), _draft(config)
    given.pop("model", None)
    options = {name: value for name, value in asdict(config).items() if name not in OWN}
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = {
        "fastkernels": f"{fastkernels.__version__} (source {_source()})",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": device,
        "GPUs": _gpus(config.ranks_per_node) if device == "cuda" else {},
        "checkpoint": _formats(folder),
        "a model whose fingerprint is": fingerprint(folder, config.load_format != "dummy"),
        "options": options | {"speculative_config": given},
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }
    if draft is not None:
        found["a draft model whose fingerprint is"] = fingerprint(draft)
    return found


def _gpus(number: int) -> dict[str, Any]:
    """The kind of this node's GPUs, and the versions with which they compute and communicate."""
    kinds = sorted({torch.cuda.get_device_name(i) for i in range(min(number, torch.cuda.device_count()))})
    driver = None
    with contextlib.suppress(OSError):
        driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", DRIVER.read_text())
    return {
        "GPUs": ", ".join(kinds),
        "NVIDIA driver": None if driver is None else driver.group(),
        "NCCL": ".".join(map(str, nccl.version())),
    }


def _formats(folder: Path) -> dict[str, Any]:
    """The formats of a checkpoint's weights, which its fingerprint does not name."""
    try:
        raw = json.loads((folder / "config.json").read_text())
        quantized = raw.get("quantization_config") or {}
        return {
            "a model in the dtype": raw.get("dtype") or raw.get("torch_dtype"),
            "a model with the quantization": quantized.get("quant_method"),
        }
    except (OSError, ValueError, AttributeError):  # of a pipeline, or wrong: its loader has the message
        return {}


def _draft(config: EngineConfig) -> Path | None:
    """The folder of the draft model, if the options name one."""
    model = (config.speculative_config or {}).get("model")
    return None if model is None else weights.resolve(model)


def fingerprint(folder: Path, with_weights: bool = True) -> str:
    """A hash of a checkpoint's configs and, from each file of weights, its name, its size and some of its blocks.

    Files that hold the same weights in another layout count no more than in checkpoints.resolve: a node may lack them.
    """
    made = sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.name in ("config.json", "model_index.json"):
            made.update(name.encode() + path.read_bytes())
        elif with_weights and path.suffix in WEIGHTS and not _is_other_layout(path, folder):
            size = path.stat().st_size
            made.update(f"{name} {size}".encode())
            with path.open("rb") as file:
                for i in range(SAMPLES):
                    file.seek(max(0, size - SAMPLE) * i // (SAMPLES - 1))
                    made.update(file.read(SAMPLE))
    return made.hexdigest()[:12]


def _is_other_layout(path: Path, folder: Path) -> bool:
    """Whether a file of weights is in Meta's, Mistral's or PyTorch's layout, next to one that is read instead."""
    if path.relative_to(folder).parts[0] == "original":
        return True
    other = path.name.startswith("consolidated") or fnmatchcase(path.name, "pytorch_model*.bin")
    return other and any((path.parent / name).is_file() for name in (SINGLE, INDEX))


def _source() -> str:
    """A hash of this package's code: two commits may have the same version."""
    root, made = Path(fastkernels.__file__).parent, sha256()
    for path in sorted(root.rglob("*.py")):
        made.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return made.hexdigest()[:12]


def follow(config: EngineConfig, patience: float | None = None) -> None:
    """Run the ranks of this node until node 0 ends the engine.

    patience  seconds after SIGTERM in which node 0's requests may finish, before it ends the engine; None: signals are
              left to the caller. See ending_by_signals

    Raises ValueError for a node that node 0 refuses, TimeoutError if node 0 does not answer, ConnectionError if it ends
    first, CheckpointError, and WorkerDied if the engine does not start or ends with an error.
    """
    try:
        Environment.read()  # see make_engine
        folder = weights.resolve(config.model)
        _check_gpus(config)
        said = about(config, folder)
    except (ValueError, OSError, weights.CheckpointError) as error:  # node 0 need not wait for this node
        with contextlib.suppress(OSError, ValueError, WorkerDied):
            _connect(config, "control", min(config.dist_timeout, nodes.TELL_S), error=str(error)).close()
        raise
    control = _connect(config, "control", config.dist_timeout, about=said)
    log.info("node %d: node 0 is at %s:%d", config.node_rank, control.there, config.master_port)
    first = config.node_rank * config.ranks_per_node
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        with (
            contextlib.nullcontext(lambda: False) if patience is None else ending_by_signals(patience) as ends
        ):
            for rank in range(first, first + config.ranks_per_node):
                try:
                    processes[rank] = _start(config, rank, folder, control.here)
                except (OSError, ValueError):
                    if wait([control.connection], GRACE):
                        _hear_end(control)  # which is the reason
                    raise
            _watch(config, control, processes, ends)
        for process in processes.values():
            ended(process)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        control.cut()
        control.close()


class Followed:
    """Stands for the engine on a node that is not node 0, after its end."""

    def __init__(self, config: EngineConfig):
        self._node = config.node_rank

    def shutdown(self) -> None:
        """Nothing is left to end."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"node {self._node} has no engine: use that of node 0, which has ended")


def _check_gpus(config: EngineConfig) -> None:
    """Raise ValueError for fewer GPUs than ranks."""
    gpus, needed = torch.cuda.device_count(), config.ranks_per_node
    if config.device != "cpu" and 0 < gpus < needed:
        raise ValueError(f"node {config.node_rank} needs {needed} GPUs, and there are {gpus}")


def _connect(config: EngineConfig, kind: str, seconds: float, **more: Any) -> Channel:
    """A connection to node 0, which may come later, or may be busy.

    Raises TimeoutError, ValueError if it refuses this node, ConnectionError if it ends, and WorkerDied with its reason
    if it cannot start.
    """
    where = nodes.place(config)
    patience, waits = Patience(seconds), f"node {config.node_rank} waits for node 0 at {where}"
    while True:
        try:
            sock = socket.create_connection((config.master_addr, config.master_port), nodes.GREETING_S)
            break
        except socket.gaierror as error:
            raise OSError(
                f"master_addr {config.master_addr!r} is not a known address: {error.strerror}"
            ) from error
        except OSError as error:
            last = error.strerror or str(error)
        if patience.left < 0:
            raise TimeoutError(
                f"node 0 did not answer at {where} in {seconds:g} s ({last}): start it, or correct --master-addr and"
                " --master-port"
            )
        patience.report(
            f"{waits} ({last})",
            "check that the same command runs with --node-rank 0 and what it says there, that --master-addr and"
            " --master-port are equal on all nodes, and that no firewall is between them",
        )
        time.sleep(RETRY_S)
    channel, nonce = Channel(sock), secrets.token_hex(16)
    greeting = _greeting(channel, where, waits, patience)
    try:
        channel.limit(nodes.LOST_S)
        message = {"node": config.node_rank, "kind": kind, "nonce": nonce, **more}
        channel.send({**message, "proof": proof(greeting["nonce"], message)})
        answer = channel.receive()
        refused, given = str(answer["refused"]), str(answer.pop("proof"))
        channel.limit(0)
    except (EOFError, OSError, ValueError, TypeError, KeyError) as error:
        channel.close()
        raise ValueError(f"{where} is not node 0 of an engine that waits for nodes ({error})") from error
    if not refused and given != proof(nonce, answer):
        refused = f"{nodes.KEY} is not that of node 0"
    if refused:
        channel.close()
        if answer.get("failed"):
            raise WorkerDied(0, f"cannot start the engine: {refused}")
        raise ValueError(f"node 0 refuses this node: {refused}")
    return channel


def _greeting(channel: Channel, where: str, waits: str, patience: Patience) -> dict[str, Any]:
    """Wait for node 0's greeting. Raises what _connect raises."""
    try:
        while not channel.connection.poll(patience.pause):
            patience.report(
                f"{waits}, which has not greeted it",
                "node 0 may still read its model; otherwise another program has this port",
            )
            if patience.left < 0:
                raise ValueError("it sent no greeting in time")
        channel.limit(nodes.LOST_S)
        found = channel.receive()
        if not isinstance(found, dict) or "nonce" not in found:
            raise ValueError("it sent another greeting")
        return found
    except (EOFError, OSError) as error:
        channel.close()
        raise ConnectionError(
            f"{where} closed the connection before a greeting: node 0 has ended, and its own output says why; or it is"
            " another program: correct --master-addr and --master-port"
        ) from error
    except ValueError as error:
        channel.close()
        raise ValueError(f"{where} is not node 0 of an engine that waits for nodes ({error})") from error


def _start(config: EngineConfig, rank: int, folder: Path, address: str) -> subprocess.Popen[bytes]:
    """Start a rank with its connections to node 0. address: of this node, which the others reach."""
    channels = [_connect(config, kind, nodes.LOST_S, rank=rank) for kind in ("commands", "life")]
    cpu = (config.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu"
    threads = max(1, torch.get_num_threads() // config.ranks_per_node) if cpu else None
    named = interfaces(nodes.interface_of(address))
    try:
        fds = channels[0].connection.fileno(), channels[1].connection.fileno()
        folders = [str(path) for path in (folder, _draft(config)) if path is not None]
        return start(fds, threads, *folders, **{k: v for k, v in named.items() if k not in os.environ})
    finally:
        for channel in channels:
            channel.close()


def _watch(
    config: EngineConfig,
    control: Channel,
    processes: Mapping[int, subprocess.Popen[bytes]],
    stopping: Callable[[], bool],
) -> None:
    """Wait for the end of the engine. Raises WorkerDied if it ends with an error."""
    alive, deaths, until = dict(processes), dict[int, str](), float("inf")
    while time.monotonic() < until:
        if wait([control.connection], LOOK_S):
            return _hear_end(control)
        if stopping():
            control.send({"stopped": True})
            raise WorkerDied(config.node_rank * config.ranks_per_node, "was stopped with its node")
        for rank, process in list(alive.items()):
            if (code := process.poll()) is not None:
                del alive[rank]
                deaths[rank] = f"(pid {process.pid}) {how_ended(code)}"
                until = min(until, time.monotonic() + 2 * GRACE)  # for node 0 to tell the reason
                with contextlib.suppress(OSError):
                    control.send({"rank": rank, "how": deaths[rank]})
    raise WorkerDied(*next(iter(deaths.items())))


def _hear_end(control: Channel) -> None:
    """Read how node 0 has ended the engine. Raises WorkerDied if it was an error."""
    try:
        reason = str(control.receive()["end"])
    except (EOFError, OSError, ValueError, TypeError, KeyError):
        reason = f"node 0 ({control.there}) has ended"
    if reason:
        raise WorkerDied(0, f"has ended the engine: {reason}")


@contextmanager
def ending_by_signals(patience: float) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether this node must end, for the main thread.

    After a signal to all nodes node 0 ends the engine: after SIGTERM when its requests have finished, at the latest
    after `patience` seconds. So this node ends GRACE seconds later; after SIGINT in GRACE seconds; at a second signal.
    """
    until = float("inf")

    def handle(number: int, frame: Any) -> None:
        nonlocal until
        left = GRACE + (patience if number == signal.SIGTERM else 0.0)
        until = time.monotonic() + (left if until == float("inf") else 0.0)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: time.monotonic() >= until
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
