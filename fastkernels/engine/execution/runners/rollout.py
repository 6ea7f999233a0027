"""The runner of world models: frame after frame, each denoised in view of those before it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.engine.cache import kv_cache
from fastkernels.engine.cache.kv_cache import Limits
from fastkernels.engine.execution.forward import transfer
from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.execution.runners.encode import CACHE_OPTIONS
from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.pipelines.schedules import Schedule

ACTIVATIONS = (
    2 << 30
)  # bytes that are left for them: a window of Oasis at once, and frames of 32 requests, need 1 GiB


@dataclass(frozen=True)
class Beginning:
    """A request that begins: see FrameRequest."""

    request_id: str
    images: np.ndarray
    actions: np.ndarray
    steps: int
    seed: int


@dataclass(frozen=True)
class RolloutInput:
    """One pass of requests in progress.

    starts  requests that begin with this pass
    rows    (request id, number of its pass), those of `starts` included
    drops   requests that were aborted since the last pass
    """

    starts: Sequence[Beginning]
    rows: Sequence[tuple[str, int]]
    drops: Sequence[str] = ()


@dataclass
class Window:
    """A request's state: latents [P + N, ...] float32 and actions [P + N, A] of all frames.

    slot    of the cache
    known   first frames that are given
    start   the first frame of the window
    cached  frames from there on whose keys and values are in the cache
    x       latents [1, ...] of the frame that is being made
    inputs  what the model takes [M] for each step of that frame
    """

    slot: int
    latents: torch.Tensor
    actions: torch.Tensor
    known: int
    schedule: Schedule
    known_time: float
    generator: torch.Generator
    start: int = 0
    cached: int = 0
    x: torch.Tensor | None = None
    inputs: torch.Tensor | None = None

    def enter(self, frame: int, length: int) -> range:
        """Move the window to a new frame. Returns the frames before it that have to be computed."""
        start = max(0, frame + 1 - length)
        if start != self.start:  # every frame before saw one that has left
            self.start, self.cached = start, 0
        return range(self.start + self.cached, frame)


@dataclass(frozen=True)
class Row:
    """Frames of one request to compute: latents [F, ...], inputs [F, M], at a place of its window."""

    window: Window
    latents: torch.Tensor
    inputs: torch.Tensor
    place: int


class Rollout(Runner):
    """Runs a world model; its interface is in models/diffusion/oasis.py.

    Frames before the one that is made have one noise level, and attention along time is causal. Their keys and values
    are therefore computed once, not in every denoising step, until the window moves: then its frames have other frames
    before them. The modulations by times and actions are computed for all steps of a frame at once: they are a third of
    the weights. A step of one frame of all requests, whatever their steps, is one CUDA graph.
    """

    def _prepare(self, folder: Path) -> None:
        config, default = self.config, EngineConfig(model="")
        for name in (*(n for n in CACHE_OPTIONS if n != "kv_cache_memory"), "max_model_len"):
            if getattr(config, name) != getattr(default, name):
                raise ValueError(f"{name} applies to models of tokens; {config.model} makes frames")

    def num_fitting_blocks(self) -> int:
        """See Runner: requests whose windows fit into the memory. Raises ValueError if not even one does."""
        config = self.config
        one = self._cache_bytes()
        if config.kv_cache_memory is not None:
            room = config.kv_cache_memory
        elif self.device.type == "cpu":
            room = max(kv_cache.CPU_CACHE, one)
        else:
            room = kv_cache.cuda_budget(config) - torch.cuda.memory_allocated() - ACTIVATIONS
        if room < one:
            raise ValueError(
                f"the window of a request needs {one} bytes, and {max(room, 0)} are free (kv_cache_memory or"
                " gpu_memory_utilization)"
            )
        return min(room // one, config.max_num_seqs)

    def _cache_bytes(self) -> int:
        """Bytes of the cache of one request."""
        found: torch.Tensor = self.model.new_cache(1)
        return found.numel() * found.itemsize

    def bind(self, num_blocks: int) -> None:
        """See Runner."""
        self.limits = Limits(0, self.model.tokens, self.config.max_num_batched_tokens)
        self.max_model_len = self.model.tokens
        self.slots = num_blocks
        self.cache = self.model.new_cache(num_blocks)
        self._free = list(reversed(range(num_blocks)))
        self._windows: dict[str, Window] = {}
        self.capture()

    def capture(self) -> None:
        """See Runner."""
        if self.device.type == "cuda" and not self.config.enforce_eager:
            self.graphs = ForwardGraphs(self.device)

    @torch.inference_mode()
    def launch(self, step: RolloutInput) -> RolloutStep:
        """Start a pass."""
        self._drop(step.drops)
        self._begin(step.starts)
        rows, new, ended = [], [], []
        for request_id, index in step.rows:
            window = self._windows[request_id]
            steps = len(window.schedule)
            frame, at = window.known + index // (steps + 1), index % (steps + 1)
            if at == 0:
                new.append((window, frame))
                continue
            assert window.x is not None and window.inputs is not None
            rows.append((Row(window, window.x, window.inputs[at - 1 : at], frame - window.start), at - 1))
            if at == steps:
                ended.append((request_id, window, frame))
        passes: dict[int, list[tuple[Row, int | None]]] = {1: list(rows)}
        for row in self._enter(new):
            passes.setdefault(len(row.latents), []).append((row, None))
        for group in passes.values():
            if group:
                self._forward([row for row, _ in group], [at for _, at in group])
        return RolloutStep(self.device, self._finish(ended))

    def _begin(self, starts: Sequence[Beginning]) -> None:
        if not starts:
            return
        images = torch.from_numpy(np.concatenate([s.images for s in starts]))
        parts = self.model.encode(images.to(self.device)).split([len(s.images) for s in starts])
        for start, latents in zip(starts, parts, strict=True):
            schedule, known_time = self.model.schedule(start.steps)
            kept = latents.new_zeros((len(start.actions), *latents.shape[1:]))
            kept[: len(latents)] = latents
            actions, generator = self._to_device(start.actions), torch.Generator().manual_seed(start.seed)
            self._windows[start.request_id] = Window(
                self._free.pop(), kept, actions, len(latents), schedule, known_time, generator
            )

    def _enter(self, new: Sequence[tuple[Window, int]]) -> list[Row]:
        """Begin frames. Returns the passes over frames before them."""
        if not new:
            return []
        spans, times, actions = [], [], []
        for window, frame in new:
            before = window.enter(frame, self.model.window)
            spans.append(before)
            times.append(np.full(len(before), window.known_time, np.float32))
            times.append(window.schedule.times)
            of_frame = window.actions[frame].expand(len(window.schedule), -1)
            actions += [window.actions[before.start : before.stop], of_frame]
            window.x = self.model.noise(window.generator).to(self.device)
        given = self._to_device(np.concatenate(times)), torch.cat(actions)
        inputs = self._run(
            "modulations", self.model.modulations, given
        ).clone()  # the next graph overwrites it
        rows, at = [], 0
        for (window, frame), before in zip(new, spans, strict=True):
            middle = at + len(before)
            if len(before):
                latents = window.latents[before.start : before.stop]
                rows.append(Row(window, latents, inputs[at:middle], before.start - window.start))
            at = middle + len(window.schedule)
            window.inputs, window.cached = inputs[middle:at], frame - window.start
        return rows

    def _forward(self, rows: Sequence[Row], steps: Sequence[int | None]) -> None:
        """Compute rows of as many frames each. steps: of the schedule; None: the row only fills the cache."""
        x = torch.stack([row.latents for row in rows])
        inputs = torch.stack([row.inputs for row in rows])
        numbers = [(row.window.slot, row.place) for row in rows]
        slots, places = self._to_device(np.array(numbers, np.int64).T).unbind()
        v = self._run("forward", self._step, (x, inputs, slots, places))
        moves = [
            (row.window, i, at) for i, (row, at) in enumerate(zip(rows, steps, strict=True)) if at is not None
        ]
        if not moves:
            return
        factors = np.zeros((2, len(rows), *[1] * (x.dim() - 1)), np.float32)
        for window, i, at in moves:
            factors[:, i] = np.reshape(
                [window.schedule.keep[at], window.schedule.add[at]], (2, *[1] * (x.dim() - 1))
            )
        keep, add = self._to_device(factors).unbind()
        moved = keep * x + add * v.float()
        for window, i, _ in moves:
            window.x = moved[i]

    def _step(self, x: torch.Tensor, inputs: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> Any:
        return self.model(x, inputs, slots, places, self.cache)

    def _finish(self, ended: Sequence[tuple[str, Window, int]]) -> dict[str, torch.Tensor]:
        """Decode frames that are done: {request id: pixels}. A request whose last frame is done leaves."""
        if not ended:
            return {}
        for _, window, frame in ended:
            assert window.x is not None
            window.latents[frame] = window.x[0]
        latents = torch.stack([window.latents[frame] for _, window, frame in ended])
        pixels = self._run("decode", self.model.decode, (latents,))
        found = {request_id: pixels[i].clone() for i, (request_id, _, _) in enumerate(ended)}
        self._drop([i for i, window, frame in ended if frame + 1 == len(window.latents)])
        return found

    def _drop(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            window = self._windows.pop(request_id, None)
            if window is not None:
                self._free.append(window.slot)

    def _run(
        self, key: Hashable, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return function(*inputs) if self.graphs is None else self.graphs(key, function, inputs)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return transfer.to_device(array, self.device)


class RolloutStep:
    """A launched pass (step.Pending). pixels: {request id: [3, H, W] uint8} of frames that end with it."""

    def __init__(self, device: torch.device, pixels: dict[str, torch.Tensor]):
        self._pixels = pixels
        self._done = torch.cuda.Event() if device.type == "cuda" and pixels else None
        if self._done is not None:
            self._done.record()

    def result(self) -> dict[str, np.ndarray]:
        """{request id: [H, W, 3] uint8}. Waits for the device if a frame ends."""
        if self._done is not None:
            self._done.synchronize()
        return {
            i: np.ascontiguousarray(transfer.to_host(p.permute(1, 2, 0))) for i, p in self._pixels.items()
        }
