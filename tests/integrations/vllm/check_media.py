"""Models of images, audio and embeddings in vLLM: towers and cross attention, unpatched, patched and after undo."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm
from fk_integrations.core.journal import Journal
from fk_integrations.vllm import attention
from support.hosts.vllm_engine import make_llm
from support.media_oracle import RATE, tone
from support.tiny import IMAGE, make_tiny_bert, make_tiny_vlm, make_tiny_whisper
from support.vlm_oracle import image, prompt
from vllm import SamplingParams
from vllm.model_executor.layers.attention.cross_attention import (
    CrossAttention,
    create_cross_attention_backend,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

import fastkernels
from fastkernels.core.reasons import Kind

OPS = [
    "attention_dense", "embedding", "gelu", "layer_norm", "linear", "patch_embedding", "quick_gelu", "rms_norm",
    "rotary_emb", "silu_and_mul",
]  # fmt: skip
# vLLM's attention on a CPU has no heads of 16 numbers
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_QWEN2 = {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": _SECTIONS}
_QWEN3 = {"head_dim": 32, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}}
# {model: (fields, modules of its tower that each op replaces)}
TOWERS = {
    "qwen2_vl": (_QWEN2, {"attention_dense": 2, "patch_embedding": 1, "layer_norm": 5, "quick_gelu": 2, "gelu": 1}),
    "qwen2_5_vl": (_QWEN2, {"attention_dense": 3, "patch_embedding": 1, "gelu": 1}),
    "qwen3_vl": (_QWEN3, {"attention_dense": 3, "patch_embedding": 1, "layer_norm": 9, "gelu": 4}),
}  # fmt: skip
PROMPTS = [
    prompt(f"a{IMAGE}b", image(0, 40, 24)),
    prompt(f"a{IMAGE}b{IMAGE}c", image(1, 64, 24), image(2, 16, 32)),
    prompt("hello"),
]


@pytest.fixture
def engine():
    made = []

    def start(model, **options):
        made.append(make_llm(str(model), dtype="float32", num_gpu_blocks_override=64, **options))
        return made[-1]

    yield start
    for llm in made:
        llm.llm_engine.engine_core.shutdown()
    made.clear()
    gc.collect()


def generate(llm, prompts):
    """[(token ids, log probability of each)], without values of an earlier pass: neither encoded media nor keys."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    found = []
    for given in prompts:
        llm.reset_prefix_cache()
        llm.llm_engine.reset_mm_cache()
        llm.llm_engine.reset_encoder_cache()
        chosen = llm.generate([given], params, use_tqdm=False)[0].outputs[0]
        values = zip(chosen.token_ids, chosen.logprobs, strict=True)
        found.append((list(chosen.token_ids), [step[token].logprob for token, step in values]))
    return found


def check_same(found, stock):
    for (tokens, logprobs), (theirs, expected) in zip(found, stock, strict=True):
        assert tokens == theirs and logprobs == pytest.approx(expected, abs=1e-4)


def check_proved(report, modules):
    """Each op has so many modules, all of them called, without a fallback."""
    rows = report.refresh().active
    print(report)
    assert not any(row.fallbacks for row in report.rows)
    assert not any(kind is Kind.UNKNOWN_VERSION for row in report.rows for kind in row.kinds)
    for op, expected in modules.items():
        of = [row for row in rows if row.op == op]
        assert sum(row.modules for row in of) == expected, (op, of)
        assert all(row.calls and row.proof == "calls" for row in of), (op, of)


def unnamed(report, llm):
    """The classes of modules that compute something and that no row of the report names."""
    (classes,) = llm.apply_model(
        lambda model: {
            next(c.__name__ for c in type(m).__mro__ if not hasattr(c, "fastkernels"))
            for m in model.modules() if not list(m.children()) and not hasattr(m, "quant_method")
        }
    )  # fmt: skip
    text = " ".join([row.host_class for row in report.rows] + [row.reason for row in report.rows])
    return {name for name in classes if name not in text}


@pytest.mark.parametrize("kind", TOWERS)
def test_vision_tower_is_patched_and_undone(kind, engine, tmp_path):
    fields, modules = TOWERS[kind]
    llm = engine(make_tiny_vlm(tmp_path / kind, kind, **fields), max_model_len=256)
    stock = generate(llm, PROMPTS)
    assert stock[0] != stock[1]
    report = fastkernels.patch(llm, ops=OPS)
    check_same(generate(llm, PROMPTS), stock)
    check_proved(report, modules)
    assert unnamed(report, llm) <= {"LogitsProcessor", "Embedding"}
    report.undo()
    assert generate(llm, PROMPTS) == stock


MERGERS = {"qwen2_vl": 1, "qwen2_5_vl": 1, "qwen3_vl": 3}  # Qwen3-VL: two of layers within (deepstack)


@pytest.mark.parametrize("kind", TOWERS)
def test_mergers_are_patched_and_undone(kind, engine, tmp_path):
    llm = engine(make_tiny_vlm(tmp_path / kind, kind, **TOWERS[kind][0]), max_model_len=256)
    stock = generate(llm, PROMPTS)
    report = fastkernels.patch(llm, ops=["patch_merger"])
    check_same(generate(llm, PROMPTS), stock)
    check_proved(report, {"patch_merger": MERGERS[kind]})
    report.undo()
    assert generate(llm, PROMPTS) == stock


def test_whisper_is_patched_and_undone(engine, tmp_path):
    model = make_tiny_whisper(tmp_path / "whisper", d_model=64, decoder_attention_heads=2)
    llm = engine(model, max_model_len=96)
    prompts = [{"prompt": "<unk>ab", "multi_modal_data": {"audio": (tone(i, 0.9), RATE)}} for i in range(2)]
    stock = generate(llm, prompts)
    assert stock[0] != stock[1]
    report = fastkernels.patch(llm, ops=[*OPS, "attention"])
    check_same(generate(llm, prompts), stock)
    check_proved(report, {"attention_dense": 2, "layer_norm": 15})
    (row,) = [row for row in report.rows if row.op == "attention"]
    assert "6 unsupported" in row.reason and "packed for the CPU's own kernels" in row.reason
    report.undo()
    assert generate(llm, prompts) == stock


def test_cross_attention_with_flash_attention_is_undone():
    """The layer of a GPU, whose backend imports on a CPU; its KV cache is NHD in memory."""
    layer = CrossAttention.__new__(CrossAttention)
    torch.nn.Module.__init__(layer)
    host = create_cross_attention_backend(FlashAttentionBackend).get_impl_cls()
    layer.impl = impl = host.__new__(host)
    layer.kv_sharing_target_layer_name = None
    impl.attn_type, impl.kv_cache_dtype, impl.alibi_slopes, impl.sliding_window = (
        "encoder_decoder", "auto", None, (-1, -1)
    )  # fmt: skip
    impl.head_size, impl.scale, impl.logits_soft_cap, impl.sinks = 8, 8**-0.5, 0, None
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=None), model_config=SimpleNamespace(max_model_len=64),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )  # fmt: skip
    given = layer, vllm.__version__.partition("+")[0], config
    journal = Journal()
    assert attention.swap_attention(*given, journal, True).kind is Kind.LEFT_TO_HOST
    for name, other in (("logits_soft_cap", 30.0), ("sinks", torch.zeros(4)), ("sliding_window", (7, 0))):
        usual = getattr(impl, name)
        setattr(impl, name, other)
        assert "a window, a soft cap or sinks" in attention.swap_attention(*given, journal, False).text
        setattr(impl, name, usual)
    assert attention.swap_attention(*given, journal, False) is None
    generator = torch.Generator().manual_seed(0)
    kv_cache = torch.randn(5, 16, 2, 16, generator=generator).transpose(1, 2)
    table, lengths = (
        torch.tensor([[3, 1], [4, 2]], dtype=torch.int32),
        torch.tensor([21, 9], dtype=torch.int32),
    )
    query, output = torch.randn(4, 4, 8, generator=generator), torch.empty(4, 4, 8)
    metadata = SimpleNamespace(
        num_actual_tokens=4, max_query_len=3, max_seq_len=21, query_start_loc=torch.tensor([0, 3, 4]),
        seq_lens=lengths, block_table=table,
    )  # fmt: skip
    impl.forward(layer, query, None, None, kv_cache, metadata, output)
    for i, rows in enumerate((slice(0, 3), slice(3, 4))):
        states = kv_cache.transpose(1, 2)[table[i].long()].flatten(0, 1)[: lengths[i]]
        q, k, v = (t.transpose(0, 1) for t in (query[rows], states[..., :8], states[..., 8:]))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(output[rows], want.transpose(0, 1), atol=1e-5, rtol=1e-5)
    journal.undo()
    assert type(impl) is host


@pytest.mark.parametrize("cls", ["BertModel", "XLMRobertaModel"])
def test_embedder_is_patched_and_undone(cls, engine, tmp_path):
    model = make_tiny_bert(tmp_path / cls, cls=cls, num_attention_heads=2, position_embedding_type="absolute")
    llm = engine(model, max_model_len=64, runner="pooling")
    texts = ["Hello my name is", "The quick brown fox", "ab"]

    def embed():
        return np.array([found.outputs.embedding for found in llm.embed(texts, use_tqdm=False)])

    stock = embed()
    report = fastkernels.patch(llm, ops=OPS)
    np.testing.assert_allclose(embed(), stock, atol=1e-5)
    check_proved(report, {"layer_norm": 5, "linear": 8, "gelu": 1})  # vLLM has one GELU for all layers
    report.undo()
    np.testing.assert_array_equal(embed(), stock)
