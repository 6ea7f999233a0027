"""Our engine with requests of its runner, and models of libraries: an answer is one row of numbers.

A request follows from its number alone. All answers of an item have the same size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fk_bench.evaluate.run.hosts.libraries import MODELS, Library
from fk_bench.evaluate.run.hosts.requests import Requests
from fk_bench.evaluate.run.hosts.sent import Draw, Sent, medium
from fk_bench.quality.faults import CannotPlant, NoHeads


def _heard(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> Any:
    """A recording, and the number of tokens that are generated from it."""
    return medium("audio", sizes, draw), int(sizes["new"])


def _transcribed(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    """The likeliest tokens and their log probabilities: [new, 2] each."""
    from fastkernels import SamplingParams

    start = llm.llm_engine.hf_config.decoder_start_token_id
    given = [{"prompt_token_ids": [start], "multi_modal_data": {"audio": heard}} for heard, _ in requests]
    params = [
        SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=n, logprobs=1)
        for _, n in requests
    ]
    found = llm.generate(given, params, use_tqdm=False)
    made = []
    for output in (o.outputs[0] for o in found):
        tokens = list(output.token_ids)
        own = [table[token].logprob for token, table in zip(tokens, output.logprobs, strict=True)]
        made.append(np.stack((tokens, own), -1).astype(np.float32))
    return made


SPEECH = Sent(_heard, _transcribed)


class Engine:
    """model: a checkpoint's folder, or the name of a library's model in MODELS."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        given = {
            **options, "model": model, "gpu": torch.cuda.is_available(), "max_num_seqs": options["batch"],
        }  # fmt: skip
        self.sizes, self.family = options["request"], options["family"]
        self.host: Library | Requests
        if model in MODELS:
            self.host = Library(given)
        elif self.family == "speech":
            longest = {"max_model_len": int(self.sizes["new"]) + 8, "skip_tokenizer_init": False}
            given["engine_args"] = {**longest, **options["engine_args"]}
            self.host = Requests(given, SPEECH)
        else:
            self.host = Requests(given)
        self.shape: list[int] = []
        self.protein: dict[str, torch.Tensor] = {}  # of a library
        self.chain = ""
        if self.family == "structure" and not isinstance(self.host, Library):
            self.chain = self._request(0)[0]["chains"][0]["sequence"]

    @property
    def target(self) -> Any:
        return self.host.target

    def plant(self, fault: str) -> None:
        """Change weights in place, or with '' restore them. Raises CannotPlant."""
        found = self.host.plant(fault)
        if not found["planted"]:
            raise (CannotPlant if found["concerns"] else NoHeads)(found["reason"])

    @torch.inference_mode()
    def encode(self, seeds: list[int]) -> torch.Tensor:
        """[n, values]: an answer each. A library is called once for each request."""
        if isinstance(self.host, Library):
            subject = self.host.subject
            draws = [torch.Generator().manual_seed(seed) for seed in seeds]
            answer = subject.answer or subject.call
            inputs = [subject.make(1, draw) for draw in draws]
            if (
                self.family == "structure"
            ):  # random proteins differ in their atoms: all are one, with other noise
                self.protein = self.protein or inputs[0][0][1]
                inputs = [[(seed, self.protein)] for ((seed, _),) in inputs]
            found = [answer(made).float().cpu() for made in inputs]
            found = [row[0] if row.dim() > 1 and len(row) == 1 else row for row in found]
        else:
            requests = [self._request(seed) for seed in seeds]
            answers = self.host.sent.answer(self.host.target, requests)
            found = [torch.from_numpy(np.ascontiguousarray(a, np.float32)) for a in answers]
        if len(sizes := {tuple(row.shape) for row in found}) > 1:
            raise ValueError(f"the answers have the sizes {sorted(sizes)}, they must be equal")
        self.shape = list(found[0].shape)
        return torch.stack(found).flatten(1)

    def _request(self, seed: int) -> Any:
        """Chains are permutations of the first one, so that all have as many atoms."""
        draw = np.random.default_rng(seed)
        made = self.host.sent.make(self.target, self.sizes, draw)  # type: ignore[union-attr]
        if self.family != "structure":
            return made
        self.chain = self.chain or made[0]["chains"][0]["sequence"]
        return {"chains": [{"sequence": "".join(draw.permutation([*self.chain]))}]}, *made[1:]

    def note(self, file: Path) -> None:
        """Write the shape of one answer."""
        file.write_text(json.dumps(self.shape))

    def close(self) -> None:
        if callable(getattr(self.target, "shutdown", None)):
            self.target.shutdown()
