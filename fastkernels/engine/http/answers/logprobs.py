"""Log-probabilities in the form of OpenAI's completions and chat completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastkernels.engine.scheduling.request import Logprob, PromptLogprobs

FLOOR = -9999.0  # vLLM's replacement for minus infinity, which JSON lacks, as it does NaN
Entry = dict[int, Logprob]
Spell = Callable[[int, Logprob | None], str]


def json_number(logprob: Logprob) -> float:
    """The log-probability, and FLOOR for one that is no number of JSON."""
    return max(FLOOR, logprob.logprob)  # this order: max(x, FLOOR) of NaN is NaN


def speller(tokenizer: Any, as_token_ids: bool) -> Spell:
    """The function that writes a token, as its text or as 'token_id:5'."""

    def spell(token_id: int, logprob: Logprob | None) -> str:
        if as_token_ids or tokenizer is None:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return tokenizer.decode([token_id])

    return spell


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry | None], offset: int, spell: Spell
) -> tuple[dict[str, Any], int]:
    """(the `logprobs` of a completion's choice, the text offset after it).

    entries  one per token, with that token and the most likely ones; None for the first of a prompt
    offset   characters of the choice before these tokens
    """
    tokens, values, tops, offsets = [], [], [], []
    for token_id, entry in zip(token_ids, entries, strict=True):
        chosen = None if entry is None else entry[token_id]
        text = spell(token_id, chosen)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        values.append(None if chosen is None else json_number(chosen))
        top: dict[str, float] = {}
        for other, logprob in (
            entry or {}
        ).items():  # the first of two tokens with the same text is the likelier one
            top.setdefault(spell(other, logprob), json_number(logprob))
        tops.append(None if entry is None else top)
    body = {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}
    return body, offset


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], num_top: int, spell: Spell
) -> dict[str, Any]:
    """The `logprobs` of a chat completion's choice."""

    def one(token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = spell(token_id, logprob)
        return {"token": text, "logprob": json_number(logprob), "bytes": list(text.encode())}

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = sorted(entry.items(), key=lambda item: -item[1].logprob)[:num_top]
        content.append({**one(token_id, entry[token_id]), "top_logprobs": [one(i, e) for i, e in top]})
    return {"content": content}


def prompt_logprobs_body(logprobs: PromptLogprobs | None, spell: Spell) -> list[Any] | None:
    """vLLM's `prompt_logprobs`: for each token of the prompt {token id: {logprob, rank, decoded_token}}."""
    if logprobs is None:
        return None
    return [
        None
        if entry is None
        else {
            str(i): {"logprob": json_number(e), "rank": e.rank, "decoded_token": spell(i, e)}
            for i, e in entry.items()
        }
        for entry in logprobs
    ]
