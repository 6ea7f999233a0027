"""Check that a candidate built by load_inline works in the judge's cage: C++ on a CPU, CUDA by nvcc on a GPU.

    extension_check.py --out FOLDER [--device cuda]

Exit status 1 if the case is not `ok`. It builds for about a minute.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fk_bench.core.rows import append
from fk_bench.kernels.judge import Options, judge_ops

CPU = '''
import os

os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
from torch.utils.cpp_extension import load_inline

SOURCE = """
torch::Tensor run(torch::Tensor x) {
  auto r = at::relu(x);
  return r * r;
}
"""
built = load_inline("relu2_extension", SOURCE, functions=["run"])


def relu2(x):
    return built.run(x)
'''
CUDA = '''
import os

os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <cuda_bf16.h>
#include <c10/cuda/CUDAStream.h>
__global__ void kernel(const __nv_bfloat16* x, __nv_bfloat16* out, long n) {
  long i = blockIdx.x * 256L + threadIdx.x;
  if (i < n) {
    float v = __bfloat162float(x[i]);
    v = v > 0.0f ? v : 0.0f;
    out[i] = __float2bfloat16(v * v);
  }
}
torch::Tensor run(torch::Tensor x) {
  auto out = torch::empty_like(x);
  long n = x.numel();
  kernel<<<(n + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      (const __nv_bfloat16*)x.data_ptr(), (__nv_bfloat16*)out.data_ptr(), n);
  return out;
}
"""
built = load_inline("relu2_extension", "torch::Tensor run(torch::Tensor x);", SOURCE, functions=["run"])


def relu2(x):
    return built.run(x)
'''


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    file = options.out / "relu2.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(CUDA if options.device == "cuda" else CPU)
    judged = Options(
        device=options.device, cases=("random",), names=("decode_1",), timeout=600, case_budget=900
    )
    rows = judge_ops(["relu2"], {"relu2": file}, judged)
    append(options.out / "rows.jsonl", rows)
    (row,) = (r for r in rows if r.kind == "case")
    print(
        f"{row.subject.op} {row.case['name']} {row.status.value} {row.reason} {row.metrics.get('speedup', '')}"
    )
    raise SystemExit(0 if row.status.value == "ok" else 1)


if __name__ == "__main__":
    main()
