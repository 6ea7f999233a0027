"""One item: the search for the part of a set that runs, and interleaved rounds of the host with and without it."""

from __future__ import annotations

import math
import random
import statistics
import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fk_bench.core.stats import paired_ratio
from fk_bench.evaluate import checkpoints
from fk_bench.evaluate.macro_eval import ItemOutcome
from fk_bench.evaluate.reasons import Reason
from fk_bench.evaluate.run.fidelity import UNITS, Fidelity, calibration, fidelity
from fk_bench.evaluate.run.search import Dropped, Found, Probe, search
from fk_bench.evaluate.run.side import Launcher, Side, SideFailed
from fk_bench.evaluate.run.starts import Starts
from fk_bench.evaluate.suites import Entry, Model, Suite
from fk_bench.quality import faults
from fk_bench.quality.calibration import THRESHOLD, Calibration

PHASES = ("throughput", "latency")
PROBE_LENGTHS = ((19, 6), (40, 5), (3, 8))  # (prompt, output) tokens of a probe
# Of vLLM's cache, whose default is a share of a CPU's memory. On a GPU the number of its blocks is given; vLLM would
# still measure what is free, which fails if another process releases memory meanwhile.
KV_BYTES = {False: 256 << 20, True: 16 << 30}  # by whether it is a GPU
ONLY_CHECKED = (
    0.01  # of a GPU's memory: vLLM refuses to start if less is free, and other processes have loaded models
)
OWN = 2  # comparisons of the baseline with itself
FORCED = 16, 32  # most requests and tokens of each whose log probabilities are compared
LEAST_FORCED = 6  # requests of small workloads, which else spend most of their time in this comparison
SERVED = (2, 3, 5, 7)  # batch sizes of a probe after the first, at which nothing may compile
DRAFTED = 3  # tokens of a draft model in a step
MOST_OBJECTS = 1000  # different numbers in the masks of a call; with more, they are no masks
BOX = 6  # numbers of a detection: corners, score, label
VOCAB_MARGIN = 10  # ids below are special in most vocabularies


@dataclass
class Round:
    """Seconds of the same work on both sides, by the clock of this process."""

    phase: str
    number: int
    seconds: dict[str, float] = field(default_factory=dict)
    work: int = 0  # output tokens, or images


@dataclass
class Measured:
    """The result of an item for one set. outcome: None if the item counts as not run; then reason and text."""

    entry: Entry
    found: Found = field(default_factory=lambda: Found((), (), (), 0))
    rounds: list[Round] = field(default_factory=list)
    outcome: ItemOutcome | None = None
    fidelity: Fidelity | None = None
    calibration: Calibration | None = None  # of images, and of the log probabilities of text
    ci95: dict[str, tuple[float, float]] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=dict)
    reason: Reason | None = None
    text: str = ""


class Work:
    """The work of both sides of an item, and the comparison of their outputs. seed: secret until the run ends."""

    def __init__(self, entry: Entry, seed: int, vocab: int):
        self.entry, self.seed, self.vocab = entry, seed, vocab
        self.text = entry.workload.kind == "text"
        compare = entry.workload.compare
        self.kind = compare if compare in UNITS else "text" if self.text else "images"  # of fidelity

    def requests(
        self, count: int, lengths: Sequence[tuple[int, int]], key: str
    ) -> tuple[list[list[int]], list[int]]:
        """Fresh prompts: no two rounds share one."""
        draw = random.Random(f"{self.seed} {key}")
        pairs = [lengths[i % len(lengths)] for i in range(count)]
        prompts = [[draw.randrange(VOCAB_MARGIN, self.vocab) for _ in range(n)] for n, _ in pairs]
        return prompts, [n for _, n in pairs]

    def run(
        self, side: Side, count: int, key: str, lengths: Sequence[tuple[int, int]] = (), calls: int = 0
    ) -> Done:
        """One timed piece of work. Raises SideFailed, also if a number of outputs is wrong."""
        if not self.text:
            calls = calls or self.entry.workload.calls
            seed = random.Random(f"{self.seed} {key}").randrange(1 << 30)
            side.call("prepare", batch=count, seed=seed, calls=calls)
            seconds, _ = side.timed("run")
            which = random.Random().randrange(calls)  # drawn after the work: any call may be the one
            return Done(seconds, count * calls, image=(count, seed, calls, which), output=output(side, which))
        prompts, wanted = self.requests(count, lengths or self.entry.workload.lengths, key)
        seconds, found = side.timed("generate", prompts=prompts, lengths=wanted)
        tokens = checked_tokens(found.get("tokens"), wanted, self.vocab)
        return Done(seconds, sum(wanted), prompts=prompts, tokens=tokens)

    def discrepancy(self, done: Done, judge: Side) -> list[float]:
        """How far outputs are from those of the baseline, which `judge` is: text by token, images one value."""
        if self.text:
            found = judge.call("score", prompts=done.prompts, outputs=done.tokens)["scores"]
            return [max(best - own, 0.0) for request in found for own, best in request]
        count, seed, calls, which = done.image
        judge.call("prepare", batch=count, seed=seed, calls=calls)
        judge.call("run")
        return [self.apart(done.output, output(judge, which), count)]

    def apart(self, found: np.ndarray, wanted: np.ndarray, count: int) -> float:
        """The discrepancy of the outputs of `count` requests or images from those of the baseline."""
        how = self.entry.workload.compare
        if how == "tokens":
            return float(np.mean(found != wanted)) if found.size == wanted.size else math.inf
        if how == "masks":
            if found.size != wanted.size or len(np.unique(found)) > MOST_OBJECTS:
                return math.inf
            return 1 - mean_iou(found.reshape(count, -1), wanted.reshape(count, -1))
        if how == "boxes" and found.size == wanted.size and not wanted.size % (count * BOX):
            found = matched(found.reshape(count, -1, BOX), wanted.reshape(count, -1, BOX)).ravel()
        return relative_error(found, wanted)

    def logprobs(self, side: Side, base: Side, key: str, fault: str = "") -> float:
        """How far the log probabilities of generated tokens are from those of the baseline after the same prefixes.

        fault: planted in `side` while it generates
        """
        prefixes = [prompt for prompt, _ in self.entry.workload.lengths]
        most, new = FORCED
        count = min(most, max(LEAST_FORCED, 2 * self.entry.workload.throughput))
        longest = self.entry.workload.longest - max(prefixes)
        lengths = [(n, min(new, longest)) for n in prefixes]
        prompts, wanted = self.requests(count, lengths, f"logprobs {key}")
        found = side.call("generate", prompts=prompts, lengths=wanted, logprobs=True)
        if fault:  # the side may be the baseline that scores
            side.call("plant", fault="")
        tokens = checked_tokens(found.get("tokens"), wanted, self.vocab)
        scores = base.call("score", prompts=prompts, outputs=tokens)["scores"]
        return spread(found.get("logprobs"), [[own for own, _ in request] for request in scores])


def spread(found: Any, wanted: list[list[float]]) -> float:
    """Root mean square of the differences; infinite for other shapes, and for what is not finite."""
    try:
        pairs = [(a, b) for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=True)]
        apart = np.array([float(a) - b for a, b in pairs])
    except (TypeError, ValueError):
        return math.inf
    return float(np.sqrt(np.mean(np.square(apart)))) if np.isfinite(apart).all() else math.inf


def calibrated(work: Work, base: Side) -> Calibration:
    """The scale of an item, from the baseline repeated and with planted faults.

    Images have sums in another order, too; the log probabilities of text are always compared with another way to
    compute them: those of single steps with those of a whole sequence.
    """
    runs: dict[str, float] = {}
    found: dict[str, float] = {}
    unplanted: dict[str, str] = {}
    seed = random.Random(f"{work.seed} calibration").randrange(1 << 30)

    count = work.entry.workload.latency

    def made() -> np.ndarray:
        base.call("prepare", batch=count, seed=seed, calls=1)
        base.call("run")
        return output(base, 0)

    if work.text:
        runs |= {f"own {i}": work.logprobs(base, base, f"own {i}") for i in range(OWN)}
    else:
        reference = made()
        runs["again"] = work.apart(made(), reference, count)
    for fault in faults.FAULTS if work.text else (faults.REORDER, *faults.FAULTS):
        answer = base.call("plant", fault=fault)
        if answer.get("planted"):
            apart = (
                work.logprobs(base, base, fault, fault) if work.text else work.apart(made(), reference, count)
            )
            (found if fault in faults.FAULTS else runs)[fault] = apart
            base.call("plant", fault="")
        elif answer.get("concerns") and fault != faults.REORDER:  # which is no fault
            unplanted[fault] = str(answer.get("reason"))
    return calibration("logprobs" if work.text else work.kind, runs, found, unplanted)


@dataclass(frozen=True)
class Done:
    """One piece of work. image: batch, seed, calls of the round, and the call whose output is compared: `output`."""

    seconds: float
    work: int
    prompts: list[list[int]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    image: tuple[int, int, int, int] = (0, 0, 0, 0)
    output: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))


def checked_tokens(found: Any, lengths: Sequence[int], vocab: int) -> list[list[int]]:
    """Token ids of every request, exactly `lengths` of them. Raises SideFailed."""
    if not isinstance(found, list) or len(found) != len(lengths):
        raise SideFailed(Reason.INCORRECT, f"{len(lengths)} requests were sent, and {found!r:.80} came back")
    for n, (tokens, wanted) in enumerate(zip(found, lengths, strict=True)):
        if not isinstance(tokens, list) or len(tokens) != wanted:
            count = len(tokens) if isinstance(tokens, list) else 0
            raise SideFailed(Reason.INCORRECT, f"request {n}: {count} tokens came back instead of {wanted}")
        if not all(type(t) is int and 0 <= t < vocab for t in tokens):
            raise SideFailed(Reason.INCORRECT, f"request {n}: an output is no token id below {vocab}")
    return found


def output(side: Side, call: int) -> np.ndarray:
    found = side.call("output", call=call).get("output")
    try:
        return np.frombuffer(b64decode(found or ""), np.float32)
    except (ValueError, TypeError) as error:
        raise SideFailed(Reason.INCORRECT, f"an output that is no array: {error}") from None


def matched(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The rows of each group of `found` in the order of those of `wanted` that they are closest to: [n, rows, width].

    Rows of equal scores have no order of their own, and an error of rounding may exchange them.
    """
    made = np.empty_like(found)
    for group, others, own in zip(made, wanted, found, strict=True):
        apart = np.abs(others[:, None].astype(np.float64) - own[None]).sum(-1)  # [rows, rows]
        apart[~np.isfinite(apart)] = np.finfo(np.float64).max
        for i in range(len(others)):
            nearest = int(apart[i].argmin())
            group[i] = own[nearest]
            apart[:, nearest] = np.inf
    return made


def mean_iou(found: np.ndarray, wanted: np.ndarray) -> float:
    """Over the objects of all clips in either: [clips, pixels] of their numbers, 0 outside. 1 without an object.

    Numbers that are not finite count as 0.
    """
    ious = []
    for own, other in zip(np.where(np.isfinite(found), found, 0), wanted, strict=True):
        for number in set(own[own != 0].tolist()) | set(other[other != 0].tolist()):
            mine, theirs = own == number, other == number
            ious.append((mine & theirs).sum() / (mine | theirs).sum())
    return float(np.mean(ious)) if ious else 1.0


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """|found - wanted| / |wanted|; infinite for another size, and for what is not finite."""
    if found.size != wanted.size or not np.isfinite(found).all():
        return math.inf
    below = float(np.linalg.norm(wanted.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - wanted)) / max(below, 1e-30)


def options_of(entry: Entry, model: Model, suite: Suite, dtype: str, gpu: bool, sides: int) -> dict[str, Any]:
    """The options of `hosts.open_host`."""
    work = entry.workload
    longest = max(work.longest, max(map(sum, PROBE_LENGTHS))) + 16
    longest += int(model.request.get("tokens", 0)) if work.media else 0
    count = max(work.throughput, work.latency, *SERVED)
    by_name = model.timm or model.named or model.library
    where = by_name or str(checkpoints.folder(model, work.kind))
    dummy = model.weights == "dummy" or (work.kind != "text" and not model.path)
    engine_args = dict(entry.engine_args)
    if model.draft:
        draft = str(
            checkpoints.folder(
                replace(model, config=model.draft, public="", draft={}, files={}, tokenizers={}), "draft"
            )
        )
        engine_args["speculative_config"] = {
            "method": "eagle3",
            "model": draft,
            "num_speculative_tokens": DRAFTED,
        }
    if work.kind == "requests" and not model.path:
        dtype = str(model.config.get("dtype", dtype))
    share = ONLY_CHECKED if gpu and entry.item.host == "vllm" else round(0.85 / sides, 3)
    return {
        "host": entry.item.host, "kind": work.kind, "model": where, "dtype": dtype, "gpu": gpu,
        "load_format": "dummy" if dummy else "auto", "max_model_len": longest, "max_num_seqs": count,
        "kv_tokens": -(-count * longest * 33 // 32 // 16) * 16, "tensor_parallel": entry.item.ranks,
        "kv_bytes": KV_BYTES[gpu] if entry.item.host == "vllm" else None,
        "gpu_share": share, "shared": gpu, "engine_args": engine_args, "compiled": entry.compiled,
        "arguments": dict(model.arguments), "image_size": model.image_size, "steps": model.steps,
        "request": dict(model.request), "media": work.media,
    }  # fmt: skip


def traced(entry: Entry, gpu: bool) -> bool:
    """Whether a compiler traces the modules of the item's host."""
    return entry.compiled or (
        entry.item.host == "vllm" and not entry.engine_args.get("enforce_eager", not gpu)
    )


def vocab_of(entry: Entry) -> int:
    if entry.workload.kind != "text":
        return 0
    from fk_bench.offline.host import vocab_size

    return vocab_size(str(checkpoints.folder(entry.model, "text")))


class ItemRun:
    """Measures an item for a set. say: progress, a line at a time."""

    def __init__(
        self, entry: Entry, suite: Suite, launcher: Launcher, dtype: str, seed: int, say: Callable[[str], None]
    ):  # fmt: skip
        self.entry, self.suite, self.launcher, self.dtype = entry, suite, launcher, dtype
        self._say, self._began = say, time.monotonic()
        self.work = Work(entry, seed, vocab_of(entry))

    def say(self, text: str) -> None:
        self._say(f"{self.entry.name}: {text} [{time.monotonic() - self._began:.0f} s]")

    def measure(self, files: Mapping[str, str], readable: Sequence[str], retry: bool = True) -> Measured:
        """The result for {op: file}. retry: whether culprits are dropped; without, the set runs whole or not at all."""
        result = Measured(self.entry)
        small, whole = self.entry.model.small, self.entry.model
        try:
            with Starts(self.together) as starts:
                judging, first = self.planned(starts, small, (), True), self.planned(starts, small, readable)
                plain, other = self.planned(starts, whole, ()), self.planned(starts, whole, readable)
                with judging() as judge:
                    self.put_in(judge, {})
                    prober = Prober(self, judge, files, readable, first)
                    result.found = prober.found(retry)
                if not result.found.kept:
                    result.reason, result.text = _nothing_left(result.found)
                    return result
                kept = {op: files[op] for op in result.found.kept}
                self.say(f"{len(kept)} of {len(files)} candidates kept")
                with plain() as base:
                    self.put_in(base, {})
                    self.say("the host is ready")
                    with other() as mine:
                        self.put_in(mine, kept)
                        self.say("the host with the set is ready")
                        self._rounds(result, base, mine)
        except SideFailed as error:
            result.outcome, result.reason, result.text = None, error.reason, str(error)
        return result

    @property
    def together(self) -> bool:
        """Whether all processes start at once: on a GPU, unless the first one compiles kernels for the others."""
        return self.launcher.gpu and self.entry.item.host != "fastkernels"

    def planned(
        self, starts: Starts, model: Model, readable: Sequence[str], trusted: bool = False
    ) -> Callable[[], Side]:
        """A process with the model loaded, started now or when it is taken. trusted: see `Launcher.spawn`."""
        options = options_of(self.entry, model, self.suite, self.dtype, self.launcher.gpu, 2)
        seen = [*readable]
        if not (model.timm or model.named or model.library):
            folder = Path(options["model"])  # a snapshot of the hub has links to files outside of it
            seen += [
                str(folder),
                *sorted({str(f.resolve().parent) for f in folder.rglob("*") if f.is_symlink()}),
            ]
        seen += [options["engine_args"]["speculative_config"]["model"]] if model.draft else []
        return starts.plan(
            partial(self.launcher.spawn, self.entry.item.host, seen, self.entry.timeout, trusted),
            lambda side: side.call("open", **options),
        )

    def put_in(self, side: Side, files: Mapping[str, str]) -> None:
        """Patch a host with these files, all of which fit. Raises SideFailed."""
        if files:
            side.call("check", files=dict(files))
            failed = side.call("patch", files=dict(files))["failed"]
            if lost := sorted(failed.keys() & files.keys()):
                raise SideFailed(Reason.UNSUPPORTED, f"{lost[0]}: {failed[lost[0]]['text']}")
        elif not self.work.text:
            side.call("patch", files={})  # compiles, if the item is compiled

    def _rounds(self, result: Measured, base: Side, mine: Side) -> None:
        sides = {"baseline": base, "set": mine}
        own: list[float] = []
        other: list[float] = []
        load = self.entry.workload
        counts = dict(zip(PHASES, (load.throughput, load.latency), strict=True))
        for phase, count in counts.items():
            for r in range(-1, load.rounds):  # -1 warms up
                done = {}
                order = list(sides) if r % 2 else list(reversed(sides))
                for name in order:
                    done[name] = self.work.run(sides[name], count, f"{phase} {r}")
                if r < 0:
                    continue
                seconds = {name: d.seconds for name, d in done.items()}
                result.rounds.append(Round(phase, r, seconds, done["set"].work))
                other.append(statistics.fmean(self.work.discrepancy(done["set"], base)))
                own.append(self._own(done["baseline"], base))
            self.say(f"{phase} measured")
        live = mine.call("live").get("live")
        result.live = {str(k): int(v) for k, v in live.items()} if isinstance(live, dict) else {}
        scale = result.calibration = calibrated(self.work, base)
        self.say("correctness calibrated")
        if self.work.text:
            apart = self.work.logprobs(mine, base, "set")
            result.fidelity = worse(
                fidelity("text", other, own), fidelity("logprobs", [apart], [scale.noise], scale)
            )
        else:
            result.fidelity = fidelity(self.work.kind, other, own, scale)
        conclude(result)

    def _own(self, done: Done, base: Side) -> float:
        """The baseline's discrepancy from itself."""
        return statistics.fmean(self.work.discrepancy(done, base))


def worse(*found: Fidelity) -> Fidelity:
    return min(found, key=lambda f: f.correctness)


def conclude(result: Measured) -> None:
    """Fill in the outcome and its intervals from the rounds."""
    speeds = {}
    for phase in PHASES:
        mine = [r for r in result.rounds if r.phase == phase]
        ratio, interval = paired_ratio(
            [r.seconds["baseline"] for r in mine], [r.seconds["set"] for r in mine]
        )
        speeds[phase] = ratio
        if interval is not None:
            result.ci95[phase] = interval
    if not any(result.live.values()):
        result.reason, result.text = Reason.NOT_DEPLOYED, "no candidate ran"
        return
    assert result.fidelity is not None
    if (scale := result.calibration) is not None and not scale.sensitive:
        result.reason, result.text = Reason.INSENSITIVE, insensitive(scale)
        return
    result.outcome = ItemOutcome(speeds["throughput"], speeds["latency"], result.fidelity.correctness)
    if result.fidelity.correctness < THRESHOLD:
        result.reason, result.text = Reason.INCORRECT, str(result.fidelity)


def insensitive(scale: Calibration) -> str:
    parts = [
        f"the planted fault {f} is no larger than the host's own {scale.noise:.3g}" for f in scale.unseen
    ]
    parts += [f"{fault} could not be planted: {why}" for fault, why in scale.unplanted.items()]
    return "; ".join(parts) or "no fault was planted"


def _nothing_left(found: Found) -> tuple[Reason, str]:
    if not found.dropped:
        return Reason.UNUSED, "the model calls no op of the set"
    first = found.dropped[0]
    return first.reason, f"all candidates were dropped; {first.op}: {first.text}"


class Prober:
    """Cheap probes of parts of a set: a small model, a few short requests, then batches of other sizes."""

    def __init__(
        self, run: ItemRun, judge: Side, files: Mapping[str, str], readable: Sequence[str],
        first: Callable[[], Side] | None = None,
    ):  # fmt: skip
        self.run, self.judge, self.files, self.readable = run, judge, files, readable
        self._first = first  # the process of the first probe
        self._baseline()

    def _baseline(self) -> None:
        """The baseline's own discrepancy and compilations in the same probe."""
        self.run.say("the host with the small model is ready")
        done = self._work(self.judge)
        self.compiled = self._served(self.judge)  # before it scores: the set's process does not
        self.noise = [statistics.fmean(self.run.work.discrepancy(d, self.judge)) for d in done]
        self.scale = calibrated(self.run.work, self.judge)

    def found(self, retry: bool) -> Found:
        if retry:
            return search(self.files, self.probe)
        whole = self.probe(tuple(sorted(self.files)))
        kept = self.files.keys() - whole.unused
        if whole.passed:
            return Found(tuple(sorted(kept)), (), tuple(sorted(whole.unused)), 1)
        lost = whole.failed or dict.fromkeys(kept, (whole.reason or Reason.RUN_TIME, whole.text))
        return Found((), tuple(Dropped(op, *why) for op, why in lost.items()), (), 1)

    def probe(self, ops: tuple[str, ...]) -> Probe:
        self.run.say(f"probe of {', '.join(ops)}")
        files = {op: self.files[op] for op in ops}
        run = self.run
        try:
            with Starts(together=False) as starts, self._host(starts) as side:
                if failed := _failures(side.call("check", files=files), ops):
                    return Probe(failed)
                answer = side.call("patch", files=files)
                refused = _failures(answer, ops)
                unused = {op for op, (reason, _) in refused.items() if reason is Reason.UNUSED}
                if len(unused) < len(refused) or not answer.get("patched"):
                    lost = {op: why for op, why in refused.items() if op not in unused}
                    return Probe(
                        lost,
                        None if refused else Reason.UNSUPPORTED,
                        str(answer.get("text"))[:500],
                        (),
                        frozenset(unused),
                    )
                if traced(run.entry, run.launcher.gpu) and (failed := _failures(side.call("deployed"), ops)):
                    return Probe(failed, unused=frozenset(unused))
                side.call("watch")
                done = self._work(side)
                apart = [statistics.fmean(run.work.discrepancy(d, self.judge)) for d in done]
                scale = None if run.work.text else self.scale
                found = fidelity(run.work.kind, apart, self.noise, scale)
                if found.correctness < THRESHOLD:
                    return Probe(reason=Reason.INCORRECT, text=str(found), unused=frozenset(unused))
                answer = side.call("live")
                idle = [op for op in ops if op not in unused and not answer["live"].get(op)]
                unused |= {op for op in idle if not answer["modules"].get(op)}
                idle = [op for op in idle if op not in unused]
                if idle:
                    why = Reason.NOT_DEPLOYED, "in place, and no call of the model ran it"
                    return Probe(dict.fromkeys(idle, why), unused=frozenset(unused))
                compiled = self._served(side)
                if new := [n for n, mine in compiled.items() if mine and not self.compiled[n]]:
                    count = sum(compiled[n] for n in new)
                    text = f"{count} compilations in batches of {new} after warm-up, the host none"
                    return Probe(reason=Reason.COMPILES_WHILE_SERVING, text=text, unused=frozenset(unused))
                if run.work.text:  # after the compilations: it runs other batches
                    apart = [run.work.logprobs(side, self.judge, f"probe {sorted(ops)}")]
                    found = fidelity("logprobs", apart, [self.scale.noise], self.scale)
                    if found.correctness < THRESHOLD:
                        return Probe(reason=Reason.INCORRECT, text=str(found), unused=frozenset(unused))
                return Probe(unused=frozenset(unused))
        except SideFailed as error:
            return Probe(reason=error.reason, text=str(error), files=error.files)

    def _host(self, starts: Starts) -> Side:
        """A process for a probe: for the first one, that which may have started before."""
        take, self._first = self._first, None
        run = self.run
        side = (take or run.planned(starts, run.entry.model.small, self.readable))()
        run.put_in(side, {})
        return side

    def _work(self, side: Side) -> list[Done]:
        work = self.run.work
        return [
            work.run(side, count, f"probe {count}", PROBE_LENGTHS, calls=2)
            for count in (len(PROBE_LENGTHS), 1)
        ]

    def _served(self, side: Side) -> dict[int, int]:
        """{size: compilations} in batches of sizes that were not seen before; none if the host compiles each size."""
        found = dict[int, int]()
        before = side.compilations()
        for count in () if self.run.entry.compiled else SERVED:
            self.run.work.run(side, count, f"served {count}", PROBE_LENGTHS, calls=1)
            after = side.compilations()
            found[count], before = after - before, after
        return found


def _failures(found: Mapping[str, Any], ops: Sequence[str]) -> dict[str, tuple[Reason, str]]:
    """The failures that a process reports for these ops."""
    failed = found.get("failed")
    if not isinstance(failed, dict):
        return {}
    try:
        return {
            op: (Reason(failed[op]["reason"]), str(failed[op]["text"])[:500]) for op in ops if op in failed
        }
    except (KeyError, TypeError, ValueError):
        raise SideFailed(Reason.RUN_TIME, "a report of failures that cannot be read") from None
