"""The engine of diffusion pipelines: prompts in, images out, with continuous batching over the steps of schedules."""

from __future__ import annotations

import random
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fastkernels.engine.engines.budget_engine import BudgetEngine
from fastkernels.engine.execution.runners.denoise import DenoiseInput, Start
from fastkernels.engine.inputs.images import is_image, rgb
from fastkernels.engine.scheduling.denoising import SEEDS, ImageParams, ImageRequest, ImageRequestOutput
from fastkernels.engine.scheduling.encoding import BudgetScheduler
from fastkernels.models.common.pipelines.pipeline import Guidance, Pipeline, Size

STRENGTH = 0.6  # of a request with an image, by default


class DenoiseEngine(BudgetEngine):
    """See Engine. Each step advances every running image by one step of its own schedule.

    Images run while their tokens fit into max_num_batched_tokens; one that is larger runs alone. When one ends, a
    waiting one joins.
    """

    kind = "Denoise"
    makes, params_class = "images", ImageParams
    request_class = ImageRequest
    scheduler: BudgetScheduler[ImageRequest]
    requests: dict[str, ImageRequest]

    def _start(self) -> None:
        super()._start()
        self._seeds = random.Random(self.config.seed)
        self._drops: list[str] = []
        height, width = self.model.size[:2]
        self.max_pixels: int = self.config.max_pixels or 4 * height * width

    @property
    def model(self) -> Pipeline:
        return self.runner.model

    def make_request(
        self, request_id: str, prompt: Any, params: ImageParams | None = None, priority: int = 0
    ) -> ImageRequest:
        """See Engine. params: default ImageParams(); their n must be 1, see make_requests."""
        made = self.make_requests(request_id, prompt, params, priority)
        if len(made) > 1:
            raise ValueError(f"n must be 1 for one request, got {len(made)}: make_requests makes several")
        return made[0]

    def make_requests(
        self, request_id: str, prompt: Any, params: ImageParams | None = None, priority: int = 0
    ) -> list[ImageRequest]:
        """Checked requests for the n images of a prompt, with ids '{request_id}-0' and so on if there are several.

        A prompt is a text, or {"prompt": a text, "image": a PIL image that it changes}.
        Safe in any thread. Raises ValueError, whose message begins with the parameter.
        """
        if params is not None and type(params) is not self.params_class:
            wanted = self.params_class.__name__
            raise ValueError(f"a model that makes {self.makes} takes {wanted}, got {type(params).__name__}")
        params = params or self.params_class()
        model, config = self.model, self.config
        prompt, image = self._parts(prompt, params)
        most = min(config.max_images, config.max_waiting)
        if params.n > most:
            raise ValueError(f"n must be at most {most}, got {params.n}")
        if image is not None and params.height is None and params.width is None:
            params = self._size_of(image, params)
        size = self._size(params)
        steps = params.num_inference_steps or model.steps
        if steps > config.max_steps:
            raise ValueError(f"num_inference_steps must be at most {config.max_steps}, got {steps}")
        first, pixels = 0, None
        if image is not None:
            strength = STRENGTH if params.strength is None else params.strength
            first, pixels = model.first_step(steps, strength), _resized(image, size)
            if first >= steps:
                raise ValueError(f"strength must leave a step of {steps}, got {strength}")
        scale = self._scale(params)
        for name, text in (("the prompt", prompt), ("negative_prompt", params.negative_prompt or "")):
            _check_unicode(name, text)
            model.check_prompt(text, name)
        tokens = model.tokens(size) * (2 if model.guidance is Guidance.DOUBLED and scale > 1 else 1)
        seed = self._seeds.randrange(SEEDS) if params.seed is None else params.seed
        names = [request_id] if params.n == 1 else [f"{request_id}-{i}" for i in range(params.n)]
        return [
            ImageRequest(
                name,
                prompt,
                replace(params, n=1),
                size,
                steps,
                scale,
                (seed + i) % SEEDS,
                tokens,
                priority,
                pixels,
                first,
            )
            for i, name in enumerate(names)
        ]

    def _parts(self, prompt: Any, params: ImageParams) -> tuple[str, Any]:
        """Text, and the image in RGB that comes with it, if there is one."""
        image = None
        if isinstance(prompt, Mapping) and self.model.edits:
            if unknown := prompt.keys() - {"prompt", "image"}:
                names = ", ".join(map(repr, sorted(map(str, unknown))))
                raise ValueError(f"the prompt may have 'prompt' and 'image', got {names}")
            prompt, image = prompt.get("prompt"), prompt.get("image")
        if not isinstance(prompt, str):
            raise ValueError(f"the prompt must be text, got {reprlib.repr(prompt)}")
        if image is None:
            if params.strength is not None:
                raise ValueError("strength needs an image")
            return prompt, None
        if not is_image(image):
            raise ValueError(f"image must be a PIL image, got {type(image).__name__}")
        return prompt, rgb(image).copy()  # it is read when the request runs

    def _size_of(self, image: Any, params: ImageParams) -> ImageParams:
        """The image's size, cut to what the model takes."""
        width, height = (n - n % self.model.multiple for n in image.size)
        if not width or not height:
            least = self.model.multiple
            raise ValueError(
                f"image must have at least {least} x {least} pixels, got {image.width} x {image.height}: give a size"
            )
        return replace(params, height=height, width=width)

    def _size(self, params: ImageParams) -> Size:
        model = self.model
        height, width = params.height or model.size[0], params.width or model.size[1]
        for name, value in (("height", height), ("width", width)):
            if value % model.multiple:
                raise ValueError(f"{name} must be a multiple of {model.multiple}, got {value}")
        if height * width > self.max_pixels:
            raise ValueError(
                f"height times width must be at most {self.max_pixels} pixels, got {height * width} ({width} x"
                f" {height})"
            )
        return height, width

    def _scale(self, params: ImageParams) -> float:
        model = self.model
        if params.negative_prompt is not None and model.guidance is not Guidance.DOUBLED:
            raise ValueError(f"negative_prompt is not supported by {self.config.model}")
        if params.guidance_scale and model.guidance is Guidance.NONE:
            raise ValueError(
                f"guidance_scale must be 0, got {params.guidance_scale}: {self.config.model} was distilled to need"
                " no guidance"
            )
        return float(model.scale if params.guidance_scale is None else params.guidance_scale)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[ImageRequestOutput]:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._drops += [i for i in dict.fromkeys(ids) if i in self.requests]
        super().abort_request(ids)
        if not self.requests:  # no step would tell the runner
            drops, self._drops = self._drops, []
            self.executor.launch(DenoiseInput((), (), drops))
        return []

    def abort_all(self) -> None:
        self._drops += self.requests
        super().abort_all()

    def step(self) -> list[ImageRequestOutput]:
        batch = list(self.scheduler.schedule())
        if not batch:
            return []
        drops, self._drops = self._drops, []
        starts = [
            Start(
                r.request_id,
                r.prompt,
                r.params.negative_prompt,
                r.size,
                r.steps,
                r.scale,
                r.seed,
                r.image,
                r.first,
                r.params.step_cache,
            )
            for r in batch
            if r.step == r.first
        ]
        rows = [(r.request_id, r.step) for r in batch]
        found = self._launch(DenoiseInput(starts, rows, drops))
        for request in batch:
            request.step += 1
        ended = [r for r in batch if r.request_id in found]
        self._remove(ended)
        for request in ended:
            _, request.reused = found[request.request_id]
            self.stats.denoise_steps_reused += request.reused
        self.stats.denoise_steps += len(batch)
        self.stats.images += ended
        return [
            ImageRequestOutput(
                r.request_id, r.prompt, [found[r.request_id][0]], [r.seed], r.steps, [r.reused]
            )
            for r in ended
        ]

    @property
    def steps_left(self) -> int:
        """Steps that the queued and running images still need."""
        return sum(r.steps - r.step for r in list(self.requests.values()))


def _resized(image: Any, size: Size) -> np.ndarray:
    """Pixels [H, W, 3] of a PIL image at this size."""
    from PIL import Image

    height, width = size[:2]
    return np.array(image.resize((width, height), Image.Resampling.LANCZOS))


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode text: {error}") from error
