"""A vLLM plugin that requests AMX tiles from the operating system, in every vLLM process.

vLLM's CPU attention uses them without the request, so that a short first bfloat16 prompt ends in SIGILL.
"""


def register() -> None:
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
