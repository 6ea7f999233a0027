"""What the SGLang checks share. They run inside .venv-sglang, started by tests/hosts/test_sglang.py."""

import os

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


def make_engine(**options):
    import sglang

    defaults = {
        "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_cuda_graph": True,
        "max_total_tokens": 4096, "random_seed": 0, "log_level": "warning",
    }  # fmt: skip
    return sglang.Engine(model_path=os.environ["TINY_LLAMA"], **{**defaults, **options})


def generate(engine, tokens=8):
    """[(token ids, log probability of each)] of greedy decoding: one prompt at a time, so that batches are the same."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    found = [engine.generate(p, sampling, return_logprob=True) for p in PROMPTS]
    return [(o["output_ids"], [step[0] for step in o["meta_info"]["output_token_logprobs"]]) for o in found]


def forced(engine, text):
    """The log probability of each token of the text after the first, and of the next one."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    info = engine.generate(text, sampling, return_logprob=True, logprob_start_len=0)["meta_info"]
    found = info["input_token_logprobs"][1:] + info["output_token_logprobs"]
    return [entry[0] for entry in found]


def ids(result):
    return [tokens for tokens, _ in result]


@pytest.fixture
def candidate(tmp_path):
    """candidate(source) -> the path of a file that holds it."""

    def write(source):
        (tmp_path / "candidate.py").write_text(source)
        return str(tmp_path / "candidate.py")

    return write
