"""Messages of a runner: any bytes are a reply that the judge may believe, or that candidate's failure."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import unicodedata
from collections.abc import Iterator
from typing import Any

import pytest
from fk_bench.core.rows import Status
from fk_bench.kernels.judge.processes import messages, runner
from fk_bench.kernels.judge.processes.messages import SCHEMAS, Failed, Message
from fk_bench.kernels.judge.processes.protocol import (
    MAX_MESSAGE,
    Channel,
    ChannelClosed,
    ChannelGarbage,
    ChannelTimeout,
)
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess
from fk_bench.kernels.judge.rows.verdict import Evidence, decide
from hypothesis import given
from hypothesis import strategies as st

NONCE = "0123456789abcdef"
PLACE = {"nbytes": 64, "stride": [1], "arena": 0}
VALID: dict[str, dict[str, Any]] = {
    "load": {"import_s": 0.1, "baselines": ["cublas"], "compilers": []},
    "use": {"unchecked": [0]}, "prepare": {},
    "case": {}, "free": {}, "copy": {}, "compiled": {}, "queue": {}, "calls": {},
    "deployment": {"deployed": "", "serving": "unknown: no axis of tokens"},
    "store": {"port": 29500},
    "join": {},
    "call": {"aliases": [], "live": {"rms_norm": 1}, "refused": {"triton": "no GPU"}},
    "estimate": {"seconds": 1e-5},
    "capture": {"outputs": [[PLACE, {**PLACE, "arena": None, "handle": "0f" * 64, "offset": 8}]]},
    "run": {"events_s": 1e-3},
    "trace": {"call_s": 1e-5, "launches": 1.0, "kernels": ["k"]},
}  # fmt: skip
FAILED = {"error": "oom", "reason": "no memory", "context_lost": False}
COMMANDS = st.sampled_from(sorted(SCHEMAS))

# Lone surrogates, control characters and escape sequences included
wild_text = st.text(st.characters(categories=None))  # type: ignore[arg-type]
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), wild_text)
any_json = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner), st.dictionaries(wild_text, inner)), max_leaves=12
)


def encoded(reply: Any, nonce: str | None = NONCE) -> bytes:
    if isinstance(reply, dict) and nonce is not None:
        reply = {**reply, "nonce": nonce}
    return json.dumps(reply).encode()


def read(do: str, body: bytes) -> Message | None:
    """The reply in its schema; None if it is garbage. Any other exception fails the test."""
    try:
        found = messages.answer(do, NONCE, body)
    except ChannelGarbage:
        return None
    assert type(found) in (SCHEMAS[do], Failed)
    return found


# Bodies of replies


@pytest.mark.parametrize("do", SCHEMAS)
def test_valid_reply_is_read(do: str) -> None:
    assert type(read(do, encoded(VALID[do]))) is SCHEMAS[do]
    assert isinstance(read(do, encoded(FAILED)), Failed)


@given(COMMANDS, st.binary(max_size=200))
def test_bytes_are_a_reply_or_garbage(do: str, body: bytes) -> None:
    read(do, body)
    with contextlib.suppress(ChannelGarbage):
        messages.hello(body)


@given(COMMANDS, any_json)
def test_json_is_a_reply_or_garbage(do: str, reply: Any) -> None:
    found = read(do, encoded(reply))
    assert found is None or isinstance(reply, dict)
    with contextlib.suppress(ChannelGarbage):
        messages.hello(encoded(reply, None))


@given(st.data(), COMMANDS)
def test_changed_field_is_a_reply_or_garbage(data: st.DataObject, do: str) -> None:
    reply = dict(data.draw(st.sampled_from([VALID[do], FAILED])))
    names = st.sampled_from([*reply, "error", "status", "mode", "speedup"])
    reply |= data.draw(st.dictionaries(names, any_json, min_size=1))
    found = read(do, encoded(reply))
    if found is not None:
        assert set(reply) <= set(type(found).model_fields)


@given(st.data(), COMMANDS)
def test_damaged_bytes_are_a_reply_or_garbage(data: st.DataObject, do: str) -> None:
    body = bytearray(encoded(data.draw(st.sampled_from([VALID[do], FAILED]))))
    for _ in range(data.draw(st.integers(1, 4))):
        at, size = data.draw(st.integers(0, len(body))), data.draw(st.integers(0, 8))
        body[at : at + size] = data.draw(st.binary(max_size=8))
    read(do, bytes(body))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"\xff", b'{"nonce":', b'"' * 99, b"1" * 5000, b"[" * 200_000, b'{"a":' * 200_000,
        b'{"nonce": "0123456789abcdef", "error": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("do", ["call", "capture"])
def test_nesting_and_fragments_are_garbage(do: str, body: bytes) -> None:
    assert read(do, body) is None


@pytest.mark.parametrize(
    ("do", "reply"),
    [
        ("load", {**VALID["load"], "mode": "module"}),
        ("call", {k: v for k, v in VALID["call"].items() if k != "aliases"}),
        ("call", {**VALID["call"], "aliases": [-1]}),
        ("call", {**VALID["call"], "aliases": [True]}),
        ("estimate", {"seconds": float("nan")}),
        ("estimate", {"seconds": -1.0}),
        ("estimate", {"seconds": "1.0"}),
        ("trace", {"launches": float("inf")}),
        ("capture", {"outputs": [[{**PLACE, "arena": -64}]]}),
        ("capture", {"outputs": [[{**PLACE, "handle": "/dev/mem"}]]}),
        ("run", {"seconds": 1e-9}),
        ("copy", {**FAILED, "error": None}),
        ("copy", {"error": "oom"}),
    ],
)  # fmt: skip
def test_reply_beyond_its_schema_is_garbage(do: str, reply: dict[str, Any]) -> None:
    assert read(do, encoded(reply)) is None


@pytest.mark.parametrize("nonce", [None, "", "0" * 16, 1, True, [NONCE]])
def test_reply_needs_nonce_of_its_command(nonce: Any) -> None:
    assert read("copy", json.dumps({} if nonce is None else {"nonce": nonce}).encode()) is None


# Reported failures

STATUSES = st.sampled_from([s.value for s in Status])


@given(st.one_of(STATUSES, STATUSES.map(str.upper), wild_text), wild_text, st.booleans(), st.booleans())
def test_failure_is_never_ok(error: str, reason: str, trusted: bool, lost: bool) -> None:
    failed = Failed.model_construct(error=error, reason=reason, context_lost=lost)
    status, said = messages.believed(failed, trusted)
    assert status in messages.TRUSTED_FAILURES | {Status.INVALID}
    assert trusted or status is not Status.UNSUPPORTED
    for who in ("candidate", "baseline"):
        verdict = decide(Evidence(failure=RunnerError(status, said, lost, who)))
        assert verdict.status not in (Status.OK, Status.SKIPPED) and not verdict.speedup


@pytest.mark.parametrize("status", Status)
def test_process_may_report_few_statuses(status: Status) -> None:
    failed = Failed(error=status.value, reason="why", context_lost=False)
    found, reason = messages.believed(failed, False)
    if status in (Status.COMPILE_ERROR, Status.RUNTIME_ERROR, Status.SIGNATURE_MISMATCH, Status.OOM):
        assert (found, reason) == (status, "why")
    else:
        assert found is Status.INVALID and status.value in reason


def plain(text: str) -> bool:
    return not any(unicodedata.category(c) in ("Cc", "Cs") for c in text)


@given(wild_text.filter(lambda t: not any("\ud800" <= c <= "\udfff" for c in t)))
def test_texts_of_replies_are_printable(text: str) -> None:
    failed = read("call", encoded({**FAILED, "error": text, "reason": text}))
    assert isinstance(failed, Failed)
    assert plain(failed.reason) and plain(messages.believed(failed, False)[1])
    called = read("call", encoded({"aliases": [], "live": {text: 1}, "refused": {text: text}}))
    assert all(plain(t) for t in [*called.live, *called.refused, *called.refused.values()])  # type: ignore[union-attr]
    loaded = read("load", encoded({"import_s": 0.0, "baselines": [text], "compilers": [text]}))
    assert plain(loaded.baselines[0]) and plain(loaded.compilers[0])  # type: ignore[union-attr]
    traced = read("trace", encoded({"trace": text, "kernels": [text]}))
    assert plain(traced.trace) and plain(traced.kernels[0])  # type: ignore[union-attr]


def test_escape_sequences_are_removed() -> None:
    text = "\x1b[2K\x1b[1A\rrms_norm ok \x1b]0;title\x074.8 \u202e\x9b"
    failed = read("copy", encoded({**FAILED, "reason": text}))
    assert isinstance(failed, Failed) and failed.reason == " rms_norm ok 4.8 "


# A real socket


class Peer:
    """A child process that has written `data` to its channel and gone."""

    def __init__(self, data: bytes, open_: bool = False):
        self.channel, self.other = socket.socketpair()
        self.killed = False
        if data:
            self.other.sendall(data)
        if not open_:
            self.other.shutdown(socket.SHUT_WR)

    def resume(self) -> None:
        pass

    def wait(self, timeout: float) -> None:
        return None

    def kill(self) -> None:
        self.killed = True

    def output_tail(self, limit: int) -> str:
        return "\x1b[2Klast \x07words"


def framed(body: bytes, size: int | None = None) -> bytes:
    return struct.pack("!I", len(body) if size is None else size) + body


def told(do: str, data: bytes, open_: bool = False) -> tuple[RunnerError | Message, Peer]:
    """The outcome of a command to a process that has sent these bytes, which knew the nonce."""
    peer = Peer(data, open_)
    with peer.channel, peer.other:
        process = RunnerProcess(peer, "candidate", 0.05, False)
        try:
            process.begin(do)
            process._nonce = NONCE
            return process.end(), peer
        except RunnerError as error:
            return error, peer


@given(
    COMMANDS,
    st.one_of(
        st.binary(max_size=64),
        st.binary(max_size=64).map(framed),
        any_json.map(lambda j: framed(encoded(j))),
        st.tuples(st.binary(max_size=16), st.integers(0, 2**32 - 1)).map(lambda t: framed(*t)),
    ),
)  # fmt: skip
def test_socket_bytes_are_a_reply_or_failure(do: str, data: bytes) -> None:
    found, peer = told(do, data)
    if isinstance(found, RunnerError):
        assert found.who == "candidate" and plain(str(found))
        assert peer.killed or not found.fatal or found.status in {*messages.FAILURES, Status.INVALID}
        assert decide(Evidence(failure=found)).status not in (Status.OK, Status.SKIPPED)
    else:
        assert type(found) is SCHEMAS[do]
        assert decide(Evidence()).status is Status.FAILED  # a reply alone is no evidence


@pytest.mark.parametrize("status", Status)
def test_forged_status_is_never_ok(status: Status) -> None:
    found, _ = told("call", framed(encoded({"error": status.value, "reason": "", "context_lost": False})))
    assert isinstance(found, RunnerError)
    assert decide(Evidence(failure=found)).status not in (Status.OK, Status.SKIPPED, Status.UNSUPPORTED)


@pytest.mark.parametrize(
    ("data", "open_", "status"),
    [
        (b"", False, Status.CRASH),
        (b"", True, Status.TIMEOUT),
        (framed(b"{", 100), True, Status.TIMEOUT),
        (framed(b"{", 100), False, Status.CRASH),
        (framed(b"", messages.LIMIT + 1), True, Status.INVALID),
        (framed(b"[1, 2]"), True, Status.INVALID),
        (framed(encoded({}, "0" * 16)), True, Status.INVALID),
    ],
)  # fmt: skip
def test_broken_channel_ends_the_process(data: bytes, open_: bool, status: Status) -> None:
    found, peer = told("copy", data, open_)
    assert isinstance(found, RunnerError) and found.status is status and found.fatal and peer.killed
    assert str(found).endswith("its last output: last words")


# The channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_message_above_its_limit_is_garbage(ends: Any) -> None:
    ends[1].sendall(framed(b"", MAX_MESSAGE + 1))
    with pytest.raises(ChannelGarbage):
        ends[0].receive_bytes(1.0)
    ends[1].sendall(framed(b"12345"))
    with pytest.raises(ChannelGarbage):
        ends[0].receive_bytes(1.0, limit=4)


def test_command_carries_a_fresh_nonce(ends: Any) -> None:
    channel, other = ends
    nonces = {channel.command("run", 1.0, start=3) for _ in range(3)}
    received = [Channel(other).receive(1.0) for _ in range(3)]
    assert {r.pop("nonce") for r in received} == nonces and len(nonces) == 3
    assert received == [{"do": "run", "start": 3}] * 3


def test_command_carries_file_descriptors(ends: Any) -> None:
    channel, other = ends
    read, write = os.pipe()
    channel.command("case", 1.0, (write,), text="x" * 100_000)
    channel.command("run", 1.0)
    runner = Channel(other)
    assert runner.receive(1.0)["do"] == "case" and runner.receive(1.0)["do"] == "run"
    os.close(write)
    os.write(runner.fds.pop(), b"there")
    assert os.read(read, 9) == b"there" and not runner.fds
    os.close(read)


def test_judge_takes_no_file_descriptors(ends: Any) -> None:
    channel, other = ends
    before = os.listdir("/proc/self/fd")
    socket.send_fds(other, [framed(b"{}")], [0, 1])
    assert channel.receive_bytes(1.0) == b"{}" and os.listdir("/proc/self/fd") == before


def test_half_a_message_times_out_then_closes(ends: Any) -> None:
    channel, other = ends
    other.sendall(framed(b'{"a"', 100))
    with pytest.raises(ChannelTimeout):
        channel.receive_bytes(0.05)
    other.close()
    with pytest.raises(ChannelClosed):
        channel.receive_bytes(1.0)


def test_reader_that_stalls_is_a_timeout(ends: Any) -> None:
    with pytest.raises(ChannelTimeout):
        ends[0].send({"text": "x" * (8 << 20)}, 0.05)


@pytest.mark.parametrize("lost", [True, False])
def test_lost_cuda_context_is_fatal(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner reports by a flag whether its context survived; the text of its error does not matter."""

    def synchronize() -> None:
        if lost:
            raise RuntimeError("reworded")

    monkeypatch.setattr(runner, "_synchronize", synchronize)
    side = object.__new__(runner.RunnerState)
    side.device = "cuda"
    reply = {"error": "oom", "reason": "CUDA error", "context_lost": side.context_lost()}
    found, _ = told("call", framed(encoded(reply)))
    assert isinstance(found, RunnerError) and found.fatal is lost and found.status is Status.OOM
    side.device = "cpu"
    assert not side.context_lost()
