"""Routing with random weights in a real vLLM and in our engine: tiny models whose routers have a bias."""

import pytest
from fk_bench.offline import offline
from fk_bench.offline.random_weights import VllmWorker
from support.tiny import GEMMA4_EXPERTS, make_tiny

REQUESTS, EXPERTS, PER_TOKEN = 32, 32, 4
MODELS = {
    "gemma4_text": {
        **GEMMA4_EXPERTS, "num_experts": EXPERTS, "top_k_experts": PER_TOKEN, "final_logit_softcapping": 30.0,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN},
    "deepseek_v3": {
        # vLLM's kernel for a CPU has these sizes only.
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 64,
        "head_dim": 64, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": PER_TOKEN,
    },
}  # fmt: skip
PROMPTS = [[10 + i, 50 + i, 450 - 7 * i] for i in range(REQUESTS)]


def experts_reached(host, model):
    """The distinct experts of the decode steps of 32 requests, a number for each layer with experts."""
    options = {
        "model": str(model), "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 64, "max_num_seqs": REQUESTS,
        "kv_tokens": None, "kv_bytes": 1 << 27, "gpu": False, "gpu_share": 0.2, "tensor_parallel": 1,
        "engine_args": {"device": "cpu"} if host == "fastkernels" else {},
    }  # fmt: skip
    generate, _, llm = getattr(offline, host)(options)
    chosen = {}

    def keep(name, ids):
        if len(ids) == REQUESTS:
            chosen.setdefault(name, []).append(len(ids.unique()))

    if host == "vllm":
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        for name, module in worker.get_model().named_modules():
            if hasattr(getattr(module, "router", None), "set_capture_fn"):
                module.router.set_capture_fn(lambda ids, name=name: keep(name, ids))
    else:
        for name, module in llm.llm_engine.runner.model.named_modules():
            if name.endswith((".router", ".gate", ".router.proj")):

                def hook(module, args, output, name=name):  # biases are 0
                    logits = output[0] if isinstance(output, tuple) else output
                    if logits.shape[1] == EXPERTS:  # not Gemma 4's router, whose projection is a module
                        keep(name, logits.topk(PER_TOKEN).indices)

                module.register_forward_hook(hook)
    generate(PROMPTS, 4)
    assert len(chosen) == (1 if "deepseek" in str(model) else 2)  # the first layer of DeepSeek-V3 is dense
    return [min(counts) for counts in chosen.values()]


@pytest.mark.parametrize("kind", MODELS)
def test_all_experts_are_reached_in_both_engines(tmp_path, kind):
    """Of 32 experts, 32 different tokens with uniform routing to 4 reach 31.6 on average."""
    model = make_tiny(tmp_path / kind, kind, **MODELS[kind])
    for host in ("vllm", "fastkernels"):
        assert min(experts_reached(host, model)) >= 26, host


def test_hosts_own_random_weights_reach_few(tmp_path, monkeypatch):
    monkeypatch.setattr(VllmWorker, "draw_random_weights", lambda self: None)
    model = make_tiny(tmp_path / "gpt_oss", "gpt_oss", **MODELS["gpt_oss"])
    assert experts_reached("vllm", model) == [PER_TOKEN, PER_TOKEN]
