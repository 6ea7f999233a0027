"""patch(target): put our modules, or a user's candidates, into a host, and prove that they run.

A host is found by its entry point (group `fastkernels.hosts`), which names its integration.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Protocol

from fastkernels.core.candidate import resolve
from fastkernels.core.env import Environment
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.registry import UnknownName, check_names
from fastkernels.verify import phases

log = logging.getLogger("fastkernels")


class PatchError(RuntimeError):
    """The patch failed, and nothing has changed; the message gives the reason."""


@dataclass(frozen=True)
class Request:
    """A request to every process of a host, sent as JSON.

    action      'patch', 'undo', 'report' (counters since the patch) or 'reset' (counters to zero)
    ops         op names, None for all that are on by default for the host
    candidates  {op: file}
    disable     ops that stay off
    strict      a fallback, an unknown host version or an unsupported module is an error
    options     of 'record_start' and 'record_stop' (fk_integrations.core.call_recording)
    """

    action: str
    ops: tuple[str, ...] | None = None
    candidates: Mapping[str, str] = field(default_factory=dict)
    disable: tuple[str, ...] = ()
    strict: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        raw = json.loads(text)
        ops = raw.get("ops")
        return cls(
            raw["action"], None if ops is None else tuple(ops), raw.get("candidates") or {},
            tuple(raw.get("disable") or ()), bool(raw.get("strict")), raw.get("options") or {},
        )  # fmt: skip

    @classmethod
    def from_environment(cls, env: Environment | None = None) -> Request:
        env = env or Environment.read()
        return cls("patch", env.ops, dict(env.candidates), env.disable, env.strict)


@dataclass
class Row:
    """One (rank, op, host class) of a report.

    state       'active': ours is in place; 'off': not used; 'planned': engines built from now on
    calls       runs of the op's body in that process since the patch (or since the last capture)
    proof       'calls'; 'fell back' if plain PyTorch ran in all of them;
                'trace' if kernel names in a profiler trace of a replayed step show it; 'uncalled' if steps
                have run and the model has called no module of the row
    reason      the reasons as one line
    left        {reason: calls} that stayed the host's because no tuned table lists ours as faster there
    candidate   the parts of a user's file that run here, 'function', 'class' or 'function+class', and its path
    inside      ops of which a user's function runs inside these modules; their calls are in their own rows
    provider    the provider that FASTKERNELS_PROVIDER names for the op
    reasons     [{kind, text, modules}]: modules is 0 where the reason concerns the whole row
    measured    what was measured on this chip for the op, a line for each shape and size
    most_tokens the largest batch in which a compiled model runs ours; None: all
    unlimited   modules outside of the compiled code, which run ours in batches of every size in spite of most_tokens
    """

    rank: int
    op: str
    host_class: str
    modules: int
    state: str
    calls: int = 0
    proof: str = ""
    reason: str = ""
    fallbacks: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    candidate: str = ""
    inside: list[str] = field(default_factory=list)
    provider: str = ""
    reasons: list[dict[str, Any]] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    most_tokens: int | None = None
    unlimited: int = 0

    @property
    def kinds(self) -> list[Kind]:
        return [Kind(reason["kind"]) for reason in self.reasons]

    def explain(self, reasons: Mapping[Reason, int]) -> None:
        """Set the reasons: {reason: modules}, 0 modules for the whole row. Those left to the host come last."""
        ordered = sorted(reasons.items(), key=lambda pair: pair[0].kind.left)
        self.reasons = [{"kind": r.kind.value, "text": r.text, "modules": n} for r, n in ordered]
        self.reason = "; ".join(_line(reason, modules) for reason, modules in ordered)


def _line(reason: Reason, modules: int) -> str:
    if reason.kind in (Kind.OTHER_CLASS, Kind.UNRECOGNIZED):
        return f"{modules} stay with the host: {reason.text}"
    if reason.kind.left:
        return f"{modules} left to the host: {reason.text}" if modules else f"left to the host: {reason.text}"
    if reason.kind is Kind.FUSED and modules:
        return f"{modules} fused: {reason.text}"
    return f"{modules} unsupported: {reason.text}" if modules else reason.text


def nothing_patched(rows: Sequence[Row], request: Request) -> str | None:
    """Why a patch without an active row is an error; None: a row is active, or the host keeps all by default."""
    if any(row.state != "off" for row in rows):
        return None
    kinds = [kind for row in rows for kind in row.kinds]
    requested = request.ops is not None or bool(request.candidates)
    if not requested and any(kind.left for kind in kinds) and all(kind.harmless for kind in kinds):
        return None
    why = dict.fromkeys(f"{row.op} ({row.host_class}): {row.reason}" for row in rows)
    if not why:
        return "nothing to patch: " + (
            f"the model runs none of {', '.join(request.ops)}"
            if request.ops
            else "no op is on by default here"
        )
    return f"nothing to patch: {'; '.join(why)}"


class Host(Protocol):
    """A host integration: an object named by an entry point of the group `fastkernels.hosts`."""

    name: str

    def version(self) -> str | None:
        """The installed version, None if the host is not installed. Must not import the host."""

    def matches(self, target: Any) -> bool:
        """Whether this live object is one of this host's."""

    def call(self, target: Any, request: Request) -> list[dict[str, Any]]:
        """Carry out the request in every process of the live object; one reply per process, in rank order.

        A reply is {'rank', 'pid', 'host', 'version', 'rows': [Row as dict], 'error': str or None}. In a pipeline it
        also has 'stage': only ranks of one stage have the same modules; it may have 'seconds' of each phase. Raises
        PatchError for an unreachable process.
        """

    async def call_async(self, target: Any, request: Request) -> list[dict[str, Any]]:
        """The same for an asynchronous engine."""


def hosts() -> dict[str, Host]:
    """The installed integrations, by host name. One that fails to import is skipped with a warning."""
    found: dict[str, Host] = {}
    for entry in entry_points(group="fastkernels.hosts"):
        try:
            found[entry.name] = entry.load()
        except ImportError as error:
            log.warning("the integration %s (%s) does not import: %s", entry.name, entry.value, error)
    return found


class Report:
    """The result of a patch, per (rank, op, host class), with `undo`. Also a context manager.

    seconds  {phase: seconds} of the last patch or undo in vLLM or SGLang, of each phase in the slowest process
    """

    def __init__(self, host: Host, target: Any, replies: list[dict[str, Any]]):
        self.host, self.target, self.undone = host, target, False
        self._read(replies)

    def _read(self, replies: list[dict[str, Any]]) -> None:
        self.pids = {r["rank"]: r["pid"] for r in replies}
        self.version = replies[0]["version"] if replies else None
        self.rows = [Row(**row) for r in replies for row in r["rows"]]
        self.seconds = phases.slowest(r.get("seconds", {}) for r in replies)

    @property
    def active(self) -> list[Row]:
        return [r for r in self.rows if r.state == "active"]

    @property
    def verified(self) -> bool:
        """Whether ops are in place and each has run in every process since the patch or the last capture.

        Modules that the model never calls (`uncalled`) are not counted, if others have run.
        """
        needed = [r for r in self.active if r.proof != "uncalled"]
        return bool(needed) and all(r.calls > 0 and r.proof != "fell back" for r in needed)

    @property
    def uncalled(self) -> list[Row]:
        """Active rows whose modules the model has not called, though steps have run."""
        return [r for r in self.active if r.proof == "uncalled"]

    @property
    def patched_modules(self) -> int:
        return sum(r.modules for r in self.active)

    @property
    def patched_calls(self) -> int:
        return sum(calls for calls in self._calls().values())

    def _calls(self) -> dict[tuple[int, str], int]:
        return {(r.rank, r.op): r.calls for r in self.active}  # a counter is per op, not per host class

    @property
    def candidates(self) -> dict[str, int]:
        """{op: calls} of the user's candidates in place, over all ranks; `Row.candidate` names the places."""
        calls: dict[tuple[int, str], int] = {(r.rank, r.op): r.calls for r in self.active if r.candidate}
        return {op: sum(n for (_, o), n in calls.items() if o == op) for _, op in sorted(calls)}

    def refresh(self) -> Report:
        """Read the counters again from every process."""
        self._read(_checked(self.host, self.host.call(self.target, Request("report"))))
        return self

    def reset(self) -> Report:
        """Set the counters to zero in every process."""
        self._read(_checked(self.host, self.host.call(self.target, Request("reset"))))
        return self

    def undo(self) -> None:
        """Restore everything. A second call does nothing."""
        if not self.undone:
            replies = _checked(self.host, self.host.call(self.target, Request("undo")))
            self.undone, self.seconds = True, phases.slowest(r.get("seconds", {}) for r in replies)

    async def undo_async(self) -> None:
        if not self.undone:
            replies = _checked(self.host, await self.host.call_async(self.target, Request("undo")))
            self.undone, self.seconds = True, phases.slowest(r.get("seconds", {}) for r in replies)

    async def refresh_async(self) -> Report:
        self._read(_checked(self.host, await self.host.call_async(self.target, Request("report"))))
        return self

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.undo()
        except PatchError as failure:
            if error is None:
                raise
            log.warning("the patch was not undone: %s", failure)  # and `error`, the cause, is raised

    def to_dict(self) -> dict[str, Any]:
        return {
            "host": self.host.name,
            "version": self.version,
            "pids": self.pids,
            "rows": [asdict(r) for r in self.rows],
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        where = f"{self.patched_modules} modules patched in {len(self.pids)} process(es)"
        head = f"{self.host.name} {self.version}: {where}"
        if not self.active and any(kind.left for row in self.rows for kind in row.kinds):
            head = f"{self.host.name} {self.version}: everything was left to the host"
        lines = [f"  {'rank':>4} {'op':<20} {'host class':<24} {'modules':>7} {'calls':>8}  state"]
        for r in self.rows:
            state = r.state + (f" ({r.proof})" if r.proof else "") + (f": {r.reason}" if r.reason else "")
            state += f"; in batches of up to {r.most_tokens} tokens" if r.most_tokens else ""
            state += f", except in {r.unlimited} modules outside of compiled code" if r.unlimited else ""
            state += f"; provider {r.provider}" if r.provider else ""
            state += f"; candidate {r.candidate}" if r.candidate else ""
            state += f"; candidates inside: {', '.join(r.inside)}" if r.inside else ""
            state += "".join(f"; fell back {n}x: {why}" for why, n in r.fallbacks.items())
            state += "".join(f"; left to the host {n}x: {why}" for why, n in r.left.items())
            lines.append(f"  {r.rank:>4} {r.op:<20} {r.host_class:<24} {r.modules:>7} {r.calls:>8}  {state}")
        if self.seconds:
            lines.append(f"  the {'undo' if self.undone else 'patch'} took {phases.line(self.seconds)}")
        measured = list(dict.fromkeys(text for r in self.rows for text in r.measured))
        if measured:
            lines.append(
                "  measured on this chip (time of the host's kernel over that of ours, 95% interval):"
            )
        return "\n".join([head, *lines, *(f"    {text}" for text in measured)])

    __repr__ = __str__


def _checked(host: Host, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The replies, or PatchError with every process's error."""
    errors = [
        f"rank {r.get('rank', '?')} (pid {r.get('pid', '?')}): {r['error']}"
        for r in replies
        if r.get("error")
    ]
    if errors or not replies:
        raise PatchError(f"{host.name}: " + ("; ".join(errors) or "no process answered"))
    return replies


def disagreement(replies: list[dict[str, Any]], request: Request) -> str | None:
    """None if all ranks of a stage patched the same, else the difference, or why nothing was patched."""
    stages: dict[int, dict[int, Any]] = {}
    for r in replies:
        shape = sorted((w["op"], w["host_class"], w["modules"], w["state"]) for w in r["rows"])
        stages.setdefault(r.get("stage", 0), {})[r["rank"]] = shape
    for shapes in stages.values():
        differing = [rank for rank, shape in shapes.items() if shape != shapes[min(shapes)]]
        if differing:
            return f"ranks {differing} patched something else than rank {min(shapes)}"
    return nothing_patched([Row(**row) for r in replies for row in r["rows"]], request)


Candidates = Mapping[str, Any] | str | os.PathLike[str]


def _request(ops: Iterable[str] | str | None, candidates: Candidates | None, strict: bool | None) -> Request:
    env = Environment.read()
    if isinstance(ops, str):
        ops = [name.strip() for name in ops.split(",")]
    names = None if ops is None else check_names(ops)
    files = resolve(candidates)
    check_names(env.disable)
    return Request("patch", names, files, env.disable, env.strict if strict is None else strict)


def find_host(target: Any) -> Host:
    """The integration for a live object, or for a host's name. Raises UnknownName or PatchError."""
    found = hosts()
    if isinstance(target, str):
        if target not in found:
            raise UnknownName("host", target, found)
        return found[target]
    for host in found.values():
        if host.matches(target):
            return host
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    raise PatchError(
        f"no host integration knows {kind}. Hosts: {', '.join(sorted(found)) or 'none are installed'}"
    )


def patch(
    target: Any,
    ops: Iterable[str] | str | None = None,
    candidates: Candidates | None = None,
    strict: bool | None = None,
) -> Report:
    """Put our modules into a live engine or module, or (by a host's name) into every engine built from now on.

    target      vllm.LLM or LLMEngine, sglang.Engine, fastkernels.LLM, a transformers, timm or diffusers model, a
                diffusers pipeline, or 'vllm', 'sglang', 'timm', 'diffusers'
    ops         op names, or one name; None: all that are on by default for the host
    candidates  {op: path of a file}, or a folder of OP.py files: the user's kernels instead of ours; their code
                runs in the host's processes
    strict      a fallback, an unknown version or an unsupported module is an error (default: FASTKERNELS_STRICT)

    Returns a Report (also a context manager; `undo()` restores everything). Without `ops`, a host may keep every
    module, as on a CPU, where our code is plain PyTorch, or in a convolutional network: the report then has no active
    row, and gives the reasons.

    Raises UnknownName for an op or host that does not exist, CandidateError for a folder without candidates, and
    PatchError if the patch fails or requested ops match nothing; nothing has changed then.
    """
    host = find_host(target)
    request = _request(ops, candidates, strict)
    replies = host.call(target, request)
    failed = [r for r in replies if r.get("error")]
    if failed and len(failed) < len(replies):
        host.call(target, Request("undo"))
    _checked(host, replies)
    differs = disagreement(replies, request)
    if differs:
        host.call(target, Request("undo"))
        raise PatchError(f"{host.name}: {differs}; undone")
    return Report(host, target, replies)


def patch_from_environment(engine: Any) -> None:
    """Put the candidates of FASTKERNELS_CANDIDATES into an engine of ours that is being built. Raises PatchError."""
    env = Environment.read()
    wanted = {op: path for op, path in env.candidates.items() if op not in env.disable}
    check_names(env.candidates)
    if wanted:
        patch(engine, candidates=wanted)


async def patch_async(
    target: Any,
    ops: Iterable[str] | str | None = None,
    candidates: Candidates | None = None,
    strict: bool | None = None,
) -> Report:
    """`patch` for an asynchronous engine (vllm AsyncLLM): waits until it is idle."""
    host = find_host(target)
    request = _request(ops, candidates, strict)
    replies = _checked(host, await host.call_async(target, request))
    differs = disagreement(replies, request)
    if differs:
        await host.call_async(target, Request("undo"))
        raise PatchError(f"{host.name}: {differs}; undone")
    return Report(host, target, replies)


class _CallableModule(ModuleType):
    # Importing this module binds it as fastkernels.patch, the name under which users call the function.
    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return patch(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

__all__ = [
    "Host", "PatchError", "Report", "Request", "Row", "disagreement", "find_host", "hosts", "nothing_patched", "patch",
    "patch_async", "patch_from_environment",
]  # fmt: skip
