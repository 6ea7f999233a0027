"""Has its own runner, which calls its own steps."""

import torch.nn.functional as F


class Runner:
    def __init__(self, *steps):
        self.steps = steps

    def run(self, gate, up):
        for step in self.steps:
            gate = step(gate, up)
        return gate


RUNNER = Runner(lambda gate, up: F.silu(gate), lambda gate, up: gate * up)


def silu_and_mul(x):
    return RUNNER.run(*x.chunk(2, dim=-1))
