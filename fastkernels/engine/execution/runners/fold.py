"""The runner of structure prediction: the trunk once, then denoising steps of all samples, then their confidence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.core.runtime.graph_capture import captured
from fastkernels.engine.cache.kv_cache import Limits
from fastkernels.engine.execution.forward import transfer
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.execution.runners.encode import CACHE_OPTIONS
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.scheduling.folding import Structures
from fastkernels.models.common.configs.config import ALL_DTYPES
from fastkernels.models.common.folding.features import Features

TOKENS = 2048  # of a request: the default of max_model_len
TURN = 20  # denoising steps between two looks at the queue
MOST_GRAPHS = 4  # that are kept: each holds the conditions of its size


@dataclass(frozen=True)
class FoldStart:
    """A request that begins."""

    request_id: str
    features: Features
    samples: int
    recycles: int
    steps: int
    seed: int


@dataclass(frozen=True)
class FoldInput:
    """One step of the engine.

    starts  requests that begin with this step: their trunk runs
    rows    ids of requests that run TURN denoising steps, or what is left of them and the confidence
    drops   requests that were aborted since the last step
    """

    starts: Sequence[FoldStart]
    rows: Sequence[str]
    drops: Sequence[str] = ()


class Rollout:
    """A request in progress: what its steps read, and where its samples are."""

    def __init__(self, model: Any, start: FoldStart, device: torch.device):
        self._start, self._device = start, device
        self.features, self.steps, self.samples = start.features, start.steps, start.samples
        self.done = 0
        self._noise = torch.Generator().manual_seed(start.seed)
        self.atoms = bucket(start.features.atoms, 128, 128)
        self.tokens = bucket(start.features.tokens, 16, 64)
        self.inputs = model.inputs(
            {
                n: self._place(torch.from_numpy(a))
                for n, a in start.features.padded(self.tokens, self.atoms).items()
            }
        )
        begin = model.embed(self.inputs)
        s, z = torch.zeros_like(begin[1]), torch.zeros_like(begin[2])
        for _ in range(start.recycles + 1):
            s, z = model.cycle(self.inputs, begin, s, z, self._place(self._rows(model.most_rows)))
        self.s_input, self.s, self.z = begin[0], s, z
        self.conditions = model.condition(self.inputs, self.s_input, s, z, start.samples)
        self.schedule = self._place(model.schedule(start.steps))
        self.x = self._place(model.noise_levels(start.steps)[0] * self._normal(3, self.atoms))

    def _rows(self, most: int) -> torch.Tensor:
        """The sequences of the alignment that a cycle reads: at most `most`, others in each cycle."""
        count = self.features.sequences
        if count <= most:
            return torch.arange(count)
        return torch.randperm(count, generator=self._noise)[:most]

    def draw(self) -> tuple[torch.Tensor, ...]:
        """The random numbers of the next step, as the reference draws them: of rotation, translation and noise."""
        found = (self._normal(4), self._normal(3), self._normal(3, self.atoms))
        return tuple(self._place(t) for t in found)

    def _normal(self, size: int, padded: int = 0) -> torch.Tensor:
        """[samples, size], or with `padded` [samples, padded, size], 0 behind the request's atoms."""
        if not padded:
            return torch.randn(self.samples, size, generator=self._noise)
        found = torch.zeros(self.samples, padded, size)
        count = self.features.atoms
        found[:, :count] = torch.randn(self.samples, count, size, generator=self._noise)
        return found

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return transfer.to_device(tensor, self._device)


def bucket(n: int, small: int, large: int) -> int:
    """n rounded up to a multiple of `small`, from 512 on of `large`: requests of nearly the same size share a graph."""
    unit = small if n <= 512 else large
    return -(-n // unit) * unit


class StepGraphs:
    """CUDA graphs of a denoising step by its size. The first step of a size is eager, as it compiles kernels."""

    def __init__(self, model: Any):
        self._model = model
        self._graphs: OrderedDict[tuple[int, ...], _Graph | None] = OrderedDict()
        self.replays = 0

    def __call__(self, rollout: Rollout, step: torch.Tensor, draws: tuple[torch.Tensor, ...]) -> torch.Tensor:
        key = (rollout.tokens, rollout.atoms, rollout.samples)
        if key not in self._graphs:
            self._graphs[key] = None
            while len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
            return self._model.denoise(rollout.conditions, rollout.x, step, *draws)
        self._graphs.move_to_end(key)
        found = self._graphs[key]
        if found is None:
            found = self._graphs[key] = _Graph(self._model, rollout, step, draws)
        self.replays += 1
        return found.run(rollout, step, draws)


class _Graph:
    """One captured step, with memory of its own for all that it reads."""

    def __init__(self, model: Any, rollout: Rollout, step: torch.Tensor, draws: tuple[torch.Tensor, ...]):
        self._given = [t.clone() for t in rollout.conditions.tensors()]
        self._changing = [t.clone() for t in (rollout.x, step, *draws)]
        self._owner: Rollout | None = rollout
        conditions = rollout.conditions.like(self._given)
        self._graph = torch.cuda.CUDAGraph()
        with captured(self._graph):
            self._found = model.denoise(conditions, *self._changing)

    def run(self, rollout: Rollout, step: torch.Tensor, draws: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self._owner is not rollout:
            for own, given in zip(self._given, rollout.conditions.tensors(), strict=True):
                own.copy_(given)
            self._owner = rollout
        for own, given in zip(self._changing, (rollout.x, step, *draws), strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._found.clone()


class Fold(Runner):
    """Runs a model of the interface in models/science/openfold3.py; see `_prepare` for the dtype."""

    def _prepare(self, folder: Path) -> None:
        config, default = self.config, EngineConfig(model="")
        for name in CACHE_OPTIONS:
            if getattr(config, name) != getattr(default, name):
                raise ValueError(
                    f"{name} applies to models that generate; {config.model} predicts structures"
                )
        self._folder = folder
        if config.dtype == "auto":  # positions are compared with those of float32 models
            found = getattr(self.hf_config, "dtype", None) or torch.float32
            self.dtype = ALL_DTYPES[found] if isinstance(found, str) else found
        self.max_model_len = config.max_model_len or TOKENS

    def _loaded(self) -> None:
        self.model.ready(self._folder, self.config.load_format == "dummy")

    def num_fitting_blocks(self) -> int:
        """See Runner: 0, since nothing is cached."""
        return 0

    def bind(self, num_blocks: int) -> None:
        """See Runner."""
        self.limits = Limits(0, self.max_model_len, self.config.max_num_batched_tokens)
        self._rollouts: dict[str, Rollout] = {}
        self.capture()

    def capture(self) -> None:
        """See Runner."""
        if self.device.type == "cuda" and not self.config.enforce_eager:
            self.graphs = StepGraphs(self.model)

    @torch.inference_mode()
    def launch(self, step: FoldInput) -> FoldStep:
        """Start a step."""
        for request_id in step.drops:
            self._rollouts.pop(request_id, None)
        for start in step.starts:
            self._rollouts[start.request_id] = Rollout(self.model, start, self.device)
        ended: dict[str, Rollout] = {}
        for request_id in step.rows:
            rollout = self._rollouts[request_id]
            for _ in range(min(TURN, rollout.steps - rollout.done)):
                self._advance(rollout)
            if rollout.done == rollout.steps:
                ended[request_id] = self._rollouts.pop(request_id)
        return FoldStep({i: self._finish(rollout) for i, rollout in ended.items()}, self.device)

    def _advance(self, rollout: Rollout) -> None:
        step, draws = rollout.schedule[rollout.done], rollout.draw()
        if self.graphs is None:
            rollout.x = self.model.denoise(rollout.conditions, rollout.x, step, *draws)
        else:
            rollout.x = self.graphs(rollout, step, draws)
        rollout.done += 1

    def _finish(self, rollout: Rollout) -> _Found:
        """Compute the confidence of each sample alone: its pair representation is as large as the trunk's."""
        found: list[dict[str, torch.Tensor]] = []
        mask = rollout.inputs.token_mask > 0
        for x in rollout.x:
            logits = self.model.confidence(rollout.inputs, rollout.s_input, rollout.s, rollout.z, x)
            one = {"positions": x, "plddt": 100 * expected(logits["plddt"], 1.0)}
            if "pae" in logits:
                one |= pae_scores(logits["pae"], mask, rollout.inputs.asym_id)
            found.append(one)
        return _Found(rollout.features, found)


def expected(logits: torch.Tensor, most: float) -> torch.Tensor:
    """The mean of a distribution over equal bins from 0 to `most`. logits: [..., bins]."""
    bins = logits.shape[-1]
    centers = (torch.arange(bins, device=logits.device, dtype=torch.float32) + 0.5) * (most / bins)
    return (logits.float().softmax(-1) * centers).sum(-1)


def pae_scores(logits: torch.Tensor, mask: torch.Tensor, chain: torch.Tensor) -> dict[str, torch.Tensor]:
    """pae [N, N], and ptm and iptm, of all tokens as standard residues (supplement, section 5.9.1).

    logits: [N, N, bins]; mask: [N] bool; chain: [N]. iptm is 0 with one chain.
    """
    count = mask.sum().clamp(min=1)
    size = 1.24 * (count.clamp(min=19) - 15.0) ** (1 / 3) - 1.8
    bins = logits.shape[-1]
    centers = (torch.arange(bins, device=logits.device, dtype=torch.float32) + 0.5) * (32 / bins)
    score = (logits.float().softmax(-1) / (1 + (centers / size).square())[:, None].t()).sum(-1)
    made = {"pae": expected(logits, 32.0)}
    pairs = mask[:, None] & mask
    for name, seen in (("ptm", pairs), ("iptm", pairs & (chain[:, None] != chain))):
        made[name] = ((score * seen).sum(1) / seen.sum(1).clamp(min=1)).max()
    return made


@dataclass(frozen=True)
class _Found:
    """Results of a request: of each sample tensors by name."""

    features: Features
    samples: Sequence[dict[str, torch.Tensor]]

    def structures(self) -> Structures:
        """Without what pads the sizes, the most confident sample first. Waits for the device."""
        atoms, tokens = self.features.atoms, self.features.tokens
        whole = {
            name: torch.stack([one[name] for one in self.samples]).float().cpu().numpy()
            for name in self.samples[0]
        }
        chains = len(np.unique(self.features.arrays["asym_id"]))
        plddt = whole["plddt"][:, :atoms]
        rank = plddt.mean(1)
        if "pae" in whole:
            rank = whole["ptm"] if chains == 1 else 0.2 * whole["ptm"] + 0.8 * whole["iptm"]
        order = np.argsort(-rank, kind="stable")
        known = "pae" in whole and self.features.standard
        return Structures(
            whole["positions"][order, :atoms], plddt[order],
            whole["pae"][order, :tokens, :tokens] if "pae" in whole else None,
            whole["ptm"][order].tolist() if known else None,
            whole["iptm"][order].tolist() if known and chains > 1 else None,
        )  # fmt: skip


class FoldStep:
    """A launched step (step.Pending)."""

    def __init__(self, found: dict[str, _Found], device: torch.device):
        self._found = found
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        if self._done is not None:
            self._done.record()

    def result(self) -> dict[str, Structures]:
        """The structures of requests that end with this step. Waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        return {i: found.structures() for i, found in self._found.items()}
