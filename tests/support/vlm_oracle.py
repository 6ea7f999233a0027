"""Expected tokens and log-probabilities of prompts with images, from transformers' model and processor in float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch


def image(seed: int, width: int, height: int) -> Any:
    """A random PIL image."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompt(text: str, *images: Any) -> dict[str, Any]:
    """A prompt as LLM.generate takes it."""
    return {"prompt": text, "multi_modal_data": {"image": list(images)}} if images else {"prompt": text}


class VlmOracle:
    """transformers' model of a checkpoint of tiny.make_tiny_vlm."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._known: dict[Any, tuple[list[int], list[int]]] = {}

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32).eval()

    @cached_property
    def processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self.folder)

    def inputs(self, text: str, images: Sequence[Any]) -> Any:
        more = {"images": list(images)} if images else {}
        return self.processor(text=[text], return_tensors="pt", **more)

    @torch.inference_mode()
    def greedy(self, text: str, *images: Any, n: int = 12) -> tuple[list[int], list[int]]:
        """(token ids of the prompt, the next n greedy tokens, EOS ignored).

        Each from a pass over the whole sequence: behind an image at the end of a prompt, transformers' own decoding
        goes on from the three positions of the last feature, and its prefill from the largest of the image.
        """
        key = (text, n, *(i.tobytes() for i in images))
        if key in self._known:
            return self._known[key]
        inputs = dict(self.inputs(text, images))
        ids, kinds = inputs["input_ids"], inputs.pop("mm_token_type_ids")
        length = ids.shape[1]
        for _ in range(n):
            given = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
            last = self.model(**given, mm_token_type_ids=kinds).logits[0, -1].argmax().view(1, 1)
            ids, kinds = torch.cat([ids, last], 1), torch.cat([kinds, kinds.new_zeros(1, 1)], 1)
        self._known[key] = ids[0, :length].tolist(), ids[0, length:].tolist()
        return self._known[key]

    @torch.inference_mode()
    def logprobs(self, text: str, *images: Any) -> torch.Tensor:
        """Log-probabilities [T, V] of the token after each of the prompt's."""
        return self.model(**self.inputs(text, images)).logits[0].log_softmax(-1)
