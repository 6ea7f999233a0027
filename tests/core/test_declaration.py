"""Expressions, axes and declarations by themselves: shapes, dims of calls, costs, held-out sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fastkernels.core.declaration import Axis, Declaration, Scalar, Tensor, full
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import Case


def test_expression_values() -> None:
    sizes = {"tokens": (3, 5), "in": 4, "hidden": 10, "dtype": "bfloat16"}
    assert Expr("2 * prod(tokens) * in_ + cdiv(hidden, 4)")(sizes) == 123
    assert Expr("hidden if in_ > 4 else -hidden")(sizes) == -10
    assert Expr("itemsize(dtype) * len(tokens)")(sizes) == 4
    assert Expr("2*hidden").solve("hidden", {}, 14) == 7
    assert Expr("(a+b)*hidden").solve("a", {"b": 2, "hidden": 8}, 40) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens +", "is not an expression"),
        ("tokens.__class__", "Attribute is not allowed"),
        ("__import__('os')", "only abs, cdiv"),
        ("[t for t in tokens]", "ListComp is not allowed"),
        ("max(*tokens)", "Starred is not allowed"),
    ],
)
def test_unsafe_expression_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Expr(text)


def test_unsolvable_size_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no integer d makes 2\*d equal to 7"):
        Expr("2*d").solve("d", {}, 7)


def declaration(*arguments: Any, axes: dict[str, Axis] | None = None, **more: Any) -> Declaration:
    common = {"tokens": Axis.per_call(), "heads": Axis.count(), "hidden": Axis.width()}
    return Declaration(
        "toy", arguments, (Tensor("out", "tokens hidden"),), {**common, **(axes or {})}, **more
    )


def dims(found: Declaration, *args: Any, **defaults: Any) -> dict[str, Any]:
    return found.dims_of(args, defaults)


def test_dims_of_optional_and_leading_sizes() -> None:
    found = declaration(Tensor("x", "tokens heads? hidden"))
    assert dims(found, torch.zeros(6)) == {"tokens": 1, "hidden": 6}
    assert dims(found, torch.zeros(5, 6)) == {"tokens": 5, "hidden": 6}
    assert dims(found, torch.zeros(5, 1, 6)) == {"tokens": 5, "heads": 1, "hidden": 6}
    assert dims(found, torch.zeros(2, 3, 4, 6)) == {"tokens": 6, "heads": 4, "hidden": 6}
    leading = declaration(Tensor("x", "*tokens hidden"))
    assert dims(leading, torch.zeros(2, 3, 6)) == {"tokens": (2, 3), "hidden": 6}


def test_dims_of_expressions_and_alternatives() -> None:
    packed = declaration(Tensor("qkv", "tokens (heads+2)*hidden"), Scalar("hidden"))
    assert dims(packed, torch.zeros(3, 40), 8) == {"hidden": 8, "tokens": 3, "heads": 3}
    either = declaration(
        Tensor("x", {"by_head": "tokens heads hidden", "": "tokens heads*hidden"}), Scalar("hidden"),
        axes={"by_head": Axis(False)},
    )  # fmt: skip
    assert dims(either, torch.zeros(3, 2, 8), 8) == {"hidden": 8, "by_head": True, "tokens": 3, "heads": 2}
    assert dims(either, torch.zeros(3, 16), 8) == {"hidden": 8, "tokens": 3, "heads": 2}


def test_only_values_that_differ_are_stated() -> None:
    found = declaration(
        Tensor("x", "tokens hidden", "kind"), Tensor("weight", "hidden"), Tensor("bias", "hidden", when="bias"),
        Scalar("eps", default=1e-6), Scalar("k", dim="scales", index=0), Scalar("v", dim="scales", index=1),
        axes={"kind": Axis.dtype(Expr("dtype")), "scales": Axis.option((1.0, 1.0))},
    )  # fmt: skip
    x, weight = torch.zeros(2, 4), torch.zeros(4)
    plain = {"tokens": 2, "hidden": 4}
    assert dims(found, x, weight, bias=None, eps=1e-6, k=1.0, v=1.0) == plain
    stated = dims(found, x.half(), weight, weight, 1e-5, 0.5, 1.0)
    assert stated == {**plain, "kind": "float16", "bias": True, "eps": 1e-5, "scales": (0.5, 1.0)}
    assert found.dtype_argument == 1, "x has a dtype of its own"


def test_counted_values_replace_their_bound() -> None:
    found = declaration(
        Tensor("x", "tokens hidden", bytes="used * hidden"), Tensor("ids", "tokens", "int64", values=full(0)),
        axes={"used": Axis.counted(lambda a: int((a.ids >= 0).sum()), Expr("tokens"))},
    )  # fmt: skip
    assert found.counted == ("used",)
    case = Case("", {"tokens": 3, "hidden": 8}, "float16")
    given = dims(found, torch.zeros(3, 8).half(), torch.tensor([0, -1, -1]))
    assert given == {**case.dims, "used": 1}
    rest = 3 * 8 + 3 * 8 * 2  # ids and out
    assert found.bytes_moved(case) == 24 + rest
    assert found.bytes_moved(Case("", given, "float16")) == 8 + rest


def test_held_out_sizes_meet_constraints() -> None:
    found = declaration(
        Tensor("x", "tokens hidden"), Scalar("group"), Scalar("blocks"),
        axes={"blocks": Axis(Expr("cdiv(tokens, 4)")), "group": Axis.option(choices=(3, 5))},
        constraints=("hidden % group == 0",),
    )  # fmt: skip
    old = {"tokens": 40, "hidden": 30, "group": 3, "blocks": 12}
    drawn = [found.drawn(old, "float32", random.Random(seed)) for seed in range(40)]
    assert all(new["hidden"] % new["group"] == 0 and new["blocks"] is None for new in drawn)
    assert {new["group"] for new in drawn} == {3, 5} and len({new["tokens"] for new in drawn}) > 5


def test_wrong_values_are_named() -> None:
    found = declaration(Tensor("x", "tokens hidden", values=lambda call, shape, dtype: torch.zeros(2)))
    with pytest.raises(ValueError, match=r"toy: x of case odd is declared as torch.float32 \[3, 4\]"):
        found.inputs(Case("odd", {"tokens": 3, "hidden": 4}, "float32"), "cpu", torch.Generator())
    with pytest.raises(KeyError, match="the case gives no hidden"):
        found.inputs(Case("odd", {"tokens": 3}, "float32"), "cpu", torch.Generator())
