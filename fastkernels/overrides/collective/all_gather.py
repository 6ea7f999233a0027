"""All ranks' tensors one behind the other, in every rank."""

from __future__ import annotations

import torch

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange, words
from fastkernels.overrides.collective.all_reduce import SMALL


def reference(x: list[torch.Tensor], group: str = "tp") -> list[torch.Tensor]:
    """x: [T, ...] of each rank. Every rank gets [ranks * T, ...], in order of rank."""
    return [torch.cat(x) for _ in x]


def _shared(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    return torch.cat(exchange.exchanged("all_gather", x, group))


def _process_group(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm = parallel.communicator(group)
    comm.arrive("all_gather", x)
    out = torch.empty((comm.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    with comm.naming("all_gather"):
        exchange.gather_into(out, x.contiguous(), comm.process_group)
    return out


def _triton(x: torch.Tensor, group: str = "tp", small: int = -1) -> torch.Tensor:
    x = x.contiguous()
    symmetric = exchange.symmetric_of("all_gather", x, group)
    if small < 0:
        small = _small(x, symmetric.size) and x.nbytes * (symmetric.size - 1) <= SMALL
    if small:
        return words.gather_words([x], symmetric)[0]
    return exchange.launch(x, symmetric, 1, False).view(symmetric.size * x.shape[0], *x.shape[1:])


def _small(x: torch.Tensor, size: int) -> bool:
    """Whether x is a small message of floats: integers must arrive bit by bit."""
    return x.dtype in words.FLOATS and words.not_gathered([x.contiguous()], size) is None


def _fits(params: dict[str, int], x: torch.Tensor, group: str = "tp") -> bool:
    return params["small"] == 0 or _small(x, parallel.communicator(group).size)


all_gather = define(
    'all_gather(Tensor x, str group="tp") -> Tensor',
    fake=lambda x, group="tp": torch.empty(
        (x.shape[0] * parallel.communicator(group).size, *x.shape[1:]), dtype=x.dtype, device=x.device
    ),
    providers=(
        exchange.alone(lambda x, group="tp": x.clone(memory_format=torch.contiguous_format)),
        exchange.shared("all_gather", _shared, any_order=True),
        *exchange.over_group(_process_group),
        Provider(
            "triton", _triton, supports=lambda x, group="tp": exchange.unsupported(x, group),
            params=({"small": 0}, {"small": 1}), fits=_fits,
        ),
        Provider(
            "reference",
            lambda x, group="tp": torch.cat(exchange.gathered("all_gather", x, group)),
            devices=exchange.BOTH,
        ),
    ),
)  # fmt: skip

SPEC = OpSpec(
    name="all_gather",
    level=1,
    reference=reference,
    op=all_gather,
    ranks="ranks",
    same_bits=True,
    arguments=(Tensor("x", "tokens hidden"), Scalar("group", default="tp")),
    outputs=(Tensor("out", "ranks*tokens hidden"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "hidden": Axis.width()},
    flops="0",
    traffic="(ranks - 1) * tokens * hidden * itemsize(dtype)",
    cases=(
        Case("logits_1", {"tokens": 1, "hidden": 64128}, weight=1, tags=("model",)),
        Case("decode_32", {"tokens": 16, "hidden": 4096}, weight=64, tags=("model",)),
        Case("prefill_8k", {"tokens": 4096, "hidden": 8192}, weight=1, tags=("model",)),
        Case("smollm2", {"tokens": 7, "hidden": 576}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 1000}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5}, tags=("odd",)),
    ),
)
