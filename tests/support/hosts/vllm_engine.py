"""Shared by the vLLM checks, which run inside .venv-vllm, started by tests/integrations/test_engines.py."""

from support.checks import PROMPTS


def make_llm(model: str, **options):
    from vllm import LLM, _custom_ops
    from vllm.model_executor.models import registry

    # It would look at each new kind of model in a process of its own, so as not to initialize CUDA: 10 s.
    registry._run_in_subprocess = lambda look: look()
    # On a CPU without AMX vLLM packs linear layers for oneDNN and frees their weights, which our ops then cannot read.
    # Most checks have their worker in this process.
    _custom_ops._supports_onednn = False
    defaults = {
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "seed": 0,
    }
    return LLM(model, **{**defaults, **options})


def generate(llm, tokens: int = 8):
    """[(token ids, log probability of each)] of greedy decoding: one prompt at a time, so that batches are the same."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    chosen = [llm.generate([p], params, use_tqdm=False)[0].outputs[0] for p in PROMPTS]
    return [
        (list(c.token_ids), [step[t].logprob for t, step in zip(c.token_ids, c.logprobs, strict=True)])
        for c in chosen
    ]


def first_logprobs(result) -> list[float]:
    return [logprobs[0] for _, logprobs in result]
