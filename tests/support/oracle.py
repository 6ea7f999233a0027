"""Expected tokens, log-probabilities and ends of requests, computed one by one from transformers' logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastkernels import LLM, SamplingParams
from fastkernels.engine.scheduling.request import Logprob, RequestOutput
from fastkernels.overrides.kit.philox import exponential

TOLERANCE = 2e-4  # of float32 log-probabilities
EOS = 1  # in the checkpoints of tiny.py
STEM = [(i * 49) % 500 for i in range(40)]  # no prompt below ends within a UTF-8 character
ALL = {
    "temperature": 1.2, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.4,
    "frequency_penalty": 0.3, "logit_bias": {7: 2.0, 300: -5.0, 301: 8.0}, "min_tokens": 4, "seed": 11, "logprobs": 4,
    "prompt_logprobs": 2, "n": 3, "stop": ["5>", "_40"], "stop_token_ids": [301, 17],
}  # fmt: skip
# (prompt, params) for the models of tiny.py; the prompts share prefixes.
REQUESTS = [
    (prompt, SamplingParams(**{"max_tokens": 20, "seed": 5, **fields}))
    for prompt, fields in [
        ([7], {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1}),
        (STEM[:33], {"temperature": 0, "logprobs": 0, "prompt_logprobs": 3, "ignore_eos": True}),
        (STEM, {"n": 2, "logprobs": 5, "prompt_logprobs": 0}),
        (STEM[:20], ALL),
        (
            [9, 8, 7],
            {"temperature": 0.7, "seed": -3, "n": 2, "stop": ["1>", "2"], "include_stop_str_in_output": True},
        ),
        (
            STEM[:17],
            {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 1.0},
        ),
        (STEM[5:30], {"temperature": 0, "min_tokens": 9, "logit_bias": {1: 100.0, 44: 95.0}}),
        ([*STEM[:16], 3], {"top_p": 0.4, "temperature": 2.0, "seed": 2**63 - 9, "logit_bias": {1: 9.0}}),
    ]
]


class Oracle:
    """transformers' models in float32. Logits are cached by folder and tokens."""

    def __init__(self) -> None:
        self._models: dict[Path, Any] = {}
        self._tokenizers: dict[Path, Any] = {}
        self._logits: dict[tuple[Path, tuple[int, ...]], torch.Tensor] = {}

    def model(self, folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        if folder not in self._models:
            self._models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return self._models[folder]

    def tokenizer(self, folder: Path) -> Any:
        from transformers import AutoTokenizer

        if folder not in self._tokenizers:
            self._tokenizers[folder] = AutoTokenizer.from_pretrained(folder)
        return self._tokenizers[folder]

    @torch.inference_mode()
    def logits(self, folder: Path, ids: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] float32 of the token after each position."""
        key = (folder, tuple(ids))
        if key not in self._logits:
            self._logits[key] = self.model(folder)(torch.tensor([list(ids)])).logits[0].float()
        return self._logits[key]

    def greedy(self, folder: Path, prompt: list[int], n: int) -> list[int]:
        """The next n greedy tokens of transformers, ignoring EOS."""
        ids = torch.tensor([prompt])
        out = self.model(folder).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    def check_requests(self, folder: Path, llm: LLM) -> None:
        """Compare this engine's outputs for REQUESTS with the oracle's."""
        prompts, params = (list(each) for each in zip(*REQUESTS, strict=True))
        for output, own in zip(llm.generate(prompts, params), params, strict=True):
            self.check(folder, output, own)

    def check(self, folder: Path, output: RequestOutput, params: SamplingParams, eos: int = EOS) -> None:
        """Assert that each of the n outputs equals the oracle's. params needs a seed unless greedy."""
        prompt = output.prompt_token_ids
        assert output.finished and [o.index for o in output.outputs] == list(range(params.n))
        for out in output.outputs:
            ids = list(out.token_ids)
            rows = self.logits(folder, [*prompt, *ids])
            ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (eos,))}
            for at, token in enumerate(ids):
                seed = (params.seed or 0) + out.index
                want = choose(rows[len(prompt) - 1 + at], params, prompt, ids[:at], ends, seed)
                assert token == want, f"output {out.index}, token {at}: {token}, not {want}; {params}"
            text, *end = self._end(folder, ids, params, ends)
            assert (out.text, out.finish_reason, out.stop_reason) == (text, *end), params
            if params.logprobs is None:
                assert out.logprobs is None and out.cumulative_logprob is None
                continue
            assert out.logprobs is not None and len(out.logprobs) == len(ids)
            for at, (token, found) in enumerate(zip(ids, out.logprobs, strict=True)):
                check_logprobs(found, token, params.logprobs, rows[len(prompt) - 1 + at])
            total = math.fsum(e[t].logprob for t, e in zip(ids, out.logprobs, strict=True))
            assert out.cumulative_logprob is not None and abs(out.cumulative_logprob - total) < TOLERANCE
        self._check_prompt(folder, output, params)

    def _check_prompt(self, folder: Path, output: RequestOutput, params: SamplingParams) -> None:
        prompt, found = output.prompt_token_ids, output.prompt_logprobs
        if params.prompt_logprobs is None:
            assert found is None
            return
        assert found is not None and len(found) == len(prompt) and found[0] is None
        rows = self.logits(folder, prompt)
        for at in range(1, len(prompt)):
            entry = found[at]
            assert entry is not None
            check_logprobs(entry, prompt[at], params.prompt_logprobs, rows[at - 1])

    def _end(
        self, folder: Path, ids: list[int], params: SamplingParams, ends: set[int]
    ) -> tuple[str, str, int | str | None]:
        """Text, finish_reason and stop_reason of these tokens. Only the last one may end the request."""
        decode = self.tokenizer(folder).decode
        for n in range(1, len(ids) + 1):
            last = n == len(ids)
            if n >= params.min_tokens and ids[n - 1] in ends:
                assert last, f"went on after token {ids[n - 1]}"
                stop = ids[-1] if ids[-1] in (params.stop_token_ids or ()) else None
                return decode(ids[:-1], skip_special_tokens=True), "stop", stop
            old, text = (decode(ids[:m], skip_special_tokens=True).rstrip("\ufffd") for m in (n - 1, n))
            starts = {s: text.find(s, max(0, len(old) - len(s) + 1)) for s in params.stop_strings}
            found = [(at + len(s), s) for s, at in starts.items() if at >= 0]  # completed by the last token
            if found and n >= params.min_tokens:
                assert last, f"went on after {min(found)}"
                end, stop = min(found)
                return text[: end if params.include_stop_str_in_output else end - len(stop)], "stop", stop
        assert len(ids) == params.max_tokens
        return decode(ids, skip_special_tokens=True), "length", None


def choose(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    ends: set[int],
    seed: int,
) -> int:
    """The next token after `output` from logits [V], in vLLM's order, with noise of (seed, index, token)."""
    x = logits.double()
    if len(output) < params.min_tokens:
        x[list(ends)] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.temperature == 0:
        return int(x.argmax())
    x = x / params.temperature
    stay = filtered(x, params)
    noise = exponential(torch.tensor([seed]), torch.tensor([len(output)]), len(x))[0].double()
    return int(torch.where(stay > 0, x - noise.log(), -math.inf).argmax())


def filtered(x: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [V] after min_p, top_k and top_p, in this order, of logits divided by the temperature."""
    p = x.double().softmax(dim=-1)
    p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    if 0 < params.top_k < len(p):
        p = torch.where(p >= p.topk(params.top_k).values[-1], p, 0.0)
    p = p / p.sum()
    if params.top_p < 1:
        likely, order = p.sort(descending=True)
        p[order[likely.cumsum(dim=-1) - likely >= params.top_p]] = 0.0
    return p / p.sum()


def check_logprobs(found: dict[int, Logprob], token: int, k: int, logits: torch.Tensor) -> None:
    """Assert that the token's entry comes first, then the k most likely ones, with ties in any order."""
    want = logits.log_softmax(dim=-1)
    assert next(iter(found)) == token and k <= len(found) <= k + 1
    for other, entry in found.items():
        assert abs(entry.logprob - float(want[other])) < TOLERANCE
        least, most = (int((want > want[other] + by).sum()) for by in (TOLERANCE, -TOLERANCE))
        assert entry.rank is not None and least < entry.rank <= most
    assert {e.rank for e in found.values()} >= set(range(1, k + 1))
