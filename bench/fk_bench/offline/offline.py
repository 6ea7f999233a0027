"""One host's offline engine in its own process: `python offline.py JSON`, run by that host's interpreter.

It writes lines of JSON to the original standard output; the host's own output goes to standard error. The first line is
{"kv_tokens": n, "ends": [[phase, end]], "engine": {...}}: the size of the KV cache, the ends of the startup phases by
time.monotonic(), and our engine's own report. Then each input line {"prompts": [[token ids]], "output_len": n} is
answered with {"seconds": s, "output_tokens": n}, and "live": {op: calls} if there are candidates. With "arrivals", it
is answered with the seconds to each token; requests may arrive "later". With "media", each prompt has random images or
audio, drawn here: transformers' processor reads them before the clock starts, and "read" has its seconds. With the task
"embed" in the options, each prompt gets a vector. Sizes that are None are the host's defaults.
Imports only the engine that it runs, and the patcher if there are candidates. Random weights are of one kind in all
hosts: fk_bench.offline.random_weights.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A script's folder is on sys.path, where its modules would shadow packages of the same names.
sys.path[:] = [p for p in sys.path if os.path.abspath(p) != os.path.dirname(os.path.abspath(__file__))]

RATE = 16000  # samples of audio a second
Generate = Callable[[list[list[int]], int], int]  # prompts, tokens to generate of each -> tokens generated


ENDS = [("interpreter", time.monotonic())]


def ended(phase: str) -> None:
    ENDS.append((phase, time.monotonic()))


def given(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that are None, and `more`."""
    return {**{k: v for k, v in settings.items() if v is not None}, **more}


def embeds(options: dict[str, Any]) -> bool:
    return options.get("task") == "embed"


def _no_tokens(prompts: list[list[int]], output_len: int) -> int:
    raise RuntimeError("an encoder generates no tokens: its loads are measured with arrivals")


def fastkernels(options: dict[str, Any]) -> tuple[Generate, int, Any]:
    from fastkernels import LLM, SamplingParams

    ended("imports")
    tokens = options["kv_tokens"]
    settings = {
        "dtype": options["dtype"], "load_format": options["load_format"], "skip_tokenizer_init": True,
        "max_model_len": options["max_model_len"], "max_num_seqs": options["max_num_seqs"],
        "num_blocks": tokens and tokens // 16 + 1, "kv_cache_memory": options.get("kv_bytes"),
        "tensor_parallel_size": options["tensor_parallel"],
    }  # fmt: skip
    if embeds(options):  # without a cache, and with vLLM's tokens of a step
        settings |= {"num_blocks": None, "kv_cache_memory": None}
    llm = LLM(options["model"], **given(settings, options["engine_args"]))
    ended("engine")
    if embeds(options):
        return _no_tokens, 0, llm

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        return sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False))

    engine = llm.llm_engine
    return (
        generate,
        engine.scheduler.num_cache_tokens or engine.max_model_len * engine.config.max_num_seqs,
        llm,
    )


def limits(media: dict[str, Any], gpu: bool) -> dict[str, Any]:
    """vLLM's limits of a prompt's media. On a CPU, where the largest image takes long, it tries only these sizes."""
    if media["audio"]:
        return {"audio": 1}
    size = {} if gpu else {"width": media["side"], "height": media["side"]}
    return {"image": {"count": media["images"], **size}, "video": 0}


def vllm(options: dict[str, Any]) -> tuple[Generate, int, Any]:
    # Of a recurrent model without a limit of its context vLLM assumes 2,048 tokens. Others were checked before.
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    from vllm import LLM, SamplingParams

    ended("imports")
    settings = {
        "dtype": options["dtype"], "load_format": options["load_format"], "skip_tokenizer_init": True,
        "max_model_len": options["max_model_len"], "max_num_seqs": options["max_num_seqs"],
        "tensor_parallel_size": options["tensor_parallel"], "gpu_memory_utilization": options["gpu_share"],
        "kv_cache_memory_bytes": options.get("kv_bytes"),
    }  # fmt: skip
    if options["gpu"]:
        settings["num_gpu_blocks_override"] = options["kv_tokens"] and options["kv_tokens"] // 16
    else:
        settings["enforce_eager"] = True
    if media := options.get("media"):
        # Its processors need a tokenizer. Media that no request has are not tried out at the start.
        settings |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": limits(media, options["gpu"])}
    if embeds(options):
        settings |= {"runner": "pooling", "num_gpu_blocks_override": None, "skip_tokenizer_init": False}
    if options["load_format"] == "dummy":
        settings["worker_extension_cls"] = "fk_bench.offline.random_weights.VllmWorker"
    llm = LLM(model=options["model"], **given(settings, options["engine_args"]))
    ended("engine")
    if options["load_format"] == "dummy":
        llm.collective_rpc("draw_random_weights")
    if embeds(options):
        return _no_tokens, 0, llm

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs)

    cache = llm.llm_engine.vllm_config.cache_config
    return generate, cache.num_gpu_blocks * cache.block_size, llm


def sglang(options: dict[str, Any]) -> tuple[Generate, int, Any]:
    import sglang

    ended("imports")
    settings: dict[str, Any] = {
        "dtype": options["dtype"], "load_format": options["load_format"], "skip_tokenizer_init": True,
        "context_length": options["max_model_len"], "max_running_requests": options["max_num_seqs"],
        "max_total_tokens": options["kv_tokens"], "tp_size": options["tensor_parallel"],
    }  # fmt: skip
    if options.get("shared"):
        # Its share of what is free would count what other engines take meanwhile; the tokens above are the limit.
        settings |= {"mem_fraction_static": 0.98, "sleep_on_idle": True}
    elif options["gpu"] and options["gpu_share"]:
        import torch

        free, total = torch.cuda.mem_get_info()
        # SGLang's share is relative to the memory that is free when it starts, next to other hosts.
        settings["mem_fraction_static"] = round(min(0.9, options["gpu_share"] * total / free), 3)
    if not options["gpu"]:
        settings |= {
            "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
        }  # fmt: skip
    if options["load_format"] == "dummy":
        from fk_bench.offline.random_weights import SGLangLoader

        settings["load_format"] = SGLangLoader
    engine = sglang.Engine(model_path=options["model"], **given(settings, options["engine_args"]))
    ended("engine")

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        return sum(o["meta_info"]["completion_tokens"] for o in outputs)

    return generate, int(engine.get_server_info()["max_total_num_tokens"]), engine


@dataclass
class Sent:
    """A request, and what came of it. `after`: tokens of the first request after which it is sent.

    Seconds count from the start of the run: `at` when it was sent, `tokens` when each token came. cached: tokens of
    its prompt that the prefix cache held, None if the host does not tell. media: {kind: values} of the prompt; read:
    the seconds in which the host has read them.
    """

    prompt: list[int]
    output_len: int
    after: int = 0
    at: float = 0.0
    tokens: list[float] = field(default_factory=list)
    cached: int | None = None
    media: dict[str, Any] = field(default_factory=dict)
    read: float = 0.0

    @property
    def given(self) -> dict[str, Any]:
        """As vLLM and our engine take it."""
        more = {"multi_modal_data": self.media} if self.media else {}
        return {"prompt_token_ids": self.prompt, **more}


def drawn(media: dict[str, Any], number: int) -> dict[str, Any]:
    """Random media of a request. media: 'images' of 'side' pixels or seconds of 'audio', and a 'seed'."""
    import numpy as np

    random = np.random.default_rng(zlib.crc32(f"{media['seed']} {number}".encode()))
    if media["audio"]:
        return {"audio": (random.normal(0, 0.1, round(media["audio"] * RATE)).astype(np.float32), RATE)}
    from PIL import Image

    shape = media["images"], media["side"], media["side"], 3
    return {"image": [Image.fromarray(pixels) for pixels in random.integers(0, 256, shape, dtype=np.uint8)]}


def requests_of(work: dict[str, Any]) -> list[Sent]:
    """The requests of a line of input: `prompts`, which start together, and `later`, which arrive meanwhile."""
    made = [Sent(prompt, work["output_len"]) for prompt in work["prompts"]]
    if later := work.get("later"):
        pairs = zip(later["prompts"], later["after"], strict=True)
        made += [Sent(prompt, later["output_len"], after) for prompt, after in pairs]
    if media := work.get("media"):
        for number, request in enumerate(made):
            request.media = drawn(media, number)
    return made


def vllm_arrivals(llm: Any, requests: Sequence[Sent]) -> None:
    """Generate or embed, and note the seconds from the start to each token or vector of each request."""
    from vllm import PoolingParams, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine

    def params(output_len: int) -> Any:
        if not output_len:
            return PoolingParams(task="embed")
        return SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip

    def read(name: str, request: Sent) -> Any:
        own, tasks = params(request.output_len), engine.get_supported_tasks()
        return engine.input_processor.process_inputs(name, request.given, own, supported_tasks=tasks)

    _step(engine, requests, lambda request: request.given, params, read)


def _step(
    engine: Any, requests: Sequence[Sent], given: Callable[[Sent], Any], params: Callable[[int], Any],
    read: Callable[[str, Sent], Any],
) -> None:  # fmt: skip
    """Step vLLM's engine, or ours, until all requests have ended. Media are read before the clock starts."""
    names, ready = {}, {}
    for number, request in enumerate(requests):
        names[id(request)] = name = f"{time.perf_counter()}-{number}"
        if request.media:
            began = time.perf_counter()
            ready[name] = read(name, request)
            request.read = time.perf_counter() - began
    waiting = list(requests)
    running: dict[str, Sent] = {}
    start = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        produced = len(requests[0].tokens) if engine.has_unfinished_requests() or not running else math.inf
        while waiting and waiting[0].after <= produced:
            request = waiting.pop(0)
            name = names[id(request)]
            running[name], request.at = request, time.perf_counter() - start
            engine.add_request(name, ready.pop(name, None) or given(request), params(request.output_len))
        for output in engine.step():
            seconds, request = time.perf_counter() - start, running[output.request_id]
            count = len(output.outputs[0].token_ids) if request.output_len else 1
            request.tokens += [seconds] * count
            cached = getattr(output, "num_cached_tokens", None)
            request.cached = request.cached if cached is None else cached


def sglang_arrivals(engine: Any, requests: Sequence[Sent]) -> None:
    """As `vllm_arrivals`."""
    start = time.perf_counter()

    async def one(request: Sent, moved: asyncio.Condition) -> None:
        async with moved:
            await moved.wait_for(lambda: len(requests[0].tokens) >= request.after)
        params = {"temperature": 0, "max_new_tokens": request.output_len, "ignore_eos": True}
        request.at = time.perf_counter() - start
        stream = await engine.async_generate(input_ids=request.prompt, sampling_params=params, stream=True)
        async for part in stream:
            new = part["meta_info"]["completion_tokens"] - len(request.tokens)
            request.tokens += [time.perf_counter() - start] * new
            request.cached = part["meta_info"].get("cached_tokens", request.cached)
            if request is requests[0] and requests[-1].after:
                async with moved:
                    moved.notify_all()

    async def all_of_them() -> None:
        moved = asyncio.Condition()
        await asyncio.gather(*(one(request, moved) for request in requests))

    engine.loop.run_until_complete(all_of_them())


def fastkernels_arrivals(llm: Any, requests: Sequence[Sent]) -> None:
    """As `vllm_arrivals`."""
    from fastkernels import SamplingParams
    from fastkernels.engine.sampling.sampling_params import RequestOutputKind
    from fastkernels.engine.scheduling.encoding import PoolingParams

    engine = llm.llm_engine

    def params(output_len: int) -> Any:
        if not output_len:
            return PoolingParams("embed")
        return SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip

    def read(name: str, request: Sent) -> Any:
        return engine.make_request(name, request.given, params(request.output_len))

    _step(engine, requests, lambda request: request.prompt, params, read)


ARRIVALS: dict[str, Callable[[Any, Sequence[Sent]], None]] = {
    "vllm": vllm_arrivals, "sglang": sglang_arrivals, "fastkernels": fastkernels_arrivals,
}  # fmt: skip


class Toggled:
    """A host's engine, measured token by token, patched and undone on request.

    memory  the engine's worker tells of torch's allocator: vLLM's with random weights, on a GPU
    """

    def __init__(self, host: str, engine: Any, memory: bool = False):
        self.host, self.engine, self.memory = host, engine, memory
        self.report: Any = None

    def answer(self, work: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        if "memory" in work:
            return {"memory": self._memory()}
        if "patch" in work:
            import fastkernels as library

            self.report = library.patch(self.engine, ops=work["patch"])
            rows = [[row.op, row.state, row.modules, row.reason] for row in self.report.rows]
            seconds = time.perf_counter() - start
            return {"seconds": seconds, "phases": self.report.seconds, "memory": self._memory(), "rows": rows}
        if "undo" in work:
            self.report.undo()
            seconds = time.perf_counter() - start
            return {"seconds": seconds, "phases": self.report.seconds, "memory": self._memory()}
        if "traced" in work:
            self._call("trace_start")
        requests = requests_of(work)
        ARRIVALS[self.host](self.engine, requests)
        found: dict[str, Any] = {
            "arrivals": [r.tokens for r in requests], "sent": [r.at for r in requests],
            "cached": [r.cached for r in requests], "read": [r.read for r in requests if r.media],
        }  # fmt: skip
        if "traced" in work:
            (reply, *_) = self._call("trace_stop")
            found |= {"busy_us": reply["busy_us"], "us": reply["us"], "launches": reply["kernels"]}
            found["allocations"] = sum(
                n for name, n in reply["kernels"].items() if name.startswith("cu") and "Malloc" in name
            )
        return found

    def _memory(self) -> dict[str, float]:
        """GiB of torch's allocator in the first worker."""
        if not self.memory:
            return {}
        (of_first, *_) = self.engine.collective_rpc("allocator_gib")
        return dict(of_first)

    def _call(self, action: str) -> list[dict[str, Any]]:
        if self.host == "fastkernels":  # its runner is in this process
            from fk_integrations.patching import proof

            if action == "trace_stop":
                return [proof.stop()]
            proof.start(_device())
            return []
        from fastkernels.patch import Request, find_host

        replies = find_host(self.engine).call(self.engine, Request(action))
        if (error := replies[0]["error"]) is not None:
            raise RuntimeError(error)
        return replies


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def patched(engine: Any, candidates: str) -> Any:
    """The report of a patch with the candidates of a folder, and with no other op."""
    import fastkernels as library
    from fastkernels.core.candidate import from_directory

    files = from_directory(candidates, blocks=True)
    return library.patch(engine, ops=list(files), candidates=files)


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # hosts print to standard output
    hosts = {"fastkernels": fastkernels, "vllm": vllm, "sglang": sglang}
    generate, kv_tokens, engine = hosts[options["host"]](options)
    report = None
    if options.get("candidate"):
        from fk_bench.offline import (
            refusals,  # a host without a patch may be in an interpreter without fk_bench
        )

        with refusals.answered(answers):
            report = patched(engine, options["candidate"])
    first: dict[str, Any] = {"kv_tokens": kv_tokens, "ends": ENDS}
    if options["host"] == "fastkernels":
        phases = engine.llm_engine.phases
        first["engine"] = {"phases": phases.seconds, "kernels": phases.kernels}
    print(json.dumps(first), file=answers, flush=True)
    toggled: Toggled | None = None
    for line in sys.stdin:
        work = json.loads(line)
        if {"arrivals", "patch", "undo", "memory"} & set(work):
            tells = options["host"] == "vllm" and options["gpu"] and options["load_format"] == "dummy"
            toggled = toggled or Toggled(options["host"], engine, tells)
            if "patch" in work:
                from fk_bench.offline import refusals

                with refusals.answered(answers):
                    answer = toggled.answer(work)
            else:
                answer = toggled.answer(work)
            print(json.dumps(answer), file=answers, flush=True)
            continue
        start = time.perf_counter()
        tokens = generate(work["prompts"], work["output_len"])
        answer = {"seconds": time.perf_counter() - start, "output_tokens": tokens}
        if report is not None:
            answer["live"] = report.refresh().candidates
            report.reset()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
