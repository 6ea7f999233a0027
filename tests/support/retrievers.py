"""Tiny random checkpoints of retrieval: ColBERT, BGE-M3 with its heads, and cross-encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from support.tiny import byte_tokenizer, make_tiny_bert

QUERY, DOCUMENT, MASK, DIM = 300, 301, 302, 24  # token ids; channels of ColBERT's vectors
METADATA = {
    "dim": DIM, "similarity": "cosine", "query_maxlen": 12, "doc_maxlen": 20, "mask_punctuation": True,
    "query_token_id": f"<extra_{QUERY}>", "doc_token_id": f"<extra_{DOCUMENT}>", "attend_to_mask_tokens": False,
    "checkpoint": "ignored",
}  # fmt: skip


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with <s> and </s> around a text, types of pairs, and a mask token."""
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> $B:1 </s>:1", [("<s>", 0), ("</s>", 1)]
    )
    tokenizer.mask_token = f"<extra_{MASK}>"
    tokenizer.save_pretrained(folder)


def make_tiny_colbert(folder: Path, **metadata: Any) -> Path:
    """metadata: fields of artifact.metadata that differ from METADATA."""
    from safetensors.torch import load_file, save_file

    make_tiny_bert(folder)
    weights = {f"bert.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = torch.randn(DIM, 64, generator=torch.Generator().manual_seed(2)) * 0.2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    (folder / "artifact.metadata").write_text(json.dumps({**METADATA, **metadata}))
    save_tokenizer(folder)
    return folder


def make_tiny_bge_m3(folder: Path) -> Path:
    """An XLMRobertaModel with the class token's vector, `sparse_linear.pt` and `colbert_linear.pt`."""
    make_tiny_bert(folder, cls="XLMRobertaModel", type_vocab_size=1)
    generator = torch.Generator().manual_seed(3)
    for name, rows in (("sparse_linear", 1), ("colbert_linear", 64)):
        head = {
            "weight": torch.randn(rows, 64, generator=generator) * 0.2,
            "bias": torch.randn(rows, generator=generator) * 0.1,
        }
        torch.save(head, folder / f"{name}.pt")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    save_tokenizer(folder)
    return folder


def make_tiny_cross_encoder(folder: Path, cls: str = "BertForSequenceClassification", **fields: Any) -> Path:
    """fields: of the config, by default with one label."""
    from safetensors.torch import load_file, save_file

    make_tiny_bert(folder, cls=cls, **{"num_labels": 1, **fields})
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.startswith("classifier.") and name.endswith("weight"):
            weights[name] *= 10  # so that scores differ between documents
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(folder)
    return folder
