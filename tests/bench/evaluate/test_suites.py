"""Suites: the shipped ones, and what is wrong with others."""

from __future__ import annotations

import copy

import pytest
from fk_bench.evaluate import suites
from fk_bench.evaluate.suites import SuiteError

from fastkernels.core.registry import UnknownName

SMALL = {
    "workloads": {"chat": {"kind": "text", "about": "", "throughput": 2, "lengths": [[4, 4]]}},
    "models": {"m": {"category": "text", "config": {"model_type": "llama"}}},
    "items": [{"model": "m", "workload": "chat", "host": "transformers"}],
}


@pytest.mark.parametrize("name", suites.names())
def test_shipped_suite_is_valid(name):
    suite = suites.load(name)
    assert suite.entries and all(0 < e.minutes <= 10 for e in suite.entries)
    assert {e.item.category for e in suite.entries} <= set(suite.categories)


def test_digest_follows_every_field():
    changed = copy.deepcopy(SMALL)
    changed["workloads"]["chat"]["lengths"] = [[4, 5]]
    assert suites.read(SMALL, "a").digest == suites.read(SMALL, "b").digest
    assert suites.read(SMALL, "a").digest != suites.read(changed, "a").digest


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        (("items", 0, "host"), "vlm", "vllm"),
        (("items", 0, "model"), "n", "m"),
        (("items", 0, "workload"), "talk", "chat"),
        (("items", 0, "speed"), 1, "speed"),
        (("items", 0, "host"), "timm", "timm has no workload of text"),
        (("models", "m", "config"), {"model_type": "lama"}, "llama"),
        (("models", "m", "config"), {}, "config, public or timm"),
        (("workloads", "chat", "kind"), "video", "video"),
        (("workloads", "chat", "lengths"), [], "lengths"),
        (("workloads", "chat", "rounds"), 2, "rounds at least 3"),
        (("categories",), ["image"], "'text' is not one of its categories"),
        (("categories",), "text", "categories = 'text'"),
        (("memory_gb",), 8, "Did you mean 'memory_gib'"),
        (("memory_gib",), "lots", "memory_gib = 'lots'"),
        (("memory_gib",), 0, "memory_gib is above 0"),
        (("device",), "gpu", "unknown device 'gpu'"),
        (("dtype",), "bf16", "Did you mean 'bfloat16'"),
        (("kernels",), {"round": 5}, "Did you mean 'rounds'"),
        (("kernels",), {"sources": ["randm"]}, "Did you mean 'random'"),
        (("items",), 3, "needs tables"),
        (("items", 0), "chat", "item 1: a table of fields is needed"),
        (("items", 0, "timeout"), "300", "timeout = '300'"),
        (("items", 0, "ranks"), "2", "ranks = '2'"),
        (("workloads", "chat", "throughput"), "8", "throughput = '8'"),
        (("workloads", "chat", "round"), 5, "Did you mean 'rounds'"),
        (("workloads", "chat", "lengths"), [[1, 2, 3]], "prompt, output"),
        (("workloads", "chat"), 3, "a table of fields is needed, got 3"),
        (("models", "m", "category"), 3, "category = 3"),
    ],
)
def test_wrong_suite_names_the_entry(where, value, told):
    data = copy.deepcopy(SMALL)
    place = data
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    with pytest.raises(SuiteError, match=told):
        suites.read(data, "s")


def test_item_declared_twice_is_refused():
    with pytest.raises(SuiteError, match="m/chat/transformers is declared twice"):
        suites.read({**SMALL, "items": SMALL["items"] * 2}, "s")


def test_unknown_suite_and_model_are_named():
    with pytest.raises(UnknownName, match="smoke"):
        suites.load("smok")
    with pytest.raises(UnknownName, match="tiny-llama"):
        suites.of_model(suites.load("smoke"), "tiny-lama")
