"""Checkpoints on disk: location, files of weights, and diagnosis of damaged ones."""

from __future__ import annotations

import json
import logging
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.models.common.checkpoints import scenes

log = logging.getLogger("fastkernels")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SPEECH = "cosyvoice3.yaml"  # of a CosyVoice3, with a file for each part
PIPELINE = "model_index.json"  # of a pipeline of diffusers, with a folder for each part
OF_DIFFUSERS = "diffusion_pytorch_model.safetensors"
ARRAYS = "model.npz"  # arrays of NumPy, as of JAX models
ADAPTER = "adapter_config.json"  # of PEFT
OLDER_INDEX, OLDER = "pytorch_model.bin.index.json", "pytorch_model.bin"  # of checkpoints without safetensors
# Keys of a weight norm, as PyTorch's parametrization has them
LENGTH, DIRECTION = (f".parametrizations.weight.original{i}" for i in range(2))
DTYPES = {  # of safetensors' headers, those that a conversion of quantized tensors tells apart
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded. The message names the file, and the keys if some are wrong."""


def resolve(model: str) -> Path:
    """The folder of a checkpoint: `model` itself, or the snapshot of a hub id OWNER/NAME or OWNER/NAME@REVISION.

    With HF_HUB_OFFLINE=1, snapshots come from the cache only. Raises CheckpointError.
    """
    if not model:
        raise CheckpointError("model is empty: it must be a folder or a hub id")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _with_config(folder)
    name, _, revision = model.partition("@")
    if folder.exists() or model.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"model {model!r} is neither a folder nor a hub id (OWNER/NAME or OWNER/NAME@REVISION)"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*_linear.pt", "*.metadata"]
    others = ["original/*", "consolidated*"]  # the same weights in other layouts
    try:
        snapshot = Path(snapshot_download(name, revision=revision or None, allow_patterns=[PIPELINE, SPEECH]))
        pipeline = (snapshot / PIPELINE).is_file()
        if (snapshot / SPEECH).is_file():
            patterns = [
                SPEECH,
                "llm.*",
                "flow.pt",
                "flow.safetensors",
                "hift.*",
                "spk2info.pt",
                "*/*.json",
                "*/*.txt",
            ]
            patterns += ["campplus.onnx", "speech_tokenizer_v3.onnx"]
        elif pipeline:  # parts are in folders, next to files of weights in other layouts
            patterns = [PIPELINE, *(f"*/*.{kind}" for kind in ("json", "safetensors", "model", "txt"))]
            others = ["*.fp16.*", "*.non_ema.*", "*/openvino*", "*/flax*", "*_1_0/*"]
        snapshot = Path(
            snapshot_download(
                name, revision=revision or None, allow_patterns=patterns, ignore_patterns=others
            )
        )
        speech = (snapshot / SPEECH).is_file()
        if not pipeline and not speech and not any(snapshot.glob("*.safetensors")):
            snapshot_download(name, revision=revision or None, allow_patterns=["pytorch_model*.bin"])
    except Exception as error:
        raise CheckpointError(f"model {model!r} is not a folder, and {_hub_problem(error)}") from error
    return _with_config(snapshot)


def _with_config(folder: Path) -> Path:
    if (folder / ADAPTER).is_file():
        _check_adapter(folder)
    known = any((folder / name).is_file() for name in ("config.json", PIPELINE, SPEECH))
    if not known and scenes.find(folder) is None:
        raise CheckpointError(
            f"{folder} has no config.json and no {PIPELINE}: it is not a Hugging Face checkpoint"
        )
    return folder


def _check_adapter(folder: Path) -> None:
    """Raise CheckpointError for a folder with an adapter alone. Next to whole weights, it is left out with a warning.

    transformers applies an adapter next to weights if PEFT is installed; vLLM does not.
    """
    try:
        base = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    own = f"{folder} has an adapter ({ADAPTER}) of {base or 'another checkpoint'}"
    advice = "merge it into its base first, as PEFT's merge_and_unload does, and save the result"
    files = [f for kind in ("*.safetensors", "pytorch_model*.bin") for f in folder.glob(kind)]
    whole = any((folder / name).is_file() for name in (ARRAYS, PIPELINE, SPEECH))
    if not whole and all(f.name.startswith("adapter_") for f in files):
        raise CheckpointError(f"{own} and no whole weights: {advice}")
    log.warning("%s: it is not applied, the other weights are used; %s", own, advice)


def _hub_problem(error: Exception) -> str:
    from huggingface_hub import errors

    known = (
        (errors.GatedRepoError, "access to it is gated: accept its terms on the hub, and set HF_TOKEN"),
        (errors.RevisionNotFoundError, "the hub's repository has no such revision"),
        (errors.RepositoryNotFoundError, "the hub has no such repository (or it is private: set HF_TOKEN)"),
        (errors.LocalEntryNotFoundError, "it is not in the local hub cache, and the hub is unreachable or disabled"
         " (HF_HUB_OFFLINE)"),
        (errors.HFValidationError, "it is not a valid hub id"),
    )  # fmt: skip
    first_line = next(iter(str(error).strip().splitlines()), "")
    for kind, text in known:
        if isinstance(error, kind):
            return f"{text}: {first_line}"
    return f"the download failed: {type(error).__name__}: {first_line}"


def weight_files(folder: Path) -> list[Path]:
    """The files of weights of a checkpoint, in order: safetensors, else in PyTorch's format, else in NumPy's.

    Raises CheckpointError that names missing files.
    """
    weight_map = _weight_map(folder)
    if weight_map is not None:
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        single = next((f for n in (SINGLE, OF_DIFFUSERS, OLDER) if (f := folder / n).is_file()), None)
        files = sorted(folder.glob("*.safetensors"))
        files = [single] if single is not None and (single.name != OLDER or not files) else files
        if not files and (folder / ARRAYS).is_file():
            return [folder / ARRAYS]
        if not files and (scene := scenes.find(folder)) is not None:
            return [scene]
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise CheckpointError(f"{_index(folder)} names files that are not in {folder}: {', '.join(missing)}")
    if not files and (others := sorted(f.name for f in folder.glob("diffusion_pytorch_model*.bin"))):
        raise CheckpointError(
            f"{folder} has weights in PyTorch's format only, {some(others)}: use safetensors"
        )
    if not files:
        raise CheckpointError(
            f"{folder} has no weights: neither {SINGLE} nor {INDEX} nor {OLDER} nor {ARRAYS}"
        )
    return files


def part_files(folder: Path, stems: Iterable[str]) -> list[Path]:
    """The files of weights with these stems, safetensors before PyTorch's format. Raises CheckpointError."""
    found = [
        next((f for kind in (".safetensors", ".pt") if (f := folder / (stem + kind)).is_file()), None)
        for stem in stems
    ]
    missing = [f"{stem}.safetensors" for stem, file in zip(stems, found, strict=True) if file is None]
    if missing:
        raise CheckpointError(f"{folder} has no {', '.join(missing)} (or .pt)")
    return [file for file in found if file is not None]


def parts_of(
    folder: Path, prefixes: Mapping[str, str], device: str = "cpu"
) -> Iterator[tuple[Path, str, Callable[[], torch.Tensor]]]:
    """Iterate as `iterate` does, over files with these stems: {stem: prefix of its keys}.

    Weight norms are folded: a direction and a length are one matrix. Raises CheckpointError.
    """
    from safetensors import SafetensorError

    for file, prefix in zip(part_files(folder, prefixes), prefixes.values(), strict=True):
        try:
            opened = _opened(file) if file.suffix == ".safetensors" else nullcontext(_older(file))
            with opened as tensors:
                names = set(tensors.keys())
                for key in sorted(names):
                    if key.endswith(LENGTH) and f"{key[:-1]}1" in names:
                        own = f"{prefix}{key.removesuffix(LENGTH)}.weight"
                        yield file, own, partial(_folded, tensors, key, file, device)
                    elif not (key.endswith(DIRECTION) and f"{key[:-1]}0" in names):
                        yield file, prefix + key, partial(_read, tensors, key, file, device)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {_damage(file, error)}") from error


def _folded(tensors: Any, key: str, file: Path, device: str) -> torch.Tensor:
    """The matrix of a weight norm; `key`: of its length."""
    direction = _read(tensors, f"{key[:-1]}1", file, device)
    if device == "meta":
        return direction
    return without_norm(_read(tensors, key, file, device), direction)


def without_norm(length: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """The matrix [N, ...] of a weight norm with these parameters, over all axes but the first."""
    norm = direction.flatten(1).norm(dim=1).view(-1, *[1] * (direction.dim() - 1))
    return length * direction / norm


def _index(folder: Path) -> Path:
    """The index, which may be missing: that of PyTorch's files only without safetensors."""
    older, of_diffusers = folder / OLDER_INDEX, folder / f"{OF_DIFFUSERS}.index.json"
    if of_diffusers.is_file():
        return of_diffusers
    return older if older.is_file() and not any(folder.glob("*.safetensors*")) else folder / INDEX


def _weight_map(folder: Path) -> dict[str, str] | None:
    """{key: file name} of the index, None without one. Raises CheckpointError for an invalid index."""
    index = _index(folder)
    if not index.is_file():
        return None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise CheckpointError(f"{index} names {key} twice: {seen[key]} and {value}")
            seen[key] = value
        return seen

    try:
        weight_map = json.loads(index.read_text(), object_pairs_hook=unique)["weight_map"]
        outside = sorted({n for n in weight_map.values() if Path(n).name != n})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{index} is not an index of weights: {error!r}") from error
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {some(outside)}")
    return weight_map


def keys(folder: Path) -> set[str]:
    """The keys of all tensors. Raises CheckpointError."""
    weight_map = _weight_map(folder)
    return set(weight_map) if weight_map is not None else {key for _, key, _ in iterate(folder)}


def iterate(folder: Path, device: str = "cpu") -> Iterator[tuple[Path, str, Callable[[], torch.Tensor]]]:
    """Iterate over (file, key, read) of all tensors. read() returns the tensor; on 'meta', one of its shape.

    On the CPU read() maps the tensor into memory. Only the parts that are copied are read from disk, so that a rank
    reads its own shard. At most one file is in memory if the caller drops each tensor before the next. Raises
    CheckpointError.
    """
    from safetensors import SafetensorError

    weight_map, where = _weight_map(folder), {}  # type: ignore[var-annotated]
    for file in weight_files(folder):
        try:
            with _opened(file) as tensors:
                keys = list(tensors.keys())
                if weight_map is not None:
                    absent = {k for k, name in weight_map.items() if name == file.name} - set(keys)
                    if absent:
                        raise CheckpointError(
                            f"{_index(folder)} names tensors that {file.name} does not have: {some(sorted(absent))}"
                        )
                for key in keys:
                    if key in where:
                        raise CheckpointError(f"{folder}: {key} is in both {where[key]} and {file.name}")
                    where[key] = file.name
                    yield file, key, partial(_read, tensors, key, file, device)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {_damage(file, error)}") from error


def _opened(file: Path) -> Any:
    """A context with keys() and the tensors of a file."""
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        return safe_open(str(file), framework="pt", device="cpu")
    if file.suffix == ".npz":
        return nullcontext(_Arrays(file))
    return nullcontext(_scene(file) if file.suffix in scenes.SUFFIXES else _older(file))


class _Arrays(Mapping[str, torch.Tensor]):
    """The arrays of a .npz file, read one at a time. No code of the file is run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._found = np.load(file, allow_pickle=False)
            self._found.files  # noqa: B018 (an array alone has none)
        except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{file} is not a file of arrays: {error}") from error

    def __getitem__(self, key: str) -> torch.Tensor:
        try:
            array = self._found[key]
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"{self._file}: {key} cannot be read: {error}") from error
        if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # NumPy has no name for bfloat16
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        try:
            return torch.from_numpy(array)
        except TypeError as error:
            raise CheckpointError(f"{self._file}: {key} has the dtype {array.dtype}, no numbers") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._found.files)

    def __len__(self) -> int:
        return len(self._found.files)


def _scene(file: Path) -> dict[str, torch.Tensor]:
    try:
        return scenes.tensors(file)
    except (ValueError, OSError) as error:
        raise CheckpointError(str(error)) from error


def _older(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file in PyTorch's format, mapped into memory. No code of the file is run."""
    try:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # of before PyTorch 1.6, which cannot be mapped
            found = torch.load(file, map_location="cpu", weights_only=True)
        if not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
            raise TypeError("it has values that are no tensors")
        return dict(found)
    except Exception as error:  # of pickle, zip files, and others
        raise CheckpointError(
            f"{file} is not a file of tensors in PyTorch's format: {type(error).__name__}: {error}"
        ) from error


def heads(
    folder: Path, prefixes: Mapping[str, str], device: str = "cpu"
) -> Iterator[tuple[Path, str, Callable[[], torch.Tensor]]]:
    """Iterate as `iterate` does, over the tensors of files in PyTorch's format: {name: prefix of its keys}.

    Only tensors are read; no code of the file is run. Raises CheckpointError.
    """
    for name, prefix in prefixes.items():
        file = folder / name
        for key, tensor in _older(file).items():
            yield file, prefix + key, partial(tensor.to, device)


def _read(tensors: Any, key: str, file: Path, device: str) -> torch.Tensor:
    from safetensors import SafetensorError

    if isinstance(tensors, Mapping):
        return tensors[key].to("meta") if device == "meta" else tensors[key]
    try:
        if device == "meta":
            found = tensors.get_slice(key)
            dtype = DTYPES.get(found.get_dtype(), torch.float32)
            return torch.empty(found.get_shape(), dtype=dtype, device=device)
        return tensors.get_tensor(key)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{file}: {key} cannot be read: {error}") from error


def _damage(file: Path, error: Exception) -> str:
    """Diagnose a file that safetensors rejects: truncated tensors or a damaged header."""
    try:
        with file.open("rb") as f:
            size = file.stat().st_size
            length = int.from_bytes(f.read(8), "little")
            if size < 8 + length:
                return f"it is truncated or not a safetensors file: {size} bytes, with a header of {length} bytes"
            header = json.loads(f.read(length))
        ends = {k: 8 + length + v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"}
    except OSError:
        return str(error)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return f"its header is damaged: {error}"
    cut = sorted(k for k, end in ends.items() if end > size)
    if cut:
        return f"it is truncated, {size} bytes of {max(ends.values())}; incomplete: {some(cut)}"
    return str(error)


def some(names: list[str], limit: int = 8) -> str:
    """The first names, and the number of further ones."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
