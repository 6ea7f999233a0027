"""The same kind of random weights in every host, for `load_format="dummy"`.

The hosts fill all parameters with values of about 1e-3, also norms, after which the logits of a router are smaller than
its bias. The bias alone then sends all tokens to the same few experts, and a step reads a fraction of the weights that
it reads with a trained model. `draw` brings the model of a host to the random weights of our engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fastkernels.models.common.checkpoints.weights import EMBEDDING_STD, MX_SCALE, STD, random_generator

EMBEDDING = "VocabParallelEmbedding"  # the class of vLLM and SGLang
# Gemma's buffers: the scales of its embedding, and of Gemma 4's inputs of layers
SCALED = "normalizer", "embed_scale_per_layer"
ONES = "layer_scalar", "scale", "per_expert_scale"  # Gemma 4's factors
FACTORS = "weight_scale_2", "weight_global_scale"  # of NVFP4 matrices
FACTOR, MARLIN = 0.01, 2.0**119  # Marlin's kernels take factors times MARLIN in bfloat16
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def draw(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw the weights as `weights.dummy` does: matrices N(0, 0.02), embeddings N(0, 10) after their scale, norms and
    factors 1, biases 0.

    Quantized weights get random bits, in FP8 N(0, 1), where the hosts leave zeros. Their scales keep the host's values,
    those of MXFP4 get that of `weights.dummy`. The factors of NVFP4 matrices become FACTOR: the hosts' are reciprocals
    of random numbers, which may overflow. Values change in place, so that captured graphs read them.
    """
    drawn = set[int]()  # an embedding that is also the head is drawn as the embedding
    scales = {name.rpartition(".")[2]: float(t) for name, t in model.named_buffers() if name.endswith(SCALED)}
    with torch.inference_mode():
        for path, module in model.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in [*own, *_wrapped(module)]:
                if id(tensor) in drawn:
                    continue
                drawn.add(id(tensor))
                if tensor.dtype not in FLOATS:
                    _draw_quantized(name, tensor, random_generator(seed, f"{path}.{name}", tensor.device))
                    continue
                if name.endswith(FACTORS):
                    tensor.fill_(FACTOR * (1.0 if bool((tensor.abs() < MARLIN**0.5).all()) else MARLIN))
                elif name.endswith("bias"):  # of a router, or the correction of its scores, among others
                    tensor.zero_()
                elif (name.endswith("weight") and tensor.dim() == 1) or name in ONES:
                    tensor.fill_(1.0)
                elif name.endswith("weight"):
                    std = STD
                    if type(module).__name__ == EMBEDDING:
                        std = EMBEDDING_STD / scales.get(SCALED["per_layer" in path], 1.0)
                    tensor.normal_(
                        0.0, std, generator=random_generator(seed, f"{path}.{name}", tensor.device)
                    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _wrapped(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the MXFP4 weights and scales that vLLM holds in tensors of Triton's kernels, not in parameters."""
    for name in ("w13", "w2"):
        weight = getattr(getattr(module, f"{name}_weight", None), "storage", None)
        if weight is not None and not callable(weight):
            yield f"{name}_weight", weight.data
            config = getattr(module.quant_method, f"{name}_precision_config")
            yield f"{name}_weight_scale", config.weight_scale.storage.data


def _draw_quantized(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if tensor.dtype == torch.uint8 and "scale" in name:
        tensor.fill_(MX_SCALE)
    elif not name.endswith(("weight", "weight_packed")):
        pass  # scales, zero points, orders of columns
    elif tensor.dtype == torch.float8_e4m3fn:
        for part in tensor if tensor.dim() > 2 else [tensor]:  # an expert at a time needs less memory
            part.copy_(torch.empty_like(part, dtype=torch.float32).normal_(generator=generator))
    elif tensor.dtype in (torch.uint8, torch.int8, torch.int32):
        limits = torch.iinfo(tensor.dtype)
        tensor.random_(limits.min, limits.max + 1, generator=generator)


class VllmWorker:
    """Methods for vLLM's workers, which `worker_extension_cls` adds."""

    def allocator_gib(self) -> dict[str, float]:
        """The memory of torch's allocator on this worker's GPU."""
        found = torch.cuda.memory_stats()
        return {
            kind: found[f"{kind}_bytes.all.current"] / (1 << 30)
            for kind in ("allocated", "reserved", "inactive_split")
        }

    def draw_random_weights(self) -> None:
        worker: Any = self
        draw(worker.get_model())


class SGLangLoader:
    """SGLang's loader of random weights, then `draw`. As a class it can be SGLang's `load_format`."""

    def __new__(cls, load_config: Any) -> Any:
        from sglang.srt.model_loader.loader import DummyModelLoader

        class Loader(DummyModelLoader):
            def load_model(self, **arguments: Any) -> torch.nn.Module:
                model: torch.nn.Module = super().load_model(**arguments)
                draw(model)
                return model

        return Loader(load_config)
