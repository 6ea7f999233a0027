"""Find the expression over a config's fields that gives a value of the description under every sampled config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations, permutations, takewhile
from math import isfinite
from typing import Any

from fastkernels.models.common.descriptions import description as d
from fk_bench.scaffold.samples import Sample, Samples, equal

FORMULAS = ("{}", "{}**-0.5", "1 / {}", "{}**0.5", "{} or 0.0")


class NoExpression(ValueError):
    """No formula over the fields gives a value. fields: those that change it."""

    def __init__(self, what: str, fields: set[str]):
        named = f" and depends on {', '.join(sorted(fields))}" if fields else " and differs between layers"
        super().__init__(f"{what} has no formula over the config's fields{named}")
        self.fields = fields


Value = Callable[[d.Layer], Any]


class Search:
    """Expressions may name config, d, and for a layer its number i and its window. kind: of the layers' mixers."""

    def __init__(self, samples: Samples, kind: type = object):
        self.samples, self.kind = samples, kind
        sampled = {s.field for s in samples.all}
        names = samples.all[0].fields
        self.names = sorted(names, key=lambda n: n not in sampled)
        reverse = {v: k for k, v in getattr(samples.config, "attribute_map", {}).items()}
        self.attribute = {n: f"config.{reverse.get(n, n)}" for n in self.names}

    # -- values of the model

    def of_model(self, what: str, get: Callable[[d.Decoder], Any], usual: Sequence[str] = ()) -> str:
        """The expression of a value of the decoder. usual: tried first. Raises NoExpression."""
        rows = [(s, {"config": s.config, "d": d}, get(s.decoder)) for s in self.samples.all]
        return self._find(what, rows, usual, self._values)

    # -- values of the layers

    def of_layers(
        self, what: str, get: Value, usual: Sequence[str] = (), only: Value = lambda layer: True
    ) -> str:
        """The same for a value of each layer, or of those that meet a condition."""
        rows = self._rows(get, only)
        return self._find(what, rows, usual, self._values)

    def size_of_layers(
        self, what: str, get: Value, usual: Sequence[str] = (), only: Value = lambda layer: True
    ) -> str:
        """The same for a size, which no constant gives: the samples are small copies."""
        rows = self._rows(get, only)
        return self._find(what, rows, usual, self._sizes)

    def condition(self, what: str, get: Value) -> str:
        """The expression of a truth value of the layers; 'True' or 'False' if it is always the same."""
        rows = self._rows(lambda layer: bool(get(layer)))
        single = list(self._conditions())
        both = (f"{a} and {b}" for a, b in combinations(self._implied(single, rows), 2))
        either = (f"{a} or {b}" for a, b in combinations(self._sufficient(single, rows), 2))
        return self._find(
            what, rows, ("True", "False"), lambda _: chain(single, both, either, self._periods())
        )

    def _implied(self, conditions: list[str], rows: Any) -> list[str]:
        """The conditions that hold wherever the value is true."""
        true = [(s, names, value) for s, names, value in rows if value]
        return [c for c in conditions if all(self._right(c, names, True) for _, names, _ in true)]

    def _sufficient(self, conditions: list[str], rows: Any) -> list[str]:
        """The conditions that hold nowhere that the value is false."""
        false = [(s, names, value) for s, names, value in rows if not value]
        return [c for c in conditions if all(self._right(c, names, False) for _, names, _ in false)]

    def always(self, get: Value, value: Any, only: Value = lambda layer: True) -> bool:
        """Whether all layers, or those that meet a condition, have one value."""
        return all(equal(found, value) for _, _, found in self._rows(get, only))

    def fits(self, text: str, get: Value) -> bool:
        """Whether an expression gives the value of every layer of every sample."""
        return all(self._right(text, names, value) for _, names, value in self._rows(get))

    def _rows(self, get: Value, only: Value = lambda layer: True) -> list[tuple[Sample, dict[str, Any], Any]]:
        return [
            (s, {"config": s.config, "d": d, "i": i, "window": layer.attention.window}, get(layer))
            for s in self.samples.all
            for i, layer in enumerate(s.decoder.layers)
            if isinstance(layer.attention, self.kind) and only(layer)
        ]

    def _find(
        self, what: str, rows: Any, usual: Sequence[str], others: Callable[[Any], Iterable[str]]
    ) -> str:
        found = self._first(rows, usual, others) or self._by_flag(rows, usual, others)
        if found:
            return found
        base = _distinct(value for s, _, value in rows if not s.field)
        changes = {
            s.field for s in self.samples.all if not equal(_distinct(v for r, _, v in rows if r is s), base)
        }
        raise NoExpression(what, changes)

    def _first(self, rows: Any, usual: Sequence[str], others: Callable[[Any], Iterable[str]]) -> str:
        for text in chain(usual, others(rows)):
            if all(self._right(text, names, value) for _, names, value in rows):
                return text
        return ""

    def _by_flag(self, rows: Any, usual: Sequence[str], others: Callable[[Any], Iterable[str]]) -> str:
        """One expression where flags of the config are set and another one elsewhere; '' if there is none."""
        if not isinstance(rows[0][2], (int, float)) or isinstance(rows[0][2], bool):
            return ""
        values = self.samples.all[0].fields
        flags = [self.attribute[n] for n in self.names if isinstance(values[n], bool)]
        either = (f"{a} or not {b}" for a in flags for b in flags if a != b)
        for flag in (*flags, *either):
            when = [self._right(flag, names, True) for _, names, _ in rows]
            there = [row for row, on in zip(rows, when, strict=True) if on]
            elsewhere = [row for row, on in zip(rows, when, strict=True) if not on]
            if not there or not elsewhere:
                continue
            a = self._first(there, usual, others)
            if a and (b := self._first(elsewhere, usual, others)):
                return f"{a} if {flag} else {b}"
        return ""

    @staticmethod
    def _right(text: str, names: dict[str, Any], value: Any) -> bool:
        try:
            found = eval(text, dict(names))  # our own formulas
        except (
            AttributeError,
            TypeError,
            ZeroDivisionError,
            IndexError,
            KeyError,
            OverflowError,
            ValueError,
        ):
            return False
        if isinstance(value, bool):
            return bool(found) == value and not isinstance(found, str)
        return not isinstance(found, bool) and equal(found, value)

    def _values(self, rows: Any) -> Iterator[str]:
        first = rows[0][2]
        if isinstance(first, bool):
            yield from ("True", "False")
            yield from self._conditions()
            return
        yield literal(first)
        if isinstance(first, tuple):
            yield from (f"d.limits({self.attribute[name]})" for name in self.names)
        for name in self.names:
            for formula in FORMULAS:
                yield formula.format(self.attribute[name])
        for name in self.names:
            yield f"d.activation(config, {name!r})".replace("'", '"')

    def _sizes(self, rows: Any) -> Iterator[str]:
        yield from (t for t in self._values(rows) if t in ("1", "True") or "config" in t)
        sizes = [self.attribute[n] for n in self.names if type(self.samples.all[0].fields[n]) is int]
        yield from (f"{a} * {b}" for a, b in combinations(sizes, 2))

    def _periods(self) -> Iterator[str]:
        """Conditions that hold for one layer of each period, of fields with the most similar names first.

        A small copy may have fewer layers than a period, so that values do not tell its field.
        """
        values = self.samples.all[0].fields
        sizes = [n for n in self.names if type(values[n]) is int]
        pairs = [(p, o) for p, o in permutations(sizes, 2) if values[o] < values[p]]
        for period, offset in sorted(pairs, key=lambda pair: -_alike(*pair)):
            for compared in ("==", "!="):
                yield f"i % {self.attribute[period]} {compared} {self.attribute[offset]}"

    def _conditions(self) -> Iterator[str]:
        values = self.samples.all[0].fields
        for name in self.names:
            at = self.attribute[name]
            lists = [v for v in (s.fields[name] for s in self.samples.all) if isinstance(v, list)]
            if isinstance(values[name], bool):
                yield from (at, f"not {at}")
            elif lists and any(isinstance(entry, str) for v in lists for entry in v):
                for entry in dict.fromkeys(entry for v in lists for entry in v):
                    yield f'{at}[i] == "{entry}"'
            elif lists:
                yield from (f"{at}[i]", f"not {at}[i]", f"i in {at}", f"i not in {at}")
        yield from ("window is None", "window is not None")
        for name in self.names:
            lists = [v for v in (s.fields[name] for s in self.samples.all) if isinstance(v, list)]
            for entry in dict.fromkeys(e for v in lists for e in v if isinstance(e, str)):
                yield f'{self.attribute[name]}[i] != "{entry}"'
        for name in self.names:
            if len({s.fields[name] is None for s in self.samples.all}) == 2:
                yield from (f"{self.attribute[name]} is None", f"{self.attribute[name]} is not None")
        for name in self.names:
            if isinstance(values[name], int) and not isinstance(values[name], bool):
                at = self.attribute[name]
                yield from (
                    f"(i + 1) % {at} == 0",
                    f"(i + 1) % {at} != 0",
                    f"i % {at} == 0",
                    f"i % {at} != 0",
                    f"i < {at}",
                    f"i >= {at}",
                )


def _distinct(values: Iterable[Any]) -> list[Any]:
    """The values without those that are equal to the one before: samples may have other numbers of layers."""
    found: list[Any] = []
    for value in values:
        if not found or not equal(found[-1], value):
            found.append(value)
    return found


def _alike(a: str, b: str) -> int:
    """The length of the beginning that two names share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def literal(value: Any) -> str:
    """Python text of a value; a measured number with the digits that were measured."""
    if isinstance(value, float) and not isfinite(value):
        return f'float("{value}")'
    if isinstance(value, float):
        short = float(f"{value:.4g}")
        return repr(int(short) * 1.0 if short == int(short) else short)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(literal, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else repr(value)
