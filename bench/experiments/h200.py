"""Measure the numbers of the README and docs/performance.md again: `make bench-h200`. Rows go to $OUT.

    make bench-h200 TOKENIZER=folder [VLLM=python of its environment] [SGLANG=the same]
                                  makes random checkpoints of Llama-3.1-8B's shapes (bf16 and FP8) with that tokenizer
    make bench-h200 MODEL=folder [FP8_MODEL=folder] ...   uses these; MODEL_NAME is their name in the tables
    PYTHON=path           the Python with fastkernels[bench] (default: python3)
    TEXT_MODEL=folder     measure quality too: a small model with real weights, such as SmolLM2-135M-Instruct
    SETS=folder           candidates of others, SETS/NAME/...: judged, scored in the hosts, and studied
    VLLM_ENGINE='{"name": value}', SGLANG_ENGINE: more engine arguments for the quality parts
    GPUS=0,1,2,3          the GPUs to use (default: all that are visible); a part has one or two to itself
    ONLY=part,'servers*'  run these parts and their prerequisites; an OUT of an earlier run skips parts that succeeded
    LIMIT=seconds         time limit of each part (default: twice its expected time plus two minutes)
    QUICK=1               3 rounds of servers, a few cases of each op, half the text, live patches only
    RUN=echo              print the plan and run nothing; needs no GPU

Wrong paths are reported before anything runs. A part that fails is reported, and the other parts run. Logs are in
$OUT/logs/PART.log. The tables made of the rows are in $OUT/tables.md; TABLES=1 also copies rows to bench/results and
updates the documents. FK_BENCH_COMMIT names the commit of a copy with another history or none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT), str(ROOT / "bench"), str(ROOT / "integrations")]
sys.path[:0] = FOLDERS

from fk_bench.batch import preflight  # noqa: E402

preflight.need_modules("make bench-h200")

from fk_bench.batch.plan import left_to_do, minutes, show_failed, show_plan  # noqa: E402
from fk_bench.batch.queue import Batch, Part, chosen, done_before  # noqa: E402
from fk_bench.core import machine  # noqa: E402
from fk_bench.core.gpus import Command  # noqa: E402
from fk_bench.core.machine import absolute  # noqa: E402
from fk_bench.core.terminal.flags import ConfigError, comma_list  # noqa: E402
from fk_bench.core.terminal.signals import EndedBySignal, signals_raise  # noqa: E402

from fastkernels.core import registry  # noqa: E402

RANDOM = "Llama-3.1-8B shapes, random weights"
JUDGED = {  # {part of the judge's ops: (expected seconds on 16 cores with all cases, families)}
    "norms": (330, ("norm", "quant")),
    "attention": (310, ("attention", "dense_attention", "cache", "rope", "embedding")),
    "experts": (480, ("moe", "routing")),
    "layers": (450, ()),  # all other families
}
QUICK_CASES = (  # at least one of each op
    "decode_1", "decode_8", "decode_32", "decode_256", "qkv_32", "gate_up_32", "token_32", "static_32", "images_32",
    "cascade_32", "deepseek_32", "mixtral_32", "mamba_32", "prefill_8k", "prefill_2k", "flux",
    "flux_image", "flux_joint", "sdxl_32", "unet_32", "gpt_oss_20b_32", "gemma4_32", "gemma3_32", "mixtral_awq_32",
    "resnet_7", "siglip_32", "mla_small", "mobile_3x3", "rt_detr_20", "pyramid_8", "spp_13", "kimi_linear_32",
    "rt_detr_1", "cells_1", "best_1", "sam3_1", "sam3_frame_8", "full_2048",
    "dinov3_7b", "dinov3_mlp", "parakeet_16", "swinv2_b_3", "mamba_decode_32", "mamba2_decode_32", "gla_decode_32",
    "qwen3_next_decode_32", "kimi_linear_decode_32", "rwkv7_decode_32", "mobile_dw5", "efficient_10", "convnext_24",
    "colbert_100", "dp3_middle", "dlrm_32", "dlrm_multi_32", "gowalla_layer", "gowalla_32",
    "oasis_8", "hunyuan_256", "million", "million_1080p", "fox_1080p", "samples_256k", "color_256k", "rays_256k",
    "object", "room_stem", "room_64", "triangle_150", "pairs_150", "residues_150", "alone_150", "tokens_150",
    "ttt_1k", "ttt_8k", "ttt_3b", "gate_up_3b", "qwen3_vl_1024px",
)  # fmt: skip
EVERY_KERNEL = "linear:cuda-wgmma,attention_decode:triton-split"  # no tuned table has a small model's shapes
LONG_LOADS = "1x16384+128", "8x16384@100+64", "1x65536@100+64"
LENGTHS = ("--input-len", "512", "--output-len", "128")
FIRST_TOKENS = ("--load", "c=4,in=1920,out=8,prompts=48")
PREFILLS = ("--load", "c=1,in=600,out=8,prompts=40", "--load", "c=8,in=512,out=8,prompts=240", *FIRST_TOKENS)
AGREE, NO_AGREE = ("--agreement-prompts", "2", "--min-agreement", "0"), ("--agreement-prompts", "0")
# Features of works_with.py by host and part; the features of a part run concurrently on its GPUs (3 to 6 a GPU fit).
SHARED = {"a": "plain,fp8,gptq,awq,fp8_kv,lora", "b": "spec,ngram,window,sleep", "c": "moe,moe_fp8,sinks"}
WORKS = {
    "vllm": {
        **SHARED,
        "b": f"{SHARED['b']},ray",
        "c": f"{SHARED['c']},mla",
        "two": "tp,tp_norms,tp_sums,pp,ep,ep_dispatch",
    },
    "sglang": {**SHARED, "marlin": "gptq_marlin,awq_marlin", "two": "tp,tp_sums,pp,ep_dispatch"},
}
GPU_TESTS = (  # of several ranks
    "tests/overrides/collective/test_collectives.py", "tests/engine/execution/test_tensor_parallel.py",
    "tests/engine/execution/test_data_parallel.py",
)  # fmt: skip
PREBUILT = ("works-vllm-two", "works-sglang-marlin")  # parts that compile host kernels before their cells
# Expected seconds of a part's cells with one way of patching and with both (11 features on two H200s with 32 cores
# took 132 and 190, 2026-11-22), of compiling host kernels (106 in vLLM; SGLang's is a guess), and the limit of a cell.
SUITE, LIBRARIES, PROFILED = (
    "default",
    ("liger", "quack", "flashinfer", "inductor"),
    ("rms_norm", "linear", "silu_and_mul"),
)
# Expected seconds of a library's ops at 1.7 s a case (2026-11-27), of all profiles (a guess, with ncu), and the time
# that the judge takes for others' files: it continues where it stopped.
LIBRARY_S, PROFILE_S, FOREIGN_S = 240, 240, 480
WORKS_S, PREBUILD_S, CELL_S = {1: 130, 2: 200}, 130, 240


@dataclass(frozen=True)
class Settings:
    """The settings of a run. hosts: {'vllm': its python}; made: parts of this run make the models."""

    out: Path
    model: str
    fp8_model: str
    hosts: Mapping[str, str]
    text_model: str = ""
    engines: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    made: bool = False
    quick: bool = False
    sets: str = ""

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Settings:
        out = Path(env.get("OUT") or time.strftime("fk-bench-runs/h200-%Y%m%d-%H%M%S", time.gmtime()))
        made = not env.get("MODEL")
        hosts = {h: absolute(env[h.upper()]) for h in ("vllm", "sglang") if env.get(h.upper())}
        fp8 = env.get("FP8_MODEL") or (str(out / "model-fp8") if made and hosts else "")
        engines = {h: env[f"{h.upper()}_ENGINE"] for h in hosts if env.get(f"{h.upper()}_ENGINE")}
        return cls(
            out, env.get("MODEL") or str(out / "model"), fp8, hosts, env.get("TEXT_MODEL", ""), engines,
            env.get("TOKENIZER", ""), made, env.get("QUICK", "0") not in ("", "0"), env.get("SETS", ""),
        )  # fmt: skip

    def file(self, name: str) -> str:
        return str(self.out / name)

    @property
    def makes_fp8(self) -> bool:
        return self.fp8_model == self.file("model-fp8")


def fk(*args: str) -> Command:
    return (sys.executable, "-m", "fk_bench.cli", *args)


def experiment(name: str, *args: str, python: str = sys.executable) -> Command:
    return (python, f"bench/experiments/{name}.py", *args)


def parts(settings: Settings) -> list[Part]:
    """Return all parts that these settings allow."""
    made = [
        *_models(settings),
        *_kernels(settings),
        *_experiments(settings),
        *_collectives(settings),
        *_pictures(settings),
        *_servers(settings),
        *_hosts(settings),
        *_candidates(settings),
    ]
    known = {p.name for p in made}
    return [replace(p, after=tuple(a for a in p.after if a in known)) for p in made]


def _models(a: Settings) -> list[Part]:
    tokenizer = ("--tokenizer", a.tokenizer) if a.tokenizer else ()
    made = (
        [Part("model", (experiment("checkpoints/make_checkpoint", a.model, *tokenizer),), 60)]
        if a.made
        else []
    )
    fp8 = ("--quantize", "fp8")
    if a.makes_fp8:
        made.append(
            Part("model-fp8", (experiment("checkpoints/make_checkpoint", a.fp8_model, *tokenizer, *fp8),), 60)
        )
    return made


def judged(part: str) -> list[str]:
    """Return the ops of a part of JUDGED."""
    listed = {family for _, families in JUDGED.values() for family in families}
    mine = JUDGED[part][1]
    ops = [(op, registry.family(op)) for op in registry.op_names()]
    return [op for op, family in ops if family in mine or (not mine and family not in listed)]


def _kernels(a: Settings) -> list[Part]:
    """The judge, ten of its cases twice, and `explain`."""
    cases: tuple[str, ...] = ("--cases", "captured,random", "--rounds", "8")
    if a.quick:
        cases = ("--cases", "random", *(x for name in QUICK_CASES for x in ("--case", name)), "--rounds", "5")
    made = [
        Part(
            f"kernels-{name}", (fk("kernels", *judged(name), *cases, "--out", a.file(f"kernels-{name}")),),
            seconds * (0.3 if a.quick else 1),
        )
        for name, (seconds, _) in JUDGED.items()
    ]  # fmt: skip
    few = (
        "rms_norm", "silu_and_mul", "store_kvcache", "topk_softmax", "relu2", "--cases", "random", "--case", "decode_1",
        "--case", "decode_32", "--rounds", "8", "--starts", "2",
    )  # fmt: skip
    runs = [a.file("judge-once"), a.file("judge-again")]
    twice = (*(fk("kernels", *few, "--out", run) for run in runs), fk("diff", *runs))
    # 576 tokens: the mean length of a sequence in the servers below
    sizes = ("--batch", "1,8,32,256", "--context", "576", "--compilers", "--out", a.file("explain"))
    models = [fk("explain", m, *sizes) for m in ("llama-3.1-8b", "qwen3-8b", "mixtral-8x7b")]
    truth = experiment("judge/judge_check", "--out", a.file("judge-truth"))
    cheats = fk("kernels", "--cheats", "--device", "cuda", "--out", a.file("cheats"))
    tune = fk("tune", "qwen3-8b", "--run", a.file("tune"), "--out", a.file("tune.json"))
    return [
        *made, Part("agreement", twice, 100), Part("judge-truth", (truth,), 60), Part("explain", tuple(models), 260),
        Part("cheats", (cheats,), 360), Part("tune", (tune,), 105),
    ]  # fmt: skip


def _experiments(a: Settings) -> list[Part]:
    def one(part: str, seconds: float, name: str, rows: str, *more: str, after: tuple[str, ...] = ()) -> Part:
        return Part(part, (experiment(name, "--out", a.file(f"{rows}.jsonl"), *more),), seconds, after=after)

    tokens = ("--tokens", "1,8,16,32,64")
    longest = (  # the graph capacity of a server with default settings
        "--model", "llama-8b", "--batch", "1,8,32,64,128,256", "--context", "512,2048,8192,32768", "--capacity",
        "131072", "--seconds", "170",
    )  # fmt: skip
    made = [
        one("linear", 130, "linear/skinny_linear", "skinny-linear", "--model", "llama-8b", *tokens),
        one("linear-tp2", 130, "linear/skinny_linear", "skinny-linear-tp2", "--model", "llama-8b-tp2", *tokens),
        one("fp8", 310, "linear/linear_fp8", "linear-fp8", "--scales", "row,block", "--tokens", "1,8,32,64,128"),
        one("attention", 130, "attention/decode_attention", "decode-attention"),
        one("attention-capacity", 100, "attention/decode_attention", "decode-attention-capacity", *longest),
        one("attention-block1", 90, "attention/decode_attention", "decode-attention-block1", *longest,
            "--block-size", "1"),
        one("step", 60, "decode_step/decode_step", "decode-step", "--rows",
            a.file("skinny-linear.jsonl"), after=("linear",)),
    ]  # fmt: skip
    if "vllm" in a.hosts:  # next to vLLM's experts
        check = experiment(
            "selection/experts_check", "--out", a.file("experts.jsonl"), python=a.hosts["vllm"]
        )
        made.append(Part("experts-choice", (check,), 180))
        sweep = experiment(
            "selection/sweep", "--op", "fused_experts,fused_experts_fp8", "--tokens", "1,8,32,64,2048", "--seconds",
            "110", "--out", a.file("experts-selection.jsonl"), python=a.hosts["vllm"],
        )  # fmt: skip
        made.append(Part("experts-selection", (sweep,), 120))
    if "vllm" in a.hosts:  # next to vLLM's Marlin
        int4 = experiment("linear/linear_int4", "--out", a.file("linear-int4.jsonl"), python=a.hosts["vllm"])
        made.append(Part("linear-int4", (int4,), 300))
    return made


def _collectives(a: Settings) -> list[Part]:
    """Collectives between two GPUs: times, experts, the judge, and tests that need two GPUs.

    They come last, since parts of two GPUs would start before the checkpoints, for which the servers wait.
    """

    def one(name: str, seconds: float, *more: str, out: str, python: str = sys.executable) -> Part:
        command = experiment(f"collective/{name}", "--out", a.file(out), "--ranks", "2", *more, python=python)
        return Part(f"collectives-{name}", (command,), seconds, 2, last=True)

    python = a.hosts.get("vllm", sys.executable)  # vLLM's own kernels are baselines
    tests = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", *GPU_TESTS)
    made = [
        one("collectives", 200, out="collectives.jsonl", python=python),
        one("experts", 200, out="collectives-experts.jsonl", python=python),
        one("judged", 900, out="collectives-judged"),
    ]
    return [*made, Part("collectives-tests", (tests,), 600, 2, last=True)]


def not_installed() -> list[str]:
    """Return the packages of image models that this Python lacks."""
    return [name for name in ("diffusers", "timm") if find_spec(name) is None]


def _pictures(a: Settings) -> list[Part]:
    """Image models: the host, the compiled host, and both with the patch."""
    if not_installed():
        return []
    compiled = ("--compile-mode", "default", "--compile-blocks", "--cuda-graphs", "--dtype", "bfloat16")
    lanes = "stock,compiled,patched-compiled"

    def one(part: str, seconds: float, model: str, host: str, *more: str) -> Part:
        host_and_lanes = ("--hosts", host, "--lanes", lanes, *compiled)
        return Part(part, (fk("e2e", model, *host_and_lanes, *more, "--out", a.file(part)),), seconds)

    made: list[Part] = []
    for name, model, steps in (("flux", "flux.1", "28"), ("sdxl", "sdxl", "50")):
        sizes = ("--image-size", "1024", "--channels-last")
        made += [
            one(f"pictures-{name}{suffix}", seconds, model, "diffusers", *sizes, *more)
            for suffix, seconds, more in (
                ("", 190, ("--requests", "1", "--steps", "4", "--rounds", "3", "--costs")),
                ("-4", 200, ("--requests", "4", "--steps", "4", "--rounds", "2")),
                ("-steps", 210, ("--requests", "1", "--steps", steps, "--rounds", "2")),
            )
        ]
    often = ("--rounds", "3", "--load-format", "dummy", "--compile-ahead", "6")
    for m in ("siglip2", "dinov3", "swinv2", "vjepa2"):
        made.append(one(f"pictures-{m}", 120, m, "timm", "--requests", "1,8,32", *often))
        batches = "1,8" if m == "vjepa2" else "1,8,32"  # vjepa2: 8,192 tokens a clip of 16 images
        made.append(
            one(f"pictures-{m}-512", 150, m, "timm", "--requests", batches, "--image-size", "512", *often)
        )
    return made


def _servers(a: Settings) -> list[Part]:
    """Servers of a part share its GPU with equal KV caches and are loaded in turn. seconds: (start, round)."""
    pythons = [x for host, path in a.hosts.items() for x in ("--python", f"{host}={path}")]
    rounds, patched = 3 if a.quick else 5, [[h, f"{h}+fk"] for h in a.hosts]
    every = [lane for pair in patched for lane in pair]

    def serve(
        name: str, seconds: tuple[float, float], lanes: Sequence[str], tokens: int, concurrency: str, prompts: str,
        *more: str, model: str = a.model, gpus: int = 1, rounds: int = rounds, after: str = "model",
    ) -> Part:  # fmt: skip
        command = fk(
            "serve-compare", "--model", model, "--lanes", ",".join(lanes), *pythons, "--together", "--resident",
            str(len(lanes)), "--kv-tokens", str(tokens), "--concurrency", concurrency, "--num-prompts", prompts,
            "--rounds", str(rounds), *more, "--out", a.file(name),
        )  # fmt: skip
        return Part(name, (command,), seconds[0] + rounds * seconds[1], gpus, (after,))

    ragged = a.file("ragged-prompts.jsonl")
    write = experiment("checkpoints/ragged_prompts", "--model", a.model, "--out", ragged)
    made = [Part("prompts", (write,), 15, gpus=0, after=("model",))] if a.hosts else []
    for host, both in zip(a.hosts, patched, strict=True):
        made += [
            serve(
                f"servers-{host}", (150, 56), [*both, "fastkernels"], 65536, "1,8,32,64", "4,32,96,128", *PREFILLS,
                *LENGTHS, *AGREE,
            ),
            serve(
                f"servers-256-{host}", (120, 30), [host, "fastkernels"], 311296, "256", "256", "--input-len", "1024",
                "--output-len", "128", *NO_AGREE, rounds=3,
            ),
            serve(
                f"servers-ragged-{host}", (110, 17), both, 65536, "8,32", "32,96", "--dataset", "prompts",
                "--dataset-path", ragged, "--max-model-len", "2048", "--output-len", "128", *NO_AGREE, after="prompts",
            ),
        ]  # fmt: skip
    if a.hosts:
        made.append(
            serve(
                "servers-tp2", (190, 40), [*every, "fastkernels"], 65536, "1,8,32", "4,32,96", *FIRST_TOKENS, *LENGTHS,
                "--tensor-parallel", "2", *NO_AGREE, gpus=2,
            )
        )  # fmt: skip
    if a.hosts and a.fp8_model:  # our engine does not load FP8 weights
        made.append(
            serve(
                "servers-fp8", (170, 48), every, 65536, "1,8,32,64", "4,32,96,128", *FIRST_TOKENS, *LENGTHS, *AGREE,
                model=a.fp8_model, after="model-fp8",
            )
        )  # fmt: skip
    return made


def _hosts(a: Settings) -> list[Part]:
    """Start-up times and measurements inside a host."""
    start = ("llama-3.1-8b", "--startup", "--load-format", "dummy", "--dtype", "bfloat16")
    made = [Part("startup", (fk("e2e", *start, "--rounds", "2", "--out", a.file("startup")),), 50)]
    if "vllm" in a.hosts:
        made += _many_models(a.hosts["vllm"], a)
    for host, python in a.hosts.items():
        cache = ("--rounds", "1", "--hosts", host, "--python", f"{host}={python}", "--gpu-share", "0.4")
        cache = (*cache, "--out", a.file(f"kv-blocks-{host}"))
        stock, patched = ("env", "FASTKERNELS=0"), ("env", "FASTKERNELS=1")
        made += [
            Part(f"kv-blocks-{host}", tuple((*e, *fk("e2e", *start, *cache)) for e in (stock, patched)), 150),
        ]
        if a.text_model:
            length = ("--sequences", "16" if a.quick else "32", "--batch", "32", "--new", "64", "--exact")
            settings = ("--hosts", host, "--python", f"{host}={python}", *length, "--out", a.file("quality"))
            if host in a.engines:
                settings = (*settings, "--engine-args", f"{host}={a.engines[host]}")
            quality = ("env", f"FASTKERNELS_PROVIDER={EVERY_KERNEL}", *fk("quality", a.text_model, *settings))
            made.append(Part(f"quality-{host}", (quality,), 330))
        made += [_works(a, host, letter, features) for letter, features in WORKS[host].items()]
    return made


def _many_models(python: str, a: Settings) -> list[Part]:
    """Models that were never tuned, stock and patched; six of them in our engine as well, one at long contexts."""
    way = ("--cycles", "1", "--model-seconds", "20" if a.quick else "45", "--python", python)
    tables: dict[str, tuple[float, tuple[str, ...]]] = {
        "models": (1300, ("--no-table", "--loads", "short", "--again", "0.98", "--side-by-side", "5")),
        "engine": (900, ("--with-engine", "--side-by-side", "4")),
    }
    made = [
        Part(
            f"patch-{name}",
            (fk("patch-compare", "all", *way, *more, "--out", a.file(f"patch-{name}")),),
            seconds,
        )
        for name, (seconds, more) in tables.items()
    ]
    sparse = fk("patch-compare", "gpt-oss-20b", *way, "--with-engine", "--out", a.file("patch-gpt-oss"))
    contexts = fk(
        "patch-compare", "llama-3.1-8b", *way, "--with-engine", "--no-table", "--loads",
        LONG_LOADS[0] if a.quick else ",".join(LONG_LOADS), "--out", a.file("patch-long"),
    )  # fmt: skip
    formats = experiment(
        "checkpoints/formats", "--vllm", python, "--formats", "awq,gptq", "--layers", "0", "--out", a.file("formats")
    )  # fmt: skip
    made += [Part("patch-gpt-oss", (sparse,), 300), Part("patch-long", (contexts,), 300)]
    return [*made, Part("formats", (formats,), 260)]


def set_names(a: Settings) -> list[str]:
    """Return the names of the sets of others: the subfolders of SETS."""
    return sorted(p.name for p in Path(a.sets).iterdir() if p.is_dir()) if a.sets else []


def eval_seconds(host: str) -> float:
    """Return the seconds that the suite declares for the items of a host, with one set."""
    from fk_bench.evaluate.suites import load

    return 60 * sum(e.minutes for e in load(SUITE).entries if e.item.host == host)


def _candidates(a: Settings) -> list[Part]:
    """Sets of candidates: libraries and others' files by the judge, in hosts, and whether the times agree; profiles."""
    runs = [a.file(f"library-{name}") for name in LIBRARIES]
    judge = ("--cases", "random,held-out", "--rounds", "5", "--no-scan")
    libraries = [
        fk("kernels", "--candidate", n, *judge, "--out", run) for n, run in zip(LIBRARIES, runs, strict=True)
    ]
    step = ("llama-3.1-8b", "--batch", "32", "--context", "1024")
    profiles = [fk("profile", op, "--out", a.file(f"profile-{op}")) for op in PROFILED]
    made = [
        Part("agents-table", (*libraries, fk("agents-table", *runs)), LIBRARY_S * len(LIBRARIES)),
        Part("profile", (*profiles, fk("profile", *step, "--out", a.file("profile-step"))), PROFILE_S),
    ]
    names, after = set_names(a), ("foreign",)
    if names:
        judged_sets = experiment(
            "foreign_candidates/judge_sets", a.sets, a.file("foreign"), "--limit", str(FOREIGN_S)
        )
        made.append(Part("foreign", (judged_sets,), FOREIGN_S))
    for host, python in a.hosts.items():
        where = ("--host", host, "--python", f"{host}={python}", "--no-kernels")
        own = fk("eval", SUITE, "--selftest", *where, "--out", a.file(f"eval-selftest-{host}"))
        made.append(Part(f"eval-selftest-{host}", (own,), eval_seconds(host)))
        if names:
            sets = [w for n in names for w in ("--set", f"{n}={a.file(f'foreign/passing/{n}')}")]
            run = a.file(f"eval-{host}")
            made += [
                Part(f"eval-{host}", (fk("eval", SUITE, *where, *sets, "--out", run),),
                     eval_seconds(host) * len(names), after=after),
                Part(f"study-{host}", (fk("study", run, "--kernels", a.file("foreign"), "--markdown",
                                          a.file(f"study-{host}.md")),), 20, gpus=0, after=(f"eval-{host}",)),
            ]  # fmt: skip
    # These long parts leave the first GPUs to the checkpoints, for which the servers wait.
    return [replace(part, after=part.after or ("model", "model-fp8")) for part in made]


def _works(a: Settings, host: str, letter: str, features: str) -> Part:
    name, ways, python = f"works-{host}-{letter}", ("live",) if a.quick else ("live", "start"), a.hosts[host]
    cells = experiment(
        "works_with/works_with", "--host", host, "--features", features, "--ways", ",".join(ways), "--jobs",
        str(len(features.split(","))), "--timeout", str(CELL_S), "--out", a.file("works-with.jsonl"), "--work",
        a.file(f"work/{name}"), python=python,
    )  # fmt: skip
    seconds, commands = WORKS_S[len(ways)], (cells,)
    if name in PREBUILT:
        seconds += PREBUILD_S
        commands = (experiment("works_with/works_with", "--host", host, "--prebuild", python=python), cells)
    return Part(name, commands, seconds, 2 if letter == "two" else 1, last=True)


def tables(settings: Settings, env: Mapping[str, str]) -> list[Command]:
    """Return the commands that make tables from the rows and, with TABLES=1, update the documents."""
    name = env.get("MODEL_NAME") or (RANDOM if settings.made else "")
    called = ["--model-name", f"{Path(settings.model).name}={name}"] if name else []
    called += (
        ["--model-name", f"{Path(settings.fp8_model).name}={name} in FP8"]
        if name and settings.fp8_model
        else []
    )
    made = [fk("tables", "--results", str(settings.out), *called, "--out", settings.file("tables.md"))]
    if env.get("TABLES", "0") not in ("", "0"):
        made.append(fk("tables", "--take", str(settings.out), *called))
    return made


def wrong(settings: Settings, env: Mapping[str, str], todo: Sequence[Part]) -> list[str]:
    """Return a line for each wrong or missing setting."""
    said = preflight.wrong_folders(env, ("MODEL", "FP8_MODEL", "TEXT_MODEL", "TOKENIZER", "SETS"))
    served = [p.name for p in todo if p.name.startswith(("prompts", "servers"))]
    if settings.made and served and not settings.tokenizer:
        said.append(
            f"TOKENIZER is not set, and {served[0]} needs one: a folder with a tokenizer.json, or MODEL"
        )
    tokenizer = Path(settings.tokenizer or ".")
    if (
        settings.made
        and settings.tokenizer
        and tokenizer.is_dir()
        and not (tokenizer / "tokenizer.json").is_file()
    ):
        said.append(f"TOKENIZER={tokenizer}: it has no tokenizer.json")
    for host, python in settings.hosts.items():
        said += preflight.wrong_host(host, python)
    said += preflight.wrong_json(env, [f"{host.upper()}_ENGINE" for host in settings.engines])
    return said + preflight.wrong_out(settings.out)


def main() -> int:
    env = os.environ
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*FOLDERS, env.get("PYTHONPATH")]))
    os.chdir(ROOT)
    settings, plan = Settings.read(env), env.get("RUN") == "echo"
    not_set = [name for name in ("VLLM", "SGLANG", "TEXT_MODEL") if not env.get(name)]
    without = "; ".join(
        f"parts that need {', '.join(names)} are left out: not {what}"
        for names, what in ((not_set, "set"), (not_installed(), "installed"))
        if names
    )
    try:
        if env.get("RUN") and not plan:
            raise ConfigError(f"RUN={env['RUN']}: RUN=echo prints the plan; leave RUN out to run it")
        limit = comma_list("LIMIT", env.get("LIMIT", ""), float)
        try:
            todo = chosen(parts(settings), comma_list("ONLY", env.get("ONLY", ""), str))
        except ConfigError as error:
            raise ConfigError("; ".join(filter(None, (str(error), without)))) from None
        visible = (
            env.get("GPUS")
            or env.get("CUDA_VISIBLE_DEVICES")
            or ",".join(map(str, range(len(machine.gpu_names()))))
        )
        gpus = list(dict.fromkeys(comma_list("GPUS", visible or ("0,1,2,3" if plan else ""), str)))
        if not gpus:
            raise ConfigError("no GPU is visible: set GPUS=0,1, or RUN=echo to print the plan")
    except ConfigError as error:
        return _errors([str(error)])
    after, problems, done = tables(settings, env), wrong(settings, env, todo), done_before(settings.out, todo)
    if plan:
        assumed = "" if visible else "no GPU is visible: planned for GPUS=0,1,2,3"
        show_plan(todo, gpus, after, done, [line for line in (without, assumed) if line])
        return _errors(problems)
    if problems:
        return _errors(problems)
    try:
        batch = Batch(todo, gpus, settings.out, ROOT, limit[0] if limit else None, _say)
    except OSError as error:
        return _errors([f"OUT={settings.out}: cannot be created: {error.strerror}: {error.filename}"])
    quick, takes = ", QUICK=1" if settings.quick else "", minutes(left_to_do(todo, done), gpus)
    _say(
        f"{len(todo)} parts on GPU {','.join(gpus)}, {takes}, commit {machine.commit()}{quick}, to {settings.out}"
    )
    if without:
        _say(without)
    try:
        with signals_raise():
            failed = batch.run()
    except EndedBySignal as error:
        print(f"{error}; OUT={settings.out} resumes this run")
        return 130
    for name, command in zip(("tables", "documents"), after, strict=False):
        if subprocess.run(command).returncode:
            failed.append(name)
    if failed:
        show_failed(batch.why, batch.logs)
        print(
            f"failed: {' '.join(failed)}; "
            f"other results are in {settings.out}; OUT={settings.out} runs the failed parts again"
        )
        return 1
    print(f"results in {settings.out}, tables in {settings.file('tables.md')}")
    return 0


def _errors(lines: Sequence[str]) -> int:
    """Print error lines to standard error; return the exit status."""
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return 2 if lines else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
