"""The engine's configuration: one frozen dataclass; the server's flags take their defaults from it."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from. None means: derived from the model or the machine when the engine is built.

    model                   folder of a Hugging Face checkpoint, or a hub id
    tokenizer               folder or hub id of the tokenizer (default: the model's)
    device                  'cuda' or 'cpu' (default: cuda if there is one)
    dtype                   'auto' (see runner.pick_dtype: the checkpoint's where the device computes in it), or a name
    max_model_len           tokens of one sequence, prompt and output (default: the model's, as far as the cache holds)
    max_num_seqs            sequences that run at once
    max_num_batched_tokens  tokens of one prefill step; a prompt is never longer
    max_waiting             requests that may wait; more are refused
    block_size              tokens of one KV block
    num_blocks              KV blocks; wins over kv_cache_memory (bytes), which wins over gpu_memory_utilization
    gpu_memory_utilization  part of the GPU's memory that weights, activations and cache may use together
    load_format             'auto': safetensors; 'dummy': random weights from `seed`, no weight file is read
    enforce_eager           no CUDA graphs
    skip_tokenizer_init     token ids in, token ids out
    """

    model: str
    tokenizer: str | None = None
    device: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_waiting: int = 4096
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    seed: int = 0
    load_format: str = "auto"
    enforce_eager: bool = False
    skip_tokenizer_init: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format {self.load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is not 'cpu' or 'cuda'")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size {self.block_size} is not a power of two")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization {self.gpu_memory_utilization} is not in (0, 1]")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_waiting", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} is less than 1")
