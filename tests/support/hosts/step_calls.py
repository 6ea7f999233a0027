"""Counts of what one process does in an engine's decode steps, for the vLLM checks: numbers that depend on no clock."""

import sys
from collections import Counter

import torch

STEPS = 3


def step_calls(llm, name: str) -> tuple[Counter, int]:
    """Return the Python calls of STEPS decode steps by package, and the calls of torch's dispatcher."""
    from vllm import SamplingParams

    engine, calls = llm.llm_engine, Counter()

    def count(frame, event, _):
        if event == "call":
            parts = frame.f_code.co_filename.split("/")
            calls[
                next((p for p in ("fk_integrations", "fastkernels", "vllm", "torch") if p in parts), "other")
            ] += 1

    params = SamplingParams(temperature=0, max_tokens=2 * STEPS + 4, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": list(range(5, 12))}, params)
    for _ in range(3):
        engine.step()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            engine.step()
    finally:
        sys.setprofile(before)
    with torch.profiler.profile() as profile:
        for _ in range(STEPS):
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    return calls, sum(event.count for event in profile.key_averages() if "::" in event.key)
