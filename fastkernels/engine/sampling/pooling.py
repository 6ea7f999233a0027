"""Parameters of an encoder's request, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

TASKS = ("embed", "token_embed", "classify", "token_classify", "maxsim", "detect", "segment")
ROLES = ("", "query", "document")


@dataclass(frozen=True)
class PoolingParams:
    """Parameters of an encoder's request.

    task            'embed' (one vector), 'token_embed' (one vector per token), 'classify' (probabilities or a score),
                    'token_classify' (one weight per token), 'maxsim' (the score of a document for `query`), 'detect'
                    (boxes of objects) or 'segment' (boxes and masks of the objects that a prompt names)
    dimensions      the size of the vectors, for a model with Matryoshka embeddings
    use_activation  False: vectors without normalization, logits instead of probabilities
    role            'query' or 'document': the form of the text, for a model of late interaction
    query           vectors [n, D] float32 of a query, as 'token_embed' gives them, for the task 'maxsim'
    threshold       the least score of an object, from 0 to 1 (default: 0.5)
    max_detections  of an image, the best ones (default: all)
    mask_threshold  of 'segment': the probability above which a pixel belongs to an object (default: 0.5)
    masks           of 'segment': whether each object has a mask (default: True)
    semantic        of 'segment': also the mask of all pixels that belong to any such object (default: False)
    multimask_output  of 'segment' with marks: several masks that they can mean (default); False: the likeliest one
    """

    task: str = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None
    role: str = ""
    query: np.ndarray | None = field(default=None, compare=False)
    threshold: float | None = None
    max_detections: int | None = None
    mask_threshold: float | None = None
    masks: bool = True
    semantic: bool = False
    multimask_output: bool = True

    def __post_init__(self) -> None:
        if self.dimensions is not None and (not isinstance(self.dimensions, int) or self.dimensions < 1):
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions!r}")
        if self.task not in TASKS:
            raise ValueError(f"task {self.task!r} is not one of {', '.join(TASKS)}")
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is not 'query' or 'document'")
        for name in ("threshold", "max_detections"):
            if getattr(self, name) is not None and self.task not in ("detect", "segment"):
                raise ValueError(f"{name} belongs to the task 'detect' or 'segment', got task {self.task!r}")
        own = (("mask_threshold", None), ("masks", True), ("semantic", False), ("multimask_output", True))
        for name, default in own:
            value = getattr(self, name)
            if value is not default and self.task != "segment":
                raise ValueError(f"{name} belongs to the task 'segment', got task {self.task!r}")
            if default is not None and type(value) is not bool:
                raise ValueError(f"{name} must be True or False, got {value!r}")
        for name in ("threshold", "mask_threshold"):
            least = getattr(self, name)
            if least is not None and (type(least) not in (int, float) or not 0 <= least <= 1):
                raise ValueError(f"{name} must be a number from 0 to 1, got {least!r}")
        most = self.max_detections
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"max_detections must be an integer, at least 1, got {most!r}")
        if (self.query is not None) != (self.task == "maxsim"):
            raise ValueError(f"query belongs to the task 'maxsim', got task {self.task!r}")


@dataclass
class PoolingOutput:
    """data: float32 [H] for task 'embed', [tokens, H] for 'token_embed', [labels] for 'classify', [1] for a score."""

    data: np.ndarray

    @property
    def embedding(self) -> list[float]:
        """`data` as Python floats."""
        return self.data.tolist()

    @property
    def probs(self) -> list[float]:
        """`data` of the task 'classify' as Python floats."""
        return self.data.tolist()

    @property
    def score(self) -> float:
        """`data` of one number."""
        return float(self.data.item())
