"""vLLM's CPU attention uses AMX tiles without asking the kernel for them; a short first bfloat16 prompt then ends
in SIGILL. This plugin asks, in every vLLM process. It belongs to the machine, not to FastKernels."""


def register() -> None:
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
