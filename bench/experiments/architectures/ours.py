"""The lane of our engine: from requests on the CPU to answers on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from experiments.architectures import subjects
from experiments.architectures.subjects import Case, Lane, Subject
from experiments.architectures.times import Times
from fk_bench.evaluate import checkpoints
from fk_bench.evaluate.run.hosts.requests import FIXED
from fk_bench.evaluate.run.hosts.sent import RESERVED, SENT, medium
from fk_bench.evaluate.run.hosts.weights import redraw
from fk_bench.tables.architectures import OURS, PREPARED

KEPT_OBJECTS = 8  # of a segmenter: those of random weights are all of middling scores
KV_TOKENS = 1 << 17  # of the cache; its memory does not count in the time of a call


def run(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """Time calls with requests, and, for OURS, with requests that were checked and prepared before."""
    from fastkernels import LLM

    cases = subject.cases
    model = subjects.model_of(subject, tiny)
    folder = checkpoints.folder(model, "requests")
    options: dict[str, Any] = {"load_format": "dummy", "dtype": subject.dtype, **subject.options}
    options["max_num_seqs"] = max(case["batch"] for case in cases)
    options["skip_tokenizer_init"] = "." not in model.tokenizers
    if not times.cuda:
        options["device"] = "cpu"
    if "max_num_batched_tokens" in options and tiny:
        del options["max_num_batched_tokens"]
    with LLM(str(folder), **options) as llm:
        runner = llm.llm_engine.runner
        kind = llm.llm_engine.kind
        if kind != "Generate" and kind not in FIXED:
            redraw(runner.model)
        if kind != "Generate" and callable(getattr(runner.model, "refresh", None)):
            runner.capture()
        for case in cases:
            sizes = subjects.sizes_of(subject, case, tiny)
            work = _texts(llm, case, sizes) if kind == "Generate" else _requests(llm, case, sizes)
            times.add(case, work.whole, warm_up=2 if kind == "Generate" else 3)
            if lane.name == OURS and subject.prepared:
                times.add(case, work.prepared, PREPARED)


class Work:
    """Requests of one case. fresh: each call has its own, since the engine keeps what it has computed."""

    def __init__(self, llm: Any, draw: Any, answer: Any, count: int, fresh: bool) -> None:
        self.llm, self.draw, self.answer, self.count, self.fresh = llm, draw, answer, count, fresh
        self.random = np.random.default_rng(0)

    def made(self) -> list[Any]:
        return [self.draw(self.random) for _ in range(self.count)]

    def whole(self) -> Any:
        kept = None if self.fresh else self.made()
        return (lambda: kept or self.made()), self.answer

    def prepared(self) -> Any:
        """Calls with requests that are checked, and whose images are read, before the clock runs."""
        kept = None if self.fresh else self.made()

        def make() -> list[Any]:
            taken: list[Any] = []
            self.llm._complete = lambda requests, bar: taken.extend(requests) or (_ for _ in ()).throw(Taken)
            try:
                self.answer(kept or self.made())
            except Taken:
                return taken
            finally:
                del self.llm._complete
            raise RuntimeError("the answer made no requests")

        return make, lambda requests: self.llm._complete(requests, False)


class Taken(Exception):
    """Requests were made, and are not run yet."""


def _requests(llm: Any, case: Case, sizes: Mapping[str, Any]) -> Work:
    sent = SENT[llm.llm_engine.kind, llm.llm_engine.inputs]
    segments = getattr(llm.llm_engine, "segments", False)

    def answer(requests: Sequence[Any]) -> Any:
        if not segments:
            return sent.answer(llm, requests)
        from fastkernels.engine.sampling.pooling import PoolingParams

        params = PoolingParams("segment", threshold=0.0, max_detections=KEPT_OBJECTS)
        return llm.segment(list(requests), params, use_tqdm=False)

    count = case["batch"]
    if llm.llm_engine.kind == "Score":  # recommenders take a batch as the rows of one request
        sizes, count = {**sizes, "rows": count}, 1
    return Work(llm, lambda random: sent.make(llm, sizes, random), answer, count, segments)


def _texts(llm: Any, case: Case, sizes: Mapping[str, Any]) -> Work:
    """Prompts of random tokens, with a medium where the model reads one. No two calls share a prefix."""
    from fastkernels import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=int(sizes["new"]), ignore_eos=True, detokenize=False)
    draw = prompts(llm.llm_engine.hf_config, getattr(llm.llm_engine.runner.model, "token_ids", {}), sizes)
    return Work(llm, draw, lambda given: llm.generate(given, params, use_tqdm=False), case["batch"], True)


def prompts(config: Any, tokens: Mapping[str, int], sizes: Mapping[str, Any]) -> Any:
    """A function of a generator: one prompt for our engine or vLLM. tokens: placeholders of media by kind."""
    text = getattr(config, "text_config", None) or config
    kind = "audio" if "seconds" in sizes else "image" if "width" in sizes else ""
    length = int(sizes.get("text", sizes["tokens"]) if kind else sizes["tokens"])
    vocabulary = min([text.vocab_size, *tokens.values()])

    def draw(random: np.random.Generator) -> dict[str, Any]:
        ids = random.integers(RESERVED, vocabulary, length).tolist()
        if not kind:
            return {"prompt_token_ids": ids}
        placeholder = [tokens[kind]] if kind in tokens else []
        return {
            "prompt_token_ids": [*placeholder, *ids],
            "multi_modal_data": {kind: medium(kind, sizes, random)},
        }

    return draw
