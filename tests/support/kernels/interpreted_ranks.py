"""The Triton kernels of collectives, interpreted in two or three processes over shared memory. Prints a problem a line.

Run with TRITON_INTERPRET=1: kernels are built for the interpreter when they are imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import shutil
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist

from fastkernels.core import parallel, registry
from fastkernels.core.communicator import Communicator, Symmetric
from fastkernels.overrides.collective import words

ROOM = Symmetric.UNIT * 32
CASES = ("one", "odd_1128", "odd_257", "odd_5", "smollm2")
FEW = ("one", "odd_1128")  # of kernels that the interpreter runs slowly
MORE = (*CASES, "odd_63")
BATCHED = {
    "ep_dispatch_batched": "ep_dispatch",
    "ep_dispatch_batched_fp8": "ep_dispatch_fp8",
    "ep_combine_batched": "",
}
UNSUPPORTED = {(f"ep_{way}", case) for way in ("dispatch", "combine") for case in ("odd_257", "odd_5")}


def bytes_of(size: int) -> int:
    """Bytes of a rank's part of the shared file."""
    return -(-Symmetric.bytes_for(ROOM, size) // 4096) * 4096


def join(fd: int, rank: int, size: int, timeout: float = 60.0) -> Communicator:
    """A communicator with symmetric memory, and nothing else."""
    each = bytes_of(size)
    shared = torch.frombuffer(mmap.mmap(fd, size * each), dtype=torch.uint8)
    made = Communicator("triton")
    made.rank, made.size = rank, size
    pointers = [shared.data_ptr() + r * each for r in range(size)]
    made.symmetric = Symmetric(pointers, rank, ROOM, torch.device("cpu"), timeout, shared)
    parallel._communicators["triton"] = made
    return made


def check(rank: int, size: int, turns: int) -> None:
    """Compare all ops with their references, several times: halves of the buffers alternate.

    A call empties the last message in blocks of its own size: a call of one token is slow after one of thousands of
    words. So all ops run a case before the next one.
    """
    specs = [registry.get(name) for name in registry.collective_names()]
    for turn in range(turns):
        for named in MORE if turns > 1 else CASES:
            for spec in specs:
                name, found = spec.name, [p for p in spec.op.providers if p.name == "triton"]
                case = next((c for c in spec.cases if c.name == named), None)
                few = turns == 1 and name.startswith("ep_") and named not in FEW
                if not found or case is None or few or name in BATCHED:
                    continue
                (triton,) = found
                case = dataclasses.replace(case, dims={**case.dims, spec.ranks: size, "group": "triton"})
                every = [
                    spec.inputs(case, "cpu", torch.Generator().manual_seed(100 * turn + r))
                    for r in range(size)
                ]
                for i, argument in enumerate(spec.arguments):
                    if argument.name in spec.replicated and every[0][i] is not None:
                        for args in every[1:]:
                            args[i] = every[0][i].clone()
                lists = [
                    [t.to(torch.float64, copy=True) for t in values]
                    if isinstance(values[0], torch.Tensor)
                    else values[0]
                    for values in zip(*every, strict=True)
                ]
                want = spec.reference(*lists)[rank]
                want = [t for t in (want if isinstance(want, tuple) else (want,)) if t is not None]
                args = every[rank]
                for params in triton.params or ({},):
                    if triton.supports(*args) is not None:
                        assert (name, case.name) in UNSUPPORTED, (name, case.name, triton.supports(*args))
                        continue
                    if triton.fits is not None and not triton.fits(params, *args):
                        continue
                    mine = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
                    out = triton.fn(*mine, **params)
                    got = [
                        *(out if isinstance(out, tuple) else (out,)),
                        *(mine[i] for i in spec.declaration.mutated if mine[i] is not None),
                    ]
                    label = f"{name} {case.name} {params}"
                    for a, b in zip(got, want, strict=True):
                        limit = spec.tolerance_for(case, a.dtype)
                        a, b = a.double(), b.double()
                        near = torch.allclose(a, b, atol=limit.atol, rtol=limit.rtol)
                        assert near, f"{label}: {(a - b).abs().max()}"


def check_batched(rank: int, size: int) -> int:
    """Kernels of the batched layout against their references. The rows pass over gloo, and where they can as words."""
    comm, count = parallel.communicator("triton"), 0
    for name, way in BATCHED.items():
        spec = registry.get(name)
        (triton,) = [p for p in spec.op.providers if p.name == "triton"]
        for case in spec.cases:
            sizes = {**case.dims, spec.ranks: size, "group": "triton"}
            case = dataclasses.replace(case, dims=sizes)
            fits = all(rule(spec.declaration.sizes(sizes, case.dtype)) for rule in spec.declaration.rules)
            if "model" in case.tags or not fits:
                continue
            every = [spec.inputs(case, "cpu", torch.Generator().manual_seed(r)) for r in range(size)]
            lists = [list(v) if isinstance(v[0], torch.Tensor) else v[0] for v in zip(*every, strict=True)]
            want = spec.reference(*lists)[rank]
            assert triton.supports(*every[rank]) is None
            words_too = way and case.name not in (
                "odd_63",
                *(("odd_257", "odd_5") if way == "ep_dispatch" else ()),
            )
            for limit in (-1, 1 << 30) if words_too else (-1,):  # see not_measured
                comm.faster = {way: limit}
                got = triton.fn(*every[rank])
                for a, b in zip(
                    *((t,) if isinstance(t, torch.Tensor) else t for t in (got, want)), strict=True
                ):
                    tolerance = spec.tolerance_for(case, b.dtype)
                    assert a.dtype == b.dtype and a.shape == b.shape, (name, case.name)
                    near = torch.allclose(a.double(), b.double(), atol=tolerance.atol, rtol=tolerance.rtol)
                    assert near, f"{name} {case.name}: {(a.double() - b.double()).abs().max()}"
                count += 1
    comm.faster = {}
    return count


def check_gathered(rank: int, size: int) -> None:
    """Several tensors of one message: numbers of -1, odd lengths, an empty one."""

    def tensors(r: int) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(r)
        return [
            torch.randn(3, 130, generator=made).to(torch.bfloat16),
            torch.randint(-1, 3, (3, 7), generator=made, dtype=torch.int64),
            torch.rand(3, 7, generator=made),
            torch.randint(-1, 3, (3, 3), generator=made, dtype=torch.int32),
        ]

    symmetric = parallel.communicator("triton").symmetric
    assert symmetric is not None
    for count in (4, 1, 3, 2, 4):
        given = [tensors(r)[-count:] for r in range(size)]
        assert words.not_gathered(given[rank], size) is None
        for got, want in zip(
            words.gather_words(given[rank], symmetric), zip(*given, strict=True), strict=True
        ):
            assert torch.equal(got, torch.cat(want)), (count, got.dtype)
    empty = words.gather_words([torch.ones(0, 4), torch.full((2,), -1.0)], symmetric)
    assert empty[0].shape == (0, 4) and torch.equal(empty[1], torch.full((2 * size,), -1.0))


def rank_main(fd: int, rank: int, size: int, turns: int, store: str) -> int:
    torch.set_num_threads(1)
    comm = join(fd, rank, size)
    try:
        check(rank, size, turns)
        check_gathered(rank, size)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        assert check_batched(rank, size) > 18
        assert comm.symmetric is not None
        comm.symmetric.check()
        triton = next(p for p in registry.get("all_reduce").op.providers if p.name == "triton")
        triton.fn(torch.ones(8), "triton", 1)  # the first call of a shape is compared over the store
        if rank == 0:  # the others do not come to this one
            comm.symmetric.polls = 20
            triton.fn(torch.ones(8), "triton", 1)
            try:
                comm.symmetric.check()
            except RuntimeError as error:
                assert "rank 1 did not come" in str(error) or size > 2, error
            else:
                raise AssertionError("a missing rank was not noticed")
        return 0
    except BaseException:
        print(f"rank {rank}: {traceback.format_exc()}", flush=True)
        return 1


def main() -> None:
    size, turns = map(int, sys.argv[1:3])
    for name in registry.collective_names():
        registry.get(name)
    fd = os.memfd_create("ranks")
    os.ftruncate(fd, size * bytes_of(size))
    for buffer in torch.frombuffer(mmap.mmap(fd, size * bytes_of(size)), dtype=torch.uint8).chunk(size):
        Symmetric.clear(buffer, ROOM, size)
    pids = []
    folder = tempfile.mkdtemp()
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os._exit(rank_main(fd, rank, size, turns, os.path.join(folder, "store")))
        pids.append(pid)
    status = 0
    for _ in pids:
        ended, code = os.wait()
        if code and not status:
            status = 1
            for other in pids:
                if other != ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, 9)
    shutil.rmtree(folder)
    sys.exit(status)


if __name__ == "__main__":
    main()
