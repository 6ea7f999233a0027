"""How ops are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastkernels.core.case import Case
from fk_bench.kernels.judge.correctness.cases import SOURCES


@dataclass(frozen=True)
class Options:
    """How ops are judged.

    device    'cpu' or 'cuda'
    against   'production' (its fastest kernel), 'host', 'reference', or the path of another candidate's file
    captures  folder of captures to replay; None: the shipped ones
    cases     sources of cases, from correctness.cases.SOURCES
    names     only cases with these names
    values    of a wrong case, as its row's case['values'] has them: only this case with these values, untimed
    identity  the candidate is the baseline's own kernel, in a process of its own: every speedup should be 1
    ranks     processes of a collective; 0: no collective is judged
    task      exactly these cases instead of those of `cases`: of a task file
    rounds    interleaved rounds, each with N and 2N calls of each side
    starts    repetitions of everything in new processes; the intervals then include differences between them
    seconds   upper bound for the timed rounds of a case; there are at least three
    most      at most so many cases of each source of an op, those of models first; 0: all
    hard      kinds of extreme values that are also tried on a timed case
    deployment  also report whether a candidate's kernel runs in compiled code, and what new batch sizes compile
    timeout   seconds for one command of a side (its first call compiles)
    case_budget, op_budget   seconds that a candidate's process may take for all commands of a case, and of an op
    scan      reject candidates by the static scan
    python    {'candidate' | 'baseline': interpreter}
    cage      False: the candidate runs as this user, with network and files
    model     models.common.plans.blocks.text_of a model, whose blocks are judged; '' for ops alone
    memory    bytes of inputs and outputs of one case; None: 2 GiB on a CPU; on a GPU half of what is free,
              at most 64 GiB
    """

    device: str = "cpu"
    against: str = "production"
    cases: tuple[str, ...] = SOURCES
    names: tuple[str, ...] = ()
    ranks: int = 0
    values: str = ""
    task: tuple[Case, ...] = ()
    captures: Path | None = None
    rounds: int = 10
    starts: int = 1
    timed: bool = True
    identity: bool = False
    seconds: float = 1.0
    most: int = 0
    hard: int = 4
    deployment: bool = False
    timeout: float = 300.0
    case_budget: float = 300.0
    op_budget: float = 3600.0
    scan: bool = True
    python: Mapping[str, str] = field(default_factory=dict)
    cage: bool = True
    model: str = ""
    memory: int | None = None
