"""Text of a batch: its plan, and a summary of failures."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fk_bench.batch.queue import Part, predicted
from fk_bench.core.gpus import Command, cores_of, placed
from fk_bench.serving.lanes import shell_line


def left_to_do(parts: Iterable[Part], done: Container[str]) -> list[Part]:
    """Return the parts that are not `done`, with their remaining prerequisites."""
    return [replace(p, after=tuple(a for a in p.after if a not in done)) for p in parts if p.name not in done]


def minutes(parts: Sequence[Part], gpus: Sequence[str]) -> str:
    """Return the expected duration: 'about 12 minutes'."""
    found = math.ceil(predicted(parts, gpus)[1] / 60)
    return f"about {found} minute{'s' if found != 1 else ''}"


def show_plan(
    parts: Sequence[Part],
    gpus: Sequence[str],
    after: Sequence[Command],
    done: Mapping[str, str],
    notes: Sequence[str],
) -> None:
    """Print what would run, where and when; then the commands `after` it, `notes`, and the expected duration.

    done  {part: why it does not run}
    """
    todo = left_to_do(parts, done)
    order, end = predicted(todo, gpus)
    cores = cores_of(gpus)
    for name, said in done.items():
        print(f"== {name}: {said}")
    for begin, part, mine in order:
        where = f"GPU {','.join(mine)}" if mine else "no GPU"
        print(
            f"== {part.name}: {where}, after {begin:.0f} s, about {part.seconds:.0f} s, {part.limit:.0f} at most"
        )
        for command in part.commands:
            env, argv = placed(command, mine, cores)
            print(shell_line(env, argv))
    for part in todo:
        if part not in [p for _, p, _ in order]:
            print(f"== {part.name}: left out, it needs {part.gpus} GPUs")
    for command in after:
        print(shell_line({}, command))
    for line in notes:
        print(line)
    held = sum(p.seconds * p.gpus for _, p, _ in order)
    print(
        f"{minutes(todo, gpus)} ({end:.0f} s) on {len(gpus)} GPU{'s' if len(gpus) != 1 else ''} "
        f"({held:.0f} s of a GPU)"
    )


def show_failed(why: Mapping[str, str], logs: Path) -> None:
    """Print why each part failed or was left out, with the path of its log if it started."""
    for name, reason in why.items():
        log = logs / f"{name}.log"
        print(f"  {name}: {reason}{f' ({log})' if log.is_file() else ''}")
