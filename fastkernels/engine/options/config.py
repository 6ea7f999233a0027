"""The engine's configuration. The server's flags take their defaults from it."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, fields

from fastkernels.engine.options.speculation import Speculation

DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8")
STATE_DTYPES = ("auto", "float32", "bfloat16", "float16")
MEDIA = ("image", "video", "audio")
ATTENTION_BACKENDS = ("triton", "fa3", "flashinfer", "reference")


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine. None: derived from the model or the machine when the engine is built.

    model                   folder of a Hugging Face checkpoint, or a hub id
    tokenizer               folder or hub id of the tokenizer (default: the model's)
    device                  'cuda' or 'cpu' (default: cuda if there is one)
    dtype                   'auto' (the checkpoint's, where the device supports it: runner.pick_dtype), or a name
    max_model_len           tokens of one sequence, prompt and output (default: the model's, limited by the cache)
    max_num_seqs            sequences that run at the same time
    max_num_batched_tokens  tokens of one step, decodes and chunks of prompts together; at least max_num_seqs
    max_waiting             sequences in the queue, n per request; more are refused
    max_pixels              of an image to generate (default: four times the model's default size), or to render
                            (default: 16,777,216, which are 4096 x 4096)
    max_steps               denoising steps of an image to generate
    max_images              n of a request for images
    max_frames              frames to generate of a request
    max_characters          of a text to speak
    voices                  a folder of voices for speech: NAME.safetensors, or NAME.wav with its text in NAME.txt
    block_size              tokens of one KV block, a power of two
    num_blocks              KV blocks, including block 0, the padding block; takes precedence over kv_cache_memory
    num_snapshots           snapshots of recurrent states in the prefix cache (default: an eighth of the blocks' memory,
                            at most two for each of max_num_seqs)
    kv_cache_memory         bytes of one rank's KV cache; takes precedence over gpu_memory_utilization (CPU: 1 GiB)
    gpu_memory_utilization  share of the GPU's memory for weights, activations, cache and other processes
    kv_cache_dtype          'auto' (the model's dtype), 'bfloat16', or 'fp8' (e4m3: half the bytes, less exact)
    mamba_ssm_cache_dtype   of recurrent states: 'float32', 'bfloat16' or 'float16'; 'auto': what the checkpoint names,
                            otherwise as in vLLM the model's dtype for Mamba, Mamba-2 and gated delta rules, and
                            float32 for the others
    enable_prefix_caching   sequences with a common prefix share KV blocks, also after one has ended
    async_scheduling        schedule a step while the previous one runs (default: on CUDA, unless drafts forbid it)
    attention_backend       one of ATTENTION_BACKENDS (default: the first supported of fa3, triton, reference)
    tensor_parallel_size    ranks that each layer is sharded over: GPUs, or gloo processes on the CPU
    expert_parallel_size    groups of those ranks that have different experts (1: every expert is shared by all ranks);
                            with data-parallel ranks, of all ranks (default: data_parallel_size)
    data_parallel_size      ranks with requests of their own, which share the experts of a mixture: each has the other
                            layers, max_num_seqs sequences and a KV cache, on tensor_parallel_size GPUs or processes
    nnodes                  machines that these ranks are on, with equal numbers of neighbouring ranks
    node_rank               of this machine: node 0 has the engine, the others run their ranks for it
    master_addr             address of node 0 that the other nodes reach
    master_port             TCP port on which node 0 waits for the other nodes
    dist_timeout            seconds that a node may come late
    max_logprobs            upper limit of logprobs and prompt_logprobs of a request; -1: no limit
    seed                    of dummy weights, and of the seeds of requests without one
    load_format             'auto': safetensors; 'dummy': random weights from `seed`
    enforce_eager           no CUDA graphs
    limit_mm_per_prompt     media of each kind in a prompt, such as {"image": 4}; more are refused (default: 999)
    speculative_config      drafts of several tokens a step, with vLLM's names, such as
                            {"method": "ngram", "num_speculative_tokens": 4} (default: none); see
                            speculation.Speculation
    skip_tokenizer_init     no tokenizer: token ids in, token ids out
    json_any_whitespace     JSON of structured outputs may have any whitespace between values; False: it is in one line

    Raises ValueError, naming the field and the value, for invalid values.
    """

    model: str
    tokenizer: str | None = None
    device: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_waiting: int = 4096
    max_pixels: int | None = None
    max_steps: int = 100
    max_images: int = 10
    max_frames: int = 512
    max_characters: int = 4096
    voices: str | None = None
    block_size: int = 16
    num_blocks: int | None = None
    num_snapshots: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    attention_backend: str | None = None
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    data_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    dist_timeout: float = 600.0
    max_logprobs: int = 20
    seed: int = 0
    load_format: str = "auto"
    enforce_eager: bool = False
    limit_mm_per_prompt: dict | None = None
    speculative_config: dict | None = None
    skip_tokenizer_init: bool = False
    json_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        for name, known in (
            ("dtype", DTYPES), ("load_format", LOAD_FORMATS), ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("mamba_ssm_cache_dtype", STATE_DTYPES),
            ("attention_backend", (None, *ATTENTION_BACKENDS)), ("device", (None, "cpu", "cuda")),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                choices = ", ".join(repr(k) for k in known if k is not None)
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {choices}")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size {self.block_size} is not a power of two")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization {self.gpu_memory_utilization} is not in (0, 1]")
        defaults = {field.name: field.default for field in fields(self)}
        for name in (
            "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_waiting", "num_blocks", "kv_cache_memory",
            "tensor_parallel_size", "expert_parallel_size", "data_parallel_size", "max_pixels", "max_steps",
            "max_images", "max_frames", "max_characters", "nnodes",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                default = "" if defaults[name] is None else f", which is {defaults[name]}"
                raise ValueError(
                    f"{name} {value} is less than 1: give at least 1, or leave it out for the default{default}"
                )
        for kind, most in (self.limit_mm_per_prompt or {}).items():
            if kind not in MEDIA or type(most) is not int or most < 0:
                raise ValueError(
                    f"limit_mm_per_prompt {self.limit_mm_per_prompt!r} must have numbers of media from 0 on for"
                    f" {', '.join(MEDIA)}"
                )
        if self.speculative_config is not None:
            holds = Speculation.read(self.speculative_config).holds_drafts
            if self.async_scheduling and not holds:
                raise ValueError(
                    "async_scheduling True is not possible with speculative_config of 'ngram' or a tree: a step begins"
                    " with the tokens that the step before it accepts"
                )
        if self.num_snapshots is not None and self.num_snapshots < 0:
            raise ValueError(f"num_snapshots {self.num_snapshots} is less than 0")
        if self.max_logprobs < -1:
            raise ValueError(
                f"max_logprobs {self.max_logprobs} is invalid: it must be at least 0, or -1 for no limit"
            )
        if self.data_parallel_size > 1:
            self._check_data_parallel()
        elif self.tensor_parallel_size % self.expert_parallel_size:
            raise ValueError(
                f"expert_parallel_size {self.expert_parallel_size} does not divide tensor_parallel_size"
                f" {self.tensor_parallel_size}: it groups those ranks"
            )
        self._check_nodes()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}:"
                " every running sequence needs one token per step"
            )

    @property
    def num_ranks(self) -> int:
        """The processes that run the model together."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """The ranks on each machine: node n has those from n * ranks_per_node on."""
        return self.num_ranks // self.nnodes

    @property
    def expert_groups(self) -> int:
        """The groups of tensor-parallel ranks that have different experts."""
        return max(1, self.expert_parallel_size // self.data_parallel_size)

    def _check_nodes(self) -> None:
        """Raise ValueError for nodes that cannot have the ranks."""
        if self.num_ranks % self.nnodes:
            raise ValueError(
                f"nnodes {self.nnodes} does not divide the {self.num_ranks} ranks of tensor_parallel_size"
                f" {self.tensor_parallel_size} and data_parallel_size {self.data_parallel_size}: each node has the same"
                " number"
            )
        if not 0 <= self.node_rank < self.nnodes:
            most = f"0 to {self.nnodes - 1}" if self.nnodes > 1 else "0"
            raise ValueError(
                f"node_rank {self.node_rank} is not possible with nnodes {self.nnodes}: it must be {most}"
            )
        if not 1 <= self.master_port <= 65535:
            raise ValueError(f"master_port {self.master_port} is not a port: it must be 1 to 65535")
        if not self.master_addr:
            raise ValueError("master_addr is empty: it must be an address of node 0")
        if self.master_addr in ("0.0.0.0", "::"):
            raise ValueError(
                f"master_addr {self.master_addr} is every address: it must be the one that the other nodes reach"
            )
        if not 0 < self.dist_timeout < float("inf"):
            raise ValueError(f"dist_timeout {self.dist_timeout} is not a number of seconds above 0")

    def _check_data_parallel(self) -> None:
        """Raise ValueError for groups of experts that data-parallel ranks cannot have."""
        data, tensor = self.data_parallel_size, self.tensor_parallel_size
        possible = [data * groups for groups in range(1, tensor + 1) if tensor % groups == 0]
        if self.expert_parallel_size not in (1, *possible):
            raise ValueError(
                f"expert_parallel_size {self.expert_parallel_size} is not possible with data_parallel_size {data} and"
                f" tensor_parallel_size {tensor}: it must be {' or '.join(map(str, possible))}, or left out"
            )


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a string"),
    "bool": ((bool,), "True or False"),
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "dict": ((dict,), "a dict"),
}


def _check_type(name: str, annotation: str, value: object) -> None:
    """Raise ValueError for a value that does not match the field's annotation."""
    kind, _, optional = annotation.partition(" | ")
    if value is None and optional:
        return
    types, words = _KINDS[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name} must be {words}, got {reprlib.repr(value)}")
