"""The same kind of random weights in every host, for `load_format="dummy"`.

The hosts fill all parameters with values of about 1e-3, also norms, after which the logits of a router are smaller than
its bias. The bias alone then sends all tokens to the same few experts, and a step reads a fraction of the weights that
it reads with a trained model. `draw` brings the model of a host to the random weights of our engine.
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.models.common.weights import EMBEDDING_STD, STD, random_generator

EMBEDDING = "VocabParallelEmbedding"  # the class of vLLM and SGLang


def draw(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw the weights as `weights.dummy` does: matrices N(0, 0.02), embeddings N(0, 10), norms 1, biases 0.

    Values change in place, so that captured graphs read them. Quantized weights, scales and weights that the host has
    packed stay as they are.
    """
    drawn = set[int]()  # an embedding that is also the head is drawn as the embedding
    with torch.inference_mode():
        for path, module in model.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in own:
                if id(tensor) in drawn or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                    continue
                drawn.add(id(tensor))
                if name.endswith("bias"):  # of a router, or the correction of its scores, among others
                    tensor.zero_()
                elif name.endswith("weight") and tensor.dim() == 1:
                    tensor.fill_(1.0)
                elif name.endswith("weight"):
                    std = EMBEDDING_STD if type(module).__name__ == EMBEDDING else STD
                    tensor.normal_(
                        0.0, std, generator=random_generator(seed, f"{path}.{name}", tensor.device)
                    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class VllmWorker:
    """A method for vLLM's workers, which `worker_extension_cls` adds."""

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
