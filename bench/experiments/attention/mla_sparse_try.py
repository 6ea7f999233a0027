import sys, torch, math
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from argparse import Namespace
from experiments.common.graph_clock import Run, rounds, poisoned
from experiments.common.kernel_check import problem
from experiments.attention.mla_decode import inputs, SCALE
from fastkernels.core import registry
import statistics, faulthandler

faulthandler.dump_traceback_later(38, exit=True)
run = Run("sparse", "mla_sparse", Namespace(device="cuda", quick=False, out=sys.argv[1], seconds=60))
OP = registry.get("mla_sparse")
P = {p.name: p for p in OP.op.providers}


def args_of(lens, heads, topk, size, dtype, calls, unused):
    found = []
    for q, cache, sl, table, most, scale, rank in inputs(
        run, lens, heads, size, dtype, max(lens), calls, unused
    ):
        idx = torch.full((len(lens), topk), -1, dtype=torch.int32, device="cuda")
        for i, n in enumerate(lens):
            m = min(n, topk)
            idx[i, :m] = torch.randperm(n, device="cuda")[:m].sort().values.int()
        cu = torch.arange(len(lens) + 1, dtype=torch.int32, device="cuda")
        found.append([q, cache, idx, cu, sl, table, 1, SCALE, 512])
    return found


with torch.inference_mode():
    for lens, heads, topk, size, dtype in (
        ([4096] * 3, 128, 2048, 64, torch.bfloat16),
        ([0, 1, 63, 64, 65, 700, 3000, 5000], 16, 2048, 64, torch.bfloat16),
        ([900, 3000, 77], 70, 1000, 16, torch.float16),
    ):
        (a,) = args_of(lens, heads, topk, size, dtype, 1, math.nan)
        want = OP.reference(*[x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in a])
        for n in ("triton", "cuda"):
            with poisoned():
                run.row(
                    "check",
                    n,
                    {"lens": str(lens)[:20], "heads": heads},
                    problem(partial(P[n].fn, *a), want, rms=6e-3),
                )
    base = None
    try:
        from fastkernels.overrides.latent_attention.production import BASELINES

        base = BASELINES["mla_sparse"][0].make()
    except Exception as e:
        print("no baseline", e)
    for heads, batch, context in (
        (128, 1, 16384),
        (128, 32, 4096),
        (16, 32, 8192),
        (64, 8, 8192),
        (128, 128, 4096),
    ):
        calls = args_of([context] * batch, heads, 2048, 64, torch.bfloat16, 2 if batch > 64 else 4, 0.0)
        todo = {
            n: [partial(P[n].fn, *a) for a in calls]
            for n in ("triton", "cuda")
            if not (n == "triton" and batch > 64)
        }
        if base:
            todo["flashmla"] = [partial(base, *a) for a in calls]
        t = {n: statistics.median(v) / len(calls) for n, v in rounds(run, todo).items()}
        print(heads, batch, context, t, f"{2 * batch * 2048 * 576 / t['cuda'] / 1e3:.0f} GB/s", flush=True)
