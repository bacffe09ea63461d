"""Docstrings of emitted files: each usage line is a valid call, and each argument is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

import pytest
from conftest import ROOT

from kgen.render.rendering import render_spec, render_variants
from kgen.spec.load import loads, loads_variants

ATTENTION = "kernel: attention\nname: sample\ndtype: bf16\nhead_dim: 64\n"
NORM = "kernel: norm\nname: sample\nnorm: rms\nwidth: any\ndtype: bf16\n"
OTHERS = {
    "names that give way": ATTENTION
    + "buffers: {acc: {shape: [HQ], dtype: fp32}}\nparams: {tile: {type: int, runtime: true}}\n"
    + "score_mod: score + acc[h]\nmask_mod: q_idx - kv_idx < tile\n",
    "pages and a parameter": ATTENTION
    + (
        "gqa: 4\npasses: [forward]\nparams: {cap: {type: float, runtime: true}}\n"
        "paged_kv: {page_size: 64}\n"
    )
    + "mask_mod: q_idx >= kv_idx\nscore_mod: score * cap\n",
    "sinks": ATTENTION + "sinks: true\n",
    "lists of blocks": ATTENTION
    + "block_mask: always\nbuffers: {seen: {shape: [SK], dtype: bool}}\nmask_mod: seen[kv_idx]\n",
    "decoding": ATTENTION
    + "passes: [forward, decode]\nparams: {cap: {type: float, runtime: true}}\n"
    "score_mod: score * cap\n",
    "a norm with a parameter": NORM
    + "params: {k: {type: float, runtime: true}}\noutput_mod: y * k\n"
    "targets: {triton: {}, cuda: {}}\n",
    "a norm with everything": NORM
    + "residual: in_out\nquantize: {dtype: fp8_e4m3, scale: per_row}\npasses: [forward]\n"
    "targets: {triton: {}, cuda: {}}\n",
    "one scale": NORM
    + "quantize: {dtype: fp8_e4m3, scale: per_tensor}\npasses: [forward]\ntargets: {cuda: {}}\n",
}
VARIANTS = ATTENTION.replace("bf16", "[bf16, fp16]").replace("64", "[64, 128]")


def stock() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each stock spec with files."""
    for path in sorted((ROOT / "specs").glob("*.yaml")):
        yield path.stem, path.read_text(encoding="utf-8")


def documented(name: str, files: Mapping[str, str]) -> int:
    """Check the files that contain the function `name`. Return the number of their usage lines."""
    lines = 0
    for file, text in files.items():
        if not file.endswith(".py"):
            continue
        tree = ast.parse(text)
        functions = [
            node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        for function in functions:
            said = ast.get_docstring(function) or ""
            arguments = [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]
            missing = [one for one in arguments if not re.search(rf"\b{one}\b", said)]
            assert not missing, f"{file}: help({name}) says nothing of {missing}"
            assert "Returns " in said, f"{file}: help({name}) says nothing of the result"
            usage = re.findall(
                rf"^ *((?:[\w, ]+) = {name}\(.*\))", ast.get_docstring(tree) or "", re.MULTILINE
            )
            for line in usage:
                check_usage(line, function)
            assert len(usage) == (file != "__init__.py"), file
            lines += len(usage)
    return lines


def check_usage(line: str, function: ast.FunctionDef) -> None:
    """Check that a usage line passes exactly the required arguments and takes all results."""
    (statement,) = ast.parse(line).body
    assert isinstance(statement, ast.Assign), line
    assert isinstance(statement.value, ast.Call), line
    given = [ast.unparse(one) for one in statement.value.args]
    assert given == [one.arg for one in function.args.args][: len(given)], line
    given += [str(one.arg) for one in statement.value.keywords]
    assert all(ast.unparse(one.value) == one.arg for one in statement.value.keywords), line
    after = function.args.kwonlyargs
    positional = function.args.args[: len(function.args.args) - len(function.args.defaults)]
    needed = [one.arg for one in positional]
    needed += [
        one.arg
        for one, default in zip(after, function.args.kw_defaults, strict=True)
        if default is None
    ]
    optional = {one.arg for one in (*function.args.args, *after)} - {*needed}
    required = [one for one in given if one not in optional]
    # Both descriptions of packed sequences have a default, but a call needs one of them.
    assert required == needed, line
    (target,) = statement.targets
    taken = len(target.elts) if isinstance(target, ast.Tuple) else 1
    assert taken == results(function), line


def results(function: ast.FunctionDef) -> int:
    """Return the number of returned tensors, without those that a flag adds."""
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    last = max(returns, key=lambda node: node.lineno).value  # a flag returns before
    if isinstance(last, ast.IfExp):
        last = last.orelse
    return len(last.elts) if isinstance(last, ast.Tuple) else 1


@pytest.mark.parametrize(("name", "text"), [*stock()], ids=lambda value: value.split("\n")[0][:30])
def test_stock_specs(name: str, text: str) -> None:
    """Check the files in `generated/`, which `kgen render --check` compares with their specs."""
    folder = ROOT / "generated" / name
    folders = [
        folder,
        *(path for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"),
    ]
    found = [
        {path.name: path.read_text(encoding="utf-8") for path in one.glob("*.py")}
        for one in folders
    ]
    assert sum(documented(name, files) for files in found) >= 1, text


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_other_specs(text: str) -> None:
    assert documented("sample", render_spec(loads(text, "sample.yaml"))) >= 1


def test_variants_are_documented() -> None:
    """The folder of variants names the variant whose arguments it shows, and lists the arguments of
    the others.
    """
    folders = render_variants(loads_variants(VARIANTS, "sample.yaml"))
    assert len(folders) == 5
    for files in folders.values():
        documented("sample", files)
    said = ast.get_docstring(ast.parse(folders["sample"]["__init__.py"]).body[-1])  # type: ignore[arg-type]
    assert "The arguments of bf16_d64 follow." in (said or "")


def test_a_usage_line_that_is_wrong_is_found() -> None:
    """The check finds a missing argument, a wrong number of results, and an unknown name."""
    (function,) = ast.parse("def f(q, *, table, scale=None):\n    return a, b\n").body
    assert isinstance(function, ast.FunctionDef)
    check_usage("a, b = f(q, table=table)", function)
    for wrong in (
        "a, b = f(q)",
        "out = f(q, table=table)",
        "a, b = f(k, table=table)",
        "a, b = f(q, table=x)",
    ):
        with pytest.raises(AssertionError):
            check_usage(wrong, function)
