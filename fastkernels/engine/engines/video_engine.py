"""The engine of video pipelines: prompts in, videos out. See DenoiseEngine."""

from __future__ import annotations

from typing import Any

from fastkernels.engine.engines.denoise_engine import DenoiseEngine
from fastkernels.engine.scheduling.denoising import VideoParams
from fastkernels.models.common.pipelines.pipeline import Size


class VideoEngine(DenoiseEngine):
    """See DenoiseEngine. A request's params are VideoParams."""

    kind = "DenoiseVideo"
    makes, params_class = "videos", VideoParams

    def _size(self, params: Any) -> Size:
        frames, period = (
            params.num_frames or min(self.model.frames, self.config.max_frames),
            self.model.period,
        )
        if params.num_frames is None:
            frames -= (frames - 1) % period
        if (frames - 1) % period:
            raise ValueError(f"num_frames must be 1 more than a multiple of {period}, got {frames}")
        if frames > self.config.max_frames:
            raise ValueError(f"num_frames must be at most {self.config.max_frames}, got {frames}")
        return (*super()._size(params), frames)
