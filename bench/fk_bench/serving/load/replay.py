"""Replays a trace with arrival times, in Mooncake's JSONL format: one request a line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2354]}

timestamp is in ms. A hash id stands for a block of prompt tokens (512 in Mooncake's traces): requests with equal ids
share these tokens. A request without hash_ids shares nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fk_bench.serving.load.client import Prompt
from fk_bench.serving.load.datasets import DatasetError, Vocabulary


@dataclass(frozen=True)
class Request:
    """One line of a trace; `at` is in seconds after the first."""

    at: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...]


def read_trace(path: str, block_size: int, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a trace by time. Raises DatasetError, which names the file and the line."""
    file = Path(path)
    if not file.is_file():
        raise DatasetError(f"--trace: no such file: {path}")
    found = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if line.strip():
            found.append(_request(f"{path}:{number}", line, block_size))
    if not found:
        raise DatasetError(f"--trace: {path} has no request")
    found.sort(key=lambda r: r.at)
    first = found[0].at
    return [Request(r.at - first, r.input_len, r.output_len, r.blocks) for r in found[:limit]]


def _request(where: str, line: str, block_size: int) -> Request:
    try:
        item = json.loads(line)
        at, input_len = float(item["timestamp"]) / 1e3, int(item["input_length"])
        output_len, blocks = int(item["output_length"]), tuple(int(h) for h in item.get("hash_ids") or ())
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        raise DatasetError(
            f'{where}: expected {{"timestamp": MS, "input_length": N, "output_length": N, "hash_ids": [...]}}, '
            f"got {line[:80]!r}"
        ) from None
    if input_len < 1:
        raise DatasetError(f"{where}: input_length must be 1 or more, got {input_len}")
    needed = -(-input_len // block_size)
    if blocks and len(blocks) != needed:
        raise DatasetError(
            f"{where}: {len(blocks)} hash_ids for {input_len} tokens, but blocks of {block_size} tokens need {needed}. "
            "Set the size with --trace-block-size."
        )
    return Request(at, input_len, max(1, output_len), blocks)


def prompts_of(
    requests: Sequence[Request], vocabulary: Vocabulary, seed: str, block_size: int
) -> list[Prompt]:
    """Random prompts of the trace's lengths, with equal tokens for equal hash ids; other ones for another seed."""
    ordinary = vocabulary.ordinary
    blocks: dict[object, list[int]] = {}
    made = []
    for i, request in enumerate(requests):
        size = block_size if request.blocks else request.input_len
        tokens: list[int] = []
        for name in request.blocks or [f"request {i}"]:
            if name not in blocks:
                blocks[name] = random.Random(f"{seed}/{name}").choices(ordinary, k=size)
            tokens += blocks[name]
        made.append(Prompt(tokens[: request.input_len], request.output_len))
    return made
