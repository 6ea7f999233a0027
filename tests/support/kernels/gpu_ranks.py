"""The Triton kernels of collectives on one GPU: each rank is a stream of this process, and they wait for each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fastkernels.core import parallel, registry
from fastkernels.core.communicator import Communicator, Symmetric
from fastkernels.core.dispatch import only
from fastkernels.overrides.expert_parallel.ep_dispatch import not_launched

ROOM = Symmetric.UNIT * 256
MOST = 4 << 20  # bytes of a case


class Ranks:
    """So many communicators with symmetric memory on one GPU, named triton0, triton1, ..."""

    def __init__(self, size: int):
        device = torch.device("cuda", torch.cuda.current_device())
        buffers = [
            torch.empty(Symmetric.bytes_for(ROOM, size), dtype=torch.uint8, device=device)
            for _ in range(size)
        ]
        for buffer in buffers:
            Symmetric.clear(buffer, ROOM, size)
        self.made, self.streams = [], [torch.cuda.Stream() for _ in range(size)]
        for rank in range(size):
            made = Communicator(f"triton{rank}")
            made.rank, made.size, made.device = rank, size, device
            pointers = [b.data_ptr() for b in buffers]
            made.symmetric = Symmetric(pointers, rank, ROOM, device, 5.0, buffers)
            parallel._communicators[made.name] = made
            self.made.append(made)
        torch.cuda.synchronize()

    def load(self, call: Callable[[int], Any]) -> None:
        """Run call(rank) of each rank without waiting for peers: a kernel cannot be loaded while another one waits."""
        waits = [made.symmetric.polls for made in self.made]
        for made in self.made:
            made.symmetric.polls = 1
        self.each(call)
        torch.cuda.synchronize()
        for made, polls in zip(self.made, waits, strict=True):
            made.symmetric.polls = polls
            for state in (made.symmetric.counters, made.symmetric.calls, made.symmetric.failed):
                state.zero_()
            for buffer in made.symmetric.kept:
                Symmetric.clear(buffer, ROOM, len(self.made))
        torch.cuda.synchronize()

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        """call(rank) of each rank, on its stream; the current stream waits for all."""
        now, found = torch.cuda.current_stream(), []
        for rank, stream in enumerate(self.streams):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                found.append(call(rank))
        for stream in self.streams:
            now.wait_stream(stream)
        return found

    def check(self) -> None:
        torch.cuda.synchronize()
        for made in self.made:
            made.symmetric.check()


def calls(ranks: Ranks) -> Any:
    """(label, case, spec, a call of each rank, arguments of each rank) of all ops, cases and parameters."""
    size = len(ranks.made)
    for name in registry.collective_names():
        spec = registry.get(name)
        found = [p for p in spec.op.providers if p.name == "triton"]
        if not found:
            continue
        (triton,) = found
        for case in spec.cases:
            case = dataclasses.replace(case, dims={**case.dims, spec.ranks: size})
            if spec.bytes_moved(case) > MOST:
                continue
            every = [spec.inputs(case, "cuda", torch.Generator("cuda").manual_seed(r)) for r in range(size)]
            group = spec.position("group")
            for rank, args in enumerate(every):
                args[group] = f"triton{rank}"
                for i, argument in enumerate(spec.arguments):
                    if argument.name in spec.replicated and every[0][i] is not None:
                        args[i] = every[0][i].clone()
            way = name.replace("_batched", "")  # the exchange, which has to be a kernel, too
            if way in ("ep_dispatch", "ep_dispatch_fp8") and (
                not_launched(*every[0][:3], "triton0", case.dims.get("block", 128) if way[-1] == "8" else 0)
            ):
                continue
            for params in triton.params or ({},):
                if triton.supports(*every[0]) is None and (
                    triton.fits is None or triton.fits(params, *every[0])
                ):
                    yield f"{name} {case.name} {params}", case, spec, triton.bound(params).fn, every


def copies(args: list[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


def results(spec: Any, every: list[list[Any]]) -> list[list[torch.Tensor]]:
    lists = [
        [t.clone() for t in values] if isinstance(values[0], torch.Tensor) else values[0]
        for values in zip(*every, strict=True)
    ]
    found = spec.reference(*lists)
    return [[t for t in (r if isinstance(r, tuple) else (r,)) if t is not None] for r in found]


def close(spec: Any, case: Any, label: str, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype, label
        limit, where = spec.tolerance_for(case, b.dtype), f"{label}: output {i}"
        torch.testing.assert_close(
            a.double(), b.double(), atol=limit.atol, rtol=limit.rtol,
            msg=lambda m: f"{where}: {m}\n{places(a, b, limit)}",  # noqa: B023
        )  # fmt: skip


def places(got: torch.Tensor, want: torch.Tensor, limit: Any) -> str:
    """Which rows and columns are wrong, and some of these values."""
    if got.shape != want.shape:
        return f"{list(got.shape)} for {list(want.shape)}"
    wrong = ~torch.isclose(got.double(), want.double(), atol=limit.atol, rtol=limit.rtol)
    flat = wrong.reshape(len(wrong) if wrong.dim() else 1, -1)
    rows, columns = flat.any(1).nonzero(), flat.any(0).nonzero()
    some = [
        f"{at}: {got[tuple(at)].item():g} for {want[tuple(at)].item():g}"
        for at in wrong.nonzero()[:12].tolist()
    ]
    by_four = [int(flat[:, i::4].sum()) for i in range(4)]
    return (
        f"rows {rows.flatten().tolist()}; {len(columns)} columns from {int(columns.min())} to {int(columns.max())},"
        f" by the remainder of 4: {by_four}; {', '.join(some)}"
    )


def listed(out: Any) -> list[torch.Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def eager(size: int) -> int:
    """Compare all ops with their references, several times. Returns the number of calls."""
    ranks, count = Ranks(size), 0
    for _ in range(3):
        for label, case, spec, fn, every in calls(ranks):
            want, mutated = results(spec, every), spec.declaration.mutated
            mine = [copies(args) for args in every]
            with only("triton"):  # also the exchange of a batched layout
                ranks.load(lambda r: fn(*copies(every[r])))  # noqa: B023
                outs = ranks.each(lambda r: fn(*mine[r]))  # noqa: B023
            ranks.check()
            for r in range(size):
                written = [mine[r][i] for i in mutated if mine[r][i] is not None]
                close(spec, case, f"rank {r}: {label}", [*listed(outs[r]), *written], want[r])
            count += 1
    return count


def graphs(size: int) -> int:
    """Capture three calls of each op in one graph, and replay it with new values. Returns the number of graphs."""
    ranks, count = Ranks(size), 0
    for label, case, spec, fn, every in calls(ranks):
        if spec.declaration.mutated:
            continue
        with only("triton"):
            ranks.load(lambda r: fn(*copies(every[r])))  # noqa: B023
            ranks.each(lambda r: fn(*every[r]))  # noqa: B023
        ranks.check()
        graph = torch.cuda.CUDAGraph()
        with only("triton"), torch.cuda.graph(graph):
            outs = [ranks.each(lambda r: fn(*every[r])) for _ in range(3)][-1]  # noqa: B023
        for seed in range(3):
            for r, args in enumerate(every):
                args[0].normal_(generator=torch.Generator("cuda").manual_seed(10 * seed + r))
            want = results(spec, every)
            graph.replay()
            ranks.check()
            for r in range(size):
                close(spec, case, f"rank {r}, replay {seed}: {label}", listed(outs[r]), want[r])
        count += 1
    return count


if __name__ == "__main__":
    # All programs of all ranks must fit on the GPU at once, which those of four ranks do not.
    print("2 ranks:", eager(2), "calls,", graphs(2), "graphs", flush=True)
