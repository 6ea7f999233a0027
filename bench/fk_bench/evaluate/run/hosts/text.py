"""Engines that generate text: greedy, of exact lengths; scores of given tokens after the same prefix; faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastkernels.patch import Request, find_host
from fk_bench.evaluate.run.hosts import weights
from fk_bench.evaluate.run.hosts.patched import Patched
from fk_bench.evaluate.run.hosts.sent import RESERVED, medium
from fk_bench.quality import planting

SEEDED = 4  # first tokens of a prompt from which its medium follows
Ids = list[list[int]]
Scores = list[list[list[float]]]  # of each request and token: its log probability, and that of the likeliest


def _tables(entries: list[Any], ids: list[int]) -> list[list[float]]:
    """[log probability of the token, of the likeliest] from a host's tables {token: Logprob}."""
    return [[e[t].logprob, max(v.logprob for v in e.values())] for e, t in zip(entries, ids, strict=True)]


class Remote(Patched):
    """A host whose model is in processes of its own."""

    remote = True

    def rescale(self) -> None:
        """See `weights.rescale`; of models with random weights of the host."""
        options = {"function": f"{weights.__name__}:rescale", "arguments": {}}
        find_host(self.target).call(self.target, Request("apply", options=options))

    def plant(self, fault: str) -> dict[str, Any]:
        """The first refusal of a rank, else {"planted": True}."""
        options = {"function": f"{planting.__name__}:plant", "arguments": {"fault": fault}}
        replies = find_host(self.target).call(self.target, Request("apply", options=options))
        return _together([r["result"] for r in replies])


def _together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return next((a for a in answers if not a["planted"]), answers[0])


class Engine(Remote):
    """vLLM or our engine: both have LLM and SamplingParams."""

    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        from fk_bench.offline import offline, vllm_process

        if options["host"] == "vllm":
            vllm_process.prepare()
        build = {"fastkernels": offline.fastkernels, "vllm": offline.vllm}[options["host"]]
        if options["media"]:  # its processor names the placeholders
            options = {**options, "engine_args": {"skip_tokenizer_init": False, **options["engine_args"]}}
        _, _, self.target = build(options)
        self.remote = options["host"] == "vllm"
        if options["media"] or "speculative_config" in options["engine_args"]:
            weights.redraw(self.target.llm_engine.runner.model)
        elif options["load_format"] == "dummy":
            self.rescale()
        self._media = WithMedia(self.target, options) if options["media"] else None

    def _params(self, **given: Any) -> Any:
        if self.options["host"] == "vllm":
            from vllm import SamplingParams
        else:
            from fastkernels import SamplingParams
        return SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **given)

    def _run(self, prompts: Ids, params: list[Any]) -> Any:
        given = [{"prompt_token_ids": p} for p in prompts]
        return self.target.generate(
            self._media.added(given) if self._media else given, params, use_tqdm=False
        )

    def generate(self, prompts: Ids, lengths: list[int], logprobs: bool = False) -> dict[str, Any]:
        more: dict[str, Any] = {"logprobs": 1} if logprobs else {}
        if self._media:
            more["logit_bias"] = self._media.bias
        outputs = [
            o.outputs[0] for o in self._run(prompts, [self._params(max_tokens=n, **more) for n in lengths])
        ]
        found: dict[str, Any] = {"tokens": [list(o.token_ids) for o in outputs]}
        if logprobs:
            found["logprobs"] = [[own for own, _ in _tables(o.logprobs, list(o.token_ids))] for o in outputs]
        return found

    def rescale(self) -> None:
        if self.remote:
            super().rescale()
        else:
            self.target.llm_engine.executor.call(weights.rescale_in_runner)

    def plant(self, fault: str) -> dict[str, Any]:
        if self.remote:
            return super().plant(fault)
        return _together(self.target.llm_engine.executor.call(planting.plant_in_runner, fault))

    def score(self, prompts: Ids, outputs: Ids) -> dict[str, Any]:
        whole = [p + o for p, o in zip(prompts, outputs, strict=True)]
        params = [self._params(max_tokens=1, prompt_logprobs=1)] * len(whole)
        found = self._run(whole, params)
        return {
            "scores": [
                _tables(f.prompt_logprobs[-len(o) :], o)  # a medium has made the prompt longer
                for f, o in zip(found, outputs, strict=True)
            ]
        }


class WithMedia:
    """Gives each request of our engine a medium that follows from its prompt."""

    def __init__(self, llm: Any, options: dict[str, Any]):
        self._kind, self._sizes = options["media"], options["request"]
        # of placeholders; a decoder with a source has none
        tokens: dict[str, int] = getattr(llm.llm_engine.runner.model, "token_ids", {})
        self._placeholder, self._taken = [tokens[self._kind]] if tokens else [], {*tokens.values()}
        self.bias = dict.fromkeys(self._taken, -100.0)  # a generated placeholder would lack its medium

    def added(self, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made = []
        for one in given:
            ids = one["prompt_token_ids"]
            draw = np.random.default_rng(ids[:SEEDED])
            plain = [RESERVED if i in self._taken else i for i in ids]
            data = {self._kind: medium(self._kind, self._sizes, draw)}
            made.append({"prompt_token_ids": [*self._placeholder, *plain], "multi_modal_data": data})
        return made


class SGLang(Remote):
    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        from fk_bench.offline import offline

        _, _, self.target = offline.sglang(options)
        if options["load_format"] == "dummy":
            self.rescale()

    def generate(self, prompts: Ids, lengths: list[int], logprobs: bool = False) -> dict[str, Any]:
        params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in lengths]
        more = {"return_logprob": True} if logprobs else {}
        outputs = self.target.generate(input_ids=prompts, sampling_params=params, **more)
        found: dict[str, Any] = {"tokens": [list(o["output_ids"]) for o in outputs]}
        if logprobs:
            found["logprobs"] = [[t[0] for t in o["meta_info"]["output_token_logprobs"]] for o in outputs]
        return found

    def score(self, prompts: Ids, outputs: Ids) -> dict[str, Any]:
        whole = [p + o for p, o in zip(prompts, outputs, strict=True)]
        found = self.target.generate(
            input_ids=whole, sampling_params=[{"temperature": 0, "max_new_tokens": 1}] * len(whole),
            return_logprob=True, logprob_start_len=[0] * len(whole), top_logprobs_num=[1] * len(whole),
        )  # fmt: skip
        scores: Scores = []
        for one, prompt in zip(found, prompts, strict=True):
            meta, first = one["meta_info"], len(prompt)
            own, top = meta["input_token_logprobs"][first:], meta["input_top_logprobs"][first:]
            scores.append([[o[0], max(o[0], t[0][0])] for o, t in zip(own, top, strict=True)])
        return {"scores": scores}


class Transformers(Patched):
    """A causal model of transformers, with `generate` as users call it: a padded batch."""

    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        dtype = getattr(torch, options["dtype"])
        if options["load_format"] == "dummy":
            config = AutoConfig.from_pretrained(options["model"])
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            weights.redraw(model)
        else:
            model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype)
        model.generation_config = GenerationConfig()  # without a checkpoint's penalties and ends
        self.target = model.eval().to("cuda" if options["gpu"] else "cpu")

    def _padded(self, rows: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask, padded on the left: [B, T]."""
        longest = max(map(len, rows))
        ids = [[0] * (longest - len(r)) + r for r in rows]
        mask = [[0] * (longest - len(r)) + [1] * len(r) for r in rows]
        device = self.target.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    @torch.inference_mode()
    def generate(self, prompts: Ids, lengths: list[int], logprobs: bool = False) -> dict[str, Any]:
        ids, mask = self._padded(prompts)
        most = max(lengths)
        out = self.target.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=most, min_new_tokens=most,
            pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=logprobs,
        )  # fmt: skip
        new = out.sequences[:, ids.shape[1] :]  # [B, T]
        found: dict[str, Any] = {"tokens": _cut(new, lengths)}
        if logprobs:
            tables = torch.stack(out.logits, 1).float().log_softmax(-1)  # [B, T, V]
            found["logprobs"] = _cut(tables.gather(2, new[..., None])[..., 0], lengths)
        return found

    def plant(self, fault: str) -> dict[str, Any]:
        return planting.plant(self.target, fault)

    @torch.inference_mode()
    def score(self, prompts: Ids, outputs: Ids) -> dict[str, Any]:
        scores: Scores = []
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = torch.tensor([prompt + output], device=self.target.device)
            logits = self.target(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            table = logits.log_softmax(-1)  # [tokens, V]
            own = table.gather(1, ids[0, len(prompt) :, None])[:, 0]
            scores.append([[a, b] for a, b in zip(own.tolist(), table.amax(-1).tolist(), strict=True)])
        return {"scores": scores}


class Fla(Transformers):
    """A causal model of flash-linear-attention: its import registers the models with transformers.

    Steps are calls of the model: `generate` of transformers 5.24 loses the state of a model of fla 0.6.0.
    """

    def __init__(self, options: dict[str, Any]):
        import fla.models  # noqa: F401

        super().__init__(options)

    @torch.inference_mode()
    def generate(self, prompts: Ids, lengths: list[int], logprobs: bool = False) -> dict[str, Any]:
        ids, mask = self._padded(prompts)
        state: Any = None
        tokens, tables = [], []
        for _ in range(max(lengths)):
            out = self.target(input_ids=ids, attention_mask=mask, past_key_values=state, use_cache=True)
            logits, state = out.logits[:, -1], out.past_key_values
            ids = logits.argmax(-1, keepdim=True)
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
            tokens.append(ids)
            if logprobs:
                tables.append(logits.float().log_softmax(-1).gather(1, ids))
        found: dict[str, Any] = {"tokens": _cut(torch.cat(tokens, 1), lengths)}
        if logprobs:
            found["logprobs"] = _cut(torch.cat(tables, 1), lengths)
        return found


def _cut(rows: torch.Tensor, lengths: list[int]) -> list[list[Any]]:
    """The first values of each row: [B, T] -> lists of these lengths."""
    return [row[:n] for row, n in zip(rows.tolist(), lengths, strict=True)]
