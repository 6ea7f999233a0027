"""Load for a server: random requests with expected results, and clients that read, leave, misbehave or die."""

from __future__ import annotations

import asyncio
import json
import random
import string
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from fastkernels.engine.http.requests.protocol import ChatCompletionRequest, CompletionRequest
from fastkernels.engine.llm import LLM

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 256  # --max-model-len of the servers under load
TOLERANCE = 1e-3  # of float32 log-probabilities in batches of different shapes


@dataclass(frozen=True)
class Ask:
    """The path and body of a request, without `stream`."""

    path: str
    body: dict[str, Any]

    @property
    def fixed(self) -> bool:
        """Whether its answer is deterministic."""
        return self.body["temperature"] == 0 or "seed" in self.body


@dataclass
class Choice:
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def asks(number: int, seed: int = 0) -> list[Ask]:
    """Different requests with common prefixes and all kinds of parameters, determined by the seed."""
    rng = random.Random(seed)
    text = lambda n: "".join(rng.choices(string.ascii_lowercase + " ", k=n))  # noqa: E731
    prefixes = [text(n) for n in (16, 33, 64, 100)]
    return [_ask(rng, rng.choice(prefixes) + text(rng.randint(1, 60)), text) for _ in range(number)]


def _ask(rng: random.Random, prompt: str, text: Callable[[int], str]) -> Ask:
    body: dict[str, Any] = {
        "max_tokens": rng.choice((rng.randint(1, 30), rng.randint(60, 90))), "priority": rng.randint(-1, 1),
        "temperature": rng.choice((0, 0, 0.7, 1.0)), "return_token_ids": True,
    }  # fmt: skip
    if body["temperature"]:
        body["n"] = rng.choice((1, 2))
        body |= {"seed": rng.getrandbits(40)} if rng.random() < 0.9 else {}
    for chance, more in (
        (0.2, {"top_p": 0.9}), (0.2, {"top_k": 20}), (0.1, {"min_p": 0.05}), (0.5, {"ignore_eos": True}),
        (0.15, {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}),
        (0.1, {"logit_bias": {str(rng.randrange(4, 260)): 5.0}}), (0.2, {"min_tokens": min(3, body["max_tokens"])}),
        (0.3, {"stop": rng.sample(string.ascii_letters + string.digits, 12)}),
        (0.1, {"stop": [text(3), "_3"], "include_stop_str_in_output": True}),
    ):  # fmt: skip
        body |= more if rng.random() < chance else {}
    logprobs, chat = rng.random() < 0.2, rng.random() < 0.4
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
        body |= {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    else:
        ids = rng.random() < 0.3
        body["prompt"] = [4 + ord(c) for c in prompt] if ids else prompt
        body |= {"logprobs": 3} if logprobs else {}
    return Ask(CHAT if chat else COMPLETIONS, body)


class Reference:
    """The expected result of each request: offline, alone, without prefix cache."""

    def __init__(self, folder: Path):
        self.llm = LLM(
            str(folder), device="cpu", max_model_len=CONTEXT, num_blocks=64, enable_prefix_caching=False
        )
        self._known: dict[str, list[Choice]] = {}

    def __call__(self, ask: Ask) -> list[Choice]:
        key = json.dumps([ask.path, ask.body])
        if key not in self._known:
            kind = ChatCompletionRequest if ask.path == CHAT else CompletionRequest
            body: Any = kind.model_validate(ask.body)
            make: Any = self.llm.chat if ask.path == CHAT else self.llm.generate
            (output,) = make(ask.body["messages" if ask.path == CHAT else "prompt"], body.sampling_params())
            self._known[key] = [
                Choice(
                    o.text, o.finish_reason, list(o.token_ids),
                    [entry[t].logprob for t, entry in zip(o.token_ids, o.logprobs or (), strict=False)],
                )
                for o in output.outputs
            ]  # fmt: skip
        return self._known[key]


def all_malformed(stream: bool = False) -> list[tuple[str, bytes, dict[str, str]]]:
    """(path, body, headers) of requests that must get a 4xx."""
    wrong: list[dict[str, Any]] = [
        {"prompt": "a", "max_tokens": 0}, {"prompt": "a", "no_such_field": 1}, {"prompt": []}, {"prompt": [10**6]},
        {"prompt": [5] * CONTEXT}, {"prompt": "a", "temperature": -1}, {"prompt": "a", "temperature": "hot"},
        {"prompt": "a", "stop": ["x"] * 1000}, {"prompt": "a", "model": "another"}, {"prompt": "a", "n": 10**9},
        {"prompt": "a", "seed": 2**80}, {"prompt": "a" * 10**6}, {"messages": []}, {},
    ]  # fmt: skip
    raw = [b'{"prompt": "a"', b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"", b"[" * 10000]
    headers = {"content-type": "application/json"}
    bodies = [json.dumps(body | {"stream": stream}).encode() for body in wrong]
    paths = [CHAT if "messages" in body else COMPLETIONS for body in wrong]
    found = [(path, body, headers) for path, body in zip(paths, bodies, strict=True)]
    found += [(path, body, headers) for body in raw for path in (COMPLETIONS, CHAT)]
    return [*found, (COMPLETIONS, b'{"prompt": "a"}', {"content-type": "text/plain"})]


class Clients:
    """Clients of one server, and the outcomes of their requests.

    ends: counts of right, wrong, left (the client disconnected), refused (429), bad (4xx for malformed requests), error
    (5xx, or an error in a stream), lost (the connection ended without an answer), unreached (the same, for a request
    sent after `middle`), killed (clients).
    stories: a description of each wrong or lost one.
    """

    def __init__(self, url: str, pool: Sequence[Ask], reference: Reference, timeout: float = 60.0):
        self.url, self.pool, self.reference, self.timeout = url, pool, reference, timeout
        self.ends: Counter[str] = Counter()
        self.stories: list[str] = []
        self.after_middle = False

    async def run(
        self,
        number: int,
        concurrency: int,
        seed: int,
        killed: int = 0,
        middle: Callable[[], None] | None = None,
    ) -> None:
        """Send requests concurrently: 5% of the clients leave, 2% of the requests are malformed, and `killed` client
        processes die during their streams. middle() is called after half of the requests.
        """
        rng = random.Random(seed)
        jobs = [self._job(rng) for _ in range(number)]
        for i in range(killed):
            jobs.insert((2 * i + 1) * len(jobs) // (2 * killed), self._die)
        waiting, half = list(reversed(jobs)), number // 2
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=self.url, timeout=self.timeout, limits=limits) as client:

            async def work() -> None:
                while waiting:
                    job = waiting.pop()
                    if middle is not None and len(waiting) == half:
                        middle()
                        self.after_middle = True
                    late = self.after_middle
                    try:
                        end = await job(client)
                    except httpx.TransportError as error:  # before any byte of the answer
                        end = "unreached" if late else "lost"
                        self.stories += [] if late else [f"lost: {type(error).__name__}: {error}"]
                    self.ends[end] += 1

            await asyncio.gather(*(work() for _ in range(concurrency)))

    async def start_threads(self, times: int = 3) -> None:
        """Send all malformed requests at once, `times` times, so that the server's pools have all of their threads."""
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=self.url, timeout=self.timeout, limits=limits) as client:
            ends = await asyncio.gather(
                *(self._malformed(client, *given) for given in times * all_malformed())
            )
        assert set(ends) == {"bad"}, ends

    def _job(self, rng: random.Random) -> Callable[[httpx.AsyncClient], Any]:
        ask, stream, roll = rng.choice(self.pool), rng.random() < 0.6, rng.random()
        if roll < 0.02:
            path, body, headers = rng.choice(all_malformed(stream=rng.random() < 0.5))
            return lambda client: self._malformed(client, path, body, headers)
        after = rng.randint(0, 6) if roll < 0.07 else None
        return lambda client: self.stream(client, ask, after) if stream else self.whole(client, ask, after)

    async def whole(self, client: httpx.AsyncClient, ask: Ask, leave: int | None = None) -> str:
        """leave: hundredths of a second until the client disconnects."""
        request = client.post(ask.path, json=ask.body)
        if leave is None:
            answer = await request
        else:
            try:
                answer = await asyncio.wait_for(request, leave / 100)
            except asyncio.TimeoutError:
                return "left"
        if answer.status_code != 200:
            return self._refused(answer.status_code, answer.headers, answer.content)
        found: dict[int, Choice] = {}
        for choice in answer.json()["choices"]:
            _read(found, choice)
        return self._compare(ask, found, answer.json()["usage"])

    async def stream(self, client: httpx.AsyncClient, ask: Ask, leave: int | None = None) -> str:
        """leave: events after which the client disconnects."""
        body = {**ask.body, "stream": True, "stream_options": {"include_usage": True}}
        found: dict[int, Choice] = {}
        usage, last, left = None, "", leave
        async with client.stream("POST", ask.path, json=body) as answer:
            if answer.status_code != 200:
                return self._refused(answer.status_code, answer.headers, await answer.aread())
            try:
                async for line in answer.aiter_lines():
                    if left is not None and left <= 0:
                        return "left"
                    if not line:
                        continue
                    left, last = None if left is None else left - 1, line
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return "error"
                        usage = event["usage"] or usage
                        for choice in event["choices"]:
                            _read(found, choice)
            except httpx.TransportError as error:
                last = f"{type(error).__name__}: {error}"
        if last != "data: [DONE]":
            self.stories.append(f"lost: a stream ended with {last!r}")
            return "lost"
        return self._compare(ask, found, usage)

    def _compare(self, ask: Ask, found: dict[int, Choice], usage: dict[str, int] | None) -> str:
        wanted = self.reference(ask)
        got = [found[i] for i in sorted(found)]
        problem = None
        if len(got) != len(wanted) or any(c.finish_reason not in ("stop", "length") for c in got):
            problem = "choices"
        elif usage is None or usage["completion_tokens"] != sum(len(c.token_ids) for c in got):
            problem = "usage"
        elif ask.fixed:
            same = [
                (g.text, g.finish_reason, g.token_ids, len(g.logprobs))
                == (w.text, w.finish_reason, w.token_ids, len(w.logprobs))
                and all(abs(x - y) < TOLERANCE for x, y in zip(g.logprobs, w.logprobs, strict=True))
                for g, w in zip(got, wanted, strict=True)
            ]
            problem = None if all(same) else "answer"
        if problem is None:
            return "right"
        self.stories.append(f"wrong {problem}: {ask}\n  got {got}, {usage}\n  not {wanted}")
        return "wrong"

    def _refused(self, status: int, headers: httpx.Headers, body: bytes) -> str:
        if status == 429 and headers.get("retry-after"):
            return "refused"
        if status >= 500 and json.loads(body)["error"]["message"]:
            return "error"
        self.stories.append(f"wrong status {status}: {body!r}")
        return "wrong"

    async def _malformed(
        self, client: httpx.AsyncClient, path: str, body: bytes, headers: dict[str, str]
    ) -> str:
        answer = await client.post(path, content=body, headers=headers)
        if 400 <= answer.status_code < 500 and answer.json()["error"]["message"]:
            return "bad"
        if answer.status_code >= 500:
            return self._refused(answer.status_code, answer.headers, answer.content)
        self.stories.append(f"wrong: {answer.status_code} for {body[:80]!r}")
        return "wrong"

    async def _die(self, client: httpx.AsyncClient) -> str:
        """Kill a process while it reads three streams."""
        host, port = self.url.removeprefix("http://").split(":")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DYING, host, port, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            assert await process.stdout.readline() == b"reading\n"
        finally:
            process.kill()
            await process.wait()
        return "killed"


DYING = """
import json, socket, sys
body = json.dumps({"prompt": [5], "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
head = f"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n".encode()
sockets = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(3)]
for s in sockets:
    s.sendall(head + body)
for s in sockets:
    s.recv(100)
print("reading", flush=True)
while True:
    for s in sockets:
        s.recv(100)
"""


def _read(found: dict[int, Choice], choice: dict[str, Any]) -> None:
    """Add a choice of a complete answer or of an event."""
    to = found.setdefault(choice["index"], Choice())
    message = choice.get("message") or choice.get("delta")
    to.text += choice["text"] if message is None else message["content"]
    to.finish_reason = choice["finish_reason"] or to.finish_reason
    to.token_ids += choice["token_ids"]
    logprobs = choice["logprobs"] or {}
    to.logprobs += logprobs.get("token_logprobs") or [e["logprob"] for e in logprobs.get("content") or ()]
