"""Shared by the SGLang checks, which run inside .venv-sglang, started by tests/integrations/test_engines.py."""

import contextlib
import os
from pathlib import Path

from support.checks import PROMPTS

ROOT = Path(__file__).parents[2]  # tests/


def make_engine(**options):
    import sglang

    defaults = {
        "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_cuda_graph": True,
        "max_total_tokens": 4096, "random_seed": 0, "log_level": "warning",
    }  # fmt: skip
    return sglang.Engine(model_path=os.environ["TINY_LLAMA"], **{**defaults, **options})


@contextlib.contextmanager
def with_stand_ins():
    """Engines that are built here use the GPU stand-ins of without_gpu/sitecustomize.py."""
    before = os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "integrations" / "sglang" / "without_gpu"), before]
    )
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


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
