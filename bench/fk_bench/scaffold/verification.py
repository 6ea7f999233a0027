"""Compare a written model file with transformers: logits of a small random checkpoint, and its description."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fk_integrations.transformers import module_walk, tiny_models
from fk_integrations.transformers.decoder_roles import CORRECTIONS
from fk_integrations.transformers.recurrent_roles import ROLE
from safetensors.torch import load_file, save_file

from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.core.layer_state import StateSpec
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan
from fastkernels.overrides.attention.attention import PagedAttention
from fk_bench.scaffold.samples import Sample, Samples, equal, normal

TOKENS, BLOCK = 45, 16
TOLERANCE = 1e-3  # of the largest logit, in float32


@dataclass(frozen=True)
class Verified:
    """error: largest difference of a logit, relative to the largest; wrong: fields that change it otherwise here."""

    error: float
    configs: int
    wrong: frozenset[str] = frozenset()

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE and not self.wrong


def verify(file: Path, samples: Samples) -> Verified:
    """Load the file as an architecture and compare it. Raises what loading raises for keys that it does not map."""
    config = samples.config
    reference = tiny_models.build(config, seed=1)
    ids = torch.tensor([(i * 37 + 11) % config.vocab_size for i in range(TOKENS)])
    with tempfile.TemporaryDirectory() as folder, registry.using(file), torch.inference_mode():
        expected = reference(input_ids=ids[None], use_cache=False).logits[0]
        reference.save_pretrained(folder)
        _cut_by_role(Path(folder) / "model.safetensors", samples)
        error = float((logits(Path(folder), ids) - expected).abs().max() / expected.abs().max())
        wrong = frozenset(s.field for s in samples.all if not _same(s))
    return Verified(error, len(samples.all), wrong)


def _cut_by_role(file: Path, samples: Samples) -> None:
    """Cut the convolutions of queries, keys and values at their sizes, as published checkpoints have them.

    transformers writes thirds, which it joins again.
    """
    names = [samples.base.names.get(f"{ROLE}{part}_conv1d") for part in "qkv"]
    if not all(names):
        return
    tensors = load_file(file)
    for i, layer in enumerate(samples.all[0].decoder.layers):
        a = layer.attention
        if isinstance(a, d.GatedDelta):
            keys = [f"{samples.base.names['layers']}.{i}.{name}.weight" for name in names]
            key, value = a.key_heads * a.key_size, a.value_heads * a.value_size
            parts = torch.cat([tensors[k] for k in keys]).split([key, key, value])
            tensors |= {k: part.contiguous() for k, part in zip(keys, parts, strict=True)}
    save_file(tensors, file, {"format": "pt"})


def parameters(file: Path, config: Any) -> tuple[int, int, dict[str, str]]:
    """Parameters of the model at its real sizes: by our plan, and of transformers' modules on the meta device.

    Also {name of a module: how its size differs}, of one of each kind.
    """
    theirs, config = module_walk.real(config)
    corrections = [(name, b) for name, b in theirs.named_buffers() if name.endswith(CORRECTIONS)]
    sizes = {name: t.numel() for name, t in (*theirs.named_parameters(), *corrections)}
    with registry.using(file):
        ours = plan(config, "float32")
    differ: dict[str, tuple[str, str]] = {}
    for item in ours:
        expected = sum(sizes.get(key, 0) for key in item.keys)
        if expected != item.parameters and all(key in sizes for key in item.keys):
            what = f"{item.path} would have {item.parameters:,} parameters at the config's sizes, not {expected:,}"
            differ.setdefault(re.sub(r"\d+", "", item.path), (item.keys[0].rpartition(".")[0], what))
    return ours.parameters, sum(sizes.values()), dict(differ.values())


def _same(sample: Sample) -> bool:
    try:
        return equal(normal(registry.describe(sample.config)), sample.decoder)
    except (
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
    ):  # a formula that does not hold for this config
        return False


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Our logits of a checkpoint in float32 on the CPU: all but two tokens in one step, then one each."""
    config: Any = build.load_config(folder)
    model: Any = build.build(folder, config, torch.device("cpu"), torch.float32)
    blocks = -(-len(ids) // BLOCK)
    for layer in model.modules():
        if isinstance(layer, PagedAttention):
            layer.kv_cache = layer.new_cache(blocks + 1, BLOCK, torch.float32, "cpu")  # type: ignore[assignment]
        if isinstance(kept := getattr(layer, "keeps", None), StateSpec):
            layer.states = kept.new(2, torch.float32, "cpu")
    table, found = torch.arange(blocks, 0, -1, dtype=torch.int32)[None], []
    for start, end in ((0, len(ids) - 2), (len(ids) - 2, len(ids) - 1), (len(ids) - 1, len(ids))):
        at = torch.arange(start, end)
        slots = table[0, at // BLOCK].long() * BLOCK + at % BLOCK
        starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, end - start], [end]))
        own, fresh = torch.tensor([1], dtype=torch.int32), torch.tensor([start == 0])
        metadata = AttentionMetadata(
            slots, starts, lengths, table, end - start, end, state_slots=own, fresh=fresh
        )
        with forward_context(metadata):
            found.append(model.compute_logits(model(ids[start:end], at)))
    return torch.cat(found)
