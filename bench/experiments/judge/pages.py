"""Compare memory of this process with that of another one, mapped by an IPC handle and by a file descriptor.

    pages.py [--gb 6] [--out rows.jsonl] [--device cpu]

One JSON line for each kind of memory and each size: `ns` of a load, one after another and 64 KiB apart, over so much
of it, and `us` of the maximum of 32 MiB, one part after another. In large pages no load waits for the translation of
its address. The judge's sides map its memory by a file descriptor. --device cpu only checks the loads.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
import triton
import triton.language as tl
from fk_bench.kernels.judge.memory import ipc

APART, PART = 64 << 10, 32 << 20  # bytes
STEPS = 20_000  # loads
WORD = 8  # bytes of a load


@triton.jit(do_not_specialize=["mask"])
def _loads(words, out, stride, size, mask, steps):
    at = tl.load(out)
    for _ in range(steps):
        # The next address depends on the value, of which nothing is left.
        at += stride + (tl.load(words + at, cache_modifier=".cg") & mask)
        at = tl.where(at >= size, at - size, at)
    tl.store(out, at)


def load(memory: torch.Tensor, size: int, steps: int = STEPS) -> int:
    """Load words of the first `size` bytes, 64 KiB apart, and begin again at the end; return where the last one led."""
    at = torch.zeros(1, dtype=torch.int64, device=memory.device)
    words = memory[: memory.numel() // WORD * WORD].view(torch.int64)
    _loads[(1,)](words, at, APART // WORD, size // WORD, 0, steps, num_warps=1)
    return int(at)


class Legacy:
    """Memory of cuMemAlloc."""

    def __init__(self, nbytes: int) -> None:
        self.pointer = ctypes.c_uint64()
        torch.zeros(1, device="cuda")
        ipc.driver_call("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(nbytes))

    def handle(self) -> str:
        found = (ctypes.c_byte * 64)()
        ipc.driver_call("cuIpcGetMemHandle", ctypes.byref(found), self.pointer)
        return bytes(found).hex()


def owner(channel: Connection, nbytes: int) -> None:
    """The other process: has both kinds of memory until the channel is closed."""
    legacy, memory = Legacy(nbytes), ipc.Memory(nbytes)
    channel.send(legacy.handle())
    send_handle(channel, memory.fd, None)
    channel.poll(None)


def kinds(nbytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, memory) of each kind."""
    yield "own", torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    process = context.Process(target=owner, args=(other, nbytes), daemon=True)
    process.start()
    mapping = ipc.Mapping()
    yield "IPC handle", mapping.bytes_at({"handle": mine.recv(), "offset": 0, "nbytes": nbytes})
    mapping.close()
    yield "file descriptor", ipc.Memory(nbytes, recv_handle(mine)).bytes
    mine.close()
    process.join(5)


def seconds(call: Callable[[], Any]) -> float:
    """The median of five, after one."""
    found = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=6.0, help="GB of each memory")
    parser.add_argument("--out", help="file of rows (JSONL), which are appended")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cpu":
        memory = torch.full((3 * APART + 5,), 7, dtype=torch.uint8)
        visited = [load(memory, 3 * APART, steps) * WORD / APART for steps in range(5)]
        print(json.dumps({"visited": visited}))
        return 0
    nbytes = int(options.gb * 1e9) // PART * PART
    for name, memory in kinds(nbytes):
        for size in (PART, 8 * PART, 32 * PART, nbytes):
            parts = [part.view(torch.int64) for part in memory[:size].split(PART)]
            graph = torch.cuda.CUDAGraph()
            torch.max(parts[0])
            with torch.cuda.graph(graph):
                for part in parts:
                    torch.max(part)
            us = seconds(graph.replay) / len(parts) * 1e6
            ns = seconds(partial(load, memory, size)) / STEPS * 1e9
            line = json.dumps({"memory": name, "mb": size >> 20, "ns": round(ns, 1), "us": round(us, 2)})
            print(line, flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.write(line + "\n")
        del memory, parts, graph
    return 0


if __name__ == "__main__":
    sys.exit(main())
