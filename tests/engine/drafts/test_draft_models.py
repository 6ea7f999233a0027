"""EAGLE-3 and draft models: drafts are those of the equations, and tokens are those without drafts."""

from __future__ import annotations

import itertools
import json
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.drafts import ALWAYS, SMALL, counts, params, prompts, propose, results
from support.eagle import Eagle, make_scripted_eagle3, make_tiny_eagle3
from support.kernels import warm
from support.kernels.draft_kernel_cases import problems
from support.oracle import filtered
from support.rerun import install
from support.tiny import make_scripted, make_tiny
from torch.utils._python_dispatch import TorchDispatchMode

from fastkernels import LLM, SamplingParams, StructuredOutputsParams
from fastkernels.engine.execution.runners.generate import Generate
from fastkernels.engine.steps.step import StepInput
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.llm.llama_eagle3 import Eagle3

SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "draft_kernel_cases.py"


def eagle3(folder: Path, **more: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3, **ALWAYS, **more}


def draft_model(folder: Path, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3, **ALWAYS, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("drafts") / "llama", "llama", "float32")


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(str(folder), **SMALL)


@pytest.fixture(scope="module")
def eagle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_eagle3(tmp_path_factory.mktemp("drafts") / "eagle")


@pytest.fixture(scope="module")
def similar(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often agrees with the target."""
    return nearly(folder, make_tiny(tmp_path_factory.mktemp("drafts") / "similar", "llama", "float32"))


def nearly(folder: Path, made: Path, noise: float = 0.1) -> Path:
    """Give the checkpoint `made` the weights of the one in `folder`, with noise."""
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for weight in weights.values():
        weight += (
            noise * weight.std() * torch.empty_like(weight).normal_(generator=generator)
            if weight.dim() > 1
            else 0
        )
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[StepInput, np.ndarray | None]]]:
    """(step, drafts made after it) of all steps."""
    found: list[tuple[StepInput, np.ndarray | None]] = []
    launch = Generate.launch

    def noted(self: Generate, step: StepInput) -> Any:
        pending = launch(self, step)
        if step.masked:
            return pending
        output, nexts, drafts = pending.result(), step.next_drafts, None
        if output.input_ids is not None:
            step = replace(step, input_ids=output.input_ids)
        if self.drafter is not None and nexts is not None and nexts.count:
            drafts = self.drafter.held.drafts[torch.from_numpy(step.slots)].numpy()
        found.append((step, drafts))
        return pending

    monkeypatch.setattr(Generate, "launch", noted)
    yield found


def target_states(folder: Path, tokens: list[int]) -> torch.Tensor:
    """The hidden states [n, 3 H] before the first layer, after it, and after the second, by transformers."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _, args, out: found.append(out[0] if isinstance(out, tuple) else out)
        )
    with torch.inference_mode():
        first = model.model.embed_tokens(torch.tensor([tokens]))
        model(torch.tensor([tokens]))
    return torch.cat([t.reshape(len(tokens), -1) for t in (first, *found)], -1)


@pytest.mark.parametrize(
    "more", [{}, {"norm_before_residual": True, "embeddings": True, "draft_vocab_size": None}]
)
def test_drafts_are_those_of_the_equations(
    folder: Path, tmp_path: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """In chunks of a prompt, after a hit of the prefix cache, after rejected drafts, and next to other sequences."""
    logits: list[torch.Tensor] = []
    compute = Eagle3.compute_logits
    monkeypatch.setattr(
        Eagle3, "compute_logits", lambda self, x: logits.append(compute(self, x)) or logits[-1]
    )
    source = make_tiny_eagle3(tmp_path / "eagle", **more)
    llm = LLM(
        str(folder),
        **{**SMALL, "num_blocks": 100, "max_num_batched_tokens": 20},
        speculative_config=eagle3(source),
    )
    oracle = Eagle(source, load_file(folder / "model.safetensors")["model.embed_tokens.weight"])
    prompt = prompts(1, seed=5)[0][:6] * 5
    for beside in ([], prompts(2)):  # the second time, the prefix is known
        made.clear()
        logits.clear()
        (output, *_) = llm.generate([prompt, *beside], params(0, max_tokens=6), use_tqdm=False)
        tokens = [*prompt, *output.outputs[0].token_ids]
        states = target_states(folder, tokens)
        checked = set()
        at = 0
        for step, drafts in made:
            assert drafts is not None
            mine, at = logits[at : at + 3], at + 3
            for row in range(len(step.slots)):
                # The sequence with the prompt: its tokens say so
                first = int(step.query_lens[:row].sum())
                own = step.input_ids[first : first + step.query_lens[row]].tolist()
                end = int(step.seq_lens[row]) - (0 if step.drafts is None else int(step.drafts[row]))
                start = int(step.seq_lens[row]) - len(own)
                if step.offsets[row] < 0 or own[: end - start] != tokens[start:end] or (start and row):
                    continue
                known = end
                while known < len(tokens) and step.drafts is not None and known - end < step.drafts[row]:
                    if own[known - start] != tokens[known]:
                        break
                    known += 1
                if known >= len(tokens):
                    continue
                want, numbers = oracle.draft(states[:known], tokens[: known + 1], 3)
                assert drafts[row].tolist() == want
                for a, b in zip(mine, numbers, strict=True):
                    torch.testing.assert_close(a[row].double()[oracle.targets], b, atol=2e-4, rtol=1e-4)
                checked.add(known)
        assert len(checked) >= 5
    assert llm.llm_engine.scheduler.prefix_hits == 8 * ((len(prompt) - 1) // 8 - 1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_tokens_are_those_without_drafts(
    method: str, overlap: bool, folder: Path, plain: LLM, eagle: Path, similar: Path
) -> None:
    """Greedy and drawn; the cache is too small for all, so that some are preempted; the second time, prefixes hit."""
    settings = eagle3(eagle) if method == "eagle3" else draft_model(similar)
    drafting = LLM(str(folder), **SMALL, speculative_config=settings, async_scheduling=overlap)
    assert drafting.llm_engine.core.depth == 1 + overlap
    given, each = prompts(8), [params(i, max_tokens=16) for i in range(8)]
    want = results(plain, given, each)
    for _ in range(2):
        assert results(drafting, given, each) == want
    scheduler, found = drafting.llm_engine.scheduler, counts(drafting)
    assert found.drafts > 100 and scheduler.prefix_hits > 0 and scheduler.cache_usage == 0
    if method == "draft_model":
        assert 0.3 < found.accepted / found.drafts < 0.99


@pytest.mark.parametrize("overlap", [False, True])
def test_same_model_as_a_draft_is_always_accepted(overlap: bool, folder: Path) -> None:
    """Also for drawn tokens, whose noise is that of the target's."""
    more = {**SMALL, "num_blocks": 200, "async_scheduling": overlap}
    llm = LLM(str(folder), **more, speculative_config=draft_model(folder))
    results(llm, prompts(6), [params(i, max_tokens=12) for i in range(6)])
    assert counts(llm).drafts == counts(llm).accepted > 40


def test_scripted_draft_takes_fewer_steps(tmp_path: Path, made: list[Any]) -> None:
    """The target writes abcdefghijklm; the draft is wrong behind f."""
    folder = make_scripted(tmp_path / "target", "abcdefghijklm")
    settings = {**SMALL, "num_blocks": 100}
    plain = LLM(str(folder), **settings)
    greedy = SamplingParams(temperature=0, max_tokens=30)
    want = results(plain, ["b a", "c d"], greedy)
    assert want[0][0][1:3] == ("bcdefghijklm", "stop")
    for wrong, steps in (("", 4), ("f", 5)):
        source = make_scripted_eagle3(tmp_path / f"eagle{wrong}", folder, wrong)
        llm = LLM(str(folder), **settings, speculative_config=eagle3(source))
        made.clear()
        assert results(llm, ["b a"], greedy) == want[:1] and len(made) == steps
        assert results(llm, ["b a", "c d"], greedy) == want
        assert counts(llm).by_place[0] > counts(llm).by_place[2] > 0
        # The second sequence ends with a draft that is its stop token.
        assert (counts(llm).by_place[0] == counts(llm).sequences) == (not wrong)


def test_forced_acceptance_has_its_length(folder: Path, eagle: Path) -> None:
    """Tokens are then not the target's, and their number in a step is as requested."""
    for more, want, overlap in (
        ({"length": 2.25}, 2.25, False), ({"rates": [1.0, 0.5, 0.0]}, 2.5, True), ({"length": 1}, 1.0, True),
    ):  # fmt: skip
        forced = {f"synthetic_acceptance_{k}": v for k, v in more.items()}
        own = eagle3(eagle, rejection_sample_method="synthetic", **forced)
        given = {**SMALL, "num_blocks": 200, "async_scheduling": overlap}
        llm = LLM(str(folder), **given, speculative_config=own)
        outputs = llm.generate(prompts(6), params(0, max_tokens=40), use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == 40 for o in outputs)
        found = counts(llm)
        # The last step of a sequence has room for fewer drafts.
        assert 1 + found.accepted / found.sequences == pytest.approx(want, abs=0.2)
        with pytest.raises(ValueError, match="logprobs are not possible with synthetic acceptance"):
            llm.generate(prompts(1), params(0, logprobs=1), use_tqdm=False)


def test_drafts_stop_and_go_on_where_too_many_sequences_run(
    folder: Path, similar: Path, made: list[Any]
) -> None:
    """While they stop, the draft model stores its keys, so that later drafts agree as before."""
    settings = draft_model(folder, disable_by_batch_size=2)
    llm = LLM(str(folder), **{**SMALL, "num_blocks": 200}, speculative_config=settings)
    llm.generate(prompts(3), [params(0, max_tokens=n) for n in (8, 20, 20)], use_tqdm=False)
    numbers = [(len(step.slots), step.next_drafts.count) for step, _ in made if step.next_drafts is not None]
    assert {count for rows, count in numbers if rows == 3} == {0} and numbers[-1][1] == 3
    assert counts(llm).drafts == counts(llm).accepted > 5


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("target", ["gemma3_text", "mistral"])
def test_windows_of_target_and_draft_keep_tokens(
    target: str, overlap: bool, tmp_path: Path, folder: Path
) -> None:
    """Their blocks are in groups of different windows."""
    more: dict[str, Any] = {**SMALL, "async_scheduling": overlap}
    own = make_tiny(tmp_path / "target", target, "float32")
    given, each = prompts(4, 3), params(1, max_tokens=12)
    want = results(LLM(str(own), **SMALL), given, each)
    for source in (folder, make_tiny(tmp_path / "mistral", "mistral", "float32")):
        assert results(LLM(str(own), **more, speculative_config=draft_model(source)), given, each) == want


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_thousand_prompts_keep_tokens(
    method: str, overlap: bool, folder: Path, eagle: Path, similar: Path
) -> None:
    settings = eagle3(eagle) if method == "eagle3" else draft_model(similar)
    more = {**SMALL, "num_blocks": 400, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    given, each = prompts(1000, seed=4), [params(i, max_tokens=16) for i in range(1000)]
    one, two = (
        LLM(str(folder), **more, async_scheduling=overlap, speculative_config=own) for own in (None, settings)
    )
    assert results(two, given, each) == results(one, given, each)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_many_tokens_behind_drafts_have_the_targets_distribution(
    overlap: bool, tmp_path: Path, oracle: Any
) -> None:
    """Chi-square test of 21,000 tokens: 7,000 sequences of three, of which drafts can be two."""
    n, params = 7000, SamplingParams(temperature=1.5, top_p=0.9, max_tokens=3, ignore_eos=True, n=7000)
    target = make_tiny(tmp_path / "target", "llama", "float32", vocab_size=12)
    draft = nearly(target, make_tiny(tmp_path / "draft", "llama", "float32", vocab_size=12), noise=0.3)
    more = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 32, "max_waiting": n}
    llm = LLM(str(target), **more, speculative_config=draft_model(draft), async_scheduling=overlap)
    prompt, found = [5, 9, 4], torch.zeros(12, 12, 12, dtype=torch.float64)
    for out in llm.generate([prompt], params, use_tqdm=False)[0].outputs:
        found[tuple(out.token_ids)] += 1
    accepted = counts(llm).accepted / counts(llm).drafts
    assert counts(llm).drafts > n / 2 and 0.2 < accepted < 0.95

    def after(*tokens: int) -> torch.Tensor:
        return filtered(oracle.logits(target, [*prompt, *tokens])[-1] / 1.5, params)

    second = torch.stack([after(i) for i in range(12)])
    third = torch.stack([torch.stack([after(i, j) for j in range(12)]) for i in range(12)])
    expected = n * after()[:, None, None] * second[:, :, None] * third
    assert found.sum() == n and found[expected == 0].sum() == 0
    often = expected > 5
    cells = [(found[often], expected[often]), (found[~often].sum()[None], expected[~often].sum()[None])]
    chi = sum(float(((a - b) ** 2 / b).sum()) for a, b in cells if b.sum() > 5)
    free = int(often.sum())
    assert free > 100 and chi < free + 4 * (2 * free) ** 0.5  # 4 standard deviations


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_two_ranks_keep_tokens(
    method: str, overlap: bool, folder: Path, plain: LLM, eagle: Path, similar: Path
) -> None:
    settings = eagle3(eagle) if method == "eagle3" else draft_model(similar)
    given, each, more = prompts(6), [params(i) for i in range(6)], {**SMALL, "async_scheduling": overlap}
    with LLM(str(folder), **more, tensor_parallel_size=2, speculative_config=settings) as llm:
        assert results(llm, given, each) == results(plain, given, each)
        assert counts(llm).accepted > 20 or method == "eagle3"


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("method", ["eagle3", "draft_model", "same"])
def test_drafts_on_the_gpu_keep_tokens(
    method: str, eager: bool, folder: Path, plain: LLM, eagle: Path, similar: Path
) -> None:
    settings = {"eagle3": eagle3(eagle), "draft_model": draft_model(similar), "same": draft_model(folder)}[
        method
    ]
    more = {**SMALL, "num_blocks": 200, "device": "cuda", "dtype": "float32", "enforce_eager": eager}
    llm = LLM(str(folder), **more, speculative_config=settings)
    given = prompts(6)
    for _ in range(2):
        assert results(llm, given, params(0)) == results(plain, given, params(0))
    runner = llm.llm_engine.runner
    assert eager or runner.graphs.replays["verify"] > 10
    if method == "same":
        assert counts(llm).accepted > 0.9 * counts(llm).drafts


@pytest.mark.gpu
def test_scripted_eagle_on_the_gpu_is_accepted(tmp_path: Path) -> None:
    folder = make_scripted(tmp_path / "target", "abcdefghijklm")
    source = make_scripted_eagle3(tmp_path / "eagle", folder)
    more = {**SMALL, "num_blocks": 200, "device": "cuda", "dtype": "float32"}
    llm = LLM(str(folder), **more, speculative_config=eagle3(source))
    greedy = SamplingParams(temperature=0, max_tokens=30)
    for text in (["b a"], ["b a", "c d", "a", "d"]):
        for result, start in zip(results(llm, text, greedy), text, strict=True):
            assert result[0][1] == "abcdefghijklm".partition(start[-1])[2]
    assert counts(llm).by_place[0] == counts(llm).sequences == 15


def changed(folder: Path, out: Path, **fields: Any) -> Path:
    """A copy of a checkpoint with other fields in its config."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **fields}))
    return out


def test_drafts_that_do_not_fit_are_refused(folder: Path, eagle: Path, tmp_path: Path) -> None:
    def said(settings: dict[str, Any], error: type[Exception] = ValueError, **more: Any) -> str:
        with pytest.raises(error) as caught:
            LLM(str(more.pop("target", folder)), **{**SMALL, **more}, speculative_config=settings)
        return str(caught.value)

    other = changed(folder, tmp_path / "other", vocab_size=500)
    assert (
        "has a vocabulary of 500 tokens, and" in (text := said(draft_model(other))) and "one of 512" in text
    )
    small = make_tiny_eagle3(tmp_path / "small", vocab_size=400, draft_vocab_size=300)
    assert "vocabulary of 400 tokens" in said(eagle3(small))
    assert "is a LlamaForCausalLM, which method 'eagle3' does not run; use 'draft_model'" in said(
        eagle3(folder)
    )
    assert "is a LlamaForCausalLMEagle3, which method 'draft_model' does not run" in said(draft_model(eagle))
    wide = make_tiny_eagle3(tmp_path / "wide", target_hidden_size=64)
    assert "it reads hidden states of 64 channels, and the target has 128" in said(eagle3(wide))
    deep = make_tiny_eagle3(tmp_path / "deep", eagle_aux_hidden_state_layer_ids=None)
    text = "the default 2, n / 2, n - 3, [2, 1, -1], must be 3 ascending numbers from 0 to 2"
    assert text in said(eagle3(deep))
    several = make_tiny_eagle3(tmp_path / "several", num_hidden_layers=2)
    assert "num_hidden_layers=2 is not supported" in said(eagle3(several))
    short = changed(folder, tmp_path / "short", max_position_embeddings=64)
    assert "has a context of 64 tokens, and this engine one of 96: set max_model_len" in said(
        draft_model(short)
    )
    state = make_tiny(tmp_path / "mamba", "mamba", "float32")
    assert "keeps more than the keys of its tokens" in said(draft_model(state))
    latent = make_tiny(tmp_path / "latent", "deepseek_v3", "float32")
    assert "has latent attention" in said(draft_model(latent))
    odd = make_tiny_eagle3(tmp_path / "odd", intermediate_size=191)
    text = said(eagle3(odd), tensor_parallel_size=2)
    assert f"tensor_parallel_size 2 does not suit {odd}: " in text and "191" in text
    broken = make_tiny_eagle3(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    save_file({**weights, "d2t": weights["d2t"] + 400}, broken / "model.safetensors", {"format": "pt"})
    assert "and the target's vocabulary has 512" in said(eagle3(broken))
    save_file(
        {k: v for k, v in weights.items() if k != "d2t"}, broken / "model.safetensors", {"format": "pt"}
    )
    assert "config.draft_vocab_size=300 needs the tensor d2t" in said(eagle3(broken))
    assert "not" in said(eagle3(tmp_path / "nothing"), CheckpointError)
    with pytest.raises(ValueError, match="cannot be used alone: it is for the speculative_config"):
        LLM(str(eagle), **SMALL)


def rerun(llm: LLM) -> Any:
    """Give an engine graphs without CUDA. Returns its runner."""
    install(llm.llm_engine.runner)
    return llm.llm_engine.runner


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_graphs_make_the_same_drafts(
    method: str, overlap: bool, folder: Path, plain: LLM, eagle: Path
) -> None:
    """Graphs without CUDA, of other sizes than the steps."""
    settings = eagle3(eagle) if method == "eagle3" else draft_model(folder)
    more = {**SMALL, "num_blocks": 100, "async_scheduling": overlap}
    llms = [LLM(str(folder), **more, speculative_config=settings) for _ in range(2)]
    runner = rerun(llms[1])
    given, each = prompts(5), [params(i, max_tokens=24) for i in range(5)]
    want = results(plain, given, each)
    assert [results(llm, given, each) for llm in llms] == [want, want]
    eager, graphs = map(counts, llms)
    assert graphs.drafts == eager.drafts and graphs.accepted == eager.accepted
    replays = runner.graphs.replays
    assert replays["verify"] > 5 and (replays["drafts"] > replays["verify"]) == (method == "draft_model")


class Waits(TorchDispatchMode):
    """Where the engine reads values, or needs sizes that depend on them: on a GPU, it would wait there.

    Providers and the functions with kernels read values on the CPU only.
    """

    ONLY_CPU = ("overrides/", "models/", "draft_kernels.py", "tree_kernels.py", "step_kernels.py")
    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "repeat_interleave")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.on_cpu_only = 0

    def note(self, name: str) -> None:
        frames = traceback.extract_stack()
        own = [f for f in frames if "/fastkernels/" in f.filename and "/tests/" not in f.filename]
        if own and any(part in own[-1].filename for part in self.ONLY_CPU):
            self.on_cpu_only += 1
        elif own:
            self.found.append(f"{name}: {Path(own[-1].filename).name}:{own[-1].lineno}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, masks = func._schema.name.split("::")[-1], ()
        if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)):
            masks = [t for t in args[1] if t is not None and t.dtype == torch.bool]
        if name in self.NAMES or masks:
            self.note(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_with_drafts_wait_for_nothing(
    graphs: bool, folder: Path, eagle: Path, similar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an EAGLE-3 head, a draft model and prompt lookup, with two steps in flight where that is possible."""
    launch = Generate.launch
    for settings in (
        eagle3(eagle),
        draft_model(similar),
        {"num_speculative_tokens": 3, "prompt_lookup_min": 1, **ALWAYS},
    ):
        has_model = "model" in settings
        more = {**SMALL, "num_blocks": 100, "async_scheduling": True if has_model else None}
        llm, mode = LLM(str(folder), **more, speculative_config={"method": "ngram", **settings}), Waits()
        if graphs:
            rerun(llm)

        def watched(self: Generate, step: StepInput, mode: Waits = mode) -> Any:
            with mode:
                return launch(self, step)

        for name in ("item", "tolist", "cpu"):
            original = getattr(torch.Tensor, name)

            def noted(
                self: torch.Tensor, name: str = name, original: Any = original, mode: Waits = mode
            ) -> Any:
                mode.note(name)
                return original(self)

            monkeypatch.setattr(torch.Tensor, name, noted)
        monkeypatch.setattr(Generate, "launch", watched)
        llm.generate(prompts(4), [params(i, max_tokens=10) for i in range(4)], use_tqdm=False)
        monkeypatch.undo()
        assert counts(llm).drafts > 0 and mode.on_cpu_only > 10  # it sees those
        assert mode.found == []


@pytest.mark.gpu
def test_steps_with_drafts_wait_for_nothing_on_the_gpu(
    folder: Path, eagle: Path, similar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By CUDA's own check, of a launch; two steps are in flight."""
    launch = Generate.launch

    def watched(self: Generate, step: StepInput) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for eager, settings in itertools.product((True, False), (eagle3(eagle), draft_model(similar))):
        more = {**SMALL, "num_blocks": 200, "device": "cuda", "dtype": "float32", "enforce_eager": eager}
        llm = LLM(str(folder), **more, async_scheduling=True, speculative_config=settings)
        assert llm.llm_engine.core.depth == 2
        results(llm, prompts(6), params(0))  # compiles
        monkeypatch.setattr(Generate, "launch", watched)
        results(llm, prompts(6, seed=1), params(0))
        monkeypatch.undo()


def test_overlapped_eagle_drafts_keep_tokens(
    folder: Path, plain: LLM, eagle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of drafts is accepted; stop strings, log-probabilities, and constraints that come and go."""
    given = prompts(8, seed=7)
    each = [params(i, max_tokens=20) for i in range(8)]
    want = results(plain, given, each)
    propose(monkeypatch, [[*g, *w[0][0]] for g, w in zip(given, want, strict=True)])
    more = {**SMALL, "num_blocks": 15, "async_scheduling": True}
    llm = LLM(str(folder), **more, speculative_config=eagle3(eagle))
    assert results(llm, given, each) == want and llm.llm_engine.scheduler.num_preemptions > 0
    assert 0.2 < counts(llm).accepted / counts(llm).drafts < 0.9 and counts(llm).by_place[2] > 5
    text = want[2][0][1]
    each[2] = params(2, max_tokens=20, stop=[text[5:8]])
    each[4] = params(4, max_tokens=20, min_tokens=12, stop_token_ids=want[4][0][0][6:7], ignore_eos=False)
    each[5] = params(5, structured_outputs=StructuredOutputsParams(choice=["abcabcabc", "abcabd"]))
    each[6] = params(6, max_tokens=20, logprobs=1)
    assert results(llm, given, each) == results(plain, given, each)
    assert llm.llm_engine.scheduler.cache_usage == 0


def test_kernels_equal_pytorch() -> None:
    done = warm.run([SCRIPT], {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.gpu
def test_kernels_equal_pytorch_on_the_gpu() -> None:
    assert problems("cuda") == []
