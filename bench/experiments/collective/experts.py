"""Expert dispatch, overlapped products and small collectives on several GPUs: check, then time. See README.md.

experts.py --out rows.jsonl [--ranks 2] [--seconds 200]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from experiments.collective import collectives
from experiments.common.results import Results
from fk_bench.core.gpus import check_ranks
from fk_bench.core.rows import Status
from fk_bench.core.terminal.flags import ConfigError

from fastkernels.core import parallel, registry
from fastkernels.core.communicator import CollectiveError
from fastkernels.overrides.collective import words
from fastkernels.overrides.expert_parallel.ep_combine import ep_combine
from fastkernels.overrides.expert_parallel.ep_dispatch import ep_dispatch
from fastkernels.overrides.expert_parallel.ep_dispatch_fp8 import ep_dispatch_fp8

SIZES = ((2048, 128), (7168, 256))  # channels and experts: Qwen3-30B-A3B, DeepSeek-V3
TOKENS = (1, 4, 16, 64, 128)  # of a rank
TOPK = 8
OPS = (
    "linear_all_reduce", "linear_reduce_scatter", "all_gather_linear", "ep_dispatch", "ep_dispatch_fp8", "ep_combine",
    "all_gather", "reduce_scatter",
)  # fmt: skip


def provider(op: Any, name: str) -> Callable[..., Any]:
    return next(p.fn for p in op.providers if p.name == name)


def vllms(device: torch.device) -> Callable[[list[torch.Tensor]], torch.Tensor] | None:
    """vLLM's dispatch and combine around its experts, as AgRsAll2AllManager calls NCCL; None without vLLM."""
    try:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    except ImportError:
        return None
    comm = PyNcclCommunicator(dist.new_group(backend="gloo"), device)

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        size = dist.get_world_size()
        outs = [t.new_empty((size * t.shape[0], *t.shape[1:])) for t in tensors]
        comm.group_start()
        for out, t in zip(outs, tensors, strict=True):
            comm.all_gather(out, t)
        comm.group_end()
        back = torch.empty_like(tensors[0])
        comm.reduce_scatter(back, outs[0])
        return back

    return run


def nccls(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The same by torch.distributed."""
    size = dist.get_world_size()
    outs = [t.new_empty((size * t.shape[0], *t.shape[1:])) for t in tensors]
    for out, t in zip(outs, tensors, strict=True):
        dist.all_gather_into_tensor(out, t)
    back = torch.empty_like(tensors[0])
    dist.reduce_scatter_tensor(back, outs[0])
    return back


def pairs(rank: int, ranks: int, results: Results | None) -> Iterator[None]:
    """Times of a dispatch and a combine together."""
    comm = parallel.communicator()
    symmetric = comm.symmetric
    assert symmetric is not None, comm.without
    host = vllms(comm.device)
    for hidden, experts in SIZES:
        for tokens in TOKENS:
            made = torch.Generator("cuda").manual_seed(rank)
            x = torch.randn(tokens, hidden, generator=made, device="cuda", dtype=torch.bfloat16)
            ids = torch.rand(tokens, experts, generator=made, device="cuda").topk(TOPK, 1).indices.int()
            weights = torch.rand(tokens, TOPK, generator=made, device="cuda")

            def compact(x: Any, ids: Any, weights: Any, experts: int = experts) -> torch.Tensor:
                rows, _, _, source = provider(ep_dispatch, "triton")(x, ids, weights, experts, "tp")
                return provider(ep_combine, "triton")(rows, source, "tp")

            def compact_fp8(x: Any, ids: Any, weights: Any, experts: int = experts) -> torch.Tensor:
                rows, _, _, _, source = provider(ep_dispatch_fp8, "triton")(
                    x, ids, weights, experts, 128, "tp"
                )
                return provider(ep_combine, "triton")(rows.view(torch.bfloat16).repeat(1, 2), source, "tp")

            def collect(x: Any, ids: Any, weights: Any) -> torch.Tensor:
                every = words.gather_words([x, weights, ids], symmetric)
                return words.scatter_words(every[0], symmetric)

            ways: dict[str, Callable[..., Any]] = {
                "nccl": lambda x, ids, weights: nccls([x, weights, ids]),
                "ours, as vLLM's": collect,
                "ours, compact": compact,
                "ours, compact, FP8 (and a copy of the rows)": compact_fp8,
            }
            if host is not None:
                ways["vllm"] = lambda x, ids, weights: host([x, weights, ids])
            wrong = ""
            both = ids.new_zeros(tokens)
            for r in range(ranks):
                part = (ids >= r * experts // ranks) & (ids < (r + 1) * experts // ranks)
                both += part.any(1)
            want = (x.float() * both[:, None]).bfloat16()
            if not torch.equal(compact(x, ids, weights), want):
                wrong = "compact: another sum"
            if not torch.equal(collect(x, ids, weights).view_as(x), (x.float() * ranks).bfloat16()):
                wrong = "as vLLM's: another sum"
            agreed: list[Any] = [None] * ranks
            dist.all_gather_object(agreed, wrong)
            wrong = next(filter(None, agreed), "")
            graphs = {
                name: collectives.captured(fn, [x, ids, weights], contextlib.nullcontext())
                for name, fn in ways.items()
            }
            times = collectives.microseconds(graphs)
            if results is not None:
                for name, found in times.items():
                    status = Status.WRONG if wrong and name.startswith("ours") else Status.OK
                    case = {"tokens": tokens, "hidden": hidden, "topk": TOPK, "experts": experts}
                    results.add("ep_dispatch+ep_combine", name, case, wrong, status, time_us_p50=found)
                line = "; ".join(f"{name} {found:.2f}" for name, found in times.items())
                print(f"dispatch+combine {tokens}x{hidden}: {line} {wrong}", flush=True)
            yield


def absent(rank: int) -> str:
    """The error in rank 0 when rank 1 does not come. The group cannot be used after that."""
    comm = parallel.communicator()
    symmetric = comm.symmetric
    assert symmetric is not None
    torch.cuda.synchronize()
    dist.barrier()
    if rank:
        return ""
    symmetric.polls = 1000
    x = torch.ones(4, 2048, device="cuda", dtype=torch.bfloat16)
    words.gather_words([x], symmetric)
    try:
        symmetric.check()
    except CollectiveError as error:
        return str(error)
    return "WRONG: a missing rank was not noticed"


def rank_main(rank: int, options: argparse.Namespace, store: str) -> None:
    began = time.monotonic()
    torch.cuda.set_device(rank)
    parallel.init(rank, options.ranks, f"file://{store}", device=f"cuda:{rank}", timeout=60.0)
    reason = parallel.communicator().connect()
    assert reason is None, reason
    results = Results("experts", options.out) if rank == 0 else None

    def late() -> bool:
        """Whether the time is over, in the opinion of rank 0."""
        spent = torch.tensor(time.monotonic() - began, device="cuda")
        dist.broadcast(spent, 0)
        return spent.item() > options.seconds

    for _ in pairs(rank, options.ranks, results):
        if late():
            break
    for name in OPS:
        spec = registry.get(name)
        for case in collectives.cases(spec, options.ranks, 2 << 20):
            if late():
                if rank == 0:
                    print(f"not run for lack of time: {name} {case.name}", flush=True)
                continue
            collectives.examine(results, spec, case, rank, options.ranks)
    said = absent(rank)
    if results is not None:
        print(f"{results.wrong} wrong; a missing rank: {said}; {time.monotonic() - began:.0f} s", flush=True)
    dist.barrier()
    parallel.reset()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=170.0)
    options = parser.parse_args()
    try:
        check_ranks("--ranks", options.ranks, torch.cuda.device_count(), on_gpus=True)
    except ConfigError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (options, f"{folder}/store"), options.ranks)


if __name__ == "__main__":
    main()
