"""Parts that an exported file leaves out, and parts that it keeps."""

from __future__ import annotations

import pytest

from fastkernels.export.flat import with_joined_tests, with_one_op, with_plain_refusals
from fastkernels.export.layout import reflowed
from fastkernels.export.specialize import specialized

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
