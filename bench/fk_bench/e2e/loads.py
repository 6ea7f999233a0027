"""The loads of `fk-bench patch-compare`: requests, their lengths, what the prefix cache holds, and late arrivals.

    8x2048+8                8 requests start together: prompts of 2,048 tokens, outputs of 8
    1x16384+128             a decode at a long context, after its prompt
    8x65536@100+64          the same prompts in every run, of which the prefix cache holds 100 percent
    8x16384@90+8            90 percent of each prompt are the same in every run, the other tokens are new
    32x512+256/8x2048+8     while 32 requests decode, 8 prompts arrive one after the other, evenly over their outputs
    32x512                  32 texts of 512 tokens are embedded (--task embed)

Prompts that the cache holds begin with one sequence for each request, of which a load takes as many tokens as it
needs. The longest load computes it once in each state of the host (a change of kernels empties the cache); the others
find it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from fk_bench.core.terminal.flags import ConfigError, comma_list

DECODES = 32  # output tokens from which a load measures decoding; shorter ones measure prompts
LONG = 16384  # tokens of a prompt from which these decodes are at a long context
BLOCK = 128  # tokens, the largest block of a KV cache
FORM = re.compile(r"(\d+)x(\d+)(?:(?:@(\d+))?\+(\d+)(?:/(\d+)x(\d+)\+(\d+))?)?")
SYNTAX = "REQUESTSxINPUT[@PERCENT]+OUTPUT[/ARRIVINGxINPUT+OUTPUT], as in 8x512+128, 8x16384@90+8 or 32x512+256/8x2048+8"
GENERATE, EMBED = "generate", "embed"
TASKS = GENERATE, EMBED

PRESETS = {
    "decode": "1x512+128,8x512+128,32x512+128,64x512+128",
    "prompts": "8x2048+8,4x8192+8,1x32768+8",
    "long": "8x131072@100+64,1x131072@100+64,8x65536@100+64,1x65536@100+64,8x16384@100+64,1x16384@100+64,8x16384@90+8,"
    "1x16384+128",
    "mixed": "32x512+256/8x2048+8",
    # Decoding at several sizes of a batch, then prompts with few outputs: a patch must slow down neither.
    "short": "1x512+64,8x512+64,32x512+64,64x512+64,1x600+8,8x512+8,4x1920+8",
    "quick": "8x2048+8,4x8192+8,1x32768+8,1x512+64,8x512+64,32x512+64,64x512+64",
}
PRESETS["all"] = ",".join(PRESETS[name] for name in ("decode", "prompts", "mixed", "long"))
PRESETS["embed"] = "1x512,32x512,256x512"


class Kind(str, Enum):
    DECODE = "decode"
    PROMPTS = "prompts"
    CONTEXT = "long context"  # decoding after long prompts, or after prompts that the cache holds
    HITS = "prefix hits"  # prompts that the cache holds in part
    MIXED = "mixed"
    EMBED = "embeddings"  # no outputs


@dataclass(frozen=True)
class Load:
    """Requests that start together, tokens of each prompt and of each output.

    cached    percent of each prompt that are the same in every run
    arriving  prompts that arrive while the requests decode; their input and output tokens
    """

    requests: int
    input_len: int
    output_len: int
    cached: int = 0
    arriving: int = 0
    arriving_input: int = 0
    arriving_output: int = 0

    @classmethod
    def parse(cls, text: str) -> Load:
        """From '8x512+128'. Raises ConfigError."""
        found = FORM.fullmatch(text)
        given = [int(part) for part in found.groups(default="0")] if found else []
        without_output = found is not None and found[4] is None
        needed = (0, 1) if without_output else (0, 1, 3)
        if found is None or not all(given[i] for i in needed) or given[2] > 100:
            raise ConfigError(f"--loads: {text!r} is not {SYNTAX}")
        load = cls(given[0], given[1], given[3], given[2], *given[4:])
        if found[5] is not None:
            if not all(given[4:]):
                raise ConfigError(f"--loads: {text!r} is not {SYNTAX}")
            if load.gap < 1:
                raise ConfigError(
                    f"--loads: {text!r}: {load.arriving} prompts do not arrive one after the other during"
                    f" {load.output_len} output tokens; give {load.arriving + 1} or more"
                )
        return load

    def __str__(self) -> str:
        percent = f"@{self.cached}" if self.cached else ""
        later = f"/{self.arriving}x{self.arriving_input}+{self.arriving_output}" if self.arriving else ""
        output = f"+{self.output_len}" if self.output_len else ""
        return f"{self.requests}x{self.input_len}{percent}{output}{later}"

    @property
    def kind(self) -> Kind:
        if not self.output_len:
            return Kind.EMBED
        if self.arriving:
            return Kind.MIXED
        if self.output_len < DECODES:
            return Kind.HITS if self.cached else Kind.PROMPTS
        return Kind.CONTEXT if self.cached or self.input_len >= LONG else Kind.DECODE

    @property
    def gap(self) -> int:
        """Output tokens of the first request between two arrivals."""
        return self.output_len // (self.arriving + 1)

    @property
    def held(self) -> int:
        """Tokens at the start of each prompt that are the same in every run."""
        return self.input_len * self.cached // 100

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(self.input_len + self.output_len, self.arriving_input + self.arriving_output)

    @property
    def input_tokens(self) -> int:
        return self.requests * self.input_len + self.arriving * self.arriving_input

    @property
    def new_tokens(self) -> int:
        """Tokens of a run that take room in the cache, in whole blocks, without those that it holds already."""

        def blocks(tokens: int) -> int:
            return -(-(tokens + 1) // BLOCK) * BLOCK

        own = self.requests * blocks(self.input_len - self.held + self.output_len)
        return own + self.arriving * blocks(self.arriving_input + self.arriving_output)


def parse_loads(text: str, task: str = GENERATE) -> tuple[list[Load], frozenset[Load]]:
    """The loads of `--loads`, and those of them that a preset gave. Raises ConfigError, also for another task's."""
    given, preset = list[Load](), set[Load]()
    for part in comma_list("--loads", text, str):
        if part in PRESETS:
            found = [Load.parse(one) for one in PRESETS[part].split(",")]
            preset.update(found)
        else:
            try:
                found = [Load.parse(part)]
            except ConfigError as error:
                raise ConfigError(f"{error}; or one of {', '.join(PRESETS)}") from error
        given += found
    if not given:
        raise ConfigError(f"--loads {text!r} has no load: give one as in 8x512+128, or {', '.join(PRESETS)}")
    loads = list(dict.fromkeys(given))
    for load in loads:
        if task == EMBED and load.output_len:
            raise ConfigError(
                f"--loads: {load} has {load.output_len} output tokens, and --task embed generates none: give"
                f" REQUESTSxINPUT, as in {load.requests}x{load.input_len}, or embed"
            )
        if task == GENERATE and not load.output_len:
            raise ConfigError(
                f"--loads: {load} has no output tokens: give them as in {load}+128, or --task embed to embed texts"
            )
    return loads, frozenset(preset)


def held_tokens(loads: Iterable[Load]) -> list[int]:
    """The tokens that the prefix cache holds for each request of the loads, the longest of its prompts."""
    found = list(loads)
    most = max((load.requests for load in found if load.cached), default=0)
    return [max(load.held for load in found if load.requests > i) for i in range(most)]


def room_for(loads: Sequence[Load]) -> int:
    """The tokens that a KV cache needs so that no prompt leaves it between two runs of a load."""
    held = sum(-(-tokens // BLOCK) * BLOCK for tokens in held_tokens(loads))
    new = [load.new_tokens for load in loads]
    return held + sum(new) if held else max(new, default=0)
