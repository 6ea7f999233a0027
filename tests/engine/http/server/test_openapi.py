"""schemathesis: every generated request gets an answer that the OpenAPI document describes."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from support import policies, recommenders
from support.detectors import make_rtdetr
from support.retrievers import make_tiny_bge_m3, make_tiny_colbert, make_tiny_cross_encoder
from support.tiny_pipelines import make_tiny_flux

from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.server import Server
from fastkernels.engine.options.config import EngineConfig

CHECKS = (
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance, negative_data_rejection, unsupported_method,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny):
    """A server with short sequences, so that requests for the maximum length finish soon."""
    config = EngineConfig(str(tiny), device="cpu", max_model_len=48, num_blocks=64, max_num_seqs=64)
    # Generated bodies of 58 MB occur; 413 is no rejection of wrong data for schemathesis.
    server = Server(config, ServerConfig("tiny", max_body_size=2**30, enable_tokenizer_info_endpoint=True))
    yield server
    server.close()


ROUTES = [
    ("GET", "/health"), ("GET", "/ping"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/reset_prefix_cache"), ("POST", "/flush_cache"),
    ("POST", "/v1/responses"), ("POST", "/generate"), ("GET", "/model_info"), ("GET", "/get_model_info"),
    ("GET", "/server_info"), ("GET", "/get_server_info"), ("GET", "/load"), ("GET", "/tokenizer_info"),
    ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/audio/translations"),
]  # fmt: skip


@pytest.fixture(scope="module")
def document(server):
    return schemathesis.openapi.from_asgi("/openapi.json", server.app)


def run(document, server, method, path, mode, max_examples):
    strategy = document[path][method].as_strategy(generation_mode=mode)

    @settings(
        max_examples=max_examples, deadline=None, database=None, derandomize=True,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=strategy)
    def check(case):
        case.call_and_validate(checks=CHECKS)
        assert server.llm.healthy and server.llm.num_failed_steps == 0

    check()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_images_route(tmp_path_factory, mode):
    """With limits that let few of the generated requests make an image."""
    config = EngineConfig(
        str(make_tiny_flux(tmp_path_factory.mktemp("pipeline") / "flux")), device="cpu", max_pixels=64, max_steps=1,
        max_images=1,
    )  # fmt: skip
    server = Server(config, ServerConfig("flux", max_body_size=2**30))
    try:
        document = schemathesis.openapi.from_asgi("/openapi.json", server.app)
        run(document, server, "POST", "/v1/images/generations", mode, 8)
    finally:
        server.close()


# {kind of model: (what makes a tiny one, its routes)}
FAMILIES = {
    "cross-encoder": (make_tiny_cross_encoder, ("/score", "/rerank", "/classify")),
    "late-interaction": (make_tiny_colbert, ("/v1/score", "/v1/rerank", "/pooling")),
    "embedder": (make_tiny_bge_m3, ("/v1/embeddings", "/pooling")),
    "recommender": (recommenders.dlrm, ("/v1/scores",)),
    "policy": (policies.dp3, ("/v1/actions",)),
    "detector": (make_rtdetr, ("/v1/detections",)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [f if f == "cross-encoder" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_routes_of_other_models(name, tmp_path):
    make, paths = FAMILIES[name]
    folder = tmp_path / "model"
    make(folder)
    server = Server(EngineConfig(str(folder), device="cpu"), ServerConfig("tiny", max_body_size=2**30))
    try:
        document = schemathesis.openapi.from_asgi("/openapi.json", server.app)
        for path in paths:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                run(document, server, "POST", path, mode, 6)
    finally:
        server.close()


def skip_what_cannot_be_wrong(method, path, mode):
    if mode is GenerationMode.NEGATIVE and (method == "GET" or path.endswith("_cache")):
        pytest.skip("nothing of it can be wrong but its path")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route(document, server, method, path, mode):
    skip_what_cannot_be_wrong(method, path, mode)
    run(document, server, method, path, mode, 12 if method == "POST" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), [r for r in ROUTES if r[0] == "POST"])
def test_every_route_with_many_examples(document, server, method, path, mode):
    skip_what_cannot_be_wrong(method, path, mode)
    if mode is GenerationMode.NEGATIVE and path.startswith("/v1/audio/"):
        pytest.skip("schemathesis 4.32 fails on its own mutations of files: Unsupported type: 'Binary'")
    run(document, server, method, path, mode, 100)


def test_all_routes_are_tested(document):
    assert sorted(ROUTES) == sorted(
        (o.method.upper(), o.path) for o in (r.ok() for r in document.get_all_operations())
    )


def test_document_contains_the_limits(server):
    document = server.routes.openapi()
    assert set(document["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/metrics"}
    fields = document["components"]["schemas"]["CompletionRequest"]
    assert fields["additionalProperties"] is False and fields["required"] == ["prompt"]
    n = fields["properties"]["n"]["anyOf"][0]
    assert (n["minimum"], n["maximum"]) == (1, 128)
    assert fields["properties"]["suffix"]["enum"] == [None, ""]
    tokenize = document["components"]["schemas"]["TokenizeRequest"]
    assert [option["required"] for option in tokenize["oneOf"]] == [["prompt"], ["messages"]]
    assert "422" not in document["paths"]["/v1/completions"]["post"]["responses"]
