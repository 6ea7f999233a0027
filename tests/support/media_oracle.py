"""Expected tokens and log-probabilities of prompts with images, videos and audio, from transformers in float32."""

from __future__ import annotations

import io
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

RATE = 16000
FPS = 2.0


def tone(seed: int, seconds: float) -> np.ndarray:
    """Samples [n] float32 at RATE: a random pitch each tenth of a second, and noise."""
    random = np.random.default_rng(seed)
    pitch = np.repeat(random.uniform(100, 4000, int(10 * seconds) + 1), RATE // 10)[: int(seconds * RATE)]
    noise = random.normal(0, 0.02, len(pitch))
    return (0.5 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE) + noise).astype(np.float32)


def clip(seed: int, frames: int, width: int, height: int) -> np.ndarray:
    """Random frames [n, H, W, 3] uint8."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def smooth(frames: int, width: int, height: int) -> np.ndarray:
    """Frames [n, H, W, 3] uint8 that compress well and differ."""
    n, y, x = np.indices((frames, height, width))
    return np.stack([(8 * n + x) % 256, (4 * n + 2 * y) % 256, (x + y) % 256], axis=-1).astype(np.uint8)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """A file of one channel of 16 bits."""
    import wave

    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return made.getvalue()


def video_file(frames: np.ndarray, rate: int = 8, kind: str = "mp4") -> bytes:
    """A file with these frames, at best quality but with losses."""
    import av

    made = io.BytesIO()
    with av.open(made, "w", format={"mkv": "matroska"}.get(kind, kind)) as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.options = "yuv420p", {"qscale": "1"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())
    return made.getvalue()


def prompt(text: str, **media: list[Any]) -> dict[str, Any]:
    """A prompt as LLM.generate takes it. media: lists by kind, videos as frames at FPS, audio as samples at RATE."""
    return {"prompt": text, "multi_modal_data": media} if media else {"prompt": text}


class MediaOracle:
    """transformers' model of a checkpoint of tiny.make_tiny_vlm or tiny.make_tiny_omni."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForMultimodalLM

        return AutoModelForMultimodalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    @cached_property
    def processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self.folder)

    def inputs(self, given: dict[str, Any]) -> dict[str, Any]:
        from transformers.video_utils import VideoMetadata

        more: dict[str, Any] = {}
        media = given.get("multi_modal_data", {})
        if media.get("image"):
            more["images"] = list(media["image"])
        if media.get("audio"):
            more |= {"audio": list(media["audio"]), "sampling_rate": RATE}
        if media.get("video"):
            videos = [torch.from_numpy(v).permute(0, 3, 1, 2) for v in media["video"]]
            known = [VideoMetadata(len(v), fps=FPS, frames_indices=list(range(len(v)))) for v in videos]
            more |= {"videos": videos, "video_metadata": known, "do_sample_frames": False}
        made = dict(self.processor(text=[given["prompt"]], return_tensors="pt", **more))
        made.pop("num_audio_tokens", None)
        made.pop("video_metadata", None)
        if "video_second_per_grid" in made:
            made["video_second_per_grid"] = torch.as_tensor(made["video_second_per_grid"])
        return made

    @torch.inference_mode()
    def logprobs(self, given: dict[str, Any], output: list[int] = ()) -> torch.Tensor:  # type: ignore[assignment]
        """Log-probabilities [T, V] of the token after each of the prompt's and the output's."""
        made = self.inputs(given)
        n = len(output)
        made["input_ids"] = torch.cat([made["input_ids"], torch.tensor([output], dtype=torch.int64)], 1)
        made["attention_mask"] = torch.ones_like(made["input_ids"])
        if "mm_token_type_ids" in made:
            kinds = made["mm_token_type_ids"]
            made["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(1, n)], 1)
        return self.model(**made).logits[0].log_softmax(-1)

    def prompt_ids(self, given: dict[str, Any]) -> list[int]:
        found: list[int] = self.inputs(given)["input_ids"][0].tolist()
        return found
