"""Parts that an exported file leaves out, and parts that it keeps."""

from __future__ import annotations

from typing import Any

import pytest

from fastkernels.export.flat import (
    with_joined_tests,
    with_one_op,
    with_plain_refusals,
    without_annotations,
)
from fastkernels.export.layout import reflowed
from fastkernels.export.records import with_named_tuples, without_unused_loop_names
from fastkernels.export.refusals import with_raised_refusals
from fastkernels.export.shorten import with_any, without_single_constants, without_single_uses
from fastkernels.export.simplify import Fork, simplified
from fastkernels.export.specialize import specialized
from fastkernels.export.tidy import without_assertions

OP = """\
def register(schema, fn, fake):
    return fn


def kernel(x, scale=None, groups=1):
    if scale is not None:
        x = x * scale
    return x * groups


scaled = register("scaled(Tensor x, Tensor? scale=None, int groups=1) -> Tensor", kernel, kernel)


def host(x):
    return scaled(x, None, 2 + len(x))
"""


def test_op_loses_an_argument_that_no_call_gives() -> None:
    text = specialized(OP, {"host"})
    assert '"scaled(Tensor x, int groups=1) -> Tensor", kernel, kernel)' in text
    assert "def kernel(x, groups=1):\n    return x * groups" in text and "scaled(x, 2 + len(x))" in text


def test_op_whose_calls_are_unknown_keeps_its_arguments() -> None:
    assert specialized(OP, {"host", "scaled"}) == OP
    assert "scale=None" in specialized(
        OP.replace("return scaled(x, None, 2 + len(x))", "return scaled"), {"host"}
    )


@pytest.mark.parametrize(
    "given, kept",
    [
        ("f(x, None)", "return x"),
        ("f(x, y) + f(y, x)", "def f"),
        ("f(*x)", "def f"),
        ("f(x, **y)", "def f"),
        ("f", "def f"),
    ],
)
def test_function_has_parameters_that_differ(given: str, kept: str) -> None:
    text = "def f(x, scale):\n    return x if scale is None else x * scale()[0] * scale\n"
    text += f"\n\ndef g(x, y):\n    return {given}\n"
    assert kept in specialized(text, {"g"})


def test_field_of_one_value_is_that_value() -> None:
    text = (
        "class Plan(NamedTuple):\n    rows: int\n    parts: int = 1\n\n\n"
        "def g(n):\n    p = Plan(n.pop())\n    if p.parts > 1:\n        return 0\n    return p.rows + p.rows\n"
    )
    found = specialized(text, {"g"})
    assert "parts" not in found and "return 0" not in found and "    return p.rows + p.rows" in found
    assert "parts" in specialized(text.replace("Plan(n.pop())", "Plan(n.pop(), n.pop())"), {"g"})


def test_variable_in_capitals_is_no_constant() -> None:
    text = "def f(x):\n    return x if x else x()\n\n\ndef g(A):\n    return f(A)\n"
    assert specialized(text + "\n\ndef h(A):\n    return f(A)\n", {"g", "h"}).startswith(text)


def test_array_of_one_is_still_an_array() -> None:
    text = "def g(n):\n    return (c_uint64 * 1)(n), n * 1\n"
    assert specialized(text, {"g"}) == text.replace("n * 1", "n")


def test_function_that_only_calls_another_is_that_one() -> None:
    text = "def f(x, y):\n    return torch.add(x, y)\n\n\ndef g(n, other):\n    return n(f, f)\n"
    assert "return n(torch.add, torch.add)" in specialized(text, {"g"})
    assert specialized(swapped := text.replace("(x, y)\n\n", "(y, x)\n\n"), {"g"}) == swapped


GUARDED = """\
def guarded(schema, kernel, fake, supports):
    return kernel


def supports(x, n=1, *_):
    if n > 64:
        return "unsupported"
    return {}


op = guarded("op(Tensor x, int n=1, int m=1) -> Tensor", kernel, fake, supports)
"""
GUARD = """\
def op(x, n=1, *rest):
    if not (x.is_cuda or INTERPRETED):
        raise Unsupported
    if n > 64:
        raise Unsupported
{}    return torch.ops.ns.op.default(x, n, *rest)
"""


@pytest.mark.parametrize(
    "result, refused",
    [
        ("None", ""),
        ("first(x) or second(x)", "first(x) or second(x)"),
        ('None if x.dim() == 2 else "unsupported"', "not (x.dim() == 2)"),
        ('"unsupported" if n % 8 else None', "n % 8"),
    ],
)
def test_guard_of_the_only_op_has_its_tests(result: str, refused: str) -> None:
    more = f"    if {refused}:\n        raise Unsupported\n" if refused else ""
    found = with_one_op(GUARDED.format(result), "ns")
    assert found.endswith(GUARD.format(more)) and "def supports" not in found and "def guarded" not in found


def test_guard_calls_a_function_with_other_results() -> None:
    found = with_one_op(GUARDED.format("reason(x)[0] if x else 'other'"), "ns")
    assert "def supports(x, n=1, *_):" in found and "supports(*args) is not None:" in found


def test_call_with_an_effect_is_evaluated_once() -> None:
    text = "def f(x, y):\n    return y if y else x\n\n\ndef g(n):\n    return f(n.pop(), n.pop())\n"
    assert specialized(text, {"g"}) == text


def test_kernels_and_comments_are_kept() -> None:
    text = (
        "@triton.jit\ndef kernel(x, FLAG: tl.constexpr):\n    if FLAG:\n        pass\n\n\n"
        "def g(x, flag):\n    # why\n    if flag:  # how\n        kernel[1](x, FLAG=False)\n"
    )
    assert specialized(text, {"g"}) == text


@pytest.mark.parametrize(
    "parameter, value, test",
    [
        ("dtype: int", "None if dtype == FP8 else dtype", "dtype != FP8"),
        ("dtype: int | None", "None if dtype == FP8 else dtype", "dtype not in (None, FP8)"),
        ("dtype: int", "None if dtype in (0, 4) else dtype", "dtype not in (0, 4)"),
        ("flag: bool", "flag", "flag"),
        ("mask: int | None", "mask", "mask is not None"),
    ],
)
def test_refusal_becomes_a_test(parameter: str, value: str, test: str) -> None:
    text = f'def f({parameter}):\n    refuse("f", given={value})\n'
    assert with_plain_refusals(text) == f"def f({parameter}):\n    if {test}:\n        raise Unsupported\n"


def test_refusal_of_an_unknown_type_stays() -> None:
    text = 'def f(x):\n    packed = g(x)\n    refuse("f", packed=packed)\n'
    assert with_plain_refusals(text) == text


def test_tests_of_one_action_are_joined() -> None:
    long = " or ".join(f"x.{c * 12} is None" for c in "abc")
    text = "".join(f"    if {long.replace('x.', f'{n}.')}:\n        raise Unsupported\n" for n in "wxyz")
    found = with_joined_tests(f"def f(w, x, y, z):\n{text}    return x\n")
    assert found.count("raise Unsupported") == 1 and found.count(" is None") == 12
    other = f"def f(x):\n    if {long}:\n        raise Unsupported\n    if {long}:\n        return x\n"
    assert with_joined_tests(other) == other


def test_layout_keeps_the_meaning() -> None:
    assert reflowed("x = (\n    a,\n)\n") == "x = (a,)\n"
    assert reflowed("f(\n    a,  # why\n)\n") == "f(\n    a,  # why\n)\n"
    wide = f"f({', '.join(f'argument_{i}' for i in range(12))})\n"
    assert max(map(len, reflowed(wide).split("\n"))) <= 110 and len(reflowed(wide).split("\n")) == 5


RECORD = '''\
from typing import NamedTuple

import torch


class Pair(NamedTuple):
    """Two numbers."""

    first: int
    second: int{}


def f(a, b):
    return Pair(a, b)
'''


def test_record_without_defaults_becomes_a_named_tuple() -> None:
    found = with_named_tuples(RECORD.format(""), {"f"})
    assert '\n\nPair = namedtuple("Pair", "first second")\n\n' in found and "class Pair" not in found
    space: dict[str, Any] = {}
    exec(found, space)
    assert space["f"](1, 2).second == 2 and space["Pair"]._fields == ("first", "second")


@pytest.mark.parametrize("more", [" = 2", "\n\n    def total(self):\n        return self.first"])
def test_record_with_more_than_fields_stays(more: str) -> None:
    assert with_named_tuples(RECORD.format(more), {"f"}) == RECORD.format(more)
    assert with_named_tuples(RECORD.format(""), {"f", "Pair"}) == RECORD.format("")


def test_record_that_is_only_read_vanishes() -> None:
    text = RECORD.format("").replace(
        "return Pair(a, b)", "p = Pair(a, b)\n    return g(p.second, p.first, p.second)"
    )
    text += "\n\ndef g(a, b, c):\n    return a(c) + b(a) + c(b)\n"
    assert "return g(b, a, b)" in specialized(text, {"f", "g"})
    passed = text.replace("p.first", "p")
    assert "p = Pair(a, b)" in specialized(passed, {"f", "g"})
    assigned = text.replace("    return g(", "    a = b()\n    return g(")
    assert "p = Pair(a, b)" in specialized(assigned, {"f", "g"})


@pytest.mark.parametrize(
    "loop, found",
    [
        ('for name, t in (("x", x), ("y", y)):', "for t in (x, y):"),
        ('for name, t, n in (("x", x, 1), ("y", y, 2)):', "for t, n in ((x, 1), (y, 2)):"),
        ('for name, t in {"x": x}.items():', "for t in (x,):"),
        ('named = {"x": (x, 1), "y": (y, 2)}\n    for name, (t, n) in named.items():',
         "for t, n in ((x, 1), (y, 2)):"),
    ],
)  # fmt: skip
def test_name_that_a_loop_does_not_read_is_dropped(loop: str, found: str) -> None:
    text = f"def f(x, y):\n    {loop}\n        if t.dim():\n            return 1\n"
    assert (
        without_unused_loop_names(text)
        == f"def f(x, y):\n    {found}\n        if t.dim():\n            return 1\n"
    )
    read = text.replace("return 1", "return name")
    assert without_unused_loop_names(read) == read


@pytest.mark.parametrize(
    "given, found",
    [
        ("x + False", "x"),
        ("x + 0", "x"),
        ("x + 1", "x + 1"),
        ("g(**{'a': x, 'b': 1})", "g(a=x, b=1)"),
        ("g(**{'a b': x})", "g(**{'a b': x})"),
        ("1 if x.y is not x.y else x", "x"),
        ("1 if x.y != x.y else x", "1 if x.y != x.y else x"),  # NaN
    ],
)
def test_known_expression_is_shortened(given: str, found: str) -> None:
    assert specialized(f"def f(x):\n    return {given}\n", {"f"}) == f"def f(x):\n    return {found}\n"


def test_fork_has_no_marks_of_a_patch() -> None:
    text = (
        "from __future__ import annotations\n\n\ndef f(cls):\n"
        '    return cls.forward is not getattr(cls, "fastkernels", cls).forward or not hasattr(cls, "fastkernels")\n'
    )
    assert simplified("fastkernels.overrides.x", text) == text
    assert "return cls.forward is not cls.forward or not False" in simplified(
        "fastkernels.overrides.x", text, Fork("vllm")
    )


def test_assertions_for_type_checkers_are_dropped() -> None:
    kept = "def f(x):\n    assert x is not None and x > 0\n    return x\n"
    assert without_assertions(kept) == kept
    assert without_assertions(kept.replace(" and x > 0", ", x")) == "def f(x):\n    return x\n"


def test_short_tests_of_one_action_are_one_line() -> None:
    text = "    if x:\n        raise Unsupported\n    if y:\n        raise Unsupported\n"
    assert with_joined_tests(f"def f(x, y):\n{text}    return x\n") == (
        "def f(x, y):\n    if x or y:\n        raise Unsupported\n    return x\n"
    )


def test_guard_drops_annotations_and_named_arguments() -> None:
    text = GUARDED.format("None").replace("x, n=1, *_", "x: T, n: int = 1, *_: Any, **__: Any")
    assert "\ndef op(x, n=1, *rest):\n" in with_one_op(text, "ns")


def test_loop_of_one_test_becomes_any() -> None:
    text = "def f(x, y):\n    for t in (x, y):\n        if t.dim() != 2:\n            raise Unsupported\n    return x\n"
    found = (
        "def f(x, y):\n    if any(t.dim() != 2 for t in (x, y)):\n        raise Unsupported\n    return x\n"
    )
    assert with_any(text) == found
    for other in (
        text.replace("return x", "return t"),  # the variable of the loop is read behind it
        text.replace("raise Unsupported", "return x"),
        text.replace("    return x", "    else:\n        x = y\n    return x"),
        text.replace("!= 2:", "!= 2:  # why"),
    ):
        assert with_any(other) == other


@pytest.mark.parametrize(
    "body, found",
    [
        ("n = x.dim()\n    return g(n)", "return g(x.dim())"),
        ("n = x + 1\n    return n * 2", "return (x + 1) * 2"),
        ("n = g(x)\n    y = n", "y = g(x)"),
        ("n = 1, 2\n    return g(n)", "return g((1, 2))"),
        ("n = x if y else 1\n    return 3 if n else 4", "return 3 if (x if y else 1) else 4"),
        ("n = x == 1 or y\n    if not n:\n        return y", "if not (x == 1 or y):\n        return y"),
    ],
)
def test_variable_for_the_next_statement_is_written_there(body: str, found: str) -> None:
    assert without_single_uses(f"def f(x, y):\n    {body}\n") == f"def f(x, y):\n    {found}\n"


@pytest.mark.parametrize(
    "body",
    [
        "n = x.dim()\n    return n + n",
        "n = x.dim()\n    y = g(y)\n    return n",
        "n = g(x)\n    return h(y) + n",  # the calls would change places
        "n = g(x)\n    return y and n",  # it might not be called
        "n = g(x)\n    return [n for _ in y]",
        "n = x.dim()\n    return f'{n}'",
        "n = x.dim()  # why\n    return n",
        f"n = x.{'a' * 120}\n    return n",
    ],
)
def test_variable_with_another_use_or_order_is_kept(body: str) -> None:
    text = f"def f(x, y):\n    {body}\n"
    assert without_single_uses(text) == text


def test_constant_of_one_use_is_written_there() -> None:
    text = "A = (torch.float16, 1)\n\n\ndef f(x):\n    return x.dtype in A\n"
    assert (
        without_single_constants(text, {"f"}).strip() == "def f(x):\n    return x.dtype in (torch.float16, 1)"
    )
    for other in (
        text.replace("1)", "1)  # why"),
        text.replace("in A", "in A or A"),
        text.replace("1)", "g())"),
        text.replace("(x)", "(x=A)").replace("in A", "in x"),
        text.replace("def f", "@triton.jit\ndef f"),
    ):
        assert without_single_constants(other, {"f"}) == other
    assert without_single_constants(text, {"f", "A"}) == text


REASONS = """\
def reason(x):
    if x > 1:
        return "unsupported"
    return None if x else "unsupported"


def f(x):
    {}
    return x
"""


@pytest.mark.parametrize(
    "call",
    [
        "if reason(x) is not None:\n        raise Unsupported",
        "r = reason(x)\n    if r is not None:\n        raise Unsupported",
    ],
)
def test_function_of_reasons_raises_itself(call: str) -> None:
    found = with_raised_refusals(REASONS.format(call), {"f"})
    assert "    if x > 1:\n        raise Unsupported\n    if not x:\n        raise Unsupported\n" in found
    assert "def f(x):\n    reason(x)\n    return x\n" in found
    for old, new in (
        ("raise Unsupported", "return 1"),
        (" is not None", " is None"),
        ("return x", "return reason"),
    ):
        text = REASONS.format(call).replace(old, new)
        assert with_raised_refusals(text, {"f"}) == text
    assert with_raised_refusals(REASONS.format(call), {"f", "reason"}) == REASONS.format(call)


def test_fork_leaves_a_logged_fallback_to_the_host() -> None:
    text = (
        "from __future__ import annotations\n\n\ndef f(x):\n    if x:\n        op.note('slow')\n"
        "        y = x + 1\n        return y\n    op.leave('end')\n"
    )
    found = simplified("fastkernels.overrides.x", text, Fork("vllm"))
    assert "    if x:\n        raise Unsupported\n" in found and "y = x + 1" not in found
    assert "import Unsupported" in found
    assert "y = x + 1" in simplified("fastkernels.overrides.x", text)


def test_local_variable_has_no_annotation() -> None:
    text = "N: int = 1\n\n\ndef f(x: int) -> int:\n    y: Any = x\n    z: int\n    return y\n"
    assert without_annotations(text, {"f"}) == text.replace("y: Any =", "y =")
