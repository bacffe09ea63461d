"""The parameters of a function, as text and as the arguments of a call."""

from __future__ import annotations

import ast

import pytest

from kgen.targets.signature import Signature


@pytest.mark.parametrize(
    ("signature", "text", "usage", "arguments"),
    [
        (
            Signature(("q", "k"), ("slopes",), (("scale", "None"), ("eps", "1e-06"))),
            "q, k, *, slopes, scale=None, eps=1e-06",
            "q, k, slopes=slopes",
            ["q", "k", "slopes=slopes", "scale=scale", "eps=eps"],
        ),
        (Signature(("x",), (), (("eps", "0.0"),)), "x, *, eps=0.0", "x", ["x", "eps=eps"]),
    ],
)
def test_a_signature(signature: Signature, text: str, usage: str, arguments: list[str]) -> None:
    assert str(signature) == text
    assert signature.usage == usage
    assert signature.arguments == arguments
    function = ast.parse(f"def f({text}): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert tuple(a.arg for a in function.args.args) == signature.tensors
