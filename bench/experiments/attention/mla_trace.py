import sys, torch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from argparse import Namespace
from experiments.common.graph_clock import Run
from experiments.attention.mla_decode import Timed, inputs
from fastkernels.overrides.latent_attention import mla_decode_cuda as m

run = Run("trace", "mla_decode", Namespace(device="cuda", quick=False, out="/dev/null", seconds=60))


class Traced(m.Plan):
    @property
    def options(self):
        return (*m.Plan.options.fget(self), "-DTRACE=1")


plan0 = m.plan
m.plan = lambda q, c, *a, **p: Traced(*plan0(q, c, *a, **p))
m.TRACE = 160 * 3 * 64
NAMES = {
    1: "start",
    2: "waited",
    3: "planned",
    4: "P:part",
    5: "P:free1",
    6: "P:free2",
    7: "queries",
    8: "full1",
    9: "full2",
    10: "QK",
    11: "softmax",
    12: "PVother",
    13: "PVown",
    14: "PVlast",
    15: "met",
    16: "end",
}
with torch.inference_mode():
    for heads, batch, context in ((16, 32, 600), (16, 1, 4096), (128, 128, 4096), (64, 64, 1100)):
        at = Timed(heads, batch, context)
        calls = inputs(run, at.lens, heads, 64, torch.bfloat16, context, 6)
        for a in calls:
            m.decode(*a)
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        kept = []
        with torch.cuda.graph(g):
            for a in calls:
                m.decode(*a)
                kept.append(m.last[0])
        for _ in range(3):
            g.replay()
        torch.cuda.synchronize()
        t = kept[3][2 * batch :].view(160, 3, 64).cpu()
        for block in (0, 1, 40, 77):
            base = int(t[block, 0, 0]) & 0xFFFFFF
            for w in range(3):
                line = []
                for v in t[block, w].tolist():
                    code, c = v >> 24, ((v & 0xFFFFFF) - base) & 0xFFFFFF
                    if not 0 < code < 17 or c > 3000000:
                        break
                    line.append(f"{NAMES[code]}@{c}")
                    if code == 16:
                        break
                print(
                    f"h{heads} b{batch} c{context} block {block} {'WG0 WG1 PROD'.split()[w]}: "
                    + " ".join(line),
                    flush=True,
                )
