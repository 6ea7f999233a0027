"""PyTorch's threads next to a model on a GPU, and copies to the host and the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastkernels.engine.execution import threads
from fastkernels.engine.execution.forward import transfer

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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [2, 1 << 16])
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
