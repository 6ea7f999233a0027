"""Peak rates of GPUs: the lower bound of a kernel's time, and how close the kernel comes to it.

Peaks are from NVIDIA's public data sheets and architecture white papers (A100, H100, H200, B200, L40S, L4, A10, Ada and
Blackwell GeForce), dense, at boost clock. Measured rates stay below: copies on an H200 reach about 4.45 of 4.8 TB/s.
So a time below the floor means a wrong measurement or missing work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MARGIN = 0.05  # for clocks above the data sheet's, and operands that stayed in the caches

# torch dtype: unit of the peak. A float32 product may run as TF32.
UNIT = {
    "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float32": "tf32",
    "float64": "fp64",
}  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """One GPU: device memory in GB/s, L2 in MB, tflops by unit ('bf16', 'fp16', 'fp8', 'tf32', 'fp32', 'fp64').

    link_gb_per_s  what it can send to other GPUs: NVLink in one direction, or PCIe where it has none; 0: unknown
    """

    name: str
    gb_per_s: float
    l2_mb: float
    tflops: Mapping[str, float] = field(default_factory=dict)
    link_gb_per_s: float = 0.0

    def flops_per_s(self, dtype: str) -> float | None:
        """The highest peak for operations on that dtype; None if unknown."""
        unit = UNIT.get(dtype, "fp32")
        found = [self.tflops[u] for u in ((unit, "fp32") if unit == "tf32" else (unit,)) if u in self.tflops]
        if not found and unit == "fp8":  # without fp8 units it is computed in half precision
            found = [self.tflops[u] for u in ("fp16", "bf16") if u in self.tflops]
        return 1e12 * max(found) if found else None


def _tflops(bf16: float, fp8: float | None, tf32: float, fp32: float, fp64: float, fp16: float = 0.0) -> dict:
    known = {"bf16": bf16, "fp16": fp16 or bf16, "tf32": tf32, "fp32": fp32, "fp64": fp64}
    return known if fp8 is None else {**known, "fp8": fp8}


_HOPPER_SXM = _tflops(989.4, 1978.9, 494.7, 66.9, 66.9)
_AMPERE = _tflops(312.0, None, 156.0, 19.5, 19.5)
# Words of the device's name, specific names first: the first entry with all its words in the name matches.
_KNOWN: tuple[tuple[str, Peaks], ...] = (
    ("gb200", Peaks("GB200", 8000.0, 126.0, _tflops(2500.0, 5000.0, 1250.0, 80.0, 40.0), 900.0)),
    ("b200", Peaks("B200", 8000.0, 126.0, _tflops(2250.0, 4500.0, 1125.0, 75.0, 37.0), 900.0)),
    ("h200 nvl", Peaks("H200 NVL", 4800.0, 50.0, _tflops(835.5, 1671.0, 417.5, 60.0, 60.0), 450.0)),
    ("h200", Peaks("H200", 4800.0, 50.0, _HOPPER_SXM, 450.0)),
    ("gh200 480gb", Peaks("GH200", 4000.0, 50.0, _HOPPER_SXM, 450.0)),
    ("gh200", Peaks("GH200", 4900.0, 50.0, _HOPPER_SXM, 450.0)),
    ("h100 pcie", Peaks("H100 PCIe", 2039.0, 50.0, _tflops(756.0, 1513.0, 378.0, 51.2, 51.2), 300.0)),
    ("h100 nvl", Peaks("H100 NVL", 3938.0, 50.0, _tflops(835.5, 1671.0, 417.5, 60.0, 60.0), 300.0)),
    ("h100", Peaks("H100 SXM", 3352.0, 50.0, _HOPPER_SXM, 450.0)),
    ("h20", Peaks("H20", 4000.0, 60.0, _tflops(148.0, 296.0, 74.0, 44.0, 1.0), 450.0)),
    ("a100 sxm4 40gb", Peaks("A100 SXM 40GB", 1555.0, 40.0, _AMPERE, 300.0)),
    ("a100 pcie 40gb", Peaks("A100 PCIe 40GB", 1555.0, 40.0, _AMPERE, 300.0)),
    ("a100 pcie", Peaks("A100 PCIe 80GB", 1935.0, 40.0, _AMPERE, 300.0)),
    ("a100", Peaks("A100 SXM 80GB", 2039.0, 40.0, _AMPERE, 300.0)),
    ("l40s", Peaks("L40S", 864.0, 96.0, _tflops(362.1, 733.0, 183.0, 91.6, 1.43), 32.0)),
    ("l4", Peaks("L4", 300.0, 48.0, _tflops(121.0, 242.5, 60.5, 30.3, 0.47), 32.0)),
    ("a10g", Peaks("A10G", 600.0, 6.0, _tflops(125.0, None, 62.5, 31.2, 0.98), 32.0)),
    ("a10", Peaks("A10", 600.0, 6.0, _tflops(125.0, None, 62.5, 31.2, 0.98), 32.0)),
    # GeForce: half the rate if bf16 and fp8 accumulate in float32; the floor uses the higher one.
    ("rtx 4090", Peaks("RTX 4090", 1008.0, 72.0, _tflops(165.2, 660.6, 82.6, 82.6, 1.29, fp16=330.3), 32.0)),
    (
        "rtx 5090",
        Peaks("RTX 5090", 1792.0, 96.0, _tflops(209.5, 838.0, 104.8, 104.8, 1.64, fp16=419.0), 64.0),
    ),
)


def peaks(gpu: str | None, override: Mapping[str, float] | None = None) -> Peaks | None:
    """The peaks of a device by its CUDA name; None for a CPU, a slice of a GPU (MIG) or an unknown device.

    override: {'gb_per_s': ..., 'l2_mb': ..., unit: tflops}; replaces values or, with gb_per_s, adds a device.
    Raises ValueError for another key.
    """
    words = set(re.split(r"[^a-z0-9]+", (gpu or "").lower()))
    found = next((p for names, p in _KNOWN if words.issuperset(names.split())), None)
    found = None if "mig" in words else found
    if not override:
        return found
    unknown = sorted(set(override) - {"gb_per_s", "l2_mb", "bf16", "fp16", "fp8", "tf32", "fp32", "fp64"})
    if unknown:
        raise ValueError(
            f"unknown peak: {', '.join(unknown)} (known: gb_per_s, l2_mb, bf16, fp16, fp8, tf32, fp32, fp64)"
        )
    sizes = {k: v for k, v in override.items() if k in ("gb_per_s", "l2_mb")}
    units = {k: v for k, v in override.items() if k not in sizes}
    if found is None:
        return (
            Peaks(gpu or "", sizes["gb_per_s"], sizes.get("l2_mb", 0.0), units)
            if "gb_per_s" in sizes
            else None
        )
    return replace(
        found, tflops={**found.tflops, **units}, gb_per_s=sizes.get("gb_per_s", found.gb_per_s),
        l2_mb=sizes.get("l2_mb", found.l2_mb),
    )  # fmt: skip


def known() -> list[str]:
    """Names of the GPUs with known peaks."""
    return [p.name for _, p in _KNOWN]


def floor_us(bytes_moved: int, flops: int, dtype: str, gpu: Peaks | None) -> float | None:
    """Lower bound of a call in microseconds: its compulsory bytes at the memory's peak, or its operations at the peak
    of the unit for `dtype`, whichever is longer. None for an unknown GPU."""
    if gpu is None:
        return None
    rate = gpu.flops_per_s(dtype)
    compute = 1e6 * flops / rate if rate else 0.0
    return max(bytes_moved / gpu.gb_per_s / 1e3, compute)


def percent(time_us: float, floor: float | None) -> float | None:
    """How close a call came to the roofline: 100 if it takes no longer than the floor."""
    return None if floor is None or time_us <= 0 else 100.0 * floor / time_us


def too_fast(time_us: float, floor: float | None, margin: float = MARGIN) -> str:
    """Why a time is impossible; '' if it is not."""
    if time_us <= 0:
        return f"{time_us:.3g} us is not a time"
    if floor is None or time_us >= floor * (1.0 - margin):
        return ""
    return f"{time_us:.3g} us is faster than the machine allows ({floor:.3g} us): the work was not done, or not timed"


def ridge(dtype: str, gpu: Peaks) -> float | None:
    """Operations per byte at which the memory's roof meets the unit's: kernels below it are bound by memory."""
    rate = gpu.flops_per_s(dtype)
    return rate / (1e9 * gpu.gb_per_s) if rate else None
