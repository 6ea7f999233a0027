"""Images and audio of the requests of `fk-bench patch-compare` and `e2e`, and whether a model takes them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fk_bench.core.terminal.flags import ConfigError
from fk_bench.e2e import processors
from fk_bench.e2e.loads import EMBED, Load
from fk_bench.offline.host import LEAST, config_of

FORM = re.compile(r"(\d+)x(\d+)")
RATE, HOP = processors.RATE, processors.HOP
MOST_IMAGES = 64  # of a request
SMALLEST = 16  # pixels of a side
AROUND = "vision_start_token_id", "vision_end_token_id"  # tokens in front of and behind an image


@dataclass(frozen=True)
class Media:
    """The media of each request of every load.

    images  in the prompt; side: pixels of each side
    audio   seconds
    """

    images: int = 0
    side: int = 0
    audio: float = 0.0

    @classmethod
    def parse(cls, images: str, audio: float | None) -> Media:
        """From the values of --images and --audio. Raises ConfigError."""
        if audio is not None and not (math.isfinite(audio) and audio > 0):
            raise ConfigError(f"--audio {audio:g}: give seconds above 0, as in --audio 30")
        if not images:
            return cls(audio=audio or 0.0)
        if audio is not None:
            raise ConfigError("--images and --audio exclude each other: measure one kind at a time")
        found = FORM.fullmatch(images)
        count, side = map(int, found.groups()) if found else (0, 0)
        if not found or not count or side < SMALLEST:
            raise ConfigError(
                f"--images {images!r}: give IMAGESxPIXELS, images of a request and pixels of a side, at least"
                f" 1 and {SMALLEST}, as in --images 1x1024"
            )
        if count > MOST_IMAGES:
            raise ConfigError(
                f"--images {images!r}: a request has {count} images, and {MOST_IMAGES} are the most"
            )
        return cls(count, side)

    def __bool__(self) -> bool:
        return bool(self.images or self.audio)

    @property
    def text(self) -> str:
        """As it is given: '1x1024', or ''."""
        return f"{self.images}x{self.side}" if self.images else ""

    def check(self, host: str, task: str, loads: Sequence[Load]) -> None:
        """Raise ConfigError for what cannot be measured with media, or with another task than generating."""
        flags = {f"--task {EMBED}": task == EMBED, "--images": self.images, "--audio": self.audio}
        flag = next((name for name, given in flags.items() if given), "")
        if flag and host == "sglang":
            raise ConfigError(f"{flag} is for --host vllm: SGLang is measured with texts that it continues")
        if self and task == EMBED:
            raise ConfigError(f"--task {EMBED} embeds texts: it excludes --images and --audio")
        cached = [str(load) for load in loads if load.cached]
        if self and cached:
            raise ConfigError(
                f"--loads: {cached[0]} has cached prompts, and those with media are new in every run"
            )

    def case(self) -> dict[str, Any]:
        """The fields of a row."""
        return {"images": self.text, "audio": self.audio}


NO_MEDIA = Media()


@dataclass(frozen=True)
class MediaPlace:
    """The media of a request in one model.

    front     token ids in front of the text: for each image a placeholder, and what is around it
    features  tokens of a prompt for its media, more than `front` has
    states    of an encoder, whose keys and values a request keeps for cross attention
    texts     random tokens of a prompt are below this id
    """

    front: tuple[int, ...] = ()
    features: int = 0
    states: int = 0
    texts: int = 0


def placed(
    model: str, path: str, folder: Path, loads: Sequence[Load], task: str, media: Media, random: bool
) -> tuple[str, MediaPlace]:  # fmt: skip
    """The folder of a model, with its processor if requests have media, and what these are in a prompt.

    path    its folder; folder: of the run, for a processor that is generated if the weights are random

    Raises ValueError for a task, media or loads that the model has not.
    """
    config = config_of(path)
    _check_task(model, config, task, media)
    if media or task == EMBED:
        path = processors.completed(model, path, folder, bool(media), random)
    place = place_of(model, path, config, media)
    for load in loads:
        _check_front(load, place, media)
    return path, place


def _check_task(model: str, config: Any, task: str, media: Media) -> None:
    """Raise ValueError for a task or media that a model has not. config: as load_config of a folder gives it."""
    from fastkernels.models.common.descriptions.registry import by_architecture

    names = getattr(config, "architectures", None) or [""]
    found = by_architecture().get(names[0])
    runner, kinds = (found.arch.runner, found.arch.media) if found else ("Generate", ())
    if task == EMBED:
        known = [m.arch.names[0] for m in _encoders()]
        if names[0] not in known:
            raise ValueError(
                f"{model} is no encoder of texts to vectors: --task {EMBED} measures {', '.join(known)}"
            )
        return
    if runner == "Encode":
        raise ValueError(f"{model} is an encoder and generates no tokens: give --task {EMBED}")
    for kind, given in (("image", media.images), ("audio", media.audio)):
        if given and kind not in kinds:
            flag, what = ("--images", "images") if kind == "image" else ("--audio", "audio")
            own = f"reads {' and '.join(kinds)}" if kinds else "reads text only"
            others = ", ".join(m.arch.names[0] for m in _readers(kind))
            raise ValueError(f"{flag}: {model} {own}, and takes no {what}; models that do: {others}")
    if kinds == ("audio",) and not media.audio:
        raise ValueError(f"{model} reads audio with every prompt: give its seconds, as in --audio 30")


def _encoders() -> list[Any]:
    """The models of one vector a text: transformers' names of others end with their head."""
    from fastkernels.models.common.descriptions.registry import models

    found = [m for m in models().values() if m.arch.runner == "Encode" and m.arch.inputs == "tokens"]
    return [m for m in found if m.arch.names[0].endswith("Model")]


def _readers(kind: str) -> list[Any]:
    from fastkernels.models.common.descriptions.registry import models

    return [m for m in models().values() if kind in m.arch.media]


def place_of(model: str, path: str, config: Any, media: Media) -> MediaPlace:
    """The media of a request in this model, whose processor is in the folder `path`.

    Raises ValueError for more media than the model or its processor takes.
    """
    vocab = int(config.vocab_size)
    if not media:
        return MediaPlace(texts=vocab)
    if media.audio:
        return _audio(model, config, media, vocab)
    side, processor = media.side, _image_processor(model, path)
    most = (getattr(processor, "size", None) or {}).get("longest_edge")
    if most and side * side > most:
        raise ValueError(
            f"--images {media.text}: the image processor of {model} makes images of more than {most:,} pixels smaller:"
            f" give at most {media.images}x{math.isqrt(most)}"
        )
    patches = processor.get_number_of_image_patches(side, side, {})
    own = patches // processor.merge_size**2
    token = int(config.image_token_id)
    around = [int(i) for name in AROUND if (i := getattr(config, name, None)) is not None]
    each = (around[0], token, around[1]) if len(around) == 2 else (token,)
    special = [*around, token, *_specials(config, vocab)]
    if min(special) <= LEAST:
        raise ValueError(
            f"--images: {model} has a token of media at id {min(special)}: none is left for text"
        )
    return MediaPlace(each * media.images, media.images * (own - 1), 0, min(special))


def _audio(model: str, config: Any, media: Media, vocab: int) -> MediaPlace:
    states = getattr(config, "max_source_positions", None)
    if states is None:
        raise ValueError(
            f"--audio: {model} has audio within its prompt; only models whose encoder reads all of it are measured,"
            " such as Whisper"
        )
    most = 2 * states * HOP / RATE
    if media.audio > most:
        raise ValueError(
            f"--audio {media.audio:g}: {model} reads at most {most:g} s of audio with a prompt: give --audio {most:g}"
        )
    return MediaPlace(states=states, texts=vocab)


def _specials(config: Any, vocab: int) -> list[int]:
    """Ids of other media: a prompt must not have them by chance."""
    names = ("video_token_id", "audio_token_id", "vision_token_id")
    found = [getattr(config, name, None) for name in names]
    return [i for i in found if isinstance(i, int) and 0 <= i < vocab]


def _image_processor(model: str, path: str) -> Any:
    from transformers import AutoImageProcessor

    from fastkernels.models.common.checkpoints.weights import resolve

    folder = resolve(path)
    try:
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"the image processor of {model} in {folder} cannot be used: {why}") from error


def _check_front(load: Load, place: MediaPlace, media: Media) -> None:
    """Raise ValueError for a load whose prompt has no room for the marks of its images next to text."""
    shortest = min(filter(None, (load.input_len, load.arriving_input)))
    if len(place.front) >= shortest:
        raise ValueError(
            f"{load}: a prompt of {shortest} tokens has no room for text next to {len(place.front)} tokens that mark"
            f" {media.images} images: give longer --loads"
        )
