"""An out-of-tree SGLang platform: plain PyTorch on the CPU, without sgl_kernel and AMX. For tests and the demo."""


def activate() -> str:
    """Entry point of `sglang.srt.platforms`: the path of the platform class."""
    return "cpu_host_sglang.platform.TorchCpuPlatform"
