"""The runner of encoders: one forward pass over whole sequences, pooled or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.engine.cache.kv_cache import Limits, wanted_model_len
from fastkernels.engine.execution.forward import transfer
from fastkernels.engine.execution.forward.forward_graphs import MOST, ForwardGraphs
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.execution.runners.activation import read_activation
from fastkernels.engine.execution.runners.pooling import Pooling, read_pooling
from fastkernels.engine.execution.runners.segmenting import (
    Followed,
    NextFrames,
    Segmenting,
    SegmentStep,
    Wanted,
)
from fastkernels.engine.inputs.images import READERS
from fastkernels.engine.inputs.pixels import Scale
from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.interfaces.detector import Detector
from fastkernels.models.common.interfaces.segmenter import ImageSegmenter
from fastkernels.models.common.layers.cnn import Conv
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.recsys.maxsim import maxsim

Task: TypeAlias = tuple[str, bool]
# A step of short texts waits for launches of kernels. It runs in a CUDA graph, padded to one of these numbers of
# tokens, four in each octave, and more than EXACT_ROWS texts to a power of two. Above TEXT_WORK, tokens times the
# square of the hidden size, a step keeps the GPU busy without a graph.
TEXT_ROWS, TEXT_GRAPHS, TEXT_WORK = 64, 128, 10_000_000_000
TEXT_TOKENS = tuple(sorted({16, *(part << n for n in range(2, 12) for part in (4, 5, 6, 7)), 1 << 14}))
EXACT_ROWS = 4
IMAGE_SIZES = 64  # batches of images, by the tokens of each, of which the metadata is kept
CACHE_OPTIONS = ("num_blocks", "kv_cache_memory", "kv_cache_dtype", "mamba_ssm_cache_dtype", "attention_backend",
                 "speculative_config")  # fmt: skip


@dataclass(frozen=True)
class EncodeInput:
    """B whole sequences: input_ids [T] int64, one sequence after the other; query_lens [B] int32.

    query_lens counts hidden states. tasks [B]: of PoolingParams, and whether their activation applies. Instead of
    input_ids, a model of images or videos has the patches [P, C * p * p] of each image, in float32 or, for some
    checkpoints, as bytes, and their grids (engine.inputs.images.Patches).

    token_type_ids  [T]; None: all 0
    seen            [B]: the first tokens of each sequence, which all its tokens attend to; None: all
    kept            [T] bool: tokens whose vectors count for the task 'maxsim'
    queries         vectors [n, D] float32 of the queries of that task; query_of [B]: the index of each sequence's
    wanted          [B], of the task 'segment'
    clips           instead of sequences, the next frames of all clips that run; None: of sequences
    """

    input_ids: np.ndarray
    query_lens: np.ndarray
    tasks: Sequence[Task]
    patches: Sequence[np.ndarray] | None = None
    grids: Sequence[tuple[int, ...]] = ()
    token_type_ids: np.ndarray | None = None
    seen: np.ndarray | None = None
    kept: np.ndarray | None = None
    queries: Sequence[np.ndarray] = ()
    query_of: Sequence[int] = ()
    wanted: Sequence[Wanted] = ()
    clips: Sequence[NextFrames] | None = None

    @classmethod
    def of_clips(cls, clips: Sequence[NextFrames]) -> EncodeInput:
        """A step of clips. Without any, all clips are forgotten."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int32), [], clips=clips)


class Encode(Runner):
    """Runs an encoder: model(input_ids [T], positions [T]) returns hidden states [T, H]. It has no KV cache.

    Models of images and videos are called with patches and grids; see models/vision/dinov3.py.
    """

    def _prepare(self, folder: Path) -> None:
        config = self.config
        default = EngineConfig(model="")
        for name in CACHE_OPTIONS:
            if getattr(config, name) != getattr(default, name):
                raise ValueError(f"{name} applies to models that generate; {config.model} is an encoder")
        self._reads = (
            registry.find(self.hf_config.architectures[0]).arch.inputs in READERS
        )  # images or videos
        if self._reads:
            self.max_model_len = config.max_model_len or config.max_num_batched_tokens
            self.pooling = Pooling("own")
        else:
            self._limit_text(folder)
        if config.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_model_len"
                f" {self.max_model_len}: an encoder computes a sequence in one step"
            )

    def _limit_text(self, folder: Path) -> None:
        config = self.config
        self.pooling = read_pooling(folder)
        own = wanted_model_len(config, self.hf_config)
        self.max_model_len = own if config.max_model_len else min(own, self.pooling.max_tokens or own)

    segmenting: Segmenting | None = None

    def _loaded(self) -> None:
        settings = getattr(self.hf_config, "preprocessing", None)
        self.scale = None if settings is None else Scale.of(settings, self.device)
        self.capture()
        if self.pooling.mode == "own" and not isinstance(self.model, (Detector, ImageSegmenter)):
            self.pooling = replace(self.pooling, own=self.model.pool)
        if getattr(self.model, "num_labels", 0):
            self.activation = read_activation(self.hf_config)

    def capture(self) -> None:
        """See Runner: graphs and kept features are made again, when a request needs them."""
        self._images: OrderedDict[bytes, tuple[AttentionMetadata, torch.Tensor]] = OrderedDict()
        finds = isinstance(self.model, (Detector, ImageSegmenter))
        captures = finds or self.config.tensor_parallel_size == 1
        if captures and self.device.type == "cuda" and not self.config.enforce_eager:
            convolves = any(isinstance(module, Conv) for module in self.model.modules())
            self.graphs = ForwardGraphs(self.device, MOST if self._reads else TEXT_GRAPHS, convolves)
        if isinstance(self.model, ImageSegmenter):
            self.segmenting = Segmenting(self.model, self.device, self.graphs)

    def num_fitting_blocks(self) -> int:
        """See Runner: 0, since nothing is cached."""
        return 0

    def bind(self, num_blocks: int) -> None:
        """See Runner."""
        self.limits = Limits(0, self.max_model_len, self.config.max_num_batched_tokens)

    @torch.inference_mode()
    def launch(self, step: EncodeInput) -> EncodeStep | SegmentStep | FollowedStep:
        """Start one forward pass without waiting for the device, except for clips."""
        if self.segmenting is not None and step.clips is not None:
            return FollowedStep(self.segmenting.follow(step.clips, self._to_device))
        if self.segmenting is not None and step.patches is not None:
            return self.segmenting.launch(step.wanted, np.concatenate(step.patches), self._to_device)
        starts = np.zeros(len(step.query_lens) + 1, dtype=np.int64)
        np.cumsum(step.query_lens, out=starts[1:])
        if step.patches is not None:
            return self._launch_images(step, starts)
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], step.query_lens)
        arrays = [step.input_ids, positions]
        arrays += [] if step.token_type_ids is None else [step.token_type_ids]
        seen = None if step.seen is None or (step.seen >= step.query_lens).all() else step.seen
        if seen is None and self._is_short(starts):
            hidden, cu_seqlens = self._replay(arrays, starts, int(step.query_lens.max()))
        else:
            metadata, cu_seqlens = self._described(step.query_lens, starts)
            if seen is not None:
                rows = np.flatnonzero(positions < np.repeat(seen, step.query_lens))
                metadata = replace(
                    metadata, key_rows=self._to_device(rows), seq_lens=self._to_device(seen).int(),
                    max_seqlen_k=int(seen.max()),
                )  # fmt: skip
            with forward_context(metadata):
                hidden = self.model(*map(self._to_device, arrays))
        found = {t: self._head(step, t, hidden, cu_seqlens) for t in dict.fromkeys(step.tasks)}
        return EncodeStep(step, starts, found)

    def _launch_images(self, step: EncodeInput, starts: np.ndarray) -> EncodeStep:
        assert step.patches is not None
        key = step.query_lens.tobytes()
        if key not in self._images:  # a replayed graph needs none of them
            self._images[key] = self._described(step.query_lens, starts)
            if len(self._images) > IMAGE_SIZES:
                self._images.popitem(last=False)
        metadata, cu_seqlens = self._images[key]
        self._images.move_to_end(key)
        tasks, grids = tuple(dict.fromkeys(step.tasks)), tuple(step.grids)
        patches = transfer.joined(step.patches, self.device)
        bare = replace(step, patches=None)  # a graph keeps it

        def compute(patches: torch.Tensor) -> list[torch.Tensor]:
            if self.scale is not None and patches.dtype == torch.uint8:
                patches = self.scale(patches)
            with forward_context(metadata):
                hidden = self.model(patches, grids)
                return [self._head(bare, task, hidden, cu_seqlens) for task in tasks]

        made = compute(patches) if self.graphs is None else self.graphs((grids, tasks), compute, [patches])
        return EncodeStep(step, starts, dict(zip(tasks, made, strict=True)))

    def _described(self, lens: np.ndarray, starts: np.ndarray) -> tuple[AttentionMetadata, torch.Tensor]:
        """Metadata of whole sequences for attention, and where each starts on the device."""
        cu_seqlens, longest = self._to_device(starts), int(lens.max())
        metadata = AttentionMetadata(
            slot_mapping=cu_seqlens.new_empty(0), cu_seqlens_q=cu_seqlens.int(), seq_lens=cu_seqlens.diff().int(),
            block_table=cu_seqlens.new_empty(len(lens), 0).int(), max_seqlen_q=longest, max_seqlen_k=longest,
            padded=False,
        )  # fmt: skip
        return metadata, cu_seqlens

    def _is_short(self, starts: np.ndarray) -> bool:
        """Whether a step of these texts runs in a graph."""
        rows, tokens = len(starts) - 1, int(starts[-1])
        few = rows <= TEXT_ROWS and tokens <= TEXT_TOKENS[-1]
        return self.graphs is not None and few and tokens * self.hf_config.hidden_size**2 <= TEXT_WORK

    def _replay(
        self, arrays: Sequence[np.ndarray], starts: np.ndarray, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states of short texts, and where each starts. arrays [T]: their ids, positions and types.

        All that the device needs is one copy.
        """
        rows, tokens = len(starts) - 1, int(starts[-1])
        arrays, bounds = padded(arrays, starts)
        longest = len(arrays[0]) if rows <= EXACT_ROWS else next_power_of_2(longest)
        joint, places = transfer.packed([bounds, *arrays], self.device, np.int64)

        def compute(joint: torch.Tensor) -> torch.Tensor:
            wide, *given = (joint[place] for place in places)
            bounds = wide.int()
            metadata = AttentionMetadata(
                slot_mapping=bounds.new_empty(0), cu_seqlens_q=bounds, seq_lens=bounds.diff(),
                block_table=bounds.new_empty(len(bounds) - 1, 0), max_seqlen_q=longest, max_seqlen_k=longest,
                padded=False,
            )  # fmt: skip
            with forward_context(metadata):
                return self.model(*given)

        key = "texts", longest, len(bounds), len(arrays)
        return self.graphs(key, compute, [joint])[:tokens], joint[: rows + 1]

    def _head(
        self, step: EncodeInput, task: Task, hidden: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """Compute a task for all sequences; 'maxsim' the scores [queries, B]."""
        kind, activated = task
        if kind == "embed":
            return (self.pooling if activated else replace(self.pooling, normalize=False))(hidden, starts)
        if kind == "classify":
            logits = self.model.classify(hidden, starts).float()
            return self.activation(logits) if activated else logits
        if kind == "detect":
            return hidden
        if kind == "token_classify":
            return self.model.token_classify(hidden, activated)
        vectors = self.model.token_embed(hidden, activated) if hasattr(self.model, "token_embed") else hidden
        return vectors if kind == "token_embed" else self._scores(step, vectors, starts)

    def _scores(self, step: EncodeInput, vectors: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        lens = np.array([len(query) for query in step.queries])
        queries = self._to_device(np.concatenate(step.queries), np.float32)
        kept = None if step.kept is None else self._to_device(step.kept, np.bool_)
        return maxsim(
            queries, vectors.float(), self._to_device(np.concatenate([[0], lens.cumsum()])).int(), starts.int(),
            int(lens.max()), int(step.query_lens.max()), kept,
        )  # fmt: skip

    def _to_device(self, array: np.ndarray, dtype: Any = np.int64) -> torch.Tensor:
        return transfer.to_device(array, self.device, dtype)


def padded(arrays: Sequence[np.ndarray], starts: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Arrays [T] with zeros up to the next of TEXT_TOKENS, and the bounds of the sequences: the zeros are one more.

    More than EXACT_ROWS sequences get empty ones up to a power of two, next to the zeros.
    """
    rows = len(starts) - 1
    size = next(n for n in TEXT_TOKENS if n >= starts[-1])
    wanted = rows + (size > starts[-1]) if rows <= EXACT_ROWS else next_power_of_2(rows) + 1
    bounds = np.concatenate((starts, np.full(wanted - rows, size)))
    return [np.pad(a, (0, size - len(a))) for a in arrays], bounds


@dataclass(frozen=True)
class FollowedStep:
    """A step of clips, which has ended (step.Pending)."""

    found: list[list[Followed] | None]

    def result(self) -> list[list[Followed] | None]:
        """See Segmenting.follow."""
        return self.found


class EncodeStep:
    """A launched forward pass (step.Pending). found: {task: what the model computed for all sequences}."""

    def __init__(self, step: EncodeInput, starts: np.ndarray, found: Mapping[Task, torch.Tensor]):
        self._step, self._starts, self._found = step, starts, found

    def result(self) -> list[np.ndarray]:
        """Per sequence in float32, as PoolingOutput.data. Waits for the device."""
        arrays = {task: transfer.to_host(tensor.float()) for task, tensor in self._found.items()}
        return [self._of(row, task[0], arrays[task]) for row, task in enumerate(self._step.tasks)]

    def _of(self, row: int, kind: str, found: np.ndarray) -> np.ndarray:
        if kind in ("token_embed", "token_classify", "detect"):
            return found[self._starts[row] : self._starts[row + 1]]
        return found[self._step.query_of[row], row, None] if kind == "maxsim" else found[row]
