"""patch(target): put our modules, or a user's candidates, into a host, and prove that they run.

A host is found by its entry point (group `fastkernels.hosts`), which names its integration.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from fastkernels.core.cancellation import to_the_end
from fastkernels.core.candidate import named_in, resolve
from fastkernels.core.env import Environment
from fastkernels.core.reasons import Kind, Phrase, Reason
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
    options     of 'record_start' and 'record_stop' (fk_integrations.core.call_recording), and 'apply' (.applied)
    patch       the id of a patch. 'undo', 'report' and 'reset' with an id are about that patch alone: if it is not in
                place, they change nothing and return no rows. Without an id they are about any
    """

    action: str
    ops: tuple[str, ...] | None = None
    candidates: Mapping[str, str] = field(default_factory=dict)
    disable: tuple[str, ...] = ()
    strict: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    patch: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        raw = json.loads(text)
        ops = raw.get("ops")
        return cls(
            raw["action"], None if ops is None else tuple(ops), raw.get("candidates") or {},
            tuple(raw.get("disable") or ()), bool(raw.get("strict")), raw.get("options") or {},
            raw.get("patch") or "",
        )  # fmt: skip

    @classmethod
    def from_environment(cls, env: Environment | None = None) -> Request:
        env = env or Environment.read()
        return cls("patch", env.ops, dict(env.candidates), env.disable, env.strict)


@dataclass
class Row:
    """One (rank, op, host class) of a report.

    state       'active': ours is in place; 'off': not used; 'planned': engines built from now on
    calls       runs of the op's body since the patch (or since the last capture)
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
    more_than   the largest batch in which a compiled model does not run ours; None: it runs in small ones, too
    captured    whether only CUDA graphs and compiled code run ours; eager calls are the host's
    in_prompts  modules for which a compiler pass has ours compute larger batches than those of decodes
    own         whether `calls` are those of the row's own modules; else, in our engine, the op's in that process, where
                rows of one op share them
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
    more_than: int | None = None
    captured: bool = False
    in_prompts: int = 0
    own: bool = False
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
    if reason.kind is Kind.FUSED and modules:
        return f"{modules} fused: {reason.text}"
    phrase = reason.kind.phrase.value
    if modules:
        return f"{modules} {phrase}: {reason.text}"
    return f"{phrase}: {reason.text}" if reason.kind.left else reason.text


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

        A reply is {'rank', 'pid', 'host', 'version', 'rows': [Row as dict], 'error': str or None}, with 'node', the
        machine, if there can be several. In a pipeline it also has 'stage': only ranks of one stage have the same
        modules; it may have 'seconds' of each phase, and 'lasting' changes that outlive an undo. Raises PatchError for
        an unreachable process.
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

    target   the live object; None after the undo, so that the report does not keep a model in memory
    nodes    {rank: machine}, for hosts that can run on several
    lasting  changes of the processes that outlive an undo
    seconds  {phase: seconds} of the last patch or undo in vLLM or SGLang, of each phase in the slowest process
    """

    def __init__(self, host: Host, target: Any, replies: list[dict[str, Any]], patch: str = ""):
        self.host, self.target, self.undone, self._patch = host, target, False, patch
        self._read(replies)

    def _read(self, replies: list[dict[str, Any]]) -> None:
        self.pids = {r["rank"]: r["pid"] for r in replies}
        self.nodes = {r["rank"]: r["node"] for r in replies if r.get("node")}
        self.version = replies[0]["version"] if replies else None
        self.rows = [Row(**row) for r in replies for row in r["rows"]]
        self.seconds = phases.slowest(r.get("seconds", {}) for r in replies)
        self.lasting = list(dict.fromkeys(text for r in replies for text in r.get("lasting", ())))

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
        return sum(self._calls(self.active).values())

    def _calls(self, rows: Iterable[Row]) -> dict[tuple[int, str], int]:
        """{(rank, op): calls}; rows without a count of their own show the op's."""
        found: dict[tuple[int, str], int] = {}
        for r in rows:
            found[r.rank, r.op] = r.calls + (found.get((r.rank, r.op), 0) if r.own else 0)
        return found

    @property
    def candidates(self) -> dict[str, int]:
        """{op: calls} of the user's candidates in place, over all ranks; `Row.candidate` names the places."""
        calls = self._calls(r for r in self.active if r.candidate)
        return {op: sum(n for (_, o), n in calls.items() if o == op) for _, op in sorted(calls)}

    def refresh(self) -> Report:
        """Read the counters again from every process. No rows are left after the patch was undone."""
        return self._update("report")

    def reset(self) -> Report:
        """Set the counters to zero in every process."""
        return self._update("reset")

    def _update(self, action: str) -> Report:
        if self.undone:
            self.rows = []
        else:
            self._read(_call(self.host, self.target, Request(action, patch=self._patch)))
        return self

    def undo(self) -> None:
        """Restore everything. A second call does nothing; after an interruption, it continues."""
        if not self.undone:
            self._end(_call(self.host, self.target, Request("undo", patch=self._patch)))

    async def undo_async(self) -> None:
        if not self.undone:
            self._end(await _call_async(self.host, self.target, Request("undo", patch=self._patch)))

    def _end(self, replies: list[dict[str, Any]]) -> None:
        self.undone, self.seconds = True, phases.slowest(r.get("seconds", {}) for r in replies)
        self.target = None

    async def refresh_async(self) -> Report:
        if self.undone:
            return self._update("report")
        self._read(await _call_async(self.host, self.target, Request("report", patch=self._patch)))
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
            "nodes": self.nodes,
            "rows": [asdict(r) for r in self.rows],
            "seconds": self.seconds,
            "lasting": self.lasting,
        }

    def __str__(self) -> str:
        where = f"{self.patched_modules} modules patched in {len(self.pids)} process(es)"
        head = f"{self.host.name} {self.version}: {where}"
        if not self.active and any(kind.left for row in self.rows for kind in row.kinds):
            head = f"{self.host.name} {self.version}: everything was left to the host"
        lines = _node_lines(self.nodes)
        lines += [f"  {'rank':>4} {'op':<20} {'host class':<24} {'modules':>7} {'calls':>8}  state"]
        for r in self.rows:
            state = r.state + (f" ({r.proof})" if r.proof else "") + (f": {r.reason}" if r.reason else "")
            state += "; in CUDA graphs, and the host's in eager steps" if r.captured else ""
            state += f"; in batches of up to {r.most_tokens} tokens" if r.most_tokens else ""
            state += f"; in batches of more than {r.more_than} tokens" if r.more_than is not None else ""
            state += (
                f"; {r.in_prompts} in larger batches, too" if r.in_prompts and r.more_than is None else ""
            )
            state += f", except in {r.unlimited} modules outside of compiled code" if r.unlimited else ""
            state += f"; provider {r.provider}" if r.provider else ""
            state += f"; candidate {r.candidate}" if r.candidate else ""
            state += f"; candidates inside: {', '.join(r.inside)}" if r.inside else ""
            state += "".join(f"; {Phrase.FELL_BACK.value} {n}x: {why}" for why, n in r.fallbacks.items())
            state += "".join(f"; {Phrase.LEFT.value} {n}x: {why}" for why, n in r.left.items())
            lines.append(f"  {r.rank:>4} {r.op:<20} {r.host_class:<24} {r.modules:>7} {r.calls:>8}  {state}")
        if self.seconds:
            lines.append(f"  the {'undo' if self.undone else 'patch'} took {phases.line(self.seconds)}")
        lines += [f"  {text}" for text in self.lasting]
        measured = list(dict.fromkeys(text for r in self.rows for text in r.measured))
        if measured:
            lines.append(
                "  measured on this chip (time of the host's kernel over that of ours, 95% interval):"
            )
        return "\n".join([head, *lines, *(f"    {text}" for text in measured)])

    __repr__ = __str__


def _node_lines(nodes: Mapping[int, str]) -> list[str]:
    """A line for each of several machines, with its ranks."""
    found: dict[str, list[int]] = {}
    for rank, node in nodes.items():
        found.setdefault(node, []).append(rank)
    if len(found) < 2:
        return []
    return [f"  {node}: rank {', '.join(map(str, ranks))}" for node, ranks in found.items()]


def _checked(host: Host, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The replies, or PatchError with every process's error."""
    several = len({r.get("node") for r in replies}) > 1
    errors = []
    for r in replies:
        if r.get("error"):
            on = f" on {r.get('node', '?')}" if several else ""
            errors.append(f"rank {r.get('rank', '?')} (pid {r.get('pid', '?')}{on}): {r['error']}")
    if errors or not replies:
        raise PatchError(f"{host.name}: " + ("; ".join(errors) or "no process answered"))
    return replies


_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_named_locks: dict[str, threading.Lock] = {}


def _lock_of(target: Any) -> threading.Lock:
    """The lock of a live object or of a host's name. Objects that cannot be keys of a weak dictionary share one."""
    if isinstance(target, str):
        return _named_locks.setdefault(target, threading.Lock())
    try:
        return _locks.setdefault(target, threading.Lock())
    except TypeError:
        return _named_locks.setdefault("", threading.Lock())


@contextmanager
def _alone(host: Host, target: Any) -> Iterator[None]:
    """Wait until no other thread changes this target. Raises PatchError where the wait would block an event loop."""
    lock = _lock_of(target)
    if lock.locked() and _in_a_loop():
        raise PatchError(
            f"{host.name}: another patch or undo of this target has not ended yet: await it first"
        )
    with lock:
        yield


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@asynccontextmanager
async def _alone_async(target: Any) -> AsyncIterator[None]:
    lock, held = _lock_of(target), False
    try:
        while not (held := lock.acquire(blocking=False)):
            await asyncio.sleep(0.01)
        yield
    finally:
        if held:
            lock.release()


def _call(host: Host, target: Any, request: Request) -> list[dict[str, Any]]:
    with _alone(host, target):
        return _checked(host, host.call(target, request))


async def _call_async(host: Host, target: Any, request: Request) -> list[dict[str, Any]]:
    async with _alone_async(target):
        return _checked(host, await host.call_async(target, request))


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
    if strict is not None and not isinstance(strict, bool):
        raise TypeError(f"strict must be True, False or None, got {strict!r:.80}")
    if isinstance(ops, str):
        ops = [name.strip() for name in ops.split(",") if name.strip()]
    elif ops is not None:
        ops = list(ops) if isinstance(ops, Iterable) else [ops]
        if wrong := [name for name in ops if not isinstance(name, str)]:
            raise TypeError(f"ops must be names of ops, such as ['rms_norm'], got {wrong[0]!r:.80}")
    names = env.ops if ops is None else check_names(ops)
    files = resolve(candidates)
    if names == () and not files:
        raise ValueError(
            "ops is empty: name ops, such as ['rms_norm'], or omit it for those that are on by default"
        )
    chosen = env.strict if strict is None else strict
    return Request("patch", names, files, env.disable, chosen, patch=uuid.uuid4().hex)


def _name_blocks(host: Host, target: Any, candidates: Candidates | None) -> None:
    """Let a host that knows the blocks of its model name them, before the names of candidates are checked."""
    if (name_blocks := getattr(host, "name_blocks", None)) is not None:
        name_blocks(target, named_in(candidates))


def find_host(target: Any) -> Host:
    """The integration for a live object, or for a host's name. Raises UnknownName or PatchError."""
    found = hosts()
    if isinstance(target, str):
        if target not in found:
            raise UnknownName("host", target, found, "A model is passed as the live object, not by its name.")
        return found[target]
    for host in found.values():
        if host.matches(target):
            return host
    kind = target if isinstance(target, type) else type(target)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    what = f"the class {name}: pass an object of it" if kind is target else name
    known = ", ".join(sorted(found)) or "none are installed"
    raise PatchError(
        f"no host integration knows {what}. Pass a live engine, model or pipeline of one of these hosts, or its name:"
        f" {known}"
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
    ops         op names, or one name; None: those of FASTKERNELS_OPS, else all that are on by default for the host
    candidates  {op: path of a file}, or a folder of OP.py files: the user's kernels instead of ours; their code
                runs in the host's processes. In our engine also blocks of its model, such as llama.mlp
    strict      a fallback, an unknown version or an unsupported module is an error (default: FASTKERNELS_STRICT)

    Returns a Report (also a context manager; `undo()` restores everything). Without `ops`, a host may keep every
    module, as on a CPU, where our code is plain PyTorch, or in a convolutional network: the report then has no active
    row, and gives the reasons.

    Raises UnknownName for an op or host that does not exist, CandidateError for a file or folder without candidates,
    ValueError for an empty list of ops, and PatchError if the patch fails or requested ops match nothing; nothing has
    changed then. The same holds for an exception from outside, such as Ctrl-C. If that interrupts the way back, too,
    the next patch or `unpatch` ends it.
    """
    host = find_host(target)
    _name_blocks(host, target, candidates)
    request = _request(ops, candidates, strict)
    undo = Request("undo", patch=request.patch)
    with _alone(host, target):
        try:
            replies = host.call(target, request)
            if _undo_needed(replies, request):
                host.call(target, undo)
            return _report(host, target, replies, request)
        except PatchError:
            raise
        except BaseException as error:
            log.warning("%s interrupted the patch: everything is put back", type(error).__name__)
            try:
                _checked(host, host.call(target, undo))
            except PatchError as failure:
                log.warning(_NOT_UNDONE, failure)  # and `error`, the cause, is raised
            raise


_NOT_UNDONE = "the interrupted patch was not undone: %s"


def _undo_needed(replies: list[dict[str, Any]], request: Request) -> bool:
    """Whether a patch that some process has made has to go: another one failed, or they differ."""
    failed = [r for r in replies if r.get("error")]
    if failed:
        return len(failed) < len(replies)
    return bool(replies) and disagreement(replies, request) is not None


def _report(host: Host, target: Any, replies: list[dict[str, Any]], request: Request) -> Report:
    """The report of a patch. Raises PatchError for an error of a process, and for what `disagreement` finds."""
    if differs := disagreement(_checked(host, replies), request):
        raise PatchError(f"{host.name}: {differs}; undone")
    return Report(host, target, replies, request.patch)


def unpatch(target: Any) -> None:
    """Restore a patched object without its report: after an interruption, of a copy, or of a server with FASTKERNELS=1.

    target   as for `patch`; an object that is not patched stays as it is

    Raises UnknownName for an unknown host, and PatchError if the object cannot be restored now.
    """
    host = find_host(target)
    _call(host, target, Request("undo"))


async def unpatch_async(target: Any) -> None:
    """`unpatch` for an asynchronous engine."""
    host = find_host(target)
    await _call_async(host, target, Request("undo"))


def patch_from_environment(engine: Any) -> None:
    """Put the candidates of FASTKERNELS_CANDIDATES into an engine of ours that is being built. Raises PatchError."""
    env = Environment.read()
    wanted = {op: path for op, path in env.candidates.items() if op not in env.disable}
    if wanted:
        patch(engine, candidates=wanted)


async def patch_async(
    target: Any,
    ops: Iterable[str] | str | None = None,
    candidates: Candidates | None = None,
    strict: bool | None = None,
) -> Report:
    """`patch` for an asynchronous engine (vllm AsyncLLM): waits until it is idle.

    Raises what `patch` does; nothing has changed then, in no rank. The same holds for a cancellation.
    """
    host = find_host(target)
    _name_blocks(host, target, candidates)
    request = _request(ops, candidates, strict)
    undo = Request("undo", patch=request.patch)
    async with _alone_async(target):
        try:
            replies = await host.call_async(target, request)
            if _undo_needed(replies, request):
                await to_the_end(host.call_async(target, undo))
            return _report(host, target, replies, request)
        except PatchError:
            raise
        except BaseException as error:
            log.warning("%s interrupted the patch: everything is put back", type(error).__name__)
            try:
                _checked(host, await to_the_end(host.call_async(target, undo)))
            except PatchError as failure:
                log.warning(_NOT_UNDONE, failure)  # and `error`, the cause, is raised
            raise


class _CallableModule(ModuleType):
    # Importing this module binds it as fastkernels.patch, the name under which users call the function.
    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return patch(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

__all__ = [
    "Host", "PatchError", "Report", "Request", "Row", "disagreement", "find_host", "hosts", "nothing_patched", "patch",
    "patch_async", "patch_from_environment", "unpatch", "unpatch_async",
]  # fmt: skip
