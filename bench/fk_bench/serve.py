"""`fk-bench serve MODEL`: an OpenAI-compatible streaming server on our own engine."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from fastkernels.engine.config import EngineConfig

DEFAULT = EngineConfig(model="")


def serve(
    model: Annotated[str, typer.Argument(help="folder of a Hugging Face checkpoint, or a hub id")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0: any free one")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="what clients call it (default: MODEL)")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="default: the model's")] = DEFAULT.tokenizer,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu (default: cuda if there is one)")
    ] = DEFAULT.device,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16")] = DEFAULT.dtype,
    max_model_len: Annotated[
        int | None, typer.Option(help="tokens of a sequence (default: the model's)")
    ] = DEFAULT.max_model_len,
    max_num_seqs: Annotated[int, typer.Option(help="sequences that run at once")] = DEFAULT.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="tokens of one prefill step (default: one longest prompt, 8192 at least)"),
    ] = DEFAULT.max_num_batched_tokens,
    max_waiting: Annotated[
        int, typer.Option(help="requests that may wait; more get 429")
    ] = DEFAULT.max_waiting,
    block_size: Annotated[int, typer.Option(help="tokens of one KV block")] = DEFAULT.block_size,
    num_blocks: Annotated[
        int | None, typer.Option(help="KV blocks (default: what fits)")
    ] = DEFAULT.num_blocks,
    kv_cache_memory: Annotated[
        int | None, typer.Option(help="bytes of the KV cache (default: what fits)")
    ] = DEFAULT.kv_cache_memory,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="part of the GPU's memory to use")
    ] = DEFAULT.gpu_memory_utilization,
    seed: Annotated[int, typer.Option(help="of sampling and of dummy weights")] = DEFAULT.seed,
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights")] = DEFAULT.load_format,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="no CUDA graphs")
    ] = DEFAULT.enforce_eager,
) -> None:
    """Serve MODEL on our own engine, until Ctrl-C."""
    from fastkernels.engine import server
    from fastkernels.models.weights import CheckpointError
    from fastkernels.registry import UnknownName

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        config = EngineConfig(
            model=model, tokenizer=tokenizer, device=device, dtype=dtype, max_model_len=max_model_len,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_waiting=max_waiting,
            block_size=block_size, num_blocks=num_blocks, kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization, seed=seed, load_format=load_format,
            enforce_eager=enforce_eager,
        )  # fmt: skip
        with server.bind(host, port) as sock:
            server.serve(config, sock, served_model_name)
    except (CheckpointError, UnknownName, ValueError, OSError) as error:
        typer.echo(f"fk-bench serve: {error}", err=True)
        raise typer.Exit(1) from error


serve_command = serve
