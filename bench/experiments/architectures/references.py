"""The lanes of references: libraries and hosts, from inputs on the CPU to outputs on the CPU, with the same sizes."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.architectures import ours, patched, subjects
from experiments.architectures.subjects import BLOCKS, KEPT, Case, Lane, Subject
from experiments.architectures.times import Times
from fk_bench.core.rows import append
from fk_bench.e2e.pictures.graphs import Graphed, compile_blocks
from fk_bench.evaluate import checkpoints
from fk_bench.evaluate.run.hosts.weights import redraw
from fk_bench.evaluate.suites import Model

RATE = 16_000  # samples a second
CHECK = "torch_compilable_check"  # of transformers


def device_of(times: Times) -> torch.device:
    return torch.device("cuda" if times.cuda else "cpu")


@contextmanager
def place(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Make new modules on the device and in the dtype: random numbers of billions of weights take a CPU minutes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def on_cpu(found: Any) -> Any:
    return [t.float().cpu() for t in found if isinstance(t, torch.Tensor)]


def no_grad(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(given: Any) -> Any:
        with torch.no_grad():
            return call(given)

    return run


def compiled(function: Any, mode: str) -> Any:
    """torch.compile in a mode, for each batch size anew: kernels for any size would be slower."""
    if not mode:
        return function
    torch._dynamo.config.recompile_limit = 64
    torch._logging.set_logs(dynamo=logging.ERROR)
    if not torch.cuda.is_available():  # small models that try the script: tracing is what can fail
        return torch.compile(function, backend="eager", dynamic=False)
    return torch.compile(function, mode=mode, dynamic=False)


def library(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """A model of fk_bench.evaluate.run.hosts.libraries."""
    from fk_bench.evaluate.run.hosts.libraries import MODELS

    model = subjects.declared(subject.other)
    if tiny:
        model = model.small
    device, made, built = device_of(times), None, None
    for case in times.left(subject.cases):
        given = {**model.arguments, **({} if tiny else subject.arguments or {})}
        dtype = getattr(torch, str(given.pop("dtype")))
        if subject.dtype != "auto":
            dtype = getattr(torch, subject.dtype)
        sizes = {(subject.renamed or {}).get(k, k): v for k, v in case.items() if k != "batch"}
        sizes = dict(model.request) if tiny else {**model.request, **sizes, **(subject.fixed or {})}
        if sizes != built:
            torch.manual_seed(0)
            built, made = sizes, MODELS[model.library][1](given, sizes, device, dtype)
            inputs = made.make(case["batch"], torch.Generator().manual_seed(0))
            if lane.patched:
                times.more = patched.put_in(made.target, outputs_of(model.library, made, inputs), dtype)
            if lane.mode:
                made.target.forward = compiled(made.target.forward, lane.mode)
        inputs = made.make(case["batch"], torch.Generator().manual_seed(0))
        call = kept(made, given, device) if lane.name == KEPT else made.call
        run = no_grad(lambda inputs, call=call: call(inputs).cpu())
        times.add(case, lambda inputs=inputs, run=run: ((lambda: inputs), run))


def outputs_of(name: str, made: Any, inputs: Any) -> Callable[[], torch.Tensor]:
    """Calls of a library's model whose outputs can be compared."""
    if name == "detector":
        return lambda: patched.by_value(made.call(inputs))
    return lambda: made.call(inputs)


def kept(made: Any, given: Mapping[str, Any], device: Any) -> Callable[[Any], Any]:
    """LightGCN with embeddings that are propagated once, as a service has them: our engine does the same."""
    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        one = torch.randint(given["users"], (given["edges"],), generator=draw)
        other = given["users"] + torch.randint(given["items"], (given["edges"],), generator=draw)
        edges = torch.stack((torch.cat((one, other)), torch.cat((other, one)))).to(device)
        embedding = made.target.get_embedding(edges)

    def call(pairs: torch.Tensor) -> torch.Tensor:
        user, item = pairs.to(device)
        return (embedding[user] * embedding[item]).sum(-1)

    return call


def policies(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """Rows of experiments/policies, with names of their own."""
    from experiments.policies import policies

    for case in subject.cases:
        found = policies.Found(name, case)
        if name == "dp3":
            policies.run_dp3(case["batch"], ("reduce-overhead",), found, own=False)
        else:
            put_in = patched.put_in if lane.patched else None
            policies.pi0(
                case["cameras"], case["batch"], ("reduce-overhead",), found, own=False, put_in=put_in
            )
        append(times.out, found.rows)


def of_transformers(model: Model, device: torch.device, dtype: torch.dtype, **fields: Any) -> Any:
    """The class of transformers that the configuration names, with random weights."""
    import transformers

    config = dict(checkpoints.config_of(model))
    kind = config.pop("model_type")
    if kind == "swinv2":  # inference ignores it, and each block would be compiled anew for its own rate
        fields["drop_path_rate"] = 0.0
    made = transformers.AutoConfig.for_model(kind, **{**config, **fields})
    with place(device, dtype):
        target = getattr(transformers, config["architectures"][0])(made)
    module = sys.modules[type(target).__module__]
    if hasattr(module, CHECK):  # it reads a tensor, which breaks a graph
        setattr(module, CHECK, lambda *given, **named: None)
    return target.eval().requires_grad_(False).to(device)


def host(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """A model of timm or transformers that takes tensors of images, in channels last where it has convolutions."""
    from fk_bench.e2e.pictures import subjects as pictures

    model, device, dtype = subjects.model_of(subject, tiny), device_of(times), getattr(torch, subject.dtype)
    config = model.config
    if lane.needs == "timm":
        import timm

        size = config["pretrained_cfg"]["input_size"][-1]
        with place(device, dtype):
            more = config.get("model_args", {})
            target = timm.create_model(config["architecture"], num_classes=config["num_classes"], **more)
        target = target.eval().requires_grad_(False)
    else:
        target = of_transformers(model, device, dtype)
        size = config.get("image_size") or config.get("crop_size")
        size = size or getattr(target.config, "image_size", None) or getattr(target.config, "crop_size", 0)
        if "vision_config" in config and not size:
            size = target.config.vision_config.backbone_config.image_size
        size = size or int(target.config.num_patches**0.5) * target.config.patch_size
        redraw(target)
    made = pictures.Encoder(target, size, 1)
    made.channels_last()
    if lane.mode == BLOCKS and times.cuda:
        made.compile(None, blocks=True)
        made.capture()
    elif lane.mode != BLOCKS:
        made.target = compiled(target, lane.mode)
    function = made.graphed or made.target
    for case in times.left(subject.cases):
        inputs = {k: as_processed(v) for k, v in made.inputs(case["batch"], 0).items()}

        def call(given: Mapping[str, Any]) -> Any:
            moved = {k: read(v, device, dtype) for k, v in given.items()}
            if "x" in moved:
                return on_cpu([function(moved["x"])])
            return on_cpu(outputs(function(**moved), lane))

        times.add(case, lambda inputs=inputs: ((lambda: inputs), no_grad(call)))


def as_processed(value: Any) -> Any:
    """A tensor as an image processor leaves it: float32 on the CPU, as the arrays of our requests are."""
    if not torch.is_tensor(value):
        return value
    return value.cpu().float() if value.is_floating_point() else value.cpu()


def read(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """An argument of a model from what `as_processed` has left."""
    if not torch.is_tensor(value):
        return value
    moved = value.to(device)
    moved = moved.to(dtype) if moved.is_floating_point() else moved
    return moved.contiguous(memory_format=torch.channels_last) if moved.dim() == 4 else moved


def outputs(found: Any, lane: Lane) -> list[Any]:
    """The tensors that an application reads; of a segmenter, the masks of as many objects as ours returns."""
    if getattr(found, "pred_masks", None) is not None:
        scores = found.pred_logits.flatten(1).sigmoid()
        best = scores.topk(min(ours.KEPT_OBJECTS, scores.shape[1])).indices
        rows = torch.arange(len(best), device=best.device)[:, None]
        masks = torch.nn.functional.interpolate(
            found.pred_masks[rows, best].float(), size=MASKS, mode="bilinear", align_corners=False
        )
        return [found.pred_boxes[rows, best], scores.gather(1, best), masks > 0]
    for names in (("logits", "pred_boxes"), ("pooler_output",), ("last_hidden_state",)):
        if all(getattr(found, name, None) is not None for name in names):
            return [getattr(found, name) for name in names]
    raise ValueError(f"{lane.name} returns neither logits nor hidden states: {', '.join(found)}")


MASKS = (756, 1008)  # rows and columns of an image whose objects are found


def texts(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """An encoder of transformers: token ids to vectors, of the first token or of all of them, or to scores."""
    model, device, dtype = subjects.model_of(subject, tiny), device_of(times), getattr(torch, subject.dtype)
    late = model.config["architectures"][0] == "HF_ColBERT"
    if late:
        model = subjects.replace(model, config={**model.config, "architectures": ["BertModel"]})
    target = of_transformers(model, device, dtype)
    without_masks(target)
    head = None
    if late:
        with place(device, dtype):
            head = torch.nn.Linear(target.config.hidden_size, 128, bias=False)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        found = target(input_ids=ids)  # a mask would keep it from flash attention
        if hasattr(found, "logits"):
            return found.logits
        hidden = found.last_hidden_state
        return torch.nn.functional.normalize(head(hidden) if head is not None else hidden[:, 0], dim=-1)

    function: Any = forward
    if lane.mode == BLOCKS and times.cuda:
        compile_blocks(target, None)
        function = Graphed(forward)
    call = no_grad(lambda ids: on_cpu([function(ids.to(device, non_blocking=True))]))
    for case in times.left(subject.cases):
        sizes = subjects.sizes_of(subject, case, tiny)
        draw = torch.Generator().manual_seed(0)
        shape = case["batch"], int(sizes["tokens"])
        ids = torch.randint(ours.RESERVED, target.config.vocab_size, shape, generator=draw)
        times.add(case, lambda ids=ids: ((lambda: ids), call))


def without_masks(target: Any) -> None:
    """Let a text encoder of transformers that gets no mask run attention without one in CUDA graphs, too.

    transformers 5.17 makes a mask of ones while a stream is captured, and none before: a compiled block would be
    compiled anew in the capture, which that forbids. An attention without a function for masks gets none.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    target.set_attn_implementation(UNMASKED)


UNMASKED = "sdpa_without_masks"


def whisper(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """transformers' `generate` from samples, with a static cache and a compiled encoder where it is compiled."""
    from transformers import WhisperFeatureExtractor

    model, device, dtype = subjects.model_of(subject, tiny), device_of(times), getattr(torch, subject.dtype)
    target = of_transformers(model, device, dtype)
    own = target.generation_config
    own.eos_token_id, own.pad_token_id = None, target.config.pad_token_id
    if lane.mode:  # on a GPU, `generate` compiles the steps of a static cache
        own.cache_implementation = "static"
        encoder = target.model.encoder
        encode = compiled(encoder.forward, lane.mode)

        def kept_apart(*given: Any, **named: Any) -> Any:  # steps run in graphs of the same memory
            found = encode(*given, **named)
            found.last_hidden_state = found.last_hidden_state.clone()
            return found

        encoder.forward = kept_apart
    reader = WhisperFeatureExtractor(**dict(model.files["preprocessor_config.json"]))
    for case in times.left(subject.cases):
        sizes = subjects.sizes_of(subject, case, tiny)
        random, new = np.random.default_rng(0), int(sizes["new"])
        samples = [ours.medium("audio", sizes, random) for _ in range(case["batch"])]
        start = torch.full((case["batch"], int(sizes["tokens"])), ours.RESERVED, device=device)

        def call(samples: list[Any], start: Any = start, new: int = new) -> Any:
            features = reader(samples, sampling_rate=RATE, return_tensors="pt", device=str(device))
            features = features.input_features.to(device, dtype)
            from transformers.generation import GenerationMixin

            with torch.no_grad():  # its own `generate` cuts long audio into windows, which this is not
                return GenerationMixin.generate(
                    target, input_features=features, decoder_input_ids=start, do_sample=False, max_new_tokens=new,
                    min_new_tokens=new,
                ).cpu()  # fmt: skip

        times.add(case, lambda samples=samples: ((lambda: samples), call))


def unmask(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """LLaDA as published: each step is a pass of a bidirectional model over the whole sequence, without a cache."""
    from transformers import LlamaConfig, LlamaModel

    model, device, dtype = subjects.model_of(subject, tiny), device_of(times), getattr(torch, subject.dtype)
    c = model.config
    config = LlamaConfig(
        vocab_size=c["vocab_size"], hidden_size=c["d_model"], intermediate_size=c["mlp_hidden_size"],
        num_hidden_layers=c["n_layers"], num_attention_heads=c["n_heads"], num_key_value_heads=c["n_kv_heads"],
        max_position_embeddings=c["max_sequence_length"], use_cache=False,
    )  # fmt: skip
    with place(device, dtype):
        target = LlamaModel(config).eval().requires_grad_(False)
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    for layer in target.layers:
        layer.self_attn.is_causal = False
    mask_id = c["mask_token_id"]

    def step(ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
        """Choose the `count` likeliest tokens of a block, which has these places."""
        hidden = target.embed_tokens(ids)
        angles = target.rotary_emb(hidden, positions)
        for layer in target.layers:  # without a mask: that of LlamaModel would be causal
            found = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=angles)
            hidden = found[0] if isinstance(found, tuple) else found
        hidden = target.norm(hidden.index_select(1, places))
        best, tokens = head(hidden).float().softmax(-1).max(-1)
        block = ids.index_select(1, places)
        best = torch.where(block == mask_id, best, -1.0)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(count).indices, True)
        return ids.index_copy(1, places, torch.where(chosen, tokens, block))

    function: Any = step
    if lane.mode == BLOCKS and times.cuda:
        compile_blocks(target, None)
        function = Graphed(step)
    for case in times.left(subject.cases):
        sizes = subjects.sizes_of(subject, case, tiny)
        tokens, new, steps = int(sizes["tokens"]), int(sizes["new"]), int(sizes["steps"])
        length = max(n for n in range(1, BLOCK + 1) if new % n == 0)
        each = length // (steps // (new // length))
        draw = torch.Generator().manual_seed(0)
        prompt = torch.randint(ours.RESERVED, mask_id, (case["batch"], tokens), generator=draw)

        def call(prompt: Any, new: int = new, length: int = length, each: int = each) -> Any:
            ids = torch.cat((prompt, torch.full((len(prompt), new), mask_id)), 1).to(device)
            positions = torch.arange(ids.shape[1], device=device)[None]
            for at in range(prompt.shape[1], ids.shape[1], length):
                places = torch.arange(at, at + length, device=device)
                for _ in range(length // each):
                    ids = function(ids, positions, places, each)
            return ids.cpu()

        times.add(case, lambda prompt=prompt, call=call: ((lambda: prompt), no_grad(call)), warm_up=2)


BLOCK = 32  # tokens of a block of an answer, as UnmaskParams has it


def pipeline(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """A pipeline of diffusers from prompts to images; HunyuanVideo's from random embeddings of prompts."""
    from fk_bench.e2e.pictures import random_pipeline
    from fk_bench.e2e.pictures import subjects as pictures

    model, device, dtype = subjects.model_of(subject, tiny), device_of(times), getattr(torch, subject.dtype)
    video = "frames" in subject.cases[0]
    arguments: dict[str, Any] = {}
    if video:
        model = subjects.declared("hunyuan-video-diffusers")
        model = model.small if tiny else model
    folder = checkpoints.folder(model, "requests")
    if not video:
        from transformers import PreTrainedTokenizerFast

        arguments = {
            part: PreTrainedTokenizerFast.from_pretrained(folder / part) for part in model.tokenizers
        }
    arguments["scheduler"] = scheduler(folder)  # it computes with NumPy, and stays on the CPU
    with place(device, dtype):
        target = random_pipeline.build(Path(folder), arguments)
    target.set_progress_bar_config(disable=True)
    target.to(device, dtype)
    for part in target.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    made = pictures.Pipeline(target, 0, 1)
    made.channels_last()
    if lane.mode and times.cuda:
        made.compile(None, blocks=True)
        if not video:  # the video's denoiser reads lengths of its prompts on the CPU
            made.capture()
    for case in times.left(subject.cases):
        sizes = subjects.sizes_of(subject, case, tiny)
        made.steps = int(sizes["steps"])
        made.frames = int(sizes["frames"]) if video else 0
        size = {"height": int(sizes["height"]), "width": int(sizes["width"])}
        inputs = {**made.inputs(case["batch"], 0), **size}

        def call(inputs: Any) -> Any:
            with torch.no_grad():
                return made.run(inputs).float().cpu()

        times.add(case, lambda inputs=inputs: ((lambda: inputs), call), warm_up=2)


def scheduler(folder: Path) -> Any:
    import diffusers

    config = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    return getattr(diffusers, config["_class_name"]).from_config(config)


def fla(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """A model of flash-linear-attention: a pass over the prompts, and one for each token, or a graph of that one."""
    import fla.models  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM

    model, device, dtype = subjects.model_of(subject, tiny), device_of(times), getattr(torch, subject.dtype)
    config = dict(checkpoints.config_of(model))
    with place(device, dtype):
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    target = target.eval().requires_grad_(False).to(device, dtype)
    if lane.patched:
        least = subject.cases[0]
        shape = least["batch"], int(subjects.sizes_of(subject, least, tiny)["tokens"])
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(ours.RESERVED, target.config.vocab_size, shape, generator=draw).to(device)

        def logits(model: Any = target) -> torch.Tensor:
            """Of all tokens but one in a pass, and of the last one after it."""
            first = model(input_ids=ids[:, :-1], use_cache=True)
            after = model(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)
            return torch.cat((first.logits, after.logits), 1)

        times.more = patched.put_in(
            target, logits, dtype, exact=lambda: logits(copy.deepcopy(target).float())
        )
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in signature(target.forward).parameters else {}
    for case in times.left(subject.cases):
        sizes = subjects.sizes_of(subject, case, tiny)
        random, new = np.random.default_rng(0), int(sizes["new"])
        shape = case["batch"], int(sizes["tokens"])
        vocabulary = target.config.vocab_size
        step = Replayed(target) if lane.mode and times.cuda else None

        def make(random: Any = random, shape: Any = shape, vocabulary: int = vocabulary) -> torch.Tensor:
            return torch.from_numpy(random.integers(ours.RESERVED, vocabulary, shape))

        def call(ids: torch.Tensor, new: int = new, step: Any = step) -> torch.Tensor:
            out = target(input_ids=ids.to(device), use_cache=True, **last_only)
            last, state = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            made = [last]
            if step is not None:
                step.start(last, state)
            for _ in range(new - 1):
                if step is None:
                    out = target(input_ids=last, past_key_values=state, use_cache=True)
                    last, state = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
                else:
                    last = step()
                made.append(last)
            return torch.cat(made, 1).cpu()

        times.add(case, lambda make=make, call=call: (make, no_grad(call)), warm_up=2)


class Replayed:
    """A step of a model of FLA in a CUDA graph: the states of its layers are copied in place."""

    def __init__(self, model: Any) -> None:
        self.model, self.graph = model, None
        self.ids: Any = None
        self.states: list[Any] = []

    def start(self, last: torch.Tensor, cache: Any) -> None:
        """Continue from the states that a pass over prompts has left."""
        from torch.utils._pytree import tree_flatten

        found, tree = tree_flatten([layer.state for layer in cache.layers])
        if self.graph is None:
            self._capture(last, cache, found, tree)
        self.ids.copy_(last)
        for own, new in zip(self.states, found, strict=True):
            if torch.is_tensor(own):
                own.copy_(new)

    def _capture(self, last: torch.Tensor, cache: Any, found: list[Any], tree: Any) -> None:
        from torch.utils._pytree import tree_flatten, tree_unflatten

        self.ids = last.clone()
        self.states = [t.clone() if torch.is_tensor(t) else t for t in found]
        seen = [layer._seen_tokens for layer in cache.layers]

        def step() -> None:
            given = tree_unflatten(self.states, tree)
            for layer, state, count in zip(cache.layers, given, seen, strict=True):
                layer.state, layer._seen_tokens = state, count
            out = self.model(input_ids=self.ids, past_key_values=cache, use_cache=True)
            after = tree_flatten([layer.state for layer in out.past_key_values.layers])[0]
            for own, new in zip(self.states, after, strict=True):
                if torch.is_tensor(own):
                    own.copy_(new)
            self.ids.copy_(out.logits[:, -1].argmax(-1, keepdim=True))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # kernels are compiled, and chosen
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.ids.clone()


def _vllm(subject: Subject, times: Times, tiny: bool, **more: Any) -> tuple[Any, Any, Model]:
    """(vLLM's LLM, its module, the model)."""
    from fk_bench.offline import vllm_process

    vllm_process.prepare()
    import vllm

    model = subjects.model_of(subject, tiny)
    most = max(case["batch"] for case in subject.cases)
    options: dict[str, Any] = {
        "model": str(checkpoints.folder(model, "requests")), "dtype": subject.dtype, "load_format": "dummy",
        "skip_tokenizer_init": "." not in model.tokenizers, "max_num_seqs": most, **more,
    }  # fmt: skip
    if not times.cuda:
        options["enforce_eager"] = True
        if "seconds" not in model.request:
            options["max_model_len"] = 512
    return vllm.LLM(**options), vllm, model


def pooling(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """vLLM's pooling runner."""
    llm, vllm, model = _vllm(subject, times, tiny, runner="pooling", enable_prefix_caching=False)
    architecture = model.config["architectures"][0]
    task = {"HF_ColBERT": "token_embed", "XLMRobertaForSequenceClassification": "classify"}.get(
        architecture, "embed"
    )
    for case in times.left(subject.cases):
        sizes = subjects.sizes_of(subject, case, tiny)
        random = np.random.default_rng(0)
        shape = case["batch"], int(sizes["tokens"])
        rows = random.integers(ours.RESERVED, model.config["vocab_size"], shape).tolist()
        prompts = [{"prompt_token_ids": row} for row in rows]

        def call(prompts: Any) -> Any:
            return llm.encode(prompts, vllm.PoolingParams(), pooling_task=task, use_tqdm=False)

        times.add(case, lambda prompts=prompts: ((lambda: prompts), call))


def vllm(name: str, subject: Subject, lane: Lane, times: Times, tiny: bool) -> None:
    """vLLM with the prompts of our lane."""
    kind = "audio" if "seconds" in subjects.sizes_of(subject, subject.cases[0], tiny) else "image"
    llm, module, _ = _vllm(subject, times, tiny, limit_mm_per_prompt={kind: 1})
    config = llm.llm_engine.model_config.hf_config
    tokens = {"image": config.image_token_id} if kind == "image" else {}
    around = [config.vision_start_token_id, config.vision_end_token_id] if kind == "image" else []
    for case in times.left(subject.cases):
        sizes = subjects.sizes_of(subject, case, tiny)
        draw, random = ours.prompts(config, tokens, sizes), np.random.default_rng(0)
        params = module.SamplingParams(
            temperature=0, max_tokens=int(sizes["new"]), ignore_eos=True, detokenize=False
        )

        def make(case: Case = case, draw: Any = draw, random: Any = random) -> list[Any]:
            made = [draw(random) for _ in range(case["batch"])]
            for one in made:
                if around:
                    first, *rest = one["prompt_token_ids"]
                    one["prompt_token_ids"] = [around[0], first, around[1], *rest]
                else:
                    one["multi_modal_data"] = {kind: (one["multi_modal_data"][kind], RATE)}
            return made

        def call(given: list[Any], params: Any = params) -> Any:
            return llm.generate(given, params, use_tqdm=False)

        times.add(case, lambda make=make, call=call: (make, call), warm_up=2)


RUNS: dict[str, Callable[[str, Subject, Lane, Times, bool], None]] = {
    "engine": ours.run, "library": library, "policies": policies, "host": host, "texts": texts, "whisper": whisper,
    "unmask": unmask, "pipeline": pipeline, "fla": fla, "pooling": pooling, "vllm": vllm,
}  # fmt: skip
