"""Requests for structures, and their results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fastkernels.engine.scheduling.denoising import SEEDS
from fastkernels.engine.scheduling.request import Status
from fastkernels.models.common.folding import structure_text
from fastkernels.models.common.folding.features import Features, Place

MOST_RECYCLES = 50
COUNTS = {"num_samples": 1, "num_recycles": 0, "num_steps": 1}  # the least of each


@dataclass(frozen=True)
class FoldParams:
    """Parameters of a request for structures. None: the model's default.

    num_samples   structures of the answer, which share the trunk's results
    num_recycles  cycles of the trunk after the first
    num_steps     denoising steps
    seed          of the samples' noise, 0 to 2^63 - 1; None: drawn by the engine
    """

    num_samples: int | None = None
    num_recycles: int | None = None
    num_steps: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, least in COUNTS.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < SEEDS):
            raise ValueError(f"seed must be an integer from 0 to 2^63 - 1, got {self.seed!r}")


@dataclass(eq=False)
class FoldRequest:
    """One input to fold. A lower priority number goes first. samples, recycles, steps, seed: with defaults.

    step  steps of the engine that are done, of `turns`: the trunk, and some denoising steps each
    """

    request_id: str
    features: Features
    params: FoldParams
    samples: int
    recycles: int
    steps: int
    seed: int
    turns: int
    priority: int = 0
    step: int = 0
    arrival: float = field(default_factory=time.monotonic)
    status: Status = Status.WAITING
    scheduled_time: float | None = None
    streams_deltas = False  # one output, at the end

    @property
    def num_tokens(self) -> int:
        """Its share of a step."""
        return self.features.tokens


@dataclass(frozen=True, eq=False)
class Structures:
    """The structures of a request, the most confident one first, for N tokens and A atoms.

    positions  [samples, A, 3] float32, in angstroms
    plddt      [samples, A] float32: the confidence in each atom's surroundings, 0 to 100
    pae        [samples, N, N] float32: the error expected of token j in token i's frame, in angstroms, or None
    ptm, iptm  of each sample, 0 to 1: the confidence in all tokens, and in the contacts of chains; None where the model
               or the input has none
    """

    positions: np.ndarray
    plddt: np.ndarray
    pae: np.ndarray | None
    ptm: Sequence[float] | None
    iptm: Sequence[float] | None


@dataclass
class FoldRequestOutput:
    """structures: see Structures. places: of their atoms."""

    request_id: str
    structures: Structures
    places: Sequence[Place]
    seed: int
    steps: int
    num_tokens: int = 0
    finished: bool = True
    prompt_token_ids: tuple[int, ...] = ()

    def text(self, sample: int = 0, format: str = "cif") -> str:
        """A structure as mmCIF ("cif") or PDB ("pdb"), with plddt in place of B factors. Raises ValueError."""
        count = len(self.structures.positions)
        if type(sample) is not int or not 0 <= sample < count:
            raise ValueError(f"sample must be an integer from 0 to {count - 1}, got {sample!r:.80}")
        return structure_text.write(
            format, self.places, self.structures.positions[sample], self.structures.plddt[sample]
        )
