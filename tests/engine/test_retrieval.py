"""Retrieval offline: heads of BGE-M3, ColBERT, cross-encoders and scores, against transformers' encoders."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fk_bench.info.verified import EMBEDDINGS, SCORES
from support.minilm import minilm_path
from support.retrievers import (
    DOCUMENT,
    MASK,
    QUERY,
    make_tiny_bge_m3,
    make_tiny_colbert,
    make_tiny_cross_encoder,
)

from fastkernels import LLM
from fastkernels.core.dispatch import counters
from fastkernels.engine import scoring
from fastkernels.engine.inputs.tokenizer import encode_pair, shortened
from fastkernels.engine.sampling.pooling import PoolingParams
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported

ASKED = ["who, me?", "a far longer question"]
GIVEN = ["It is I.", "No.", "something else, and longer than doc_maxlen"]


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_colbert(tmp_path_factory.mktemp("colbert") / "tiny")


@pytest.fixture(scope="module")
def bge_m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bge_m3(tmp_path_factory.mktemp("bge") / "tiny")


def hidden_of(folder: Path, ids: list[int], mask: list[int] | None = None) -> torch.Tensor:
    """Hidden states [tokens, H] of transformers' encoder; a checkpoint of ColBERT is a BertModel's."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        mask_of = None if mask is None else torch.tensor([mask])
        return model(torch.tensor([ids]), attention_mask=mask_of).last_hidden_state[0]


def colbert_vectors(folder: Path, text: str, query: bool, attend: bool = False) -> torch.Tensor:
    """The vectors of a text as ColBERT's own tokenizers and doc() or query() make them."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    marked = tokenizer("." + text, truncation=True, max_length=12 if query else 20).input_ids
    marked[1] = QUERY if query else DOCUMENT
    mask = [1] * len(marked)
    if query:
        mask += [int(attend)] * (12 - len(marked))
        marked += [MASK] * (12 - len(marked))
    linear = load_file(folder / "model.safetensors")["linear.weight"]
    found = F.normalize(hidden_of(folder, marked, mask) @ linear.T, dim=-1)
    symbols = {tokenizer(c, add_special_tokens=False).input_ids[0] for c in string.punctuation}
    return found if query else found[[token not in symbols for token in marked]]


def score_of(query: torch.Tensor, document: torch.Tensor) -> float:
    return float((query @ document.T).amax(1).sum())


def test_colbert_scores_equal_its_own_formula(colbert: Path) -> None:
    llm, before = LLM(str(colbert), device="cpu"), counters()["maxsim"]["calls"]
    documents = [colbert_vectors(colbert, text, False) for text in GIVEN]
    assert [len(d) for d in documents] == [10, 5, 19]  # without punctuation, and cut to 20 tokens
    for query in ASKED:
        asked = colbert_vectors(colbert, query, True)
        want = [score_of(asked, document) for document in documents]
        found = [o.outputs.score for o in llm.score(query, GIVEN)]
        np.testing.assert_allclose(found, want, atol=SCORES)
    assert counters()["maxsim"]["calls"] > before
    want = [score_of(colbert_vectors(colbert, q, True), d) for q, d in zip(ASKED, documents, strict=False)]
    np.testing.assert_allclose([o.outputs.score for o in llm.score(ASKED, GIVEN[:2])], want, atol=SCORES)
    (plain,) = llm.encode(GIVEN[0])
    assert plain.outputs.data.shape == (len(GIVEN[0]) + 2, 24)  # no marker: all tokens


def test_colbert_settings_of_the_checkpoint_are_used(tmp_path: Path) -> None:
    folder = make_tiny_colbert(tmp_path, attend_to_mask_tokens=True, mask_punctuation=False)
    llm = LLM(str(folder), device="cpu")
    params = [PoolingParams("token_embed", role=role) for role in ("query", "document")]
    query, document = llm._run([ASKED[0], GIVEN[0]], params, False)
    want = colbert_vectors(folder, ASKED[0], True, attend=True)
    np.testing.assert_allclose(query.outputs.data, want, atol=EMBEDDINGS)
    assert query.prompt_token_ids[:2] == [0, QUERY] and query.prompt_token_ids[-1] == MASK
    assert len(document.outputs.data) == len(document.prompt_token_ids) == len(GIVEN[0]) + 3


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"similarity": "l2"}, "similarity='l2' is not supported, only 'cosine'"),
        ({"query_maxlen": 0}, "query_maxlen=0 is not supported"),
        ({"dim": "24"}, "dim='24' is not supported"),
    ],
)
def test_unsupported_colbert_settings_are_named(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        LLM(str(make_tiny_colbert(tmp_path, **metadata)), device="cpu")


def test_damaged_files_beside_the_weights_are_named(tmp_path: Path) -> None:
    folder = make_tiny_colbert(tmp_path / "colbert", dim=23)
    with pytest.raises(CheckpointError, match=r"linear.weight of shape \(24, 64\) does not fit"):
        LLM(str(folder), device="cpu")
    (folder / "artifact.metadata").write_text("{")
    with pytest.raises(CheckpointError, match=r"artifact.metadata is not JSON"):
        LLM(str(folder), device="cpu")
    make_tiny_colbert(tmp_path / "other", query_token_id="[Q]")
    with pytest.raises(ValueError, match=r"the tokenizer has no token '\[Q\]'"):
        LLM(str(tmp_path / "other"), device="cpu").score("a", "b")
    folder = make_tiny_bge_m3(tmp_path / "bge")
    (folder / "sparse_linear.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"sparse_linear.pt is not a file of tensors"):
        LLM(str(folder), device="cpu")


def test_bge_m3_heads_equal_their_formulas(bge_m3: Path) -> None:
    """As in FlagEmbedding: the first token's vector, ReLU weights by token, and vectors of all tokens but the first."""
    llm = LLM(str(bge_m3), device="cpu")
    heads = {n: torch.load(bge_m3 / f"{n}_linear.pt", weights_only=True) for n in ("sparse", "colbert")}
    (dense,), (vectors,), (sparse,) = (
        llm.encode(GIVEN[0], task) for task in ("embed", "token_embed", "token_classify")
    )
    ids = dense.prompt_token_ids
    hidden = hidden_of(bge_m3, ids)
    np.testing.assert_allclose(dense.outputs.data, F.normalize(hidden[0], dim=0), atol=EMBEDDINGS)
    want = F.normalize(F.linear(hidden, heads["colbert"]["weight"], heads["colbert"]["bias"])[1:], dim=-1)
    np.testing.assert_allclose(vectors.outputs.data, want, atol=EMBEDDINGS)
    weights = F.linear(hidden, heads["sparse"]["weight"], heads["sparse"]["bias"])[1:-1, 0].relu()
    np.testing.assert_allclose(sparse.outputs.data, weights, atol=EMBEDDINGS)
    largest: dict[int, float] = {}
    for token, weight in zip(ids[1:-1], weights.tolist(), strict=True):
        if weight > 0:
            largest[token] = max(weight, largest.get(token, 0.0))
    (found,) = llm.lexical_weights(GIVEN[0])
    assert found.keys() == largest.keys() and 0 < len(found) < len(set(ids))
    np.testing.assert_allclose(list(found.values()), [largest[t] for t in found], atol=EMBEDDINGS)


def test_absent_heads_are_named(bge_m3: Path, tmp_path: Path) -> None:
    folder = make_tiny_bge_m3(tmp_path)
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        (folder / name).unlink()
    llm = LLM(str(folder), device="cpu")
    with pytest.raises(
        ValueError, match=r"'token_classify' needs the head in sparse_linear.pt, which .* has not"
    ):
        llm.lexical_weights("a")
    query = [PoolingParams("token_embed", role="query")]
    with pytest.raises(
        ValueError, match=r"role 'query', vectors for MaxSim, needs the head in colbert_linear.pt"
    ):
        llm._run(["a"], query, False)
    with pytest.raises(ValueError, match=r"'token_classify' needs a model with lexical weights"):
        LLM(str(minilm_path()), device="cpu").encode("a", "token_classify")
    with pytest.raises(ValueError, match=r"needs a model of late interaction, which"):
        LLM(str(minilm_path()), device="cpu")._run(["a"], query, False)


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        ("BertForSequenceClassification", {}),
        ("XLMRobertaForSequenceClassification", {"type_vocab_size": 1}),
        ("BertForSequenceClassification", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
        ("XLMRobertaForSequenceClassification", {"num_labels": 3, "type_vocab_size": 1}),
    ],
)  # fmt: skip
def test_cross_encoders_equal_transformers(tmp_path: Path, cls: str, fields: dict[str, Any]) -> None:
    from transformers import AutoModelForSequenceClassification

    llm = LLM(str(make_tiny_cross_encoder(tmp_path, cls, **fields)), device="cpu")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    tokenizer, labels = llm.get_tokenizer(), fields.get("num_labels", 1)
    want = []
    for text in GIVEN:
        ids, types = encode_pair(tokenizer, ASKED[0], text)
        assert sum(types) == len(text) + 1
        given = {"input_ids": torch.tensor([ids])}
        if fields.get("type_vocab_size") != 1:
            given["token_type_ids"] = torch.tensor([types])
        with torch.no_grad():
            want.append(model(**given).logits[0])
    logits = torch.stack(want)
    if labels > 1:
        ids = [encode_pair(tokenizer, ASKED[0], text)[0] for text in GIVEN]
        found = [o.outputs.probs for o in llm.classify(ids)]
        np.testing.assert_allclose(found, logits.softmax(-1), atol=SCORES)
        with pytest.raises(ValueError, match=r"one label or none; .* has a classifier of 3 labels"):
            llm.score(ASKED[0], GIVEN)
        return
    expected = logits if "sbert_ce_default_activation_function" in fields else logits.sigmoid()
    assert logits.std() > 0.01  # the documents differ
    np.testing.assert_allclose(
        [o.outputs.score for o in llm.score(ASKED[0], GIVEN)], expected[:, 0], atol=SCORES
    )
    raw = [PoolingParams("classify", use_activation=False)] * 3
    made = [
        llm.llm_engine.pair_request(f"{i}", ASKED[0], t, p)
        for i, (t, p) in enumerate(zip(GIVEN, raw, strict=True))
    ]
    found = [o.outputs.score for o in llm._complete(made, False)]
    np.testing.assert_allclose(found, logits[:, 0], atol=SCORES)


def test_unknown_activation_is_named(tmp_path: Path) -> None:
    name = "torch.nn.modules.activation.GELU"
    folder = make_tiny_cross_encoder(tmp_path, sbert_ce_default_activation_function=name)
    with pytest.raises(Unsupported, match=f"{name}' is not supported, only torch.nn.modules.linear.Identity"):
        LLM(str(folder), device="cpu")


def test_scores_of_an_embedder_are_cosines() -> None:
    llm = LLM(str(minilm_path()), device="cpu")
    vectors = np.array([o.outputs.data for o in llm.embed([*ASKED, *GIVEN])])
    found = [o.outputs.score for o in llm.score(ASKED[1], GIVEN)]
    np.testing.assert_allclose(found, vectors[2:] @ vectors[1], atol=1e-5)
    with pytest.raises(
        ValueError, match="2 queries and 3 documents: give one query, or as many as documents"
    ):
        llm.score(ASKED, GIVEN)
    with pytest.raises(ValueError, match="at least one query and one document are needed, got 1 and 0"):
        llm.score(ASKED[0], [])


def test_weights_of_a_repeated_token_are_its_largest() -> None:
    weights = np.array([0.5, 0.25, 0.0, 0.75, 2.0], np.float32)
    assert scoring.lexical_weights([7, 8, 9, 7, 2], weights, (2,)) == {7: 0.75, 8: 0.25}


def test_pairs_and_texts_are_cut_to_the_limit() -> None:
    tokenizer = LLM(str(minilm_path()), device="cpu").get_tokenizer()
    ids, types = encode_pair(tokenizer, "a b c d", "e f g h i j")
    short, short_types = encode_pair(tokenizer, "a b c d", "e f g h i j", 10)
    assert len(ids) == 13 and len(short) == len(short_types) == 10
    assert short[0] == 101 and short.count(102) == 2 and short[-1] == 102
    assert encode_pair(tokenizer, "a b c d", "e f g h i j", 4, "left") == (ids[-4:], types[-4:])
    assert shortened(tokenizer, "one two  three", 2) == "one two" and shortened(tokenizer, "one", 5) == "one"


@pytest.mark.slow
def test_two_ranks_score_as_one(colbert: Path) -> None:
    one = [o.outputs.score for o in LLM(str(colbert), device="cpu").score(ASKED[0], GIVEN)]
    with LLM(str(colbert), device="cpu", tensor_parallel_size=2) as llm:
        two = [o.outputs.score for o in llm.score(ASKED[0], GIVEN)]
    np.testing.assert_allclose(two, one, atol=SCORES)


def test_hidden_fields_of_metadata_are_ignored(colbert: Path) -> None:
    """artifact.metadata has all settings of a training run."""
    assert json.loads((colbert / "artifact.metadata").read_text())["checkpoint"] == "ignored"
    assert LLM(str(colbert), device="cpu").llm_engine.scored_by == "late-interaction"
