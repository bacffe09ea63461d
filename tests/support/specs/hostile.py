"""Hostile specs by class: input of `kgen render` from an attacker or from a faulty program.

`CASES` lists all of them. Each must end in exit code 2 with file, line and column, and write
nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kgen.family import families

KERNELS = {family.name: family.model.get() for family in families()}
"""The models of all families."""
MINIMAL = {
    "attention": {"name": "sample", "dtype": "bf16", "head_dim": "64"},
    "norm": {"name": "sample", "norm": "rms", "width": "any", "dtype": "bf16"},
    "chunk_output": {"name": "sample", "dtype": "bf16", "head_dim": "128"},
    "linear_attention": {"name": "sample", "dtype": "bf16", "head_dim": "128"},
}
EXPRESSIONS = {
    "attention": {"score_mod": "score", "mask_mod": None},
    "norm": {"input_mod": "x", "output_mod": "y"},
    "chunk_output": {"decay": "g[i]"},
    "linear_attention": {"q_map": "x"},
}
"""The expressions of each family, with a real number that each may use."""


@dataclass(frozen=True)
class Hostile:
    """One hostile spec. `put` writes it into an empty folder and returns its path."""

    kind: str
    number: int
    put: Callable[[Path], Path]

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.number}"


def spec(family: str, **fields: str | None) -> str:
    """Return a spec of a family with some fields replaced by other YAML, or left out."""
    lines = {"kernel": family, **MINIMAL[family], **fields}
    return "".join(f"{key}: {value}\n" for key, value in lines.items() if value is not None)


def _file(content: str | bytes, name: str | bytes = "hostile.yaml") -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        path = folder / os.fsdecode(name)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return put


def _sparse(folder: Path) -> Path:
    path = folder / "hostile.yaml"
    with path.open("wb") as file:
        file.truncate(4 << 30)
    return path


def _pipe(folder: Path) -> Path:
    path = folder / "hostile.yaml"
    os.mkfifo(path)
    return path


def _link(target: str) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        path = folder / "hostile.yaml"
        path.symlink_to(target)
        return path

    return put


def _each(field: str, *values: str) -> list[str]:
    """Yield values for a field that every family has."""
    return [spec(family, **{field: value}) for family in KERNELS for value in values]


def _field(family: str, field: str, *values: str, **others: str) -> list[str]:
    return [spec(family, **{field: value}, **others) for value in values]


def _texts(*texts: str, truth: bool = True) -> list[str]:
    """Yield expressions for every field that takes one.

    `x` is a real number; a mask compares with it.
    """
    found = []
    for family, fields in EXPRESSIONS.items():
        for field, real in fields.items():
            for text in texts if truth or real else ():
                written = text.replace("$", real or "q_idx")
                found.append(spec(family, **{field: json.dumps(written)}))
    return found


def _growing(n: int, first: str, step: str) -> str:
    lines = [f"x0 = {first}", *(f"x{i + 1} = {step.format(f'x{i}')}" for i in range(n))]
    return "\n".join([*lines, f"x{n}"])


def _yaml() -> dict[str, list[str | bytes]]:
    base = spec("attention")
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30)
    )
    wrong = '"\\ud800"'
    return {
        "yaml_alias_bombs": [
            base + bomb,
            base + "buffers: &a {x: *a}\n",
            base + "a: &a 1\n<<: *a\n",
        ],
        "yaml_tags": [
            base + '!!python/object/apply:os.system ["true"]: 1\n',
            *_each(
                "summary", "!!binary aGVsbG8=", '!!python/object/apply:os.system ["touch pwned"]'
            ),
        ],
        "yaml_duplicate_keys": [
            *_each("dtype", "bf16\ndtype: fp16"),
            base + "params: {a: 1, 'a': 2}\n",
        ],
        "yaml_several_documents": [base + "---\n" + base, base + "...\n---\n{}\n"],
        "yaml_directives": ["%YAML 1.1\n---\n" + base, "%TAG ! tag:x,2000:\n---\n" + base],
        "yaml_deep_flow": [base + f"buffers: {'[' * n}{']' * n}\n" for n in (20, 1000, 40_000)],
        "yaml_deep_mappings": [
            base + f"buffers: {'{a: ' * n}1{'}' * n}\n" for n in (20, 1000, 15_000)
        ],
        "yaml_deep_blocks": ["".join(f"{' ' * i}a:\n" for i in range(n)) for n in (30, 400)],
        "yaml_tabs": [base + "buffers:\n\tx: 1\n", "\t" + base],
        "yaml_unclosed": [
            base + f"summary: {text}\n" for text in ('"x', "'x", "[x", "{x: 1", "{x")
        ],
        "yaml_other_roots": [
            "- a\n- b\n",
            "text\n",
            "12\n",
            "",
            "# nothing\n",
            "---\n",
            "null\n",
            "[]\n",
        ],
        "yaml_keys": [
            base + key for key in ("? [a, b]\n: 1\n", "1: 2\n", "{a: b}: c\n", "null: 1\n", ": 1\n")
        ],
        "yaml_control_characters": [
            base + f"summary: a{c}b\n" for c in "\x00\x07\x1b\x7f\x84\ufffe"
        ],
        "yaml_bad_escapes": _each("summary", '"\\q"', '"\\x4"', '"\\U00110000"', '"\\UFFFFFFFF"'),
        "encoding_bytes": [
            base.encode() + b"summary: " + b + b"\n" for b in (b"\xff", b"\xc3", b"\xed\xa0\x80")
        ],
        "encoding_utf16": [base.encode("utf-16"), base.encode("utf-32"), base.encode("utf-16-be")],
        "encoding_overlong": [
            base.encode() + b"name: \xc0\xae\xc0\xae\n",
            b"\xf8\x88\x80\x80\x80" + base.encode(),
        ],
        "surrogates_in_texts": [
            *(t for field in ("summary", "name", "license", "dtype") for t in _each(field, wrong)),
            base + '"\\udfff": 1\n',
            base + 'params: {"a\\ud800": 1}\n',
            base + 'summary: "\\ud83d\\ude00"\n',
        ],
        "surrogates_in_comments": [
            t.replace("@", "\\ud800") for t in _texts("$ + 1  # @", truth=False)
        ],
        "too_large": [base + "#" * 100_000, "a" * 100_001, base + "# \u00e9\n" * 40_000],
        "large_numbers": [
            base + f"params: {{a: {n}}}\n"
            for n in ("9" * 39, "9" * 50_000, "1e999", "2147483648", ".inf", ".nan")
        ],
    }


def _fields() -> dict[str, list[str | bytes]]:
    shapes = (
        "[]",
        "[0]",
        "[-1]",
        "[2147483648]",
        "[1.5]",
        "[SQ, SQ, SQ, SQ, SQ, SQ, SQ]",
        "[ROWS]",
        "['']",
        "SQ",
    )
    every = [(family, field) for family, model in KERNELS.items() for field in model.model_fields]
    found: dict[str, list[str | bytes]] = {
        "a_mapping_for_everything": [spec(f, **{field: "{a: {b: c}}"}) for f, field in every],
        "a_list_for_everything": [spec(f, **{field: "[[1], 2]"}) for f, field in every],
        "missing_keys": [
            spec(f, **{key: None}) for f in KERNELS for key in ("kernel", *MINIMAL[f])
        ],
        "unknown_keys": [
            *(
                spec(f, **{key: "1"})
                for f in KERNELS
                for key in ("__class__", "model_config", "'a\\b'")
            ),
            *_each("targets", "{triton: {a: 1}}", "{../x: {}}", "{}", "{triton: 1}"),
        ],
        "names": _each(
            "name",
            *(
                "../../etc/passwd",
                "a b",
                "'a;b'",
                "import",
                "print",
                "__init__",
                "A",
                "é",
                "''",
                "a" * 61,
                "-a",
            ),
            *('"a\\nimport os"', "triton", "torch", "exp"),
        ),
        "names_of_buffers": [
            spec("attention", buffers=f"{{{name}: {{shape: [HQ], dtype: fp32}}}}")
            for name in (
                '"a\\nb"',
                "'a b'",
                "'a[0]'",
                "q",
                "score",
                "'\"'",
                "a.b",
                "__a",
                "lambda",
                "''",
            )
        ],
        "names_of_params": [
            spec(family, params=f"{{{name}: 1}}")
            for family in ("attention", "norm")
            for name in ('"a\\nb"', "'a(b)'", "x", "q", "eps", "class", "'*a'")
        ],
        "summaries": _each(
            "summary",
            *(
                '\'a """ b\'',
                r"'a \ b'",
                "'a */ b'",
                '"a\\nb"',
                '"a\\u202eb"',
                '"a\\0b"',
                '"a\\rb"',
                "x" * 201,
            ),
        ),
        "licenses": _each(
            "license", '"MIT\\nimport os"', "MIT */", "'MIT OR'", "M" * 101, '""', "é"
        ),
        "sizes_of_heads": [
            t
            for f in ("attention", "chunk_output", "linear_attention")
            for t in _field(
                f, "head_dim", "0", "-1", "2.5", "1000000000", "{qk: 0, v: 64}", "true", "64.0"
            )
        ],
        "sizes_of_norms": _field(
            "norm", "width", "0", "-1", "1099511627776", "[]", "[64, 64]", "1e3"
        ),
        "counts": [
            *_field("attention", "gqa", "0", "-4", "1.0", "2147483648", "yes"),
            *_field("norm", "heads", "0", "-4", "65536", "1.0"),
            *_field(
                "chunk_output", "heads", "{qk: 3, v: 4}", "{qk: 0, v: 0}", "{group: 70000}", "0"
            ),
            *_field("chunk_output", "chunk_size", "0", "65", "1e2", "64.5"),
            *_field(
                "linear_attention", "heads", "{qk: 3, v: 4}", "{qk: 0, v: 0}", "{group: 0}", "0"
            ),
            *_field("linear_attention", "chunk_size", "0", "65", "1e2", "64.5"),
        ],
        "lengths": _field(
            "attention",
            "lengths",
            *(
                "{q: {multiple_of: 0}}",
                "{q: {multiple_of: -1}}",
                "{q: 4.5}",
                "{kv: []}",
                "{z: any}",
                "1",
            ),
        ),
        "shapes": [
            spec("attention", buffers=f"{{t: {{shape: {shape}, dtype: fp32}}}}") for shape in shapes
        ],
        "epsilons": _field("norm", "eps", "-1", ".nan", ".inf", "2", "'x'", "1e999"),
        "params": [
            spec("attention", params=f"{{n: {value}}}")
            for value in (
                "{type: int, value: 1.5}",
                "{type: x}",
                "{value: 1}",
                "true",
                "'1'",
                "{type: int}",
            )
        ],
    }
    return found


_CONDITIONS = [("q_idx > {}", "kv_idx > {}")[i % 2].format(i) for i in range(499)]
_BALANCED = [f"({' and '.join(_CONDITIONS[i : i + 20])})" for i in range(0, 499, 20)]
"""Groups of 20 conditions, shallow enough to parse. Regrouping turns them into one chain for each
side.
"""


def _expressions() -> dict[str, list[str | bytes]]:
    zero = [
        spec(f, **{field: json.dumps(text.replace("$", "x" if f == "norm" else "q_idx"))}, **others)
        for f, field, others in (
            ("attention", "score_mod", {"params": "{n: 2}"}),
            ("norm", "input_mod", {"params": "{n: 2}"}),
        )
        for text in ("$ / (n - 2)", "$ / (2 - n)", "where($ / (n // 3) > 0, 1, 2)")
    ]
    deep = 40_000 // 10
    return {
        "zero_divisors": _texts("$ / 0", "1 + $ / (1 - 1)", "$ / 0.0", "$ / ($ - $)", truth=False),
        "zero_divisors_by_params": zero,
        "zero_divisors_of_integers": [
            spec("attention", mask_mod=f"q_idx {op} {zero} == kv_idx")
            for op in ("//", "%", "/")
            for zero in ("0", "(1 - 1)", "(b - b)", "-0", "(0 * h)")
        ],
        "zero_divisors_of_heads": [
            spec("chunk_output", heads="{qk: 4, v: 8}", decay=f"g[i] / ({zero})")
            for zero in ("H - 4", "HV - 8", "HV - 2 * H", "H // HV")
        ],
        "powers": _texts(
            "(($**8)**8)**8", "((1 + $)**8)**8", "$**9", "$**-1", "2**$", "$**8**8", truth=False
        ),
        "products_of_sums": _texts(
            " * ".join(["(1 + $)"] * 20),
            "*".join(["(1 - $)**8"] * 4),
            "1 / (1 + $ + $**2 + $**3)**8",
            truth=False,
        ),
        "many_conditions": _field("attention", "mask_mod", " and ".join(_BALANCED)),
        "products_of_many": _texts("*".join(["($ * $ * $)"] * 25), truth=False),
        "locals_that_double": _texts(
            _growing(40, "$", "{0} + {0}"),
            _growing(40, "$", "exp({0}) * {0}"),
            _growing(9, "$", "{0} * {0}"),
        ),
        "functions_that_double": _texts(
            "abs(" * 40 + "$" + ")" * 40, "silu(" * 40 + "$" + ")" * 40, truth=False
        ),
        "deep_brackets": _texts("(" * 65 + "$" + ")" * 65, "(" * deep + "$" + ")" * deep),
        "deep_operators": _texts("-" * 3000 + "$", "not " * 2000 + "True", "~" * 3000 + "$"),
        "long_chains": _texts(" + ".join(["$"] * 1500), " - ".join(["$"] * 70)),
        "long_texts": _texts("$ + 1" + " " * 10_000, "$" * 10_001),
        "calls_of_python": _texts(
            *(
                '__import__("os").system("touch pwned")',
                "open($)",
                "eval($)",
                "exec($)",
                "getattr($, 1)",
            ),
            *("().__class__.__bases__", "$.__class__", "globals()", "breakpoint()"),
        ),
        "python_that_is_none_of_ours": _texts(
            *(
                "lambda: $",
                "[$ for a in $]",
                "{$: $}",
                "f'{$}'",
                "(a := $)",
                "$ if $ else",
                "*$",
                "yield $",
            ),
            *(
                "import os",
                "def f(): pass",
                "while True: pass",
                "del $",
                "assert $",
                "$; $",
                "$ = 1",
                "await $",
            ),
        ),
        "strings": _texts("'a'", 'b"a"', "$ + '''a'''", '"%s" % $', "'a' * 1000000000"),
        "characters": _texts(
            "$ + \u0430",
            "$ \u2212 1",
            "\x00$",
            "$\x0c+ 1",
            "$ + 1\u2028",
            "$ \u00d7 2",
            "`$`",
            "$ ? 1",
        ),
        "numbers": _texts(
            "$ + " + "9" * 39, "$ + " + "9" * 5000, "$ + 1e999", "$ + 0x" + "f" * 99, "$ + 1j"
        ),
        "brackets": _texts("($", "$)", "($]", "[$", "{$", "$ + (1, 2)", "$[", "()"),
        "lines": _texts(
            "$\n$", "  $", "a = 1", "a = $\n", "a = a\na + $", "a = b\nb = $\na", "$ \\", "\\\n"
        ),
        "comments_alone": _texts("# $", "#", "\n\n# a\n"),
        "names_in_expressions": _texts(
            "$ + nothing", "$ + __x__", "$ + Q_IDX", "$ + exp", "$ + None", "$ + ..."
        ),
        "indices": [
            spec(
                "attention",
                buffers="{t: {shape: [HQ], dtype: fp32}}",
                score_mod=json.dumps(f"score + {read}"),
            )
            for read in (
                "t",
                "t[h, h]",
                "t[1.5]",
                "t[h][h]",
                "t[:]",
                "t[score]",
                "t[h > 0]",
                "t(h)",
                "t[]",
                "t.x",
            )
        ],
    }


def _numbered(kind: str, puts: Iterable[Callable[[Path], Path]]) -> list[Hostile]:
    return [Hostile(kind, number, put) for number, put in enumerate(puts)]


CASES = [
    case
    for classes in (_yaml(), _fields(), _expressions())
    for kind, contents in classes.items()
    for case in _numbered(kind, map(_file, contents))
]
CASES += _numbered("path_not_utf8", [_file(spec(f), b"\xff\xfe.yaml") for f in KERNELS])
CASES += _numbered("path_of_no_file", [_pipe, _link("/dev/zero"), _link("/dev/null")])
CASES += _numbered("path_of_much", [_sparse])
FIRST = [case for case in CASES if case.number == 0]
"""One case of each class."""
