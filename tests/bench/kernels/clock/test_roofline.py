"""The lower bound of a kernel's time: the GPU of a name, and its peak rates."""

import pytest
from fk_bench.kernels.judge.clock.roofline import Peaks, floor_us, peaks, percent, ridge, too_fast


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_device_is_found_by_cuda_name(name, known):
    assert peaks(name).name == known


@pytest.mark.parametrize(
    "name", [None, "", "NVIDIA H200 MIG 1g.18gb", "NVIDIA L40", "AMD Instinct MI300X", "H2000"]
)
def test_distance_of_unrelated_shapes_is_none(name):
    assert peaks(name) is None
    assert floor_us(1 << 30, 1 << 40, "bfloat16", peaks(name)) is None
    assert percent(5.0, None) is None
    assert too_fast(1e-3, None) == ""


def test_floor_is_maximum_of_memory_and_compute():
    h200 = peaks("NVIDIA H200")
    assert floor_us(4_800_000, 0, "bfloat16", h200) == pytest.approx(1.0)
    assert floor_us(0, 989_400_000, "bfloat16", h200) == pytest.approx(1.0)
    assert floor_us(4_800_000, 2 * 989_400_000, "float16", h200) == pytest.approx(2.0)
    assert floor_us(0, 1_978_900_000, "float8_e4m3fn", h200) == pytest.approx(1.0)
    assert floor_us(0, 494_700_000, "float32", h200) == pytest.approx(1.0)  # as TF32
    assert floor_us(0, 66_900_000, "int32", h200) == pytest.approx(1.0)
    assert ridge("bfloat16", h200) == pytest.approx(989.4 / 4.8)


def test_fp8_without_units_has_half_precision_rate():
    assert peaks("NVIDIA A100-SXM4-80GB").flops_per_s("float8_e4m3fn") == 312e12


def test_time_below_floor_is_invalid():
    assert too_fast(9.6, 10.0) == ""  # within the margin
    assert "faster than the machine" in too_fast(9.4, 10.0)
    assert "not a time" in too_fast(0.0, None)
    assert percent(20.0, 10.0) == pytest.approx(50.0)


def test_peaks_are_overridden_one_by_one():
    mine = peaks("NVIDIA H200", {"gb_per_s": 4450.0, "bf16": 900.0})
    assert (mine.gb_per_s, mine.tflops["bf16"], mine.tflops["fp8"], mine.l2_mb) == (
        4450.0,
        900.0,
        1978.9,
        50.0,
    )
    assert peaks("something", {"gb_per_s": 100.0, "fp32": 1.0}) == Peaks(
        "something", 100.0, 0.0, {"fp32": 1.0}
    )
    assert peaks("something", {"bf16": 1.0}) is None
    with pytest.raises(ValueError, match="unknown peak: bandwidth"):
        peaks("NVIDIA H200", {"bandwidth": 1.0})
