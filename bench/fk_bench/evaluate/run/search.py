"""Drop and retry: the largest part of a set that runs, and why the others were dropped.

A probe runs some of the files in a host. If it fails, the culprit is the innermost file of the set in the traceback, or
else it is found by bisection: with context c, which passes, and suspects s, of which c + s fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fk_bench.evaluate.reasons import Reason


@dataclass(frozen=True)
class Dropped:
    """A candidate that was left out. text: for people."""

    op: str
    reason: Reason
    text: str


@dataclass(frozen=True)
class Probe:
    """The outcome of one probe.

    failed  ops that the probe itself blames, with reasons
    reason  why it failed without naming a culprit; None if it ran to its end
    files   of the traceback, the innermost first
    unused  ops that the model has no place for
    """

    failed: Mapping[str, tuple[Reason, str]] = field(default_factory=dict)
    reason: Reason | None = None
    text: str = ""
    files: tuple[str, ...] = ()
    unused: frozenset[str] = frozenset()

    @property
    def passed(self) -> bool:
        return self.reason is None and not self.failed


@dataclass(frozen=True)
class Found:
    """The part of a set that is left in an item. probes: their number."""

    kept: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    unused: tuple[str, ...]
    probes: int


def search(files: Mapping[str, str], probe: Callable[[tuple[str, ...]], Probe]) -> Found:
    """Drop culprits until the rest passes.

    files  {op: path}; a path may be followed by others that belong to the op: blamed is the op whose file or folder of
           helpers is innermost
    """
    known: dict[frozenset[str], Probe] = {}

    def run(ops: Iterable[str]) -> Probe:
        key = frozenset(ops)
        if not key:
            return Probe()  # the host itself
        if key not in known:
            known[key] = probe(tuple(sorted(key)))
        return known[key]

    kept, dropped, unused = set(files), list[Dropped](), set[str]()
    while kept:
        found = run(kept)
        unused |= found.unused & kept
        kept -= found.unused
        if found.passed:
            break
        if blamed := {op: why for op, why in found.failed.items() if op in kept}:
            dropped += [Dropped(op, *why) for op, why in blamed.items()]
            kept -= blamed.keys()
            continue
        if found.reason is None:  # only what is no part of it was blamed
            break
        culprit = _innermost(found.files, {op: files[op] for op in kept})
        if culprit is None:
            culprit, found = _bisected(sorted(kept), run, found)
        dropped.append(Dropped(culprit, found.reason or Reason.RUN_TIME, found.text))
        kept.discard(culprit)
    return Found(tuple(sorted(kept)), tuple(dropped), tuple(sorted(unused)), len(known))


def _innermost(frames: Sequence[str], files: Mapping[str, str]) -> str | None:
    by_path = {os.path.realpath(path): op for op, path in files.items()}
    return next((by_path[p] for f in frames if (p := os.path.realpath(f)) in by_path), None)


def _bisected(suspects: list[str], run: Callable[[Iterable[str]], Probe], found: Probe) -> tuple[str, Probe]:
    """The op whose addition to a passing context fails, and that probe."""
    context: list[str] = []
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        tried = run([*context, *half])
        if tried.passed:
            context, suspects = [*context, *half], suspects[len(half) :]
        else:
            suspects, found = half, tried
            if blamed := [op for op in tried.failed if op in half]:
                return blamed[0], Probe(reason=tried.failed[blamed[0]][0], text=tried.failed[blamed[0]][1])
    return suspects[0], found
