"""Captured routing compared with uniform random routing of the same sizes: load by layer, and hot experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from fk_bench.capture.captures import SHIPPED, Capture, CaptureError, folders, is_capture, load
from fk_bench.routing.stats import (
    counts_of,
    expected_hit,
    hottest,
    jaccard,
    load_stats,
    spearman,
    uniform_ids,
)

BATCHES = (1, 8, 32, 128, 1024)
DRAWS = 32  # batches per mean
Found = tuple[dict[str, Any], dict[str, float]]  # case and metrics of a row


@dataclass(frozen=True)
class Routed:
    """One call of a layer's experts: ids [T, K] of `experts` experts."""

    layer: int
    phase: str  # prefill or decode
    text: str
    prompt: int | None
    step: int
    ids: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)


@dataclass(frozen=True)
class Routing:
    """The routing of a capture."""

    name: str
    capture: Capture
    experts: int
    top_k: int
    calls: tuple[Routed, ...]

    @property
    def layers(self) -> int:
        return 1 + max(c.layer for c in self.calls)

    def prefill(self, layer: int) -> list[Routed]:
        return [c for c in self.calls if c.phase == "prefill" and c.layer == layer]

    def tokens(self, layer: int) -> np.ndarray:
        """The choices of all prompts, concatenated [T, K]."""
        return np.concatenate([c.ids for c in self.prefill(layer)])


def routings(names: str = "") -> list[Routing]:
    """The captures with routing, by name or folder (comma-separated); '': the shipped ones.

    Raises CaptureError for an unknown name and for a capture without routing.
    """
    if names:
        found = []
        for name in names.split(","):
            captures = [load(p) for p in folders(SHIPPED / name if _shipped(name) else name)]
            routed = [c for c in captures if _has_routing(c)]
            # Without any routing, take the first, which then raises the error
            found += [_routing(c, str(c.folder)) for c in routed or captures[:1]]
        return found
    return [_routing(c, c.name) for c in map(load, folders()) if _has_routing(c)]


def _has_routing(capture: Capture) -> bool:
    return "routing" in (capture.model_extra or {})


def _shipped(name: str) -> bool:
    return "/" not in name and is_capture(SHIPPED / name)


def _routing(capture: Capture, where: str) -> Routing:
    listed = (capture.model_extra or {}).get("routing")
    op = capture.ops.get("fused_experts")
    if not listed or op is None or not op.calls:
        raise CaptureError(f"{where} has no routing: it needs calls of fused_experts and a list `routing`")
    shape = next(a.shape for a in op.calls[0].args if a.name == "w1")
    assert shape is not None
    calls = []
    for each in listed:
        tensors = [capture.tensors.get(each[name]) for name in ("topk_ids", "topk_weights")]
        if any(t is None for t in tensors):
            continue  # capture.problems says which
        ids, weights = (t.numpy() for t in tensors if t is not None)
        place = {k: each[k] for k in ("layer", "phase", "text", "prompt", "step")}
        calls.append(Routed(**place, ids=ids.astype(np.int32), weights=weights.astype(np.float32)))
    if not any(c.phase == "prefill" for c in calls):
        raise CaptureError(f"{where} has no usable routing: {'; '.join(capture.problems)}")
    return Routing(capture.name, capture, shape[0], calls[0].ids.shape[1], tuple(calls))


def study(routing: Routing, seed: int = 0) -> Iterator[Found]:
    """(case, metrics) of all rows that need no GPU."""
    rng = np.random.default_rng(seed)
    head = {"capture": routing.name, "experts": routing.experts, "topk": routing.top_k}
    for case, metrics in (*_load(routing, rng), *_batches(routing, rng), *_identity(routing, rng)):
        yield {**case, **head}, metrics


def _load(routing: Routing, rng: np.random.Generator) -> Iterator[Found]:
    """Load of each layer, over all prompts."""
    for layer in range(routing.layers):
        ids = routing.tokens(layer)
        uniform = uniform_ids(len(ids), routing.experts, routing.top_k, rng)
        for source, chosen in (("captured", ids), ("uniform", uniform)):
            case = {"kind": "load", "routing": source, "layer": layer, "tokens": len(ids)}
            yield case, load_stats(counts_of(chosen, routing.experts))


def _batches(routing: Routing, rng: np.random.Generator) -> Iterator[Found]:
    """Experts hit, and the load of the hottest, by the number of tokens; means over layers and draws.

    chunk: consecutive tokens of a prompt. spread: tokens from all prompts, as in sequences that are decoded together.
    decode: the captured steps. uniform: random.
    """
    experts, top_k = routing.experts, routing.top_k
    for batch in BATCHES:
        drawn: dict[str, list[np.ndarray]] = {"chunk": [], "spread": [], "decode": [], "uniform": []}
        for layer in range(routing.layers):
            prompts, ids = [c.ids for c in routing.prefill(layer)], routing.tokens(layer)
            long = [p for p in prompts if len(p) >= batch]
            for _ in range(DRAWS):
                if long:
                    prompt = long[rng.integers(len(long))]
                    at = rng.integers(len(prompt) - batch + 1)
                    drawn["chunk"].append(prompt[at : at + batch])
                if len(ids) >= batch:
                    drawn["spread"].append(ids[rng.choice(len(ids), batch, replace=False)])
                drawn["uniform"].append(uniform_ids(batch, experts, top_k, rng))
            decode = [c.ids for c in routing.calls if c.phase == "decode" and c.layer == layer]
            drawn["decode"] += [i for i in decode if len(i) == batch]
        for source, chosen in drawn.items():
            if chosen:
                stats = [load_stats(counts_of(i, experts)) for i in chosen]
                metrics = {k: float(np.mean([s[k] for s in stats])) for k in ("hit", "max_over_mean")}
                if source == "uniform":
                    metrics["hit_expected"] = expected_hit(batch, experts, top_k)
                yield {"kind": "batch", "routing": source, "tokens": batch, "draws": len(chosen)}, metrics


def _identity(routing: Routing, rng: np.random.Generator) -> Iterator[Found]:
    """Whether two parts have the same hot experts: means over all pairs of parts that differ only in `parts`."""
    captured = list(routing.calls)
    uniform = [
        Routed(c.layer, c.phase, c.text, c.prompt, c.step, uniform_ids(*_size(c, routing), rng), c.weights)
        for c in captured
    ]
    for source, calls in (("captured", captured), ("uniform", uniform)):
        for parts, pairs in _pairs(calls, routing).items():
            agree = [_agreement(a, b, max(1, routing.experts // 8)) for a, b in pairs if a.any() and b.any()]
            if agree:
                jaccards, ranks = np.array(agree).T
                metrics = {"jaccard": float(jaccards.mean()), "spearman": float(ranks.mean())}
                yield {"kind": "identity", "routing": source, "parts": parts, "pairs": len(agree)}, metrics


def _size(call: Routed, routing: Routing) -> tuple[int, int, int]:
    return len(call.ids), routing.experts, routing.top_k


def _agreement(a: np.ndarray, b: np.ndarray, hot: int) -> tuple[float, float]:
    return jaccard(hottest(a, hot), hottest(b, hot)), spearman(a, b)


def _pairs(calls: list[Routed], routing: Routing) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Loads [E] of the parts to compare."""

    def load_of(chosen: list[Routed]) -> np.ndarray:
        return sum((counts_of(c.ids, routing.experts) for c in chosen), np.zeros(routing.experts, np.int64))

    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {
        name: []
        for name in ("halves of a prompt", "prompts of a kind", "kinds of text", "prefill, decode", "layers")
    }
    whole = []
    for layer in range(routing.layers):
        prompts = [c for c in calls if c.layer == layer and c.phase == "prefill"]
        decode = [c for c in calls if c.layer == layer and c.phase == "decode"]
        kinds = {c.text: [p for p in prompts if p.text == c.text] for c in prompts}
        for c in prompts:
            half = len(c.ids) // 2
            first, second = (counts_of(part, routing.experts) for part in (c.ids[:half], c.ids[half:]))
            found["halves of a prompt"].append((first, second))
        for same in kinds.values():
            found["prompts of a kind"] += [(load_of([a]), load_of([b])) for a, b in combinations(same, 2)]
        found["kinds of text"] += [(load_of(a), load_of(b)) for a, b in combinations(kinds.values(), 2)]
        whole.append(load_of(prompts))
        found["prefill, decode"].append((whole[-1], load_of(decode)))
    found["layers"] = list(pairwise(whole))
    return found


def shape_of(experts: int, top_k: int) -> dict[str, Any]:
    """The sizes at which to time this routing. Ids are replayed, so the model has the same number of experts.

    known: whether there is a public model with that number of experts.
    """
    known = {
        (8, 2): {"model": "Mixtral-8x7B", "hidden": 4096, "intermediate": 14336},
        (128, 8): {"model": "Qwen3-30B-A3B", "hidden": 2048, "intermediate": 768},
    }
    other = {"model": f"{experts} experts", "hidden": 2048, "intermediate": 1024}
    return {**known.get((experts, top_k), other), "known": (experts, top_k) in known}


def batch_of(
    routing: Routing, source: str, tokens: int, turn: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """ids [T, K] int32 and weights [T, K] float32 of one call; `turn` is the index of the input set.

    captured: of layer `turn`; up to 128 tokens come from all prompts, as in a decode step; more are the concatenated
    prompts from a random position on, starting over at their end.
    uniform: random. same: all tokens have the same K experts, which depend on `turn`.
    """
    experts, top_k, layer = routing.experts, routing.top_k, turn % routing.layers
    weights = np.concatenate([c.weights for c in routing.prefill(layer)])
    whole = routing.tokens(layer)
    if tokens <= min(128, len(whole)):
        rows = rng.choice(len(whole), tokens, replace=False)
    else:
        rows = (rng.integers(len(whole)) + np.arange(tokens)) % len(whole)
    if source == "captured":
        ids = whole[rows]
    elif source == "uniform":
        ids = uniform_ids(tokens, experts, top_k, rng)
    elif source == "same":
        ids = np.tile((turn * top_k + np.arange(top_k)) % experts, (tokens, 1))
    else:
        raise ValueError(f"unknown routing {source!r}: captured, uniform or same")
    return ids.astype(np.int32), weights[rows]
