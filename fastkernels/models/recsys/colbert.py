"""ColBERTv2 (Santhanam et al., arXiv 2112.01488): BERT with a projection of each token, scored by MaxSim."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import torch

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces.retrieval import Form, unit
from fastkernels.models.recsys.bert import BertModel
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear

# ColBERT's own defaults of what artifact.metadata says
SETTINGS: Mapping[str, Any] = {
    "dim": 128, "similarity": "cosine", "query_maxlen": 32, "doc_maxlen": 220, "query_token_id": "[unused0]",
    "doc_token_id": "[unused1]", "mask_punctuation": True, "attend_to_mask_tokens": False,
}  # fmt: skip


class ColBERT(BertModel):
    """config: transformers.BertConfig; config.colbert: the content of artifact.metadata. Raises Unsupported.

    Queries are [CLS] [Q] text [SEP] and [MASK] up to query_maxlen; documents are [CLS] [D] text [SEP], at most
    doc_maxlen tokens, whose punctuation does not count.
    """

    scored_by = "late-interaction"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        given = getattr(config, "colbert", None) or {}
        self.settings = {**SETTINGS, **{k: v for k, v in given.items() if k in SETTINGS}}
        for name, value in self.settings.items():
            if type(value) is not type(SETTINGS[name]) or (type(value) is int and value < 1):
                raise Unsupported(
                    f"artifact.metadata: {name}={value!r} is not supported, only as {SETTINGS[name]!r}"
                )
        if self.settings["similarity"] != "cosine":
            raise Unsupported(
                f"artifact.metadata: similarity={self.settings['similarity']!r} is not supported, only 'cosine'"
            )
        self.linear = VllmReplicatedLinear(
            config.hidden_size, self.settings["dim"], bias=False, return_bias=False
        )

    def forms(self, tokenizer: Any) -> dict[str, Form]:
        """The forms of queries and documents, and of other texts: these are as they are. Raises ValueError."""
        own, skipped = self.settings, frozenset[int]()
        if own["mask_punctuation"]:
            pieces = (tokenizer.encode(symbol, add_special_tokens=False) for symbol in string.punctuation)
            skipped = frozenset(ids[0] for ids in pieces if ids)
        query = Form(
            _token(tokenizer, own["query_token_id"]), own["query_maxlen"], _token(tokenizer, tokenizer.mask_token),
            own["attend_to_mask_tokens"],
        )  # fmt: skip
        document = Form(_token(tokenizer, own["doc_token_id"]), own["doc_maxlen"], skipped=skipped)
        return {"": Form(), "query": query, "document": document}

    def token_embed(self, hidden: torch.Tensor, normalize: bool = True) -> torch.Tensor:
        """Vectors for late interaction: hidden [T, H] to [T, dim] float32."""
        return unit(self.linear(hidden), normalize)


def _token(tokenizer: Any, name: str | None) -> int:
    """The id of a token. Raises ValueError for a token that the tokenizer does not have."""
    found = tokenizer.convert_tokens_to_ids(name) if name else None
    if found is None or (found == tokenizer.unk_token_id and name != tokenizer.unk_token):
        raise ValueError(f"the tokenizer has no token {name or '[MASK]'!r}, which late interaction needs")
    return int(found)


ARCH = Architecture(
    names=("HF_ColBERT",),
    category="recsys",
    model="ColBERT",
    runner="Encode",
    model_type="bert",
    settings={"artifact.metadata": "colbert"},
    packed={"qkv_proj": ["query", "key", "value"]},
    renamed={"bert.": ""},
    unused=("pooler.*", "cls.*", "embeddings.position_ids"),
)
