"""Write prompts of many lengths for `serve-compare --dataset prompts --dataset-path FILE.jsonl`.

    ragged_prompts.py --model FOLDER --out prompts.jsonl [--count 720] [--seed 0] [--shortest 68] [--longest 1853]

Lengths are evenly distributed from --shortest to --longest tokens, counted by the model's tokenizer.json. The text is
random words of its vocabulary; a number at the front of each prompt keeps prefixes distinct. The same seed, tokenizer
and lengths give the same file.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from fk_bench.serving.load.datasets import load_vocabulary

FEWEST = 16  # tokens: room for a prompt's number and a word


def words_of(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return the tokens that are plain words, in a fixed order. Raises ValueError if there are none."""
    texts = (tokenizer.decode([i]).strip() for i in ids)
    found = sorted({t for t in texts if t.isascii() and t.isalpha()})
    if not found:
        raise ValueError("the tokenizer has no token that is a plain word")
    return found


def prompt_of(start: str, length: int, words: list[str], tokenizer: Any, rng: random.Random) -> str:
    """Return `start` and random words of at most `length` tokens, cut between words."""
    text = " ".join([start, *rng.choices(words, k=length)])  # a word has at least one token
    end = tokenizer.encode(text).offsets[length - 1][1]
    return text if text[end:] == "" else text[: text.rfind(" ", 0, end + 1)]


def prompts(model: str, number: int, shortest: int, longest: int, seed: int) -> list[tuple[str, int]]:
    """Return [(prompt, number of tokens)]. Raises ValueError without tokenizer.json or for impossible lengths."""
    tokenizer, ids = (vocabulary := load_vocabulary(model)).tokenizer, vocabulary.ordinary
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json")
    if not FEWEST <= shortest <= longest:
        raise ValueError(
            f"--shortest {shortest} --longest {longest}: {FEWEST} or more, and the longest not below it"
        )
    words, rng = words_of(tokenizer, ids), random.Random(seed)
    made = [prompt_of(f"{i}:", rng.randint(shortest, longest), words, tokenizer, rng) for i in range(number)]
    return [(text, len(tokenizer.encode(text).ids)) for text in made]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder with config.json and tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=720)
    parser.add_argument("--shortest", type=int, default=68, help="tokens")
    parser.add_argument("--longest", type=int, default=1853, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        made = prompts(options.model, options.count, options.shortest, options.longest, options.seed)
    except ValueError as error:
        parser.error(str(error))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text, _ in made))
    lengths = [n for _, n in made]
    mean = sum(lengths) / len(made)
    print(f"{options.out}: {len(made)} prompts of {min(lengths)} to {max(lengths)} tokens, mean {mean:.0f}")


if __name__ == "__main__":
    main()
