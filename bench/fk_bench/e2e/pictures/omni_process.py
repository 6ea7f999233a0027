"""vllm-omni's engine in its own process: `python omni_process.py JSON`, run by the interpreter of its environment.

It writes lines of JSON to the original standard output, first {"versions": {package: version}}. Each input line
{"requests": [[file, seed]], "batch": n, "save": file or ""} is answered with {"seconds": [...], "request_s": [...]}:
the pipeline's time in vllm-omni's worker, from embeddings to images on the device, and the whole request's, with its
ways between processes and the conversion to PIL. {"error": text} is the last answer.

The pipelines have no text encoders: prompts are names of files with embeddings. vllm-omni finds the pipelines' classes
by qualified names, through `__getattr__`. Imports nothing of ours.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
from typing import Any

# A script's folder is on sys.path, where its modules would shadow packages of the same names.
sys.path[:] = [p for p in sys.path if os.path.abspath(p) != os.path.dirname(os.path.abspath(__file__))]

MODULE = "fk_bench.e2e.pictures.omni_process"
PIPELINES = {
    "FluxPipeline": "vllm_omni.diffusion.models.flux.pipeline_flux",
    "StableDiffusionXLPipeline": "vllm_omni.diffusion.models.sdxl.pipeline_sdxl",
}
TEXT = (
    "AutoConfig", "CLIPTextModel", "CLIPTextModelWithProjection", "CLIPTokenizer", "T5EncoderModel", "T5TokenizerFast",
)  # fmt: skip
NEGATIVE = " negative"  # suffix of a file's name: its negative embeddings
FORWARD = "fk_bench_forward"  # key of the durations of a request
WARM_UP = "warm-up.pt"  # in the pipeline's folder: embeddings of one image, for vllm-omni's own first request


class Unusable(Exception):
    """vllm-omni cannot run here: the message has a remedy."""


class Absent:
    """A text encoder, its configuration or its tokenizer: nothing is loaded."""

    model_max_length = 77

    def __init__(self, *args: Any, **options: Any):
        pass

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Absent:
        return cls()

    def to(self, *args: Any, **options: Any) -> Absent:
        return self


class Embedded:
    """A pipeline of vllm-omni that gets embeddings, times itself, and saves images and latents on request."""

    weights_sources: list[Any]

    def __init__(self, **options: Any):
        home = vars(sys.modules[PIPELINES[type(self).__name__]])
        kept = {name: home[name] for name in TEXT if name in home}
        home.update(dict.fromkeys(kept, Absent))
        try:
            super().__init__(**options)
        finally:
            home.update(kept)
        self.weights_sources = [s for s in self.weights_sources if "text_encoder" not in s.subfolder]
        self._given: dict[str, dict[str, Any]] = {}

    def _embeddings(self, name: str) -> dict[str, Any]:
        import torch

        path = name if os.path.isfile(name) else os.path.join(self.od_config.model, WARM_UP)  # type: ignore[attr-defined]
        if path not in self._given:
            if len(self._given) > 8:
                self._given.clear()
            place = {"device": self.device, "dtype": self.od_config.dtype}  # type: ignore[attr-defined]
            self._given[path] = {k: t.to(**place) for k, t in torch.load(path, weights_only=True).items()}
        return self._given[path]

    def encode_prompt(self, prompt: list[str], *args: Any, **options: Any) -> tuple[Any, ...]:
        name = prompt[0].removesuffix(NEGATIVE)
        given = self._embeddings(name)
        sign = "negative_" * (name != prompt[0])
        embeddings, pooled = given[f"{sign}prompt_embeds"], given[f"{sign}pooled_prompt_embeds"]
        positions = (embeddings.new_zeros(embeddings.shape[1], 3),)
        return embeddings, pooled, *positions * (type(self).__name__ == "FluxPipeline")

    def diffuse(self, *args: Any, **options: Any) -> Any:
        self._latents = super().diffuse(*args, **options)  # type: ignore[misc]
        return self._latents

    def forward(self, requests: Any, *args: Any, **options: Any) -> Any:
        import torch

        self._embeddings(requests.prompts[0]["prompt"])  # as the other lanes: before the clock starts
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
        synchronize()
        began = time.perf_counter()
        found = super().forward(requests, *args, **options)  # type: ignore[misc]
        synchronize()
        seconds = time.perf_counter() - began
        (output,) = found if isinstance(found, list) else [found]
        output.stage_durations = {FORWARD: seconds}
        if path := requests.sampling_params_list[0].extra_args.get("save"):
            result = {"images": output.output, "latents": self._latents}
            torch.save({name: t.float().cpu() for name, t in result.items()}, path)
        return found


def __getattr__(name: str) -> type:
    if name not in PIPELINES:
        raise AttributeError(name)
    host = getattr(importlib.import_module(PIPELINES[name]), name)
    made = globals()[name] = type(name, (Embedded, host), {"__module__": MODULE})
    return made


def start(options: dict[str, Any]) -> Any:
    """The engine. Raises Unusable."""
    try:
        version = importlib.metadata.version("vllm-omni")
        from vllm_omni.entrypoints.omni import Omni
    except ImportError as error:
        raise Unusable(
            f"{sys.executable} has no working vllm-omni ({error}): install vllm-omni==0.26.0rc1 in an"
            " environment of its own, and name it with --python vllm-omni=PATH or --env vllm-omni:PYTHONPATH=FOLDERS"
        ) from error
    try:
        importlib.import_module(PIPELINES[options["pipeline"]])
    except ModuleNotFoundError as error:
        raise Unusable(f"vllm-omni {version} has no {options['pipeline']} ({error})") from error
    return Omni(
        model=options["model"], dtype=options["dtype"], stage_init_timeout=int(options["timeout"]),
        init_timeout=int(options["timeout"]),
        custom_pipeline_args={"pipeline_class": f"{MODULE}.{options['pipeline']}"},
    )  # fmt: skip


def generate(omni: Any, options: dict[str, Any], work: dict[str, Any]) -> dict[str, Any]:
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    seconds, whole = [], []
    for file, seed in work["requests"]:
        params = OmniDiffusionSamplingParams(
            seed=seed, generator_device="cpu", num_inference_steps=options["steps"], height=options["size"],
            guidance_scale=options["guidance"], width=options["size"], num_outputs_per_prompt=work["batch"],
            extra_args={"save": work["save"]},
        )  # fmt: skip
        began = time.perf_counter()
        (made,) = omni.generate({"prompt": file, "negative_prompt": file + NEGATIVE}, params, use_tqdm=False)
        whole.append(time.perf_counter() - began)
        if len(made.images) != work["batch"]:
            raise RuntimeError(f"{len(made.images)} images made instead of {work['batch']}")
        seconds.append(made.stage_durations[FORWARD])
    return {"seconds": seconds, "request_s": whole}


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("vllm-omni", "vllm", "torch", "diffusers", "transformers", "triton", "fa3-fwd"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # hosts print to standard output

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    try:
        omni = start(options)
        answer({"versions": versions()})
        for line in sys.stdin:
            answer(generate(omni, options, json.loads(line)))
        omni.close()
    except Exception as error:
        import traceback

        traceback.print_exc()
        answer({"error": str(error) if isinstance(error, Unusable) else f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
