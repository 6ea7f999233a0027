"""What the vLLM checks share. They run inside .venv-vllm, started by tests/hosts/test_vllm.py."""

import pytest

PROMPTS = ["Hello my name is", "The quick brown fox", "ab"]
RMS_NORM_BUG = "def rms_norm(x, weight, eps, *args):\n    raise ValueError('a bug in the candidate')\n"
RMS_NORM_TWICE = (
    "import torch\n"
    "def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):\n"
    "    h = x.float() if residual is None else x.float() + residual.float()\n"
    "    if residual is not None:\n"
    "        residual.copy_(h)\n"
    "    return (2 * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight\n"
)


def make_llm(model: str, **options):
    from vllm import LLM

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


@pytest.fixture
def candidate(tmp_path):
    """candidate(source) -> the path of a file that holds it."""

    def write(source: str) -> str:
        (tmp_path / "candidate.py").write_text(source)
        return str(tmp_path / "candidate.py")

    return write
