"""Trees of EAGLE-3 drafts: levels are those of the equations, and tokens are those without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.drafts import ALWAYS, SMALL, counts, params, prompts, propose, results
from support.eagle import Eagle, make_scripted_eagle3, make_tiny_eagle3
from support.kernels import warm
from support.kernels.tree_kernel_cases import problems
from support.rerun import Rerun
from support.tiny import make_scripted, make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.engine.execution.attention.base import metadata_of
from fastkernels.engine.execution.drafts.drafting import Drafter
from fastkernels.engine.options.draft_tree import DraftTree

SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "tree_kernel_cases.py"
TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)]"
PATHS = DraftTree.read(TREE)


def tree(folder: Path, **more: Any) -> dict[str, Any]:
    own = {"method": "eagle3", "model": str(folder), "speculative_token_tree": TREE}
    return {**own, "num_speculative_tokens": len(PATHS), **ALWAYS, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("trees") / "llama", "llama", "float32")


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(str(folder), **SMALL)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_eagle3(tmp_path_factory.mktemp("trees") / "eagle")


def test_tree_is_read_like_vllm() -> None:
    made = DraftTree.read([(1,), (0, 0), (0,)])  # any order
    assert made.paths == ((0,), (1,), (0, 0)) and made.depths == (0, 1, 1, 2) and made.children[1] == (3,)
    assert not made.is_chain and DraftTree.read("[(0,), (0, 0)]").is_chain
    seen = [[d for d in range(5) if bits >> d & 1] for bits in PATHS.masks]
    assert seen[:5] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 2, 3, 4], [0, 3, 4], [0, 3, 4]]
    drafts = [5, 6, 7, 8, 9, 8, 1, 2, 3]
    assert PATHS.accepted(drafts, [6, 0, 8, 0, 0, 0, 3, 0, 0, 4]) == [2, 6, 9]
    assert PATHS.accepted(drafts[:6], [6, 0, 8, 0, 0, 0, 3]) == [2, 6]
    assert PATHS.accepted(drafts, [0] * 10) == [] and PATHS.accepted(drafts, [0] * 10, forced=2) == [1, 4]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("[(0,), (0, 0, 0)]", r"has \(0, 0, 0\), but not its parent \(0, 0\)"),
        ("[(1,)]", r"has \(1,\), but not \(0,\): children are numbered from 0"),
        ("[(0,), (0,)]", "has a path twice"), ("[(0,), ('a',)]", "is not a list of paths"),
        ("__import__('os')", "is not a list of paths"), ("[" * 5000, "is not a list of paths"),
        ("[]", "is not a list of paths"), (7, "is not a list of paths"),
        ("[(0,), (1,)]", "has 2 drafts, and num_speculative_tokens is 9: they must be equal"),
    ],
)  # fmt: skip
def test_wrong_tree_is_refused(given: Any, text: str, folder: Path, eagle: Path) -> None:
    with pytest.raises(ValueError, match=text):
        LLM(str(folder), **SMALL, speculative_config=tree(eagle, speculative_token_tree=given))


def test_models_without_tree_masks_are_refused(folder: Path, eagle: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'speculative_token_tree' is not supported by 'draft_model'"):
        LLM(str(folder), **SMALL, speculative_config=tree(folder, method="draft_model"))
    windowed = make_tiny(tmp_path / "mistral", "mistral", "float32")
    own = make_tiny_eagle3(tmp_path / "own", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    with pytest.raises(ValueError, match="not supported for attention with a sliding window"):
        LLM(str(windowed), **SMALL, speculative_config=tree(own))


def test_tokens_are_those_without_drafts(
    folder: Path, plain: LLM, eagle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths through all ranks are accepted; the cache is too small for all sequences; then prefixes hit."""
    given, each = prompts(8), [params(i, max_tokens=24) for i in range(8)]
    want = results(plain, given, each)
    texts = [[*g, *w[0][0]] for g, w in zip(given, want, strict=True)]
    propose(monkeypatch, texts)
    llm = LLM(str(folder), **{**SMALL, "num_blocks": 16}, speculative_config=tree(eagle))
    for _ in range(2):
        assert results(llm, given, each) == want
    scheduler, found = llm.llm_engine.scheduler, counts(llm)
    assert found.by_place[0] > found.by_place[1] > found.by_place[2] > 10 and found.by_place[3] == 0
    assert scheduler.num_preemptions > 0 and scheduler.prefix_hits > 0 and scheduler.cache_usage == 0


def test_second_best_drafts_are_accepted(tmp_path: Path) -> None:
    """The draft's best token behind f is wrong, and its second one right."""
    folder = make_scripted(tmp_path / "target", "abcdefghijklm")
    source = make_scripted_eagle3(tmp_path / "eagle", folder)
    weights, theirs = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    embedding = theirs["model.embed_tokens.weight"]
    from transformers import PreTrainedTokenizerFast

    (token,) = PreTrainedTokenizerFast.from_pretrained(folder)("f").input_ids
    weights["lm_head.weight"][400, int(embedding[token].argmax())] = (
        2.0 * weights["lm_head.weight"].abs().max()
    )
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    greedy, more = SamplingParams(temperature=0, max_tokens=30), {**SMALL, "num_blocks": 100}
    want = results(LLM(str(folder), **more), ["b a", "c d"], greedy)
    chain = {"method": "eagle3", "model": str(source), "num_speculative_tokens": 3, **ALWAYS}
    steps = []
    for settings in (chain, tree(source)):
        llm = LLM(str(folder), **more, speculative_config=settings)
        assert results(llm, ["b a", "c d"], greedy) == want
        steps.append(counts(llm).sequences)
    assert steps[1] < steps[0]


def test_drafts_are_those_of_the_equations(
    folder: Path, eagle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node is the most likely token behind its path, or the next one by its rank."""
    import transformers

    found: list[tuple[int, int, list[int]]] = []
    original = Drafter.chain

    def chain(self: Drafter, rows: int, longest: int, most: int = 0) -> torch.Tensor:
        drafts = original(self, rows, longest, most)
        found.append((int(self._rows.at[0]), int(self._rows.token[0]), drafts[0].tolist()))
        return drafts

    monkeypatch.setattr(Drafter, "chain", chain)
    llm = LLM(str(folder), **{**SMALL, "max_num_batched_tokens": 20}, speculative_config=tree(eagle))
    prompt = prompts(1, seed=5)[0][:30]
    (output,) = llm.generate([prompt], params(0, max_tokens=8), use_tqdm=False)
    tokens = [*prompt, *output.outputs[0].token_ids]
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kept: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, a, out: kept.append(out[0] if isinstance(out, tuple) else out))
    with torch.inference_mode():
        first = model.model.embed_tokens(torch.tensor([tokens]))
        model(torch.tensor([tokens]))
    states = torch.cat([t.reshape(len(tokens), -1) for t in (first, *kept)], -1)
    oracle = Eagle(eagle, load_file(folder / "model.safetensors")["model.embed_tokens.weight"])
    checked = 0
    for at, token, drafts in found:
        if at + 1 < len(prompt) or at + 1 >= len(tokens) or tokens[at + 1] != token:
            continue  # a chunk of the prompt, or behind the last token
        own = oracle._linear(states[: at + 1].double(), "fc")
        with torch.inference_mode():
            for node, kids in enumerate(PATHS.children):
                if not kids:
                    continue
                path = [node]
                while PATHS.parents[path[0]]:
                    path.insert(0, PATHS.parents[path[0]])
                ids, hidden = tokens[1 : at + 2], own
                for step in [0, *(path if node else [])]:
                    if step:
                        ids, hidden = [*ids, drafts[step - 1]], torch.cat([hidden, out[-1:]])  # noqa: F821
                    logits, out = oracle._layer(torch.tensor(ids), hidden)  # noqa: RUF059
                best = oracle.targets[logits[-1].topk(len(kids)).indices].tolist()
                assert [drafts[kid - 1] for kid in kids] == best
        checked += 1
    assert checked >= 5


def test_forced_acceptance_has_its_length(folder: Path, eagle: Path) -> None:
    forced = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.25}
    llm = LLM(str(folder), **{**SMALL, "num_blocks": 200}, speculative_config=tree(eagle, **forced))
    llm.generate(prompts(6), params(0, max_tokens=40), use_tqdm=False)
    assert 1 + counts(llm).accepted / counts(llm).sequences == pytest.approx(2.25, abs=0.2)
    with pytest.raises(ValueError, match=r"must be a number in \[1, 4\]"):
        LLM(
            str(folder),
            **SMALL,
            speculative_config=tree(eagle, **{**forced, "synthetic_acceptance_length": 5}),
        )


def test_graphs_make_the_same_drafts(
    folder: Path, plain: LLM, eagle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs without CUDA, of other sizes than the steps."""
    given, each = prompts(5), [params(i, max_tokens=12) for i in range(5)]
    want = results(plain, given, each)
    llms = [
        LLM(str(folder), **{**SMALL, "num_blocks": 100}, speculative_config=tree(eagle)) for _ in range(2)
    ]
    runner = llms[1].llm_engine.runner
    sizes = SMALL["max_num_seqs"], runner.limits.max_model_len, 48
    for backend in (runner.backend, runner.drafter.backend):
        backend.plan_capture = lambda inputs, table, backend=backend: metadata_of(backend, inputs, table)
    with torch.inference_mode():
        runner.graphs = Rerun(
            runner._captured, runner.backend, runner.batch, runner.device, *sizes, runner.drafter
        )
    assert [results(llm, given, each) for llm in llms] == [want, want]
    eager, graphs = map(counts, llms)
    assert graphs.drafts == eager.drafts and graphs.accepted == eager.accepted
    assert runner.graphs.replays["drafts"] > 5 and runner.graphs.replays["mixed"] > 2


@pytest.mark.slow
def test_thousand_prompts_keep_tokens(folder: Path, eagle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**SMALL, "num_blocks": 400, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    given, each = prompts(1000, seed=4), [params(i, max_tokens=16) for i in range(1000)]
    want = results(LLM(str(folder), **more), given, each)
    propose(monkeypatch, [[*g, *w[0][0]] for g, w in zip(given, want, strict=True)])
    llm = LLM(str(folder), **more, speculative_config=tree(eagle))
    assert results(llm, given, each) == want and counts(llm).by_place[2] > 200


@pytest.mark.slow
def test_two_ranks_keep_tokens(folder: Path, plain: LLM, eagle: Path) -> None:
    given, each = prompts(6), [params(i) for i in range(6)]
    with LLM(str(folder), **SMALL, tensor_parallel_size=2, speculative_config=tree(eagle)) as llm:
        assert results(llm, given, each) == results(plain, given, each)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
def test_trees_on_the_gpu_keep_tokens(eager: bool, folder: Path, plain: LLM, eagle: Path) -> None:
    more = {**SMALL, "num_blocks": 200, "device": "cuda", "dtype": "float32", "enforce_eager": eager}
    llm = LLM(str(folder), **more, speculative_config=tree(eagle))
    given = prompts(6)
    for _ in range(2):
        assert results(llm, given, params(0)) == results(plain, given, params(0))
    runner = llm.llm_engine.runner
    assert eager or (runner.graphs.replays["drafts"] > 10 and runner.graphs.replays["mixed"] > 10)


@pytest.mark.gpu
def test_scripted_tree_on_the_gpu_is_accepted(tmp_path: Path) -> None:
    folder = make_scripted(tmp_path / "target", "abcdefghijklm")
    source = make_scripted_eagle3(tmp_path / "eagle", folder)
    more = {**SMALL, "num_blocks": 200, "device": "cuda", "dtype": "float32"}
    llm = LLM(str(folder), **more, speculative_config=tree(source))
    greedy = SamplingParams(temperature=0, max_tokens=30)
    for text in (["b a"], ["b a", "c d", "a", "d"]):
        for result, start in zip(results(llm, text, greedy), text, strict=True):
            assert result[0][1] == "abcdefghijklm".partition(start[-1])[2]
    assert counts(llm).by_place[0] == counts(llm).sequences == 15


def test_kernels_equal_pytorch() -> None:
    done = warm.run([SCRIPT], {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.gpu
def test_kernels_equal_pytorch_on_the_gpu() -> None:
    assert problems("cuda") == []
