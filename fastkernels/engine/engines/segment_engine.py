"""The engine of models of point clouds: clouds in, one forward pass, a row of numbers and a class for each point."""

from __future__ import annotations

from fastkernels.engine.engines.score_engine import ScoreEngine


class SegmentEngine(ScoreEngine):
    """See ScoreEngine. A step has as many clouds as max_num_seqs and, of points, max_num_batched_tokens allow.

    A larger cloud runs alone. outputs.data is [points, classes], and outputs.items the class of each point; None for a
    model without a head, whose outputs.data are features.
    """

    kind = "Segment"
    served, counted, limit = "models of point clouds", "points", "max_model_len"
