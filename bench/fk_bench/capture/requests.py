"""The requests of a capture: real text, in waves that run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

SYSTEM = (
    "You are a careful assistant for engineers. Answer in plain words, name the units of every number, and say so when"
    " you do not know."
)
QUESTIONS = (
    "What is the difference between latency and throughput?",
    "A kernel reads 256 MB and writes 256 MB in 160 microseconds. How many bytes a second is that, and is it near the"
    " limit of a card with 4.8 TB/s?",
    "Explain paged attention to somebody who knows how virtual memory works, in four sentences.",
    "Write a short Python function that returns the median of a list of numbers without sorting all of it.",
    "My server answers the first token after two seconds but the following ones every 20 milliseconds. The prompts have"
    " about three thousand tokens and come in bursts of forty. What would you look at first, and what could I change"
    " without buying more hardware?",
    "Name three reasons why the same prompt can give different answers at temperature zero.",
    "Translate into French: the train leaves at noon, and the bakery next to the station closes an hour earlier.",
)
FOLLOW_UPS = (
    ("Latency is the time of one request, throughput how many are done in a second.", "Which one do users feel?"),
    ("Keys and values are kept in blocks, and a table says which block holds which tokens.", "Who makes that table?"),
    ("Look at how long the prompts wait before they are computed.", "And if the waiting is short?"),
)  # fmt: skip
PARAGRAPHS = (
    "A mill stood at the bend of the river for two hundred years. Its wheel turned slowly in summer, when the water was"
    " low, and so fast after the spring rains that the miller had to lift the gate by hand, a little at a time.",
    "The profiler shows two kernels where one was expected. The first copies the rows of the batch into a contiguous"
    " buffer, the second multiplies them. Giving the multiplication the strides of its input removes the copy, and with"
    " it a third of the bytes that the layer moves.",
    "To bake a loaf of bread, mix five hundred grams of flour with three hundred and fifty of water, ten of salt and a"
    " little yeast. Wait until the dough has doubled, fold it four times, shape it, wait again, and bake it hot.",
    "Whales sleep with one half of the brain at a time. The other half keeps an eye open and remembers to breathe. A"
    " young whale sleeps beside its mother and drifts in the stream that she makes.",
    "The scheduler gives every running sequence one token of a step and fills what is left with a chunk of the oldest"
    " prompt. When the cache is full, the youngest sequence gives its blocks back, and is computed again later.",
    "In the harbour office hung a map with a pin for every ship. When the telephone rang, the clerk moved a pin by the"
    " width of a finger, and somewhere on the other side of the world a freighter had passed a lighthouse.",
    "Rounding a sum to sixteen bits after every term loses small numbers that are added to a large one. Keeping the sum"
    " in thirty-two bits and rounding once costs nothing, because the registers are that wide anyway.",
    "The garden was narrow and long. Beans climbed along the south wall, potatoes grew where the pear tree gave no"
    " shade, and at the far end, behind the compost, somebody had planted a row of sunflowers against the railway.",
)


@dataclass(frozen=True)
class Ask:
    """One request: its text as chat messages or, for `text`, as it is; how many tokens to generate, and how."""

    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""
    max_tokens: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def _chat() -> list[list[Ask]]:
    """A conversation that fills the prefix cache, six that begin like it, three continued ones."""
    system = ("system", SYSTEM)
    sampled = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0}]
    first = [Ask((system, ("user", QUESTIONS[0])), max_tokens=32)]
    second = [
        Ask((system, ("user", q)), max_tokens=32 + 4 * i, seed=i, **sampled[i % 3])  # type: ignore[arg-type]
        for i, q in enumerate(QUESTIONS[1:])
    ]
    third = [
        Ask(
            (system, ("user", QUESTIONS[2 * i]), ("assistant", answer), ("user", more)),
            max_tokens=40,
            seed=9 + i,
        )
        for i, (answer, more) in enumerate(FOLLOW_UPS)
    ]
    return [first, second, third]


def _batch() -> list[list[Ask]]:
    """Sixteen texts to be continued at once, which end at about the same time."""
    texts = [" ".join(PARAGRAPHS[(i + k) % 8] for k in range(1 + i // 8)) for i in range(16)]
    return [[Ask(text=text, max_tokens=32) for text in texts]]


def _long() -> list[list[Ask]]:
    """One long text, then the same with another end, together with two short ones."""
    text = " ".join(PARAGRAPHS[(i * 3 + i // 8) % 8] for i in range(24))
    return [
        [Ask(text=text, max_tokens=16)],
        [
            Ask(text=f"{text} {PARAGRAPHS[2]}", max_tokens=24),
            *(Ask(text=p, max_tokens=32) for p in PARAGRAPHS[:2]),
        ],
    ]


SCENARIOS: dict[str, Callable[[], list[list[Ask]]]] = {"chat": _chat, "batch": _batch, "long": _long}


def requests(scenario: str, model: str) -> list[list[dict[str, Any]]]:
    """The waves as token ids of the model's tokenizer: [{'prompt': ids, 'max_tokens', 'temperature', 'top_p', 'seed'}].

    Raises UnknownName for an unknown scenario, OSError or ValueError for a model without a tokenizer.
    """
    from transformers import AutoTokenizer

    from fastkernels.core.registry import UnknownName

    if scenario not in SCENARIOS:
        raise UnknownName("scenario", scenario, SCENARIOS)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    waves = []
    for wave in SCENARIOS[scenario]():
        made = []
        for ask in wave:
            how = {k: v for k, v in asdict(ask).items() if k not in ("messages", "text")}
            made.append({"prompt": _ids(tokenizer, ask), **how})
        waves.append(made)
    return waves


def _ids(tokenizer: Any, ask: Ask) -> list[int]:
    if ask.text:
        return tokenizer.encode(ask.text)
    messages = [{"role": role, "content": content} for role, content in ask.messages]
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n".join(f"{m['role']}: {m['content']}" for m in messages) + "\nassistant:")
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)
