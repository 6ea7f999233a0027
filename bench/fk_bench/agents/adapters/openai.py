"""Any OpenAI-compatible endpoint: a minimal loop of prompt, check and feedback. It needs httpx alone.

An answer that is late, no answer at all, or one without a source is an attempt spent, with its reason.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from fk_bench.agents.adapters import task_folder

NETWORK = True
ENV = ("OPENAI_API_KEY", "OPENAI_BASE_URL")
OPTIONS: Mapping[str, str | None] = {
    "model": None, "url": "", "timeout": "300", "temperature": "", "max_tokens": "", "attempts": "20",
}  # fmt: skip
SYSTEM = "You write fast GPU kernels. Answer with the whole candidate file in one Python code block."
TURNS = 2  # of earlier answers and feedback that stay in the prompt
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_DEFINES = re.compile(r"^(?:def|class) ", re.MULTILINE)


def command(options: Mapping[str, str]) -> str:
    return task_folder.program("openai", options, OPTIONS)


class Lost(Exception):
    """An answer that brings no source; the message says why."""


def ask(url: str, options: Mapping[str, str], messages: list[dict[str, str]]) -> tuple[str, int]:
    """(text, tokens) of one answer. Raises Lost."""
    body: dict[str, Any] = {"model": options["model"], "messages": messages}
    for name, cast in (("temperature", float), ("max_tokens", int)):
        if options[name]:
            body[name] = cast(options[name])
    key = os.environ.get("OPENAI_API_KEY", "")
    limit = float(options["timeout"])
    try:
        answer = httpx.post(
            f"{url.rstrip('/')}/chat/completions", json=body, timeout=limit,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )  # fmt: skip
    except httpx.TimeoutException:
        raise Lost(f"no answer within {limit:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Lost(f"no answer: {type(error).__name__}: {error}") from None
    if answer.status_code != 200:
        raise Lost(f"status {answer.status_code}: {answer.text[:200]}")
    try:
        found = answer.json()
        text = found["choices"][0]["message"]["content"]
        tokens = int((found.get("usage") or {}).get("total_tokens") or 0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise Lost(f"the answer is no chat completion: {answer.text[:200]}") from None
    if not isinstance(text, str):
        raise Lost("the answer has no text")
    return text, tokens


def source_of(text: str) -> str:
    """The last code block that defines something. Raises Lost."""
    blocks = [b for b in _BLOCK.findall(text) if _DEFINES.search(b)]
    if not blocks:
        raise Lost(f"the answer has no code block with a function or class: {text[:200]!r}")
    return blocks[-1]


def loop(
    options: Mapping[str, str],
    prompt: str,
    finish: Callable[[str], str] = lambda source: source,
    system: str = SYSTEM,
) -> int:
    """Ask, write the candidate, check, and repeat with the feedback. finish: makes the answer's source a candidate."""
    url = options["url"] or os.environ.get("OPENAI_BASE_URL", "") or "https://api.openai.com/v1"
    file = task_folder.candidate()
    first = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    turns: list[list[dict[str, str]]] = []
    for _ in range(int(options["attempts"])):
        text = ""
        try:
            text, tokens = ask(url, options, [*first, *(m for turn in turns[-TURNS:] for m in turn)])
            task_folder.usage(tokens)
            file.write_text(finish(source_of(text)), encoding="utf-8")
            answer = task_folder.check()
        except Lost as error:
            answer = task_folder.lost(str(error))
        print(answer, flush=True)
        if task_folder.used_up(answer):
            break
        said = {k: v for k, v in answer.items() if k not in ("left", "profile")}
        turn = [
            {
                "role": "user",
                "content": f"The judge answers: {said}\nImprove the candidate. Answer with the whole file.",
            }
        ]
        turns.append(([{"role": "assistant", "content": text}] if text else []) + turn)
    return 0


def main() -> int:
    return loop(task_folder.options_of(sys.argv), task_folder.statement())


if __name__ == "__main__":
    raise SystemExit(task_folder.run(main))
