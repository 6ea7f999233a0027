"""Compiles the grammars of structured outputs for a model's vocabulary, in threads, each one once."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastkernels.engine.structured.params import StructuredOutputsParams
from fastkernels.engine.structured.special_tokens import special_ids

THREADS = 4
MANY = 8  # matchers whose masks are filled in several threads
CACHE_BYTES = 512 << 20
DEADLINE = 30.0  # seconds to compile one grammar
_LOCATION = re.compile(r"^(\[[\d:]+\] \S+: )?(Check failed: \(.*?\) is (true|false): )?")
_WHITESPACE = b" \t\n\r"
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_VOCABULARIES = {"json": "json", "json_object": "json", "structural_tag": "all"}  # the others: "text"
_COMMENT = re.compile(r"(#|//).*$", re.MULTILINE)


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar. words: the mask of the first token, int32 [W] as in rows.TokenMasks.

    blank: the mask of tokens of whitespace, for JSON that allows any number of them between values; else None
    """

    compiled: Any
    words: np.ndarray
    size: int
    blank: np.ndarray | None = None

    def matcher(self) -> Any:
        """A matcher at the start of the output."""
        import xgrammar

        return xgrammar.GrammarMatcher(self.compiled)


class Grammars:
    """The grammars of one model: a cache of the latest CACHE_BYTES. Safe in any thread.

    eos_token_ids: allowed where the output may end. Special tokens are never part of an output, except in structural
    tags, which may name them. Tokens with control characters are never part of JSON, which allows only three of them,
    between values; xgrammar allows them in strings whose length is bounded.

    any_whitespace: whether JSON may have any whitespace between values, unless its parameters decide
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int], any_whitespace: bool = False
    ):
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self.any_whitespace = any_whitespace
        self.num_compiled = 0
        self._compilers: dict[str, Any] = {}
        self._blank: np.ndarray | None = None
        self._futures: OrderedDict[tuple[str, str, bool], Future[Grammar]] = OrderedDict()
        self._sizes: dict[tuple[str, str, bool], int] = {}  # of compiled grammars
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, params: StructuredOutputsParams) -> Future[Grammar]:
        """The grammar, or the ValueError that says what is wrong, as soon as it is compiled. Raises ValueError."""
        if self.tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, which skip_tokenizer_init left out")
        one_line = params.disable_any_whitespace
        key = (params.kind, params.text, not self.any_whitespace if one_line is None else one_line)
        with self._lock:
            future = self._futures.get(key)
            if future is None or future.cancelled():
                self._threads = self._threads or ThreadPoolExecutor(
                    THREADS, thread_name_prefix="fastkernels-grammar"
                )
                future = self._futures[key] = self._threads.submit(self._make, key)
            self._futures.move_to_end(key)
            return future

    def get(self, params: StructuredOutputsParams) -> Grammar:
        """Wait for the grammar. Raises ValueError."""
        try:
            return self.submit(params).result(DEADLINE)
        except (FutureTimeoutError, TimeoutError) as error:
            raise _too_slow(params) from error

    async def ready(self, params: StructuredOutputsParams) -> None:
        """Wait for the grammar without blocking the event loop. Raises ValueError."""
        compiling = asyncio.wrap_future(self.submit(params))
        try:  # shielded: other requests may wait for the same grammar
            await asyncio.wait_for(asyncio.shield(compiling), DEADLINE)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise _too_slow(params) from error

    def close(self) -> None:
        """End the threads, after what they compile now. The next grammar starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _make(self, key: tuple[str, str, bool]) -> Grammar:
        """Compile a grammar, and forget those that were used least recently if there are too many."""
        try:
            grammar = self._compile(*key)
        except BaseException:
            with self._lock:
                self._futures.pop(key, None)
            raise
        with self._lock:
            self.num_compiled += 1
            self._sizes[key] = grammar.size
            for old in list(self._futures):
                if sum(self._sizes.values()) <= CACHE_BYTES:
                    break
                if old != key and old in self._sizes:
                    del self._futures[old], self._sizes[old]
        return grammar

    def _compile(self, kind: str, text: str, one_line: bool) -> Grammar:
        import xgrammar

        compiler = self._compiler(_VOCABULARIES.get(kind, "text"))
        try:
            if kind in ("json", "json_object"):
                compiled = compiler.compile_json_schema(text, any_whitespace=not one_line)
            elif kind == "regex":
                compiled = compiler.compile_regex(text)
            elif kind == "structural_tag":
                compiled = compiler.compile_structural_tag(text)
            elif kind == "grammar" and "::=" not in _COMMENT.sub("", text):
                compiled = compiler.compile_lark(text)
            else:
                compiled = compiler.compile_grammar(text)
            bits = xgrammar.allocate_token_bitmask(1, self.vocab_size)
            xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bits)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:  # what xgrammar raises for bad input
            reason = _LOCATION.sub("", str(error)).strip()
            raise ValueError(f"structured_outputs: {kind} cannot be used: {reason}") from error
        if not bits.any():
            raise ValueError(
                f"structured_outputs: {kind} cannot be used: no token of this model can begin such an output"
            )
        blank = self._blank if kind in ("json", "json_object") and not one_line else None
        return Grammar(compiled, bits[0].numpy(), compiled.memory_size_bytes + 4 * bits.numel(), blank)

    def _compiler(self, vocabulary: str) -> Any:
        """The compiler for a vocabulary: 'all' tokens, those of 'text', or those of 'json'."""
        with self._making:  # a vocabulary takes a second
            if vocabulary not in self._compilers:
                self._compilers[vocabulary] = self._make_compiler(vocabulary)
            return self._compilers[vocabulary]

    def _make_compiler(self, vocabulary: str) -> Any:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(
            self.tokenizer, vocab_size=self.vocab_size, stop_token_ids=self.eos_token_ids or None
        )
        if vocabulary != "all":
            special = special_ids(self.tokenizer)
            vocab = [b"" if i in special else text for i, text in enumerate(info.decoded_vocab)]
            if vocabulary == "json":
                blank = [i for i, text in enumerate(vocab) if text and not text.strip(_WHITESPACE)]
                self._blank = words_of(blank, self.vocab_size)
                vocab = [b"" if _CONTROL.search(text) else text for text in vocab]
            info = xgrammar.TokenizerInfo(
                vocab, xgrammar.VocabType.RAW, vocab_size=self.vocab_size, stop_token_ids=info.stop_token_ids,
                add_prefix_space=info.add_prefix_space,
            )  # fmt: skip
        return xgrammar.GrammarCompiler(
            info, max_threads=min(THREADS, os.cpu_count() or 1), cache_enabled=False
        )


def _too_slow(params: StructuredOutputsParams) -> ValueError:
    """The error for a grammar that is not compiled after DEADLINE seconds."""
    return ValueError(
        f"structured_outputs: {params.kind} is too complex: it takes more than {DEADLINE:g} s to compile"
    )


def words_of(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """The mask of these tokens, int32 [W]."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def next_words(matchers: Sequence[Any], vocab_size: int) -> np.ndarray:
    """The masks of the matchers' next tokens, int32 [len(matchers), W]."""
    bits = torch.empty(len(matchers), -(-vocab_size // 32), dtype=torch.int32)
    if len(matchers) > MANY:
        _batch_matcher().batch_fill_next_token_bitmask(list(matchers), bits)
    else:
        for i, matcher in enumerate(matchers):
            matcher.fill_next_token_bitmask(bits, i)
    return bits.numpy()


@functools.cache
def _batch_matcher() -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(min(THREADS, os.cpu_count() or 1))
