"""Old import paths: importing one fails with a message that names the new place.

The finder is the last on sys.meta_path: Python reaches it only for modules that do not exist.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

# {new package: modules that moved there under their old names, separated by spaces}, by the package they left
_KEPT = {
    "": {
        "core": "assemble candidate compile_cache cuda_rtc dispatch env forward_context parallel registry shapes spec",
    },
    "models": {
        "models.common": "build checkpoint config ops registry weights",
        "models.llm": "llama mixtral",
        "models.llm.qwen": "qwen3",
    },
    "models.llm": {
        "models.llm.cohere": "cohere2",
        "models.llm.gemma": "gemma2",
        "models.llm.glm": "glm4",
        "models.llm.olmo": "olmo2 olmoe",
        "models.llm.qwen": "qwen2 qwen3 qwen3_moe",
    },
    "engine": {
        "engine.cache": "blocks kv_cache",
        "engine.execution": "attention executor graphs input_batch ranks runner startup step step_kernels"
        " warm_up worker",
        "engine.http": "errors gate histogram metrics prompts protocol report_file responses schema server unserved",
        "engine.sampling": "sampler sampler_state sampling_params",
        "engine.scheduling": "detokenizer outputs request scheduler step_input",
    },
}
_RENAMED = {
    "export_source": "export.source",
    "engine.core": "engine.scheduling.engine_core",
    "engine.profile": "engine.execution.memory_profile",
    "engine.answer_logprobs": "engine.http.logprobs",
    "engine.http_stream": "engine.http.streaming",
    "engine.server_config": "engine.http.config",
    "engine.serving": "engine.http.process",
    "engine.candidates": "patch",
}
_LEVELS = ("overrides.l1", "overrides.l2", "overrides.l3")


def _table() -> dict[str, str]:
    kept = {
        f"{old}.{name}".lstrip("."): f"{new}.{name}"
        for old, packages in _KEPT.items()
        for new, names in packages.items()
        for name in names.split()
    }
    return kept | _RENAMED


MOVED = {f"fastkernels.{old}": f"fastkernels.{new}" for old, new in _table().items()}


def new_place(name: str) -> str | None:
    """The place of a module that moved, as a message names it; None for any other name."""
    if name in MOVED:
        return MOVED[name]
    level = next(
        (f"fastkernels.{part}" for part in _LEVELS if f"{name}.".startswith(f"fastkernels.{part}.")), None
    )
    if level is None:
        return None
    from fastkernels.core.registry import op_modules

    family = "its family's folder: fastkernels.overrides.FAMILY.OP (fastkernels.core.registry.op_modules() lists all)"
    return op_modules().get(name.removeprefix(f"{level}."), family)


class Moved(MetaPathFinder):
    """Raises ModuleNotFoundError for the modules in the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if fullname.startswith("fastkernels.") and new_place(fullname) is not None:
            name = _whole_name(fullname)
            # Without `name=`, which `from package import module` takes for "the package has no such attribute".
            raise ModuleNotFoundError(f"{name} moved to {new_place(name)}")


def _whole_name(name: str) -> str:
    """The module of the import statement: Python looks for the parents of a.b.c first, one at a time."""
    frame = sys._getframe()
    while frame is not None:
        asked = frame.f_locals.get("name")
        in_import = frame.f_code.co_filename.startswith("<frozen importlib")
        if in_import and isinstance(asked, str) and asked.startswith(f"{name}."):
            name = asked
        if frame.f_back is None:
            break
        frame = frame.f_back
    return name


def install() -> None:
    """Append the finder to sys.meta_path, once."""
    if not any(type(finder).__name__ == Moved.__name__ for finder in sys.meta_path):
        sys.meta_path.append(Moved())
