"""The engine's configuration: one frozen dataclass; the server's flags take their defaults from it."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8")
ATTENTION_BACKENDS = ("triton", "fa3", "flashinfer", "reference")


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from. None means: derived from the model or the machine when the engine is built.

    model                   folder of a Hugging Face checkpoint, or a hub id
    tokenizer               folder or hub id of the tokenizer (default: the model's)
    device                  'cuda' or 'cpu' (default: cuda if there is one)
    dtype                   'auto' (see runner.pick_dtype: the checkpoint's where the device computes in it), or a name
    max_model_len           tokens of one sequence, prompt and output (default: the model's, as far as the cache holds)
    max_num_seqs            sequences that run at once
    max_num_batched_tokens  tokens of one step, decodes and chunks of prompts together; at least max_num_seqs
    max_waiting             sequences that may wait, of which a request has n; more are refused
    block_size              tokens of one KV block, a power of two
    num_blocks              KV blocks, block 0 included, which only padding uses; wins over kv_cache_memory
    kv_cache_memory         bytes of one rank's KV cache; wins over gpu_memory_utilization (default on the CPU: 1 GiB)
    gpu_memory_utilization  part of the GPU's memory that may be in use: weights, activations, cache, other processes
    kv_cache_dtype          'auto' (the model's dtype), 'bfloat16', or 'fp8' (e4m3, half the bytes, less exact)
    enable_prefix_caching   sequences that begin alike share KV blocks, also with ones that have ended
    async_scheduling        schedule a step while the one before it runs (default: on CUDA)
    attention_backend       one of ATTENTION_BACKENDS (default: fa3, triton or reference, the first that can serve here)
    tensor_parallel_size    processes that share each layer: GPUs, or gloo processes on the CPU
    max_logprobs            the most that a request's logprobs and prompt_logprobs may ask for
    seed                    of dummy weights, and of the seeds that requests without one are given
    load_format             'auto': safetensors; 'dummy': random weights from `seed`, no weight file is read
    enforce_eager           no CUDA graphs
    skip_tokenizer_init     token ids in, token ids out

    Raises ValueError, naming the field and the value, for what no engine can have.
    """

    model: str
    tokenizer: str | None = None
    device: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_waiting: int = 4096
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    attention_backend: str | None = None
    tensor_parallel_size: int = 1
    max_logprobs: int = 20
    seed: int = 0
    load_format: str = "auto"
    enforce_eager: bool = False
    skip_tokenizer_init: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("dtype", DTYPES), ("load_format", LOAD_FORMATS), ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("attention_backend", (None, *ATTENTION_BACKENDS)), ("device", (None, "cpu", "cuda")),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                choices = ", ".join(repr(k) for k in known if k is not None)
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {choices}")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size {self.block_size} is not a power of two")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization {self.gpu_memory_utilization} is not in (0, 1]")
        for name in (
            "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_waiting", "num_blocks", "kv_cache_memory",
            "tensor_parallel_size",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} is less than 1")
        if self.max_logprobs < 0:
            raise ValueError(f"max_logprobs {self.max_logprobs} is negative")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}:"
                " every running sequence needs one token of a step"
            )
