"""`fk-bench voice`: a file of a voice, for `fk-bench serve --voices`."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated

import typer

from fk_bench.core.terminal.output import fail, last_line


def voice_command(
    source: Annotated[
        Path, typer.Argument(help="a recording, or an .npz file with the arrays tokens, frames and speaker")
    ],
    out: Annotated[Path, typer.Option(help="the file to write, NAME.safetensors")],
    model: Annotated[
        str | None, typer.Option(help="folder or hub id of the checkpoint, whose ONNX models read recordings")
    ] = None,
    text: Annotated[
        str, typer.Option(help="what the recording says; without it the voice is less close")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="end standard output with one line of JSON")] = False,
) -> None:
    """Make a voice for speech from a recording of 0.5 to 30 s, or from arrays."""
    import numpy as np

    from fastkernels.engine.speech.files import AudioError, MissingPackage
    from fastkernels.engine.speech.voice_reader import VoiceReader
    from fastkernels.engine.speech.voices import NAME, SUFFIX, Voice, VoiceError
    from fastkernels.models.common.checkpoints.checkpoint import CheckpointError, resolve

    if out.suffix != SUFFIX or not NAME.fullmatch(out.stem):
        fail(
            f"--out {str(out)!r} must be a name of letters, digits, spaces and '._-' that ends with {SUFFIX}"
        )
    if out.is_dir() or not out.parent.is_dir():
        fail(
            f"--out {out}: {'is a folder' if out.is_dir() else f'there is no folder {out.parent}'}; name a file"
        )
    try:
        if source.suffix == ".npz":
            with np.load(source, allow_pickle=False) as arrays:
                made = Voice.of(out.stem, text, *(arrays[name] for name in ("tokens", "frames", "speaker")))
        elif model is None:
            fail("a recording needs --model, the checkpoint whose ONNX models read it")
        else:
            made = VoiceReader(resolve(model)).read(source, text, out.stem)
    except (
        AudioError, CheckpointError, MissingPackage, VoiceError, OSError, KeyError, ValueError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        fail(f"{source} cannot become a voice: {error}")
    made.save(out)
    print(f"{out}: {len(made.tokens)} tokens, {len(made.frames)} frames, text {made.text!r}")
    last_line({"ok": True, "file": str(out), "tokens": len(made.tokens), "frames": len(made.frames)})
