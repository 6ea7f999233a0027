"""PyTorch's threads next to a model on a GPU, and copies to the host and the device."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastkernels import LLM
from fastkernels.engine.execution import threads
from fastkernels.engine.execution.forward import transfer
from fastkernels.engine.inputs.images import rgb

GPU = torch.device("cuda")


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_next_to_a_gpu(three: None) -> None:
    with threads.one(torch.device("cpu")):
        assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), threads.one(GPU):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 3


def test_the_number_of_the_environment_stays(three: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    threads.use_one(GPU)
    assert torch.get_num_threads() == 3


def test_refused_prompt_leaves_the_number_of_new_threads(three: None) -> None:
    def read(prompt: Any, params: Any) -> None:
        raise ValueError("no image")

    llm = object.__new__(LLM)
    llm._ids = iter(range(9))
    llm.llm_engine = SimpleNamespace(inputs="images", runner=SimpleNamespace(device=GPU), read=read)
    with pytest.raises(ValueError, match="no image"):
        llm._run(["a", "b"], [None, None], False)
    with ThreadPoolExecutor(1) as pool:
        assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 3


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_an_opened_image_is_read_by_several_threads(form: str) -> None:
    """Prompts may share an image whose file is not read yet."""
    pixels, file = np.random.default_rng(0).integers(0, 255, (400, 400, 3), np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    want = np.asarray(Image.open(file))
    for _ in range(5):
        shared = Image.open(io.BytesIO(file.getvalue()))
        with ThreadPoolExecutor(8) as pool:
            for found in pool.map(rgb, [shared] * 8):
                np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [2, 1 << 16, 1 << 20])
def test_arrays_arrive_as_they_are(device: str, rows: int) -> None:
    """Small ones and large ones, of which some are not contiguous."""
    on, draw = torch.device(device), np.random.default_rng(0)
    parts = [
        draw.normal(size=(rows, 3)),
        draw.normal(size=(3, rows)).T.astype(np.float32),
        draw.normal(size=(0, 3)),
    ]
    want = np.concatenate(parts).astype(np.float32)
    made = transfer.joined(parts, on, np.float32)
    assert made.device.type == device and made.dtype == torch.float32
    np.testing.assert_array_equal(transfer.to_host(made), want)
    np.testing.assert_array_equal(transfer.to_host(transfer.to_device(want, on)), want)
    assert transfer.to_device(torch.from_numpy(parts[1]), on).shape == (rows, 3)


@pytest.mark.parametrize("sizes", [(1,), (0, 3), (5, 7, 11, 13), (40, 2, 9), (200, 0, 1)])
def test_pieces_of_large_arrays_arrive_in_order(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """Of arrays below, at and above the size of a piece, in dtypes that NumPy has not."""
    monkeypatch.setattr(transfer, "PIECE", 32)
    parts = [torch.randn(size, 2).bfloat16() for size in sizes]
    made = transfer._staged(parts, torch.full((sum(sizes), 2), float("nan"), dtype=torch.bfloat16))
    assert torch.equal(made, torch.cat(parts))


def test_arrays_are_copied_inside_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are made there must not be written by other threads' operators."""
    monkeypatch.setattr(transfer, "PIECE", 16)
    with torch.inference_mode():
        parts = [torch.arange(9.0), torch.arange(30.0)]
        assert torch.equal(transfer._staged(parts, torch.empty(39)), torch.cat(parts))
