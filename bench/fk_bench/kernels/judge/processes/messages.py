"""The messages that a runner may send, and what the judge believes of them.

A candidate's process can write any bytes at any time, so every message is checked against the schema of the command
that it answers. Nothing in a message can make a verdict better: the mode of the call, the shapes and the dtypes are the
judge's own, and a reported failure is one of a closed set.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import from_json

from fk_bench.core.rows import Status
from fk_bench.core.terminal.text import printable
from fk_bench.kernels.judge.memory.place import Count, Place, Strict
from fk_bench.kernels.judge.processes.protocol import ChannelGarbage

# The failures that a process may report of itself; all others are decided by the judge.
FAILURES = frozenset({Status.COMPILE_ERROR, Status.RUNTIME_ERROR, Status.SIGNATURE_MISMATCH, Status.OOM})
# Our own code may also say that it does not support a call.
TRUSTED_FAILURES = FAILURES | {Status.UNSUPPORTED}
LIMIT, CAPTURE_LIMIT = 1 << 18, 8 << 20  # bytes of a message

Text = Annotated[str, Field(max_length=1 << 16), AfterValidator(printable)]
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Message(Strict):
    """A reply; fields that the schema does not name are refused."""


class Hello(Message):
    """The first message of a process, sent before it imports a candidate: the steps of its cage."""

    hello: dict[Text, Text]


class Failed(Message):
    error: Text
    reason: Text
    context_lost: bool


class Done(Message):
    pass


class Mapped(Message):
    """memory: of a trusted side that has allocated the slots itself."""

    memory: Place | None = None


class Loaded(Message):
    """compilers, production: the baselines of these kinds; missing: {a baseline of production: its packages}."""

    import_s: Seconds
    baselines: list[Text]
    compilers: list[Text]
    production: list[Text] = []
    missing: dict[Text, list[Text]] = {}


class Used(Message):
    unsupported: Text | None = None
    unchecked: list[Count] = []
    prepares: bool = False


class Called(Message):
    """aliases: outputs that share memory with an argument; live, refused: ops that ran, and reasons for fallbacks."""

    aliases: list[Count]
    live: dict[Text, Count]
    refused: dict[Text, Text]


class Estimated(Message):
    seconds: Seconds


class Captured(Message):
    outputs: list[list[Place]]


class Ran(Message):
    events_s: Seconds | None = None


class Traced(Message):
    trace: Text | None = None
    call_s: Seconds | None = None
    launches: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    kernels: list[Text] = Field(default=[], max_length=12)


class Deployed(Message):
    """Problems in compiled code, and of new batch sizes; '' if there are none. `unknown: ` and why if not tested."""

    deployed: Text
    serving: Text


class Stored(Message):
    """port: of the store that the ranks of this side meet at, in its own process."""

    port: Annotated[int, Field(ge=1, le=65535)]


SCHEMAS: dict[str, type[Message]] = {
    "load": Loaded, "use": Used, "case": Mapped, "free": Done, "call": Called, "copy": Done, "prepare": Done,
    "estimate": Estimated,
    "capture": Captured, "run": Ran, "calls": Done, "queue": Done, "trace": Traced, "compiled": Done,
    "deployment": Deployed, "store": Stored, "join": Done,
}  # fmt: skip
M = TypeVar("M", bound=Message)


def limit(do: str) -> int:
    """Bytes that a reply to this command may have."""
    return CAPTURE_LIMIT if do == "capture" else LIMIT


def hello(body: bytes) -> Hello:
    """The first message of a process. Raises ChannelGarbage."""
    return _checked(Hello, _object(body))


def answer(do: str, nonce: str, body: bytes) -> Message:
    """The reply to the command `do` that was sent with `nonce`: its schema, or Failed. Raises ChannelGarbage."""
    found = _object(body)
    if found.pop("nonce", None) != nonce:
        raise ChannelGarbage("a reply to no command")
    return _checked(Failed if "error" in found else SCHEMAS[do], found)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = from_json(body, allow_inf_nan=False)
    except ValueError:  # also for nesting that is too deep
        raise ChannelGarbage("a message that is not JSON") from None
    if not isinstance(found, dict):
        raise ChannelGarbage("a message that is not an object")
    return found


def _checked(schema: type[M], found: dict[str, Any]) -> M:
    try:
        return schema.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = printable(".".join(str(part) for part in first["loc"]), 80)
        raise ChannelGarbage(
            f"a reply that does not fit ({where or schema.__name__}: {first['type']})"
        ) from None


def believed(failed: Failed, trusted: bool) -> tuple[Status, str]:
    """Status and reason of a failure that a process reports. A status that it cannot have is INVALID."""
    known = TRUSTED_FAILURES if trusted else FAILURES
    status = next((s for s in known if s.value == failed.error), None)
    if status is not None:
        return status, failed.reason
    return (
        Status.INVALID,
        f"its process reported {failed.error[:40]!r}, which it cannot know: {failed.reason}",
    )
