"""Steps that need more memory than the device has: smaller ones run, and the batch that fits is named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import policies, recommenders, scenes
from support.tiny import make_tiny_bert
from support.tiny_pipelines import make_tiny_sdxl

from fastkernels import LLM
from fastkernels.engine.async_llm import AsyncLLM, EngineError
from fastkernels.engine.engines.budget_engine import RequestDoesNotFit
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.pooling import PoolingParams
from fastkernels.engine.scheduling.acting import ActionParams
from fastkernels.engine.scheduling.denoising import ImageParams
from fastkernels.engine.scheduling.rendering import RenderParams

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation for Memory Management"


def texts(folder: Path) -> tuple[list[Any], Any]:
    make_tiny_bert(folder)
    return [[5] * (10 + i) for i in range(7)], PoolingParams("embed")


def samples(folder: Path) -> tuple[list[Any], Any]:
    recommenders.lightgcn(folder)
    return [{"user": i, "k": 3} for i in range(7)], None


def cameras(folder: Path) -> tuple[list[Any], Any]:
    scenes.save_safetensors(folder)
    (camera,) = scenes.views(1)
    return [camera] * 7, RenderParams()


def observations(folder: Path) -> tuple[list[Any], Any]:
    policies.dp3(folder)
    return policies.observations("dp3", 7), ActionParams(seed=3)


def fill(monkeypatch: pytest.MonkeyPatch, llm: LLM, rows: Callable[[Any], int], most: int) -> list[int]:
    """Let steps of more rows raise what a full GPU does. Returns the rows of all steps."""
    found: list[int] = []
    launch = llm.llm_engine.executor.launch

    def launched(step: Any) -> Any:
        found.append(rows(step))
        if found[-1] > most:
            raise torch.OutOfMemoryError(FULL)
        return launch(step)

    monkeypatch.setattr(llm.llm_engine.executor, "launch", launched)
    return found


def answers(llm: LLM, prompts: list[Any], params: Any) -> list[np.ndarray]:
    engine = llm.llm_engine
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step()}
    outputs = [done[str(i)] for i in range(len(prompts))]
    return [getattr(o, "array", getattr(o, "actions", None)) if not hasattr(o, "outputs") else o.outputs.data
            for o in outputs]  # fmt: skip


ROWS: dict[str, tuple[Callable[[Path], tuple[list[Any], Any]], Callable[[Any], int]]] = {
    "Encode": (texts, lambda step: len(step.query_lens)),
    "Score": (samples, lambda step: len(step.samples)),
    "Render": (cameras, lambda step: len(step.cameras)),
    "Act": (observations, lambda step: len(step.observations)),
}


@pytest.mark.parametrize("kind", ROWS)
def test_smaller_steps_give_the_same_answers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, rows = ROWS[kind]
    prompts, params = make(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True)
    assert llm.llm_engine.kind == kind
    want = answers(llm, prompts, params)
    found = fill(monkeypatch, llm, rows, 3)
    for got, whole in zip(answers(llm, prompts, params), want, strict=True):
        np.testing.assert_allclose(got, whole, rtol=1e-4, atol=1e-4)
    assert found[:2] == [7, 3] and max(found[2:]) <= 3 and sum(found[1:]) == 7
    (record,) = [r for r in caplog.records if r.name == "fastkernels" and r.levelno == logging.WARNING]
    tokens = llm.llm_engine.scheduler.max_num_batched_tokens
    assert f"one of 3 requests with {tokens} tokens fits" in record.getMessage()
    assert (
        f"start with max_num_batched_tokens={max(1, tokens // llm.llm_engine.each)}," in record.getMessage()
    )
    found.clear()
    answers(llm, prompts, params)
    assert max(found) <= 3, "the limit is kept"


def test_request_that_fits_nowhere_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three clients, the one with the long text gets an error with its numbers, the others their vectors."""
    _, params = texts(tmp_path)
    llm = AsyncLLM(EngineConfig(str(tmp_path), device="cpu", skip_tokenizer_init=True))
    launch = llm.engine.executor.launch

    def launched(step: Any) -> Any:
        if len(step.input_ids) > 30:
            raise torch.OutOfMemoryError(FULL)
        return launch(step)

    monkeypatch.setattr(llm.engine.executor, "launch", launched)

    async def ask(name: str, prompt: list[int]) -> Any:
        stream, found = await llm.open([llm.make_request(name, prompt, params)]), list[Any]()
        while not stream.finished:
            found += await stream.get()
        return found

    async def all_of_them() -> list[Any]:
        given = {"a": [5] * 20, "long": [5] * 40, "b": [5] * 9}
        return await asyncio.gather(*(ask(*item) for item in given.items()), return_exceptions=True)

    try:
        first, long, last = asyncio.run(all_of_them())
    finally:
        llm.shutdown()
    assert len(first) == len(last) == 1 and isinstance(long, EngineError)
    assert str(long).startswith("the request needs more memory than the GPU has: it counts as 40 tokens")
    assert str(long).endswith("(CUDA out of memory. Tried to allocate 2.00 GiB.)")


def test_error_of_one_request_names_the_largest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = texts(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True)
    answers(llm, prompts[:2], params)
    fill(monkeypatch, llm, lambda step: len(step.input_ids), 15)
    with pytest.raises(RequestDoesNotFit, match="it counts as 16 tokens; the largest step so far had 21"):
        answers(llm, [prompts[6]], params)
    assert not llm.llm_engine.has_unfinished_requests()


def test_images_are_denoised_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, sizes = make_tiny_sdxl(tmp_path), list[int]()
    llm = LLM(str(folder), device="cpu")
    params = [ImageParams(num_inference_steps=3, seed=i, n=1) for i in range(5)]
    want = [o.images[0] for o in llm.generate_images(["a red cat"] * 5, params, use_tqdm=False)]
    runner = llm.llm_engine.runner
    forward = runner._forward

    def full(size: Any, latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(latents))
        if len(latents) > 4:  # two images with guidance
            raise torch.OutOfMemoryError(FULL)
        return forward(size, latents, *rest)

    monkeypatch.setattr(runner, "_forward", full)
    got = [o.images[0] for o in llm.generate_images(["a red cat"] * 5, params, use_tqdm=False)]
    for image, whole in zip(got, want, strict=True):
        assert np.abs(np.asarray(image, float) - np.asarray(whole, float)).max() <= 2
    assert sizes[:4] == [10, 4, 4, 2] and max(sizes[4:]) == 4
    assert "a step of 5 images of 32 x 32 needs more memory than the GPU has: 2 at a time" in caplog.text
    monkeypatch.setattr(runner, "_forward", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError(FULL)))
    with pytest.raises(torch.OutOfMemoryError):
        llm.generate_images(["a red cat"], params[:1], use_tqdm=False)
