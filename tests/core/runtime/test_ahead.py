"""Kernels that are compiled before a step launches them: for Hopper, by Triton, without a GPU."""

from __future__ import annotations

import threading

import pytest
import torch
import triton
from support.kernels import ahead as emulated
from triton.compiler import CompiledKernel

from fastkernels.core.runtime import ahead
from fastkernels.overrides.conv import conv_norm_act as conv
from fastkernels.overrides.kit import overlap


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's driver of such a chip, as far as compilations read it."""
    monkeypatch.setattr(triton.runtime.driver, "_active", emulated._Driver())


def pointwise(channels: int) -> torch.Tensor:
    x = torch.ones(1, channels, 4, 4).to(memory_format=torch.channels_last)
    return conv._triton(x, torch.ones(32, channels, 1, 1), None, activation="relu")


def test_kernels_of_a_step_are_compiled_in_threads(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, threads = conv._dense_kernel, set[str]()
    compile_ = triton.compiler.compile

    def noted(*args: object, **options: object) -> object:
        threads.add(threading.current_thread().name)
        return compile_(*args, **options)

    kernel.device_caches.clear()
    monkeypatch.setattr(triton.compiler, "compile", noted)
    with ahead.compiling():
        assert ahead.active() and not ahead.only()
        for channels in (32, 40, 32):  # of two kernels
            made = ahead.run(lambda channels=channels: pointwise(channels))
            assert made.shape == (1, 32, 4, 4) and not made.any(), "zeros, with which a step goes on"
            assert made.is_contiguous(memory_format=torch.channels_last)
        with ahead.compiling():
            assert ahead.active()
    assert not ahead.active()
    found = list(kernel.device_caches[0][0].values())
    assert len(found) == 2 and all(isinstance(k, CompiledKernel) for k in found)
    assert threads and all(name.startswith("compile") for name in threads)
    kernel.device_caches.clear()


def test_libraries_run_in_the_step_itself(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN, whose algorithms are timed in their first run, must not do this next to threads that compile."""
    x, weight = torch.ones(1, 32, 6, 6).to(memory_format=torch.channels_last), torch.ones(32, 32, 3, 3)
    monkeypatch.setattr(torch, "conv2d", lambda *_: pytest.fail("a convolution"))
    monkeypatch.setattr(triton.compiler, "compile", lambda *_, **__: None)
    with ahead.compiling():
        for call in (conv._triton, conv._library):
            made = ahead.run(
                lambda call=call: call(x, weight, torch.ones(32), padding=(1,), activation="silu")
            )
            assert made.shape == x.shape and made.stride() == x.stride() and not made.any()


def test_failed_compilation_is_left_to_the_launch(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> object:
        raise RuntimeError("no such instruction")

    kernel = conv._dense_kernel
    kernel.device_caches.clear()
    monkeypatch.setattr(triton.compiler, "compile", fails)
    with ahead.compiling():
        ahead.run(lambda: pointwise(32))
    with pytest.raises(RuntimeError, match="no such instruction"):
        pointwise(32)
    kernel.device_caches.clear()


def test_kernels_of_one_grid_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `any_grid`, the kernel without overlap is compiled when a grid needs it."""
    made: list[bool] = []
    monkeypatch.setattr(overlap, "overlaps", lambda device: True)
    monkeypatch.setattr(overlap, "_quick", True)
    monkeypatch.setattr(overlap, "_compiled", {})
    monkeypatch.setattr(triton.runtime.driver, "_active", emulated._Driver())

    def run(self: object, *args: object, grid: object, warmup: bool, **options: object) -> object:
        made.append(bool(options["OVERLAP"]))
        return type("Compiled", (), {"run": None, "function": None, "packed_metadata": None})

    monkeypatch.setattr(type(conv._dense_kernel), "run", run)
    pointwise(32)
    assert made == [True]
    made.clear()
    overlap._compiled.clear()
    monkeypatch.setattr(conv, "launch_kernel", lambda *a, any_grid, **o: overlap.launch_kernel(*a, **o))
    pointwise(32)
    assert made == [True, False]
