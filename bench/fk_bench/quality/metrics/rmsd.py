"""Distance of structures after alignment."""

from __future__ import annotations

import torch

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Structures


class RMSD(Metric):
    name = "rmsd"
    formula = "mean over structures of the least RMSD over rotations and shifts (Kabsch)"
    unit = "angstroms"
    direction = "lower"
    families = ("structure",)

    def value(self, output: Structures, reference: Structures) -> float:
        a, b = (x.points.double() - x.points.double().mean(1, keepdim=True) for x in (output, reference))
        u, _, vt = torch.linalg.svd(a.mT @ b)  # [n, 3, 3]
        fix = torch.ones_like(a[:, 0])
        fix[:, 2] = torch.det(u @ vt).sign()  # a rotation, no reflection
        aligned = a @ (u * fix[:, None]) @ vt
        return float((aligned - b).square().sum(-1).mean(-1).sqrt().mean())

    def discrepancy(self, value: float, output: Structures, reference: Structures) -> float:
        points = reference.points.double()
        spread = (points - points.mean(1, keepdim=True)).square().sum(-1).mean(-1).sqrt().mean()
        return value / max(float(spread), 1e-12)  # of the radius of gyration
