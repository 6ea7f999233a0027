"""The keyword `backend` of SGLang's dispatching forward, which our forward of such a class accepts."""

from __future__ import annotations

from typing import Any


def on_backend(module: Any, backend: Any, *args: Any) -> Any:
    """Run the host's implementation that a call names: `forward_native` for 'torch', else `forward_BACKEND`.

    backend  SGLang's KernelBackend, or its value. Raises NotImplementedError, as SGLang does, if the class has none
    """
    name = str(getattr(backend, "value", backend)).lower()
    method = getattr(module, "forward_native" if name == "torch" else f"forward_{name}", None)
    if method is None:
        raise NotImplementedError(
            f"{type(module).__name__} has no backend {name!r}: call it without `backend`"
        )
    return method(*args)
