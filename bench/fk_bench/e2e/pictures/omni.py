"""The lane `vllm-omni`: the same images by vllm-omni, in a process and an environment of its own.

It runs before the other lanes, when the GPU holds only the pipeline's weights; its rounds are not
interleaved with theirs.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fk_bench.e2e.pictures.measure import MOST_CALLS, SHORTEST, Measured, Settings
from fk_bench.e2e.pictures.omni_process import PIPELINES, WARM_UP
from fk_bench.e2e.pictures.report import file_name
from fk_bench.e2e.pictures.subjects import Pipeline, Subject
from fk_bench.offline.host import OMNI, HostFailed, HostProcess

SCRIPT = Path(__file__).with_name("omni_process.py")
GIB = 2**30
# GPU memory next to the weights for an image of 1024 x 1024 pixels and a CUDA context: a guess
ACTIVATIONS = 6 * GIB


@dataclass(frozen=True)
class Place:
    """vllm-omni's environment. timeout: seconds for its start and for a round."""

    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0

    def variables(self) -> dict[str, str]:
        """Variables of the process, whose own packages come before those next to `fk_bench`."""
        paths = self.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        ours = str(Path(__file__).parents[3])
        found = {"HF_HUB_OFFLINE": "1", **self.env}
        return found | {"PYTHONPATH": os.pathsep.join(filter(None, (paths, ours)))}


def measure(
    subject: Subject, settings: Settings, place: Place, folder: Path, say: Callable[[str], None]
) -> dict[int, Measured | str]:
    """{batch: results, or why there are none}. `folder` gets the log of the process."""
    weights = sum(t.nbytes for part in subject.parts().values() for t in part.state_dict().values())
    why = _unknown(subject) or too_large(weights)
    if why or not isinstance(subject, Pipeline):
        return dict.fromkeys(settings.batches, why)
    found: dict[int, Measured | str] = {}
    with tempfile.TemporaryDirectory(prefix="fk-bench-omni-") as path:
        checkpoint = Path(path)
        say(f"{OMNI}: saving {weights / GIB:.1f} GiB to {path}")
        subject.target.save_pretrained(checkpoint)
        _save(subject.inputs(1, settings.seed), checkpoint / WARM_UP)
        pipe = subject.target
        options = {
            "model": path, "pipeline": type(pipe).__name__, "dtype": settings.dtype, "steps": subject.steps,
            "size": subject.image_size or pipe.default_sample_size * pipe.vae_scale_factor,
            "guidance": inspect.signature(pipe.__call__).parameters["guidance_scale"].default,
            "timeout": place.timeout,
        }  # fmt: skip
        log = f"{OMNI}-{file_name(settings.model)}"
        process = HostProcess(OMNI, place.python, options, folder, None, SCRIPT, place.variables(), log)
        try:
            say(f"{OMNI}: start")
            versions = _answer(process, place.timeout)["versions"]
            for batch in settings.batches:
                if OMNI not in settings.skip.get(batch, ()):
                    say(f"batch {batch}, {OMNI}: {settings.rounds} rounds, before the other lanes")
                    found[batch] = _batch(process, subject, settings, batch, checkpoint, place.timeout)
                    found[batch].versions.update(versions)  # type: ignore[union-attr]
        except HostFailed as error:
            say(str(error))
            why = str(error).splitlines()[0]
        finally:
            process.stop()
    return {batch: found.get(batch, why) for batch in settings.batches}


def _unknown(subject: Subject) -> str:
    name = type(subject.target).__name__
    if name not in PIPELINES or getattr(subject.target, "tokenizer", None) is not None:
        known = " and ".join(PIPELINES)
        return f"{OMNI} is measured with {known} without tokenizers (flux.1, sdxl), not with this {name}"
    return ""


def too_large(weights: int) -> str:
    """Why the disk or the GPU has no room for a second copy of so many bytes, or ''."""
    free, place = shutil.disk_usage(tempfile.gettempdir()).free, tempfile.gettempdir()
    if free < weights + GIB:
        wanted = f"{weights / GIB + 1:.1f} GiB in {place} for the weights"
        return f"{OMNI} needs {wanted}, {free / GIB:.1f} are free: set TMPDIR"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if free < weights + ACTIVATIONS:
            wanted = f"{(weights + ACTIVATIONS) / GIB:.1f} GiB of GPU memory next to the pipeline"
            return f"{OMNI} needs {wanted}, {free / GIB:.1f} are free"
    return ""


def _batch(
    process: HostProcess, subject: Pipeline, settings: Settings, batch: int, checkpoint: Path, timeout: float
) -> Measured:
    """Images of the seed, after two other calls, as in the other lanes, and the times of all rounds."""

    def run(seeds: list[int], save: str = "") -> dict[str, Any]:
        files = {seed: checkpoint / f"batch-{batch}-seed-{seed}.pt" for seed in seeds}
        for seed, file in files.items():
            if not file.exists():
                _save(subject.inputs(batch, seed), file)
        requests = [(str(files[seed]), seed) for seed in seeds]
        process.tell({"requests": requests, "batch": batch, "save": save})
        return _answer(process, timeout)

    saved = checkpoint / f"batch-{batch}.pt"
    first = run([settings.seed])["seconds"][0]
    run([settings.seed])
    last = run([settings.seed], str(saved))["seconds"][0]
    calls = max(1, min(MOST_CALLS, round(SHORTEST / max(last, 1e-6))))
    rounds = [run([settings.seed + r + i % 2 for i in range(calls)]) for r in range(settings.rounds)]
    result = torch.load(saved, weights_only=True)
    return Measured(
        images=(result["images"] / 2 + 0.5).clamp(0, 1), latents=result["latents"], first_call_s=first,
        seconds=[sum(r["seconds"]) / calls for r in rounds], request_s=[sum(r["request_s"]) / calls for r in rounds],
    )  # fmt: skip


def _save(inputs: dict[str, Any], file: Path) -> None:
    torch.save({k: t.cpu() for k, t in inputs.items() if isinstance(t, torch.Tensor)}, file)


def _answer(process: HostProcess, timeout: float) -> dict[str, Any]:
    """The next answer. Raises HostFailed, also for an error of the process."""
    found = process.answer(timeout)
    if "error" in found:
        raise HostFailed(f"{OMNI}: {found['error']}; see {process.log}")
    return found
