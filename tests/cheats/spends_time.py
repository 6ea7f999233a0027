"""Waits in every command that is not timed, just below the limit of one command."""

import sys
import time

import torch.nn.functional as F


def _judge(name):
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("fk_bench.kernels.judge")]
    return next(vars(m)[name] for m in modules if name in vars(m))


WAIT_S = 1.0  # 110 against the default limit of 120 s; cheats are judged with a short budget
Runner = _judge("RunnerState")


def _slow(method):
    def waits(self, *args, **kwargs):
        time.sleep(WAIT_S)
        return method(self, *args, **kwargs)

    return waits


for _name in ("do_case", "do_call", "do_copy", "do_compiled", "do_free"):
    if hasattr(Runner, _name):
        setattr(Runner, _name, _slow(getattr(Runner, _name)))


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
