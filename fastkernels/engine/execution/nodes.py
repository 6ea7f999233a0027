"""The other machines of an engine, as node 0 sees them: it waits for them, compares them with itself, and ends them.

A node has one connection of its own to node 0, its control connection, and two for each of its ranks, which are those
of a worker (see worker.py). All begin with a greeting in JSON: only a node that knows FASTKERNELS_NODE_KEY is let in.
Over the control connection the node then says how its processes ended, and node 0 when the engine ends; see follow.py.
Node 0 listens before it reads the model, so that the others learn why it does not start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import ipaddress
import json
import logging
import os
import pickle
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from multiprocessing.connection import Connection, wait
from typing import Any

from fastkernels.engine.execution.ranks import GRACE, Worker, WorkerDied
from fastkernels.engine.execution.worker import Setup
from fastkernels.engine.options.config import EngineConfig

log = logging.getLogger("fastkernels")
KEY = "FASTKERNELS_NODE_KEY"
GREETING_S = 5.0  # in which a connection must say who it is
MOST_BYTES = 1 << 20  # of a message
LOST_S = 30  # until a machine that does not answer counts as lost
TELL_S = 10.0  # for a node that is starting to hear that another one cannot
FIRST_S, OFTEN_S = 5.0, 60.0  # until a wait is reported first, and the longest time between two reports
MOST_DIFFERENCES = 5  # of a node that a message lists
SIOCGIFADDR = 0x8915


class Channel:
    """A TCP connection that passes JSON objects."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, (LOST_S - 10) // 5),
            (socket.TCP_USER_TIMEOUT, 1000 * LOST_S),
        ):  # fmt: skip
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.here, self.there = sock.getsockname()[0], sock.getpeername()[0]
        self._sock = sock
        self.connection = Connection(os.dup(sock.fileno()))

    def send(self, message: Mapping[str, Any]) -> None:
        self.connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Any:
        """Wait for a message. Raises EOFError, OSError, and ValueError for what is none."""
        return json.loads(self.connection.recv_bytes(MOST_BYTES))

    def limit(self, seconds: float) -> None:
        """The time that a read may take; 0: any."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def cut(self) -> None:
        """End the connection for both sides: they read its end. Safe in any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def close(self) -> None:
        """Leave it to another process that has it, or end it."""
        self._sock.close()
        if not self.connection.closed:
            self.connection.close()


def proof(nonce: str, message: Mapping[str, Any]) -> str:
    """Shows that the sender of a message knows the key."""
    text = nonce + json.dumps(message, sort_keys=True)
    return hmac.new(os.environ.get(KEY, "").encode(), text.encode(), sha256).hexdigest()


class Patience:
    """The time that one node waits for another, which is reported in growing intervals."""

    def __init__(self, seconds: float):
        self._seconds, self._start = seconds, time.monotonic()
        self._next = FIRST_S

    @property
    def left(self) -> float:
        return self._start + self._seconds - time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds until the next report or the end, at least 0."""
        return max(0.0, min(self.left, self._start + self._next - time.monotonic()))

    def report(self, waits: str, check: str) -> None:
        """Log who waits for whom, and what to check, if it is time for that."""
        waited = time.monotonic() - self._start
        if waited < self._next or self.left <= 0:
            return
        self._next += min(self._next, OFTEN_S)
        log.warning("%s: %.0f s so far, at most %g s; %s", waits, waited, self._seconds, check)


class Node:
    """Another machine of the engine, with its control connection."""

    def __init__(self, number: int, channel: Channel):
        self.number, self._channel = number, channel
        self._ends: dict[int, str] = {}  # by rank
        self._stopped = self._told = self._lost = False
        self._hearing = threading.Lock()

    def __str__(self) -> str:
        return f"node {self.number} ({self._channel.there})"

    @property
    def connection(self) -> Connection:
        return self._channel.connection

    def end(self, reason: str = "") -> None:
        if not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                self._channel.send({"end": reason})

    def close(self) -> None:
        self._hear(lambda: self._lost, 2 * GRACE)
        self._channel.cut()
        self._channel.close()

    def end_of(self, rank: int) -> str:
        """How a rank ended whose connections have closed."""
        self._hear(lambda: self._lost or self._stopped or rank in self._ends, GRACE)
        if self._stopped:
            return f"is lost: {self} was stopped"
        if rank in self._ends:
            return f"of {self} {self._ends[rank]}"
        if not ipaddress.ip_address(self._channel.there).is_loopback:
            _end_connections(self._channel.there)
        return f"is lost: {self} has ended" if self._lost else f"is lost: {self} has closed its connection"

    def early_end(self) -> tuple[int, str]:
        """The rank that ended before all had come, -1 if the node did, and how."""
        self._hear(lambda: self._lost or self._stopped or bool(self._ends), GRACE)
        rank = next(iter(self._ends), -1)
        return rank, self.end_of(rank)

    def _hear(self, enough: Callable[[], bool], seconds: float) -> None:
        """Read what the node says until that is enough, at most for so long."""
        until = time.monotonic() + seconds
        with self._hearing:
            while not enough():
                try:
                    if not self._channel.connection.poll(max(0.0, until - time.monotonic())):
                        return
                    said = self._channel.receive()
                    if "rank" in said:
                        self._ends[int(said["rank"])] = str(said["how"])
                    self._stopped = self._stopped or "stopped" in said
                except (EOFError, OSError, ValueError, TypeError, KeyError):
                    self._lost = True


class RemoteWorker(Worker):
    """A worker on another machine, which its node has started."""

    def __init__(self, node: Node, rank: int, commands: Channel, life: Channel):
        self.node, self.rank, self._channels = node, rank, (commands, life)
        self.commands, self.life = commands.connection, life.connection
        self._known = False

    def begin(self, setup: Setup) -> None:
        """Send what a worker needs first."""
        self.commands.send_bytes(pickle.dumps(setup))

    def _ended(self, reason: str, trace: str) -> WorkerDied:
        self._known = True
        if trace:
            return WorkerDied(self.rank, f"of {self.node} failed: {reason}", trace)
        return WorkerDied(self.rank, self.node.end_of(self.rank))

    @property
    def has_ended(self) -> bool:
        try:
            return self._known or self.life.poll()
        except OSError:
            return True

    def kill(self) -> None:
        for channel in self._channels:  # its thread that reads `life` ends the process
            channel.cut()

    def wait(self) -> None:
        self.kill()  # the node waits for the process


class Gathering:
    """Node 0 while it waits for the connections of all other nodes."""

    def __init__(self, config: EngineConfig):
        """Listen. Raises OSError if the port cannot be used."""
        self._config = config
        self._about: Mapping[str, Any] = {}
        self._sock = _listen(config.master_addr, config.master_port)
        self.address: str = self._sock.getsockname()[0]
        self.nodes: dict[int, Node] = {}
        self._channels: dict[tuple[int, str], Channel] = {}  # by rank and kind
        self._refused: set[int] = set()  # nodes that know why the engine does not start
        self._failure = ""  # of this node
        if not os.environ.get(KEY) and not ipaddress.ip_address(self.address).is_loopback:
            log.warning(
                "any process that reaches %s:%d can join as a node: set %s to the same secret on all nodes, or use a"
                " private network", self.address, config.master_port, KEY,
            )  # fmt: skip

    @staticmethod
    def of(config: EngineConfig) -> Gathering:
        """The one of the context of `listening`, or a new one."""
        return _gathering.get() or Gathering(config)

    def workers(self, about: Mapping[str, Any]) -> list[RemoteWorker]:
        """Wait for all ranks of the other nodes, and return their workers.

        about: the facts that the nodes must have in common. Raises TimeoutError that names nodes that did not come,
        and ValueError for one that differs.
        """
        config, self._about = self._config, about
        patience = Patience(config.dist_timeout)
        ranks = range(config.ranks_per_node, config.num_ranks)
        while len(self._channels) < 2 * len(ranks):
            if patience.left <= 0:
                raise TimeoutError(self._late())
            if missing := self._missing():
                patience.report(
                    f"node 0 waits at {place(config)} for {_named(missing)} of {config.nnodes}",
                    f"start the same command there with --node-rank {missing[0]}, and see what it says",
                )
            ready = wait([self._sock, *(node.connection for node in self.nodes.values())], patience.pause)
            for node in self.nodes.values():
                if node.connection in ready:
                    rank, reason = node.early_end()
                    raise WorkerDied(max(rank, node.number * config.ranks_per_node), reason)
            if self._sock in ready:
                self._accept(min(max(patience.left, 1e-3), GREETING_S))  # 0 is no limit
        return [
            RemoteWorker(
                self.nodes[rank // config.ranks_per_node], rank,
                self._channels[rank, "commands"], self._channels[rank, "life"],
            )
            for rank in ranks
        ]  # fmt: skip

    def close(self) -> None:
        """Accept no more connections."""
        self._sock.close()

    def cancel(self, error: BaseException) -> None:
        """End the nodes that have come, and tell the others why this one does not start, if they come soon."""
        if self._sock.fileno() < 0:
            return
        self._failure = described(error)
        try:
            for node in self.nodes.values():
                node.end(self._failure)
            # Late nodes have had their time, and a user who ends this one does not wait.
            soon = isinstance(error, Exception) and not isinstance(error, TimeoutError)
            self._refuse(min(TELL_S, self._config.dist_timeout) if soon else 0.0)
        finally:
            self.close()
            for node in self.nodes.values():
                node.close()
            for channel in self._channels.values():
                channel.cut()
                channel.close()

    def _refuse(self, seconds: float) -> None:
        """Tell the nodes that come in this time why the engine does not start."""
        until = time.monotonic() + seconds
        if (missing := self._missing()) and seconds:
            log.error(
                "node 0 cannot start: %s. It waits %g s to tell %s", self._failure, seconds, _named(missing)
            )
        while self._missing() and wait([self._sock], max(0.0, until - time.monotonic())):
            with contextlib.suppress(ValueError):  # a node that cannot start itself, or with another key
                self._accept(GREETING_S)

    def _missing(self) -> list[int]:
        """The nodes that have not come."""
        return [n for n in range(1, self._config.nnodes) if n not in self.nodes and n not in self._refused]

    def _late(self) -> str:
        config, missing = self._config, self._missing()
        if not missing:
            return f"the ranks of other nodes did not connect to node 0 in {config.dist_timeout:g} s"
        return (
            f"{_named(missing)} of {config.nnodes} did not come to {place(config)} in {config.dist_timeout:g} s: start"
            f" it with the same options and --node-rank {missing[0]}, or increase --dist-timeout"
        )

    def _accept(self, seconds: float) -> None:
        """Let a connection in, if it is of another node. Raises ValueError for a node that differs.

        After a failure of node 0 a node is told, and not let in.
        """
        try:
            channel = Channel(self._sock.accept()[0])
        except OSError:  # it has already left
            return
        nonce = secrets.token_hex(16)
        try:
            channel.limit(seconds)
            channel.send({"greeting": "fastkernels", "nonce": nonce})
            said = channel.receive()
            given, theirs = str(said.pop("proof")), str(said["nonce"])
            if not hmac.compare_digest(given, proof(nonce, said)):
                self._answer(channel, theirs, f"{KEY} is not that of node 0")
                raise ValueError(f"{KEY} differs")
            channel.limit(0)
            number, kind = int(said["node"]), str(said["kind"])
            rank = int(said.get("rank", -1))
            about = dict(said.get("about") or {})
        except (EOFError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("a connection from %s is not of a node: %s", channel.there, error)
            channel.close()
            return
        if kind != "control":
            known = (
                number in self.nodes and kind in ("commands", "life") and (rank, kind) not in self._channels
            )
            if not known or rank // self._config.ranks_per_node != number:
                channel.close()
                return
            self._channels[rank, kind] = channel
            self._answer(channel, theirs, "")
            return
        if number in self.nodes or not 0 < number < self._config.nnodes:
            why = "is already there" if number in self.nodes else f"is none of {self._config.nnodes}"
            self._answer(channel, theirs, f"node_rank {number} {why}: choose another --node-rank")
            log.warning("a connection from %s was refused: node %d %s", channel.there, number, why)
            channel.close()
            return
        node = Node(number, channel)
        if self._failure:
            self._answer(channel, theirs, self._failure, failed=True)
            self._refused.add(number)
            channel.close()
            return
        wrong = said.get("error") or difference(self._about, about, str(node))
        self._answer(channel, theirs, wrong)
        if wrong:
            self._refused.add(number)
            channel.close()
            raise ValueError(wrong if not said.get("error") else f"{node}: {wrong}")
        self.nodes[number] = node
        log.info("%s has come: %d of %d", node, len(self.nodes) + 1, self._config.nnodes)

    @staticmethod
    def _answer(channel: Channel, nonce: str, refused: str, failed: bool = False) -> None:
        """failed: node 0 cannot start, and this is why."""
        answer = {"refused": refused, "failed": failed}
        with contextlib.suppress(OSError):
            channel.send({**answer, "proof": proof(nonce, answer)})


_gathering: ContextVar[Gathering | None] = ContextVar("gathering", default=None)


@contextmanager
def listening(config: EngineConfig) -> Iterator[None]:
    """Listen for the other nodes from now on: an error in this context is told to them.

    For node 0 of several; nothing happens inside another such context. Raises OSError if the port cannot be used.
    """
    if config.nnodes == 1 or config.node_rank or _gathering.get() is not None:
        yield
        return
    made = Gathering(config)
    token = _gathering.set(made)
    try:
        yield
    except BaseException as error:
        made.cancel(error)
        raise
    finally:
        _gathering.reset(token)
        made.close()


def place(config: EngineConfig) -> str:
    """Where node 0 listens, for messages."""
    host = config.master_addr
    return f"{f'[{host}]' if ':' in host else host}:{config.master_port}"


def described(error: BaseException) -> str:
    """An error for the other nodes, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _named(numbers: list[int]) -> str:
    return f"node {', '.join(map(str, numbers))}"


def _end_connections(address: str) -> None:
    """End this process's connections to a machine. One that has vanished closes none, and gloo would wait for it."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                inet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if inet and sock.getpeername()[0].removeprefix("::ffff:") == address:
                    sock.shutdown(socket.SHUT_RDWR)


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], node: str) -> str:
    """A message with the differences of a node from node 0; '' if there is none."""
    found: list[str] = []
    for name, value in json.loads(json.dumps(ours)).items():
        other = theirs.get(name)
        if isinstance(value, dict):
            other = other if isinstance(other, dict) else {}
            pairs = [(key, value[key], other.get(key)) for key in value]
        else:
            pairs = [(name, value, other)]
        found += [f"{key} {has}, and node 0 has {want}" for key, want, has in pairs if want != has]
    if not found:
        return ""
    if len(found) > MOST_DIFFERENCES:
        found[MOST_DIFFERENCES:] = [f"{len(found) - MOST_DIFFERENCES} more differences"]
    must = "it" if len(found) == 1 else "they"
    return f"{node} has {'; '.join(found)}: {must} must be the same on all nodes"


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError with the option to change."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(f"master_addr {host!r} is not a known address: {error.strerror}") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen()
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            what = "it must be an address of node 0, which is this machine; or choose another --node-rank"
        else:
            what = "choose another --master-port on all nodes"
        raise OSError(f"node 0 cannot listen on {host}:{port}: {error.strerror}; {what}") from error
    return sock


def free_port(address: str) -> socket.socket:
    """A listening socket on a free port of an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((address, 0))
    sock.listen()
    return sock


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if none is found."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
