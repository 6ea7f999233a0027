"""The runner of models of point clouds: one forward pass over the clouds of a step."""

from __future__ import annotations

from pathlib import Path

from fastkernels.engine.execution.runners.score import Score

POINTS = 1 << 18  # of a cloud: the default of max_model_len
CLOUDS = 4096  # of a step, which kernels can tell apart (overrides/point/voxel_neighbors.py)


class Segment(Score):
    """See Score. A cloud may have more points than max_num_batched_tokens: it then runs alone."""

    what = "a model of point clouds"
    ids_per_token = 1

    def _prepare(self, folder: Path) -> None:
        super()._prepare(folder)
        if self.config.max_num_seqs > CLOUDS:
            raise ValueError(
                f"max_num_seqs {self.config.max_num_seqs} is more than the {CLOUDS} clouds that a step can have"
            )

    def _longest(self) -> int:
        return self.config.max_model_len or POINTS
