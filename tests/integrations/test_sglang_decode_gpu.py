"""SGLang's own decode kernel and its KV pool in a measurement, on a GPU with SGLang: pytest -s shows the times."""

from __future__ import annotations

import importlib
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations.sglang import attention, decode_points
from fk_integrations.sglang.scheduler import SglangAdapter

from fastkernels.core.tuning import Chip
from fastkernels.overrides.attention.attention_decode import attention_decode, reference
from fastkernels.verify import measure
from fastkernels.verify.measure import Point

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
D, BF16 = 128, torch.bfloat16
# (query heads, key heads): Llama-2-13B, Yi-6B, Qwen2.5-7B
SHAPES = pytest.mark.parametrize(("heads", "kv_heads"), [(40, 40), (32, 4), (28, 4)])


def runner_of(heads: int, kv_heads: int, page: int, slots: int, context: int) -> tuple[Any, list[Any]]:
    """(a model runner with SGLang's FlashAttention backend on a pool, two layers)."""
    module: Any = pytest.importorskip(attention.FLASH.partition(":")[0])
    plan = importlib.import_module("sgl_kernel.flash_attn").get_scheduler_metadata
    host = module.FlashAttentionBackend
    backend: Any = type(
        host.__name__, (), {"__module__": host.__module__, "__qualname__": host.__qualname__}
    )()
    vars(backend).update(
        init_cuda_graph_state=None, num_attention_heads=heads, num_kv_heads=kv_heads, head_dim=D, num_splits=0,
        fa_impl_ver=3, page_size=page, use_mla=False, has_softcap=False, kv_cache_dtype=BF16,
        _get_scheduler_metadata=plan, _disable_scheduler_metadata_precompute=False,
    )  # fmt: skip
    backend._compute_scheduler_metadata = MethodType(host._compute_scheduler_metadata, backend)
    pool = type("MHATokenToKVPool", (), {})()
    buffers = [torch.randn(slots + page, kv_heads, D, device="cuda", dtype=BF16) for _ in range(4)]
    pool.dtype, pool.store_dtype, pool.size, pool.page_size = BF16, BF16, slots, page
    pool.k_buffer, pool.v_buffer = buffers[:2], buffers[2:]
    pool.get_kv_buffer = lambda i: (pool.k_buffer[i], pool.v_buffer[i])
    backend.token_to_kv_pool = pool
    runner: Any = SimpleNamespace(
        attn_backend=backend, max_running_requests=64, model_config=SimpleNamespace(context_len=context),
        server_args=SimpleNamespace(kv_cache_dtype="auto", pp_size=1),
    )  # fmt: skip
    layers = [SimpleNamespace(layer_id=i, logit_cap=0.0) for i in range(2)]
    return runner, layers


@SHAPES
@pytest.mark.parametrize("page", [1, 64])
def test_hosts_kernel_agrees_in_a_graph(heads: int, kv_heads: int, page: int) -> None:
    runner, layers = runner_of(heads, kv_heads, page, 8192, 4096)
    shape = heads, kv_heads, D, page, 0, BF16
    here = SglangAdapter(runner).of("attention_decode").live(attention_decode, shape, layers)
    assert here is not None and here.host is not None and here.calls is not None
    point = Point("attention_decode", shape, (8, 4096), tuple(layers))
    found = here.calls(point, torch.device("cuda"), torch.Generator("cuda").manual_seed(0), 1 << 20)
    assert found is not None
    check, calls = found
    for given in (check, calls[0], calls[1]):
        torch.testing.assert_close(
            here.host.fn(*given).float(), reference(*given).float(), atol=2e-2, rtol=2e-2
        )
    times = measure.interleaved([here.host.fn, attention_decode.run], calls, torch.device("cuda"), 5)
    assert all(t > 0 for each in times for t in each)


@SHAPES
def test_decodes_are_measured_on_the_pool(heads: int, kv_heads: int) -> None:
    runner, layers = runner_of(heads, kv_heads, 1, 120_000, 4096)
    here = SglangAdapter(runner).of("attention_decode")
    shape = heads, kv_heads, D, 1, 0, BF16
    live = here.live(attention_decode, shape, layers)
    points = [Point("attention_decode", shape, p, tuple(layers), live) for p in here.points(attention_decode)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    found = measure.measure(points, "r", torch.device("cuda"), Chip.of("cuda"), 85.0)
    used = torch.cuda.max_memory_allocated() - held
    for text, said in found.said.items():
        print(text, said)
    print(found.seconds, f"{used >> 20} MiB")
    assert len(found.entries) == len(points) and found.stopped is None
    assert used < 3 << 30 and decode_points.host_kernel(runner) is not None
