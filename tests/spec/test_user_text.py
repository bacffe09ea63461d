"""User text changes docstrings and comments of emitted files, but no token of their code."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from jinja2 import DictLoader, Environment
from pydantic import BaseModel

from kgen.expr.nodes import Type
from kgen.expr.parse import parse_expression
from kgen.expr.scope import Scope
from kgen.family import NAMES, family
from kgen.render import header
from kgen.render.rendering import render_spec
from kgen.spec.common import checked_name, checked_own_name
from kgen.spec.load import Loaded, loads
from kgen.spec.user_text import UserText

ROOT = Path(__file__).resolve().parents[2]

HOSTILE = [
    '"""; __import__("os").system("touch pwned"); """',
    'called """causal"""',
    '""',
    '"',
    "'''; import os; '''",
    r"\nu, \x, \u12, \N{NOTHING}",
    "ends in \\",
    "ends in \\ ",
    "ends in ??/",
    "*/ #error /* */",
    "{{ 7 }} {% raw %} {# #}",
    "\rimport os",
    "\x0cimport os",
    "\x1cimport os\x85import os\u2028import os",
    "\u202e\u200b\x00\x1b]0;",
    "`$(touch pwned)`",
    "-*- coding: utf-7 -*- +ACIAIgAi-",
    "vim: set fileencoding=nothing",
]
FAMILIES = {
    "attention": "dtype: bf16\nhead_dim: 64\ntargets: {triton: {}, cuda: {passes: [delta]}}\n",
    "norm": "norm: rms\nwidth: any\ndtype: bf16\ntargets: {triton: {}, cuda: {}}\n",
    "chunk_output": "dtype: bf16\nhead_dim: 128\ntargets: {triton: {}, cute: {}}\n",
    "linear_attention": "dtype: bf16\nhead_dim: 128\n",
}
EXPRESSIONS = {
    "attention": {"score_mod": "score * 2.0", "mask_mod": "q_idx >= kv_idx"},
    "norm": {"input_mod": "x * 2.0", "output_mod": "y * 3.0"},
    "chunk_output": {"decay": "g[i] * 0.5"},
    "linear_attention": {"q_map": "x * 2.0", "k_map": "x + 1.0", "beta": "h * 0.5"},
}


def sample(family: str, comment: str = "", file: str = "sample.yaml", summary: str = "") -> Loaded:
    """Return a spec with the comment in each of its expressions, on separate lines and after
    code.
    """
    texts = {
        field: f"# {comment}\n# {comment}\n{text}  # {comment}"
        for field, text in EXPRESSIONS[family].items()
    }
    lines = [f"{field}: {json.dumps(text)}\n" for field, text in texts.items()]
    head = f"kernel: {family}\nname: sample\n{FAMILIES[family]}{''.join(lines)}"
    loaded = loads(head, file)
    # The model refuses worse summaries. The printed text must be safe without this check.
    spec = loaded.spec.model_copy(
        update={"summary": UserText(summary), "license": UserText(f"X{summary}")}
    )
    return replace(loaded, spec=spec)


def code(name: str, text: str) -> str:
    """Return a file without comments and docstrings."""
    if name.endswith(".cu"):
        # A compiler first joins lines with an escaped line end, also in comments.
        text = re.sub(r"(\\|\?\?/)[ \t]*\n", "", text)
        text = re.sub(r"//[^\n\r]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        return re.sub(r"(?:[ \t]*\n)+", "\n", text)  # long comments have several lines
    tree = ast.parse(text.encode())  # as Python reads a file: a comment can declare an encoding
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    assert all(
        t.type != tokenize.ERRORTOKEN for t in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    return ast.dump(tree)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("family", FAMILIES)
def test_code_does_not_depend_on_what_a_user_says_about_it(family: str) -> None:
    plain = {name: code(name, text) for name, text in render_spec(sample(family)).items()}
    everything = "  ".join(HOSTILE)
    for text in (everything, HOSTILE[0], "ends in \\", *HOSTILE[-2:]):
        files = render_spec(
            sample(family, text, f"{text}\nimport os #.yaml".replace("/", "|"), text)
        )
        for name, emitted in files.items():
            assert code(name, emitted) == plain[name], (name, text)
            assert header.is_untouched(emitted), (name, text)
            assert all(c.isprintable() or c == "\n" for c in emitted), (name, text)


@pytest.mark.parametrize("text", [*HOSTILE, "  ".join(HOSTILE)])
def test_landing_places(text: str) -> None:
    user = UserText(text)
    shown = user.on_terminal()
    assert ast.literal_eval(f'"""{user.in_docstring()}"""') == shown, (
        "a docstring says what was written"
    )
    assert ast.parse(f"# {user.in_comment()}\n1".encode()).body[0].lineno == 2
    for comment in (f"// {user.in_comment()}\n1", f"/* {user.in_comment()} */1"):
        assert code("k.cu", comment).strip() == "1"
    assert shown.isprintable()


def test_harmless_comments_stay_readable() -> None:
    text = render_spec(sample("attention", 'called """causal""", as \\nu is'))["triton.py"]
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert docstring.count('# called """causal""", as \\nu is') == 6


def test_it_cannot_be_printed_without_saying_where() -> None:
    text = UserText("x")
    for attempt in (
        lambda: str(text),
        lambda: f"{text}",
        lambda: "{}".format(text),  # noqa: UP032
        lambda: "%s" % text,  # noqa: UP031
        lambda: ", ".join([text]),  # type: ignore[list-item]
        lambda: "a" + text,  # type: ignore[operator]
        lambda: Environment(loader=DictLoader({"t": "{{ x }}"})).get_template("t").render(x=text),
    ):
        with pytest.raises(TypeError):
            attempt()


def _texts(model: type[BaseModel]) -> Iterator[tuple[str, typing.Any]]:
    """Yield the fields of a model, and of nested models, that take any `str` or `UserText`."""
    for name, field in model.model_fields.items():
        yield from (
            (f"{model.__name__}.{name}", part) for part in _parts(field.annotation, field.metadata)
        )


def _parts(annotation: typing.Any, metadata: list[typing.Any]) -> Iterator[typing.Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from (part for _, part in _texts(annotation))
    elif annotation in (str, UserText):
        checks = [getattr(m, "func", None) for m in metadata]
        is_name = annotation is str and {checked_name, checked_own_name} & {*checks}
        yield "name" if is_name else annotation
    elif typing.get_origin(annotation) is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        yield from _parts(inner, [*metadata, *more])
    elif typing.get_origin(annotation) in (dict, tuple, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _parts(argument, metadata)


@pytest.mark.parametrize("name", NAMES)
def test_every_free_text_of_a_spec_is_user_text(name: str) -> None:
    """Names are snake_case, and fields with a fixed list of words are safe."""
    texts = list(_texts(family(name).model.get()))
    assert {"name", UserText} <= {kind for _, kind in texts}
    assert [field for field, kind in texts if kind is str] == []


def test_targets_and_templates_do_not_ask_for_the_raw_text() -> None:
    folders = [ROOT / "kgen" / stage for stage in ("targets", "render")]
    folders += [
        ROOT / "kgen/kernels" / name / stage for name in NAMES for stage in ("plan", "targets")
    ]
    for folder in folders:
        paths = list(folder.rglob("*.py"))
        assert paths, folder
        for path in paths:
            assert ".written" not in path.read_text(), path


def test_a_comment_is_none_of_the_expression() -> None:
    scope = Scope({"score": Type.FLOAT}, {})
    assert parse_expression('score  # """', scope, Type.FLOAT) == parse_expression(
        "score", scope, Type.FLOAT
    )
