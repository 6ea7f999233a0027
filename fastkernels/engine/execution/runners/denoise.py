"""The runner of diffusion pipelines: a step of every image in progress, each at its own place in its schedule."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.engine.cache.kv_cache import Limits
from fastkernels.engine.cache.latents import LatentPool, Latents, joined
from fastkernels.engine.cache.step_cache import StepCache, reusable
from fastkernels.engine.execution.forward import transfer
from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.execution.runners.encode import CACHE_OPTIONS
from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.pipelines.pipeline import Guidance, Size
from fastkernels.models.common.pipelines.schedules import Schedule

log = logging.getLogger("fastkernels")


@dataclass(frozen=True)
class Start:
    """An image that begins.

    scale  of guidance
    image  [H, W, 3] uint8, of which it is made
    first  the step that it begins with
    step_cache  the threshold of StepCache, or None
    """

    request_id: str
    prompt: str
    negative_prompt: str | None
    size: Size
    steps: int
    scale: float
    seed: int
    image: np.ndarray | None = None
    first: int = 0
    step_cache: float | None = None


@dataclass(frozen=True)
class DenoiseInput:
    """One step of images in progress.

    starts  images that begin with this step
    rows    (request id, index of the step in its schedule), those of `starts` included
    drops   images that were aborted since the last step
    """

    starts: Sequence[Start]
    rows: Sequence[tuple[str, int]]
    drops: Sequence[str] = ()


class Denoise(Runner):
    """Runs a diffusion pipeline; its interface is in models/common/pipelines/pipeline.py.

    Stages of a step: text encoders for the images that begin, the denoiser for all, one batch for each size, and the
    image decoder for those that end.
    """

    def _prepare(self, folder: Path) -> None:
        config, default = self.config, EngineConfig(model="")
        for name in (*CACHE_OPTIONS, "max_model_len"):
            if getattr(config, name) != getattr(default, name):
                raise ValueError(f"{name} applies to models of tokens; {config.model} makes images")
        self._folder = folder

    def _loaded(self) -> None:
        seed = self.config.seed if self.config.load_format == "dummy" else None
        self.model.load_texts(self._folder, self.hf_config, self.device, self.dtype, seed)
        if self.device.type == "cuda":
            _channels_last(self.model)
        self._mark("text encoders")

    def num_fitting_blocks(self) -> int:
        """See Runner: 0, since nothing is cached."""
        return 0

    def bind(self, num_blocks: int) -> None:
        """See Runner."""
        self.limits = Limits(0, self.model.longest, self.config.max_num_batched_tokens)
        self.max_model_len = self.model.longest
        self.pool = LatentPool()
        self._fitting: dict[tuple[Size, bool], int] = {}
        if self.device.type == "cuda" and not self.config.enforce_eager:
            self.graphs = ForwardGraphs(self.device)

    def capture(self) -> None:
        """See Runner."""
        if self.graphs is not None:
            self.graphs = ForwardGraphs(self.device)

    @torch.inference_mode()
    def launch(self, step: DenoiseInput) -> DenoiseStep:
        """Start a step."""
        self.pool.drop(step.drops)
        self._start(step.starts)
        groups: dict[tuple[Size, bool], list[tuple[str, int]]] = {}
        for request_id, index in step.rows:
            image = self.pool[request_id]
            groups.setdefault((image.size, image.negative is not None), []).append((request_id, index))
        for (size, doubled), rows in groups.items():
            self._step(size, doubled, rows)
        ended = [i for i, index in step.rows if index + 1 == len(self.pool[i].schedule)]
        pixels = {i: self.model.decode(self.pool[i].values, self.pool[i].size)[0] for i in ended}
        caches = {i: self.pool[i].cache for i in ended}
        self.pool.drop(ended)
        reused = {i: cache.reused for i, cache in caches.items() if cache is not None}
        return DenoiseStep(self.device, pixels, reused)

    def _start(self, starts: Sequence[Start]) -> None:
        """Encode prompts, equal ones once, and draw the first latents."""
        if not starts:
            return
        model = self.model
        doubled = {s.request_id for s in starts if model.guidance is Guidance.DOUBLED and s.scale > 1}
        wanted: list[str | None] = [s.prompt for s in starts]
        wanted += [s.negative_prompt for s in starts if s.request_id in doubled]
        texts = list(dict.fromkeys(wanted))
        found = dict(zip(texts, model.encode(texts), strict=True))
        for start in starts:
            schedule = model.schedule(start.steps, start.size, start.first)
            values = self._first_latents(start, schedule)
            negative = found[start.negative_prompt] if start.request_id in doubled else None
            cache = None
            if start.step_cache is not None:
                cache = StepCache(start.step_cache, len(schedule), start.first)
            self.pool.add(
                start.request_id,
                Latents(
                    values, start.size, schedule, start.scale, found[start.prompt], negative, cache=cache
                ),
            )

    def _first_latents(self, start: Start, schedule: Schedule) -> torch.Tensor:
        """Noise, or the image with noise."""
        model, generator = self.model, torch.Generator().manual_seed(start.seed)
        clean = None
        if start.image is not None:
            pixels = torch.from_numpy(start.image).to(self.device).movedim(-1, 0)[None]
            clean = model.begin(model.vae.encode(pixels, generator))
        noise = model.begin(model.noise(generator, start.size, self.dtype)).to(self.device).float()
        if clean is None:
            return noise * schedule.noise
        assert schedule.signal is not None and schedule.level is not None
        return float(schedule.signal[start.first]) * clean + float(schedule.level[start.first]) * noise

    def _step(self, size: Size, doubled: bool, rows: Sequence[tuple[str, int]]) -> None:
        """One step of images of one size."""
        ids = [request_id for request_id, _ in rows]
        images = [self.pool[i] for i in ids]
        numbers = [
            (s.times[i], s.scales[i], s.keep[i], s.add[i], image.scale)
            for image, (_, i) in zip(images, rows, strict=True)
            for s in [image.schedule]
        ]
        times, scales, keep, add, guidance = self._to_device(np.array(numbers, np.float32).T)
        x = self.pool.values(ids)
        shape = (-1, *[1] * (x.dim() - 1))
        scaled, caches = x * scales.view(shape), [image.cache for image in images]
        reused = reusable(caches, [i for _, i in rows], scaled)
        if not reused:
            output = self._output(size, doubled, ids, scaled, times, guidance)
        else:
            output, rest = torch.empty_like(x), [i for i in range(len(ids)) if i not in reused]
            if rest:
                output[rest] = self._output(
                    size, doubled, [ids[i] for i in rest], scaled[rest], times[rest], guidance[rest]
                )
        for i, cache in enumerate(caches):
            if cache is not None and i in reused:
                output[i : i + 1] = cache.reuse(scaled[i : i + 1])
            elif cache is not None:
                cache.add(scaled[i : i + 1].clone(), output[i : i + 1].clone())
        made = keep.view(shape) * x + add.view(shape) * output
        if images[0].schedule.past is not None:  # all have the model's scheduler
            factors = [
                (*s.clean[:, i], s.past[i])
                for image, (_, i) in zip(images, rows, strict=True)
                for s in [image.schedule]
                if s.clean is not None and s.past is not None
            ]
            of_x, of_output, past = (f.view(shape) for f in self._to_device(np.array(factors, np.float32).T))
            made += past * self.pool.advance(ids, of_x * x + of_output * output)
        self.pool.put(ids, made)

    def _output(
        self, size: Size, doubled: bool, ids: Sequence[str], scaled: Any, times: Any, guidance: Any
    ) -> torch.Tensor:
        """The denoiser's output for images of one size, guided; of as many at once as the device has memory for."""
        most = self._fitting.get((size, doubled), len(ids))
        parts, at = list[torch.Tensor](), 0
        while at < len(ids):
            part = slice(at, at + most)
            rows = ids[part]
            made: torch.Tensor | None = None
            try:
                made = self._guided(size, doubled, rows, scaled[part], times[part], guidance[part])
            except torch.OutOfMemoryError:
                if len(rows) == 1 or self.config.tensor_parallel_size > 1:
                    raise
            if made is None:  # outside of the handler, whose error holds the tensors
                most = self._fitting[size, doubled] = len(rows) // 2
                log.warning(
                    "a step of %d images of %s needs more memory than the GPU has: %d at a time from now on",
                    len(rows), " x ".join(map(str, size)), most,
                )  # fmt: skip
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            # A graph's output lasts until the next call
            parts.append(made if len(rows) == len(ids) else made.clone())
            at += len(rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _guided(
        self, size: Size, doubled: bool, ids: Sequence[str], scaled: Any, times: Any, guidance: Any
    ) -> torch.Tensor:
        conditions = self.pool.conditions(ids)
        if not doubled:
            return self._forward(size, scaled, times, guidance, conditions).float()
        both = joined(self.pool.conditions(ids, negative=True), conditions)
        twice = [torch.cat((t, t)) for t in (scaled, times, guidance)]
        without, with_prompt = self._forward(size, twice[0], twice[1], twice[2], both).float().chunk(2)
        return without + guidance.view(-1, *[1] * (scaled.dim() - 1)) * (with_prompt - without)

    def _forward(self, size: Size, latents: Any, times: Any, scales: Any, conditions: Any) -> torch.Tensor:
        if self.graphs is None:
            return self.model(latents, times, scales, conditions, size)
        names = tuple(conditions)

        def run(latents: Any, times: Any, scales: Any, *values: Any) -> torch.Tensor:
            return self.model(latents, times, scales, dict(zip(names, values, strict=True)), size)

        return self.graphs(size, run, (latents, times, scales, *conditions.values()))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return transfer.to_device(array, self.device)


def _channels_last(model: torch.nn.Module) -> None:
    """Weights of convolutions have their channels last, as the images have."""
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        elif isinstance(module, torch.nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]


class DenoiseStep:
    """A launched step (step.Pending). pixels: {request id: [.., 3, H, W] uint8} of images that end with it.

    reused: {request id: the number of its steps that reused an output}
    """

    def __init__(self, device: torch.device, pixels: dict[str, torch.Tensor], reused: dict[str, int]):
        self._pixels, self._reused = pixels, reused
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        if self._done is not None:
            self._done.record()

    def result(self) -> dict[str, tuple[np.ndarray, int]]:
        """{request id: ([.., H, W, 3] uint8, steps that reused an output)}.

        Waits for the device, so that new requests join at the next step.
        """
        if self._done is not None:
            self._done.synchronize()
        return {
            i: (np.ascontiguousarray(transfer.to_host(p.movedim(-3, -1))), self._reused.get(i, 0))
            for i, p in self._pixels.items()
        }
