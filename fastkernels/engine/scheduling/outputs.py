"""Turns a step's tokens into text, log-probabilities, ends of requests, and outputs for the caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastkernels.engine.sampling.sampling_params import RequestOutputKind, SamplingParams
from fastkernels.engine.scheduling.detokenizer import REPLACEMENT
from fastkernels.engine.scheduling.request import (
    CompletionOutput,
    Logprob,
    PromptLogprobs,
    Request,
    RequestOutput,
    Status,
)
from fastkernels.engine.steps.step import TokenLogprobs

MOST_PARTS = 4  # tokens that one character can have: its bytes


@dataclass(eq=False)
class RequestGroup:
    """A caller's request: params.n sequences of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[Request]

    @property
    def streams_deltas(self) -> bool:
        """Whether an output holds only what is new since the last one."""
        return self.params.output_kind is RequestOutputKind.DELTA

    @property
    def finished(self) -> bool:
        return all(s.status is Status.FINISHED for s in self.sequences)


@dataclass
class News:
    """New tokens of one sequence in one step, with their log-probabilities."""

    sequence: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None


def append_token(request: Request, token: int) -> None:
    """Add a generated token. Finish the request at an end token, a stop string, or the maximum length."""
    request.output_token_ids.append(token)
    params, text, length = request.params, request.detokenizer, len(request.output_token_ids)
    if text is not None and _decodes_late(params):
        text = None
    enough = length >= params.min_tokens
    if enough and token in request.end_token_ids:
        if text is not None:
            text.finish(look=False)  # the end token itself is not part of the text
        request.finish("stop", token if token in (params.stop_token_ids or ()) else None)
        return
    stop = text.append(token, look=enough) if text is not None else None
    long = length >= request.max_tokens
    if stop is None and long and text is not None:
        stop = text.finish(look=enough)
    if stop is not None:
        request.finish("stop", stop)
    elif long:
        request.finish("length")


def end_early(request: Request, reason: str) -> None:
    """End a sequence after its last token, for a reason that the token itself does not show."""
    if request.detokenizer is not None and not _decodes_late(request.params):
        request.detokenizer.finish(look=False)
    request.finish(reason)


def _decodes_late(params: SamplingParams) -> bool:
    """Whether the text is needed only at the end, and can be decoded then."""
    return params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop


def _late_text(request: Request) -> None:
    """Decode the tokens of a sequence that decodes late."""
    text = request.detokenizer
    if text is None or not _decodes_late(request.params):
        return
    ids = request.output_token_ids
    if request.finish_reason == "stop" and ids and ids[-1] in request.end_token_ids:
        ids = ids[:-1]
    for token in ids:
        text.append(token, look=False)
    text.finish(look=False)


def read_logprobs(
    found: TokenLogprobs, row: int, num: int, tokenizer: Any, before: Sequence[int]
) -> dict[int, Logprob]:
    """{token id: Logprob} of a row: the token itself first, then the `num` most likely. before: tokens before it."""
    ids, values = found.token_ids[row], found.logprobs[row]
    entries: dict[int, Logprob] = {}
    for i in range(num + 1 if num >= 0 else len(ids)):
        token = int(ids[i])
        if token not in entries:
            rank = int(found.ranks[row]) if i == 0 else i
            entries[token] = Logprob(float(values[i]), rank, _decoded(tokenizer, token, before))
    return entries


def add_logprobs(news: News, found: TokenLogprobs, row: int, tokenizer: Any) -> None:
    """Add the new tokens' log-probabilities to the sequence. row: of the first one in `found`."""
    request = news.sequence
    news.logprobs = []
    request.logprobs = request.logprobs or []
    first = len(request.output_token_ids) - len(news.token_ids)
    for i, token in enumerate(news.token_ids):
        before = request.output_token_ids[max(first + i - MOST_PARTS + 1, 0) : first + i]
        entry = read_logprobs(found, row + i, request.params.logprobs or 0, tokenizer, before)
        news.logprobs.append(entry)
        request.logprobs.append(entry)
        request.cumulative_logprob += entry[token].logprob


def _decoded(tokenizer: Any, token: int, before: Sequence[int]) -> str | None:
    """The token's text. As in vLLM, the last of the tokens that share a character has it, and the others have none."""
    if tokenizer is None:
        return None
    text = tokenizer.decode([token])
    for parts in range(1, len(before) + 1):
        if REPLACEMENT not in text:
            break
        text = tokenizer.decode([*before[-parts:], token])
    return "" if REPLACEMENT in text else text


def fill_prompt_logprobs(request: Request, start: int, found: TokenLogprobs, tokenizer: Any) -> None:
    """Fill in log-probabilities of the prompt's tokens from position start + 1 on."""
    assert request.prompt_logprobs is not None
    wanted = request.params.prompt_logprobs or 0
    for i in range(len(found.ranks)):
        at = start + 1 + i
        before = request.prompt_token_ids[max(0, at - MOST_PARTS + 1) : at]
        request.prompt_logprobs[at] = read_logprobs(found, i, wanted, tokenizer, before)


def make_output(group: RequestGroup, news: Iterable[News]) -> RequestOutput | None:
    """The output for the caller after a step; None if the request wants only a final output."""
    kind, finished = group.params.output_kind, group.finished
    if kind is RequestOutputKind.FINAL_ONLY and not finished:
        return None
    if kind is RequestOutputKind.DELTA:
        outputs = [_delta(n) for n in news]
    else:
        outputs = [_whole(s) for s in group.sequences]
    first = group.sequences[0]
    prompt_logprobs: PromptLogprobs | None = first.prompt_logprobs
    return RequestOutput(
        group.request_id, group.prompt, group.prompt_token_ids, outputs, finished, prompt_logprobs,
        first.num_cached_tokens,
    )  # fmt: skip


def _delta(news: News) -> CompletionOutput:
    request = news.sequence
    text = "" if request.detokenizer is None else request.detokenizer.take(request.status is Status.FINISHED)
    return _completion(request, text, news.token_ids, news.logprobs)


def _whole(request: Request) -> CompletionOutput:
    text = ""
    if request.detokenizer is not None:
        done = request.status is Status.FINISHED
        if done:
            _late_text(request)
        request.num_sent_chars += len(request.detokenizer.take(done))
        text = request.detokenizer.text[: request.num_sent_chars]
    return _completion(request, text, list(request.output_token_ids), request.logprobs)


def _completion(
    request: Request, text: str, token_ids: Sequence[int], logprobs: list[dict[int, Logprob]] | None
) -> CompletionOutput:
    total = None
    if request.logprobs is not None:
        total = request.cumulative_logprob
    return CompletionOutput(
        request.index, text, token_ids, logprobs, total, request.finish_reason, request.stop_reason,
        len(request.output_token_ids),
    )  # fmt: skip
