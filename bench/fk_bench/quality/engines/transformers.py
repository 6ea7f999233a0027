"""transformers: prompts of equal length run together, then one forward a forced token, with its own cache."""

from __future__ import annotations

from typing import Any

import torch

from fk_bench.quality.forced import store


class Engine:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from transformers import AutoModel, AutoModelForCausalLM

        kind = AutoModelForCausalLM if options["family"] == "text" else AutoModel
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, options["dtype"])
        self.target: Any = kind.from_pretrained(model, dtype=dtype, **options["engine_args"]).eval()
        self.target.to(self.device)

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], tasks: list[dict[str, Any]]) -> list[list[int]]:
        """Return the tokens that were given to the model, which are each task's own."""
        by_length: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(i)
        for chosen in by_length.values():
            mine, cache = [tasks[i] for i in chosen], None
            given = torch.tensor([prompts[i] for i in chosen], device=self.device)
            for step in range(len(mine[0]["tokens"])):
                found = self.target(input_ids=given, past_key_values=cache, use_cache=True)
                cache = found.past_key_values
                store(found.logits[:, -1], mine, step)
                given = torch.tensor([[task["tokens"][step]] for task in mine], device=self.device)
        return [task["tokens"] for task in tasks]

    @torch.inference_mode()
    def encode(self, texts: list[list[int]]) -> torch.Tensor:
        """[n, D]: the mean over each text's tokens, in one padded batch."""
        longest = max(map(len, texts))
        tokens = torch.tensor([t + [0] * (longest - len(t)) for t in texts], device=self.device)
        mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in texts], device=self.device)
        hidden = self.target(input_ids=tokens, attention_mask=mask).last_hidden_state.float()  # [n, T, D]
        return ((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).cpu()

    def close(self) -> None:
        del self.target
