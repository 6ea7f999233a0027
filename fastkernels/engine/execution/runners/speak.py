"""The runner of speech models: a language model that writes speech tokens, and the stages that make sound of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fastkernels.core.dispatch import direct_calls
from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs
from fastkernels.engine.execution.runners.generate import Generate
from fastkernels.engine.speech.voices import Voice
from fastkernels.models.common.speech.flow import MOST, Utterance

LONGEST = 8192  # tokens of a sequence by default: the longest speech has 7,500
FRAMES = 64  # the frames of a batch are a multiple of these on a GPU, so that few shapes have a graph
LEAST, SMALL = (
    16,
    4096,
)  # graphs are for batches of at most this many frames; larger ones keep a GPU busy without


@dataclass(frozen=True)
class Piece:
    """Tokens of a speech that become sound.

    key        of the speech
    tokens     all of it so far, of which the first `start` have become sound
    final      whether it ends here
    streaming  whether frames are independent of later chunks
    speed      1: as the model speaks. Other speeds need start == 0 and final
    """

    key: str
    tokens: Sequence[int]
    start: int
    voice: Voice
    final: bool
    streaming: bool
    speed: float = 1.0


@dataclass(frozen=True)
class SpeechInput:
    """Pieces to make sound of, each of another speech. drops: speeches that were aborted."""

    pieces: Sequence[Piece]
    drops: Sequence[str] = ()


@dataclass
class _Spoken:
    """The frames [T, mel] of a speech so far, and the number of its samples."""

    frames: list[torch.Tensor] = field(default_factory=list)
    samples: int = 0


class Speak(Generate):
    """Runs a speech model; its interface is that of models/audio/cosyvoice3.py.

    `launch` takes a StepInput of the language model, or a SpeechInput. On a GPU the latter runs on a stream of its own,
    while the language model goes on.
    """

    speech_graphs: ForwardGraphs | None = None

    def _prepare(self, folder: Path) -> None:
        super()._prepare(folder)
        if self.config.max_model_len is None:
            self.max_model_len = min(self.max_model_len, LONGEST)
        self._spoken: dict[str, _Spoken] = {}
        self._multiple = FRAMES if self.device.type == "cuda" else 1
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def num_fitting_blocks(self) -> int:
        """See Runner: no more than all sequences need, and with room for the largest batch that becomes sound."""
        config = self.config
        found = super().num_fitting_blocks()
        if config.num_blocks is not None or self.device.type == "cpu":
            return found
        each = -(-self.max_model_len // config.block_size)
        if config.kv_cache_memory is None:
            found -= -(-self._largest() // self.block_bytes())
        return max(each + 1, min(found, config.max_num_seqs * each + 1))

    def _largest(self) -> int:
        """Bytes that the largest batch needs."""
        c = self.model.flow.config
        count = max(1, min(self.config.max_num_batched_tokens, MOST) // c.ratio - 1)
        speaker = torch.ones(c.speaker)
        voice = Voice("", "", torch.zeros(1, dtype=torch.int64), torch.zeros(c.ratio, c.mel), speaker)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._speak(SpeechInput([Piece("", [0] * count, 0, voice, True, False)])).result()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        return peak

    def capture(self) -> None:
        super().capture()
        if self.device.type == "cuda" and not self.config.enforce_eager:
            self.speech_graphs = ForwardGraphs(self.device)

    def launch(self, step: Any) -> Any:
        """Start a step of the language model (see Generate), or making sound: a SpeechStep."""
        return self._speak(step) if isinstance(step, SpeechInput) else super().launch(step)

    @torch.inference_mode()
    def _speak(self, step: SpeechInput) -> SpeechStep:
        for key in step.drops:
            self._spoken.pop(key, None)
        with self._aside(), direct_calls(self.device):
            for pieces in self._batches(step.pieces):
                self._add_frames(pieces)
            sounds = {}
            for pieces in self._batches(step.pieces, spoken=True):
                sounds.update(self._sounds(pieces))
            for piece in step.pieces:
                if piece.final:
                    self._spoken.pop(piece.key, None)
            return SpeechStep(sounds)

    def _aside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _batches(self, pieces: Sequence[Piece], spoken: bool = False) -> Iterator[list[Piece]]:
        """Pieces of similar lengths, whose frames fit into max_num_batched_tokens together.

        spoken: count the frames that there are, instead of those to make
        """

        def frames(piece: Piece) -> int:
            if spoken:
                return sum(len(f) for f in self._spoken[piece.key].frames)
            return self.model.flow.config.ratio * (len(piece.tokens) + len(piece.voice.tokens))

        batch: list[Piece] = []
        for piece in sorted(pieces, key=frames):  # the last one of a batch is the longest
            if batch and (len(batch) + 1) * frames(piece) > self.config.max_num_batched_tokens:
                yield batch
                batch = []
            batch.append(piece)
        if batch:
            yield batch

    def _add_frames(self, pieces: Sequence[Piece]) -> None:
        """Make frames of the pieces' new tokens."""
        ratio = self.model.flow.config.ratio
        rows = [
            Utterance(
                torch.tensor(p.tokens, dtype=torch.int64), p.voice.tokens, p.voice.frames, p.voice.speaker, p.final,
                p.streaming and not p.final,
            )
            for p in pieces
        ]  # fmt: skip
        found = self.model.flow(rows, self._solve, self._multiple)
        for piece, frames in zip(pieces, found, strict=True):
            new = frames[piece.start * ratio :]
            if piece.speed != 1.0 and len(new):
                size = max(1, int(len(new) / piece.speed))
                new = F.interpolate(new.T[None], size=size, mode="linear")[0].T
            self._spoken.setdefault(piece.key, _Spoken()).frames.append(new)

    def _solve(self, *inputs: torch.Tensor) -> torch.Tensor:
        flow, graphs = self.model.flow, self.speech_graphs
        rows, frames = inputs[0].shape[:2]
        if graphs is None or rows > LEAST or rows * frames > SMALL:
            return flow.solve(*inputs)
        return graphs("flow", flow.solve, inputs).clone()  # the next replay overwrites it

    def _sounds(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        """The new samples of each piece."""
        spoken = [self._spoken[piece.key] for piece in pieces]
        rows = [torch.cat(s.frames) if len(s.frames) > 1 else s.frames[0] for s in spoken]
        made = self.model.vocoder(rows, [piece.final for piece in pieces], self._stack, self._multiple)
        found = {}
        for piece, own, frames, samples in zip(pieces, spoken, rows, made, strict=True):
            own.frames = [frames]
            found[piece.key] = samples[own.samples :]
            own.samples = max(own.samples, len(samples))
        return found

    def _stack(self, *inputs: torch.Tensor) -> torch.Tensor:
        vocoder, graphs = self.model.vocoder, self.speech_graphs
        if graphs is None or len(inputs[0]) > LEAST:
            return vocoder.stack(*inputs)
        return graphs("vocoder", vocoder.stack, inputs)


class SpeechStep:
    """A launched SpeechInput, whose samples are being copied to pinned memory."""

    def __init__(self, sounds: dict[str, torch.Tensor]):
        self._sounds, self._done = sounds, None
        if any(t.is_cuda for t in sounds.values()):
            self._sounds = {
                key: torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for key, t in sounds.items()
            }
            self._done = torch.cuda.Event()
            self._done.record()

    def done(self) -> bool:
        """Whether result() would not wait."""
        return self._done is None or self._done.query()

    def result(self) -> dict[str, np.ndarray]:
        """{key: samples [n] float32}."""
        if self._done is not None:
            self._done.synchronize()
        return {key: t.float().numpy() for key, t in self._sounds.items()}
