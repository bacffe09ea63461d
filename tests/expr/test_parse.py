"""Accepted texts and their trees. Every other text raises `ExpressionError`."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kgen.expr.domain import is_always_zero
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, walk
from kgen.expr.parse import parse_expression
from kgen.expr.scope import BufferType, Scope
from kgen.expr.text_checks import MAX_DEPTH, ExpressionError
from kgen.expr.unparse import show

INT, FLOAT, BOOL = Type.INT, Type.FLOAT, Type.BOOL
INDICES = ("b", "h", "q_idx", "kv_idx", "SQ", "window")
BUFFERS = {
    "slopes": BufferType(FLOAT, 1),
    "rate": BufferType(FLOAT, 0),
    "bias": BufferType(FLOAT, 3),
    "doc": BufferType(INT, 1),
    "keep": BufferType(BOOL, 2),
}
SCOPE = Scope({"score": FLOAT, **dict.fromkeys(INDICES, INT)}, BUFFERS)

SCORE, H, Q, KV = Var("score", FLOAT), Var("h", INT), Var("q_idx", INT), Var("kv_idx", INT)
INF = Var("inf", FLOAT)


def parse(text: str, result: Type = FLOAT) -> Node:
    return parse_expression(text, SCOPE, result)


def failure(text: str, result: Type = FLOAT) -> ExpressionError:
    with pytest.raises(ExpressionError) as caught:
        parse(text, result)
    return caught.value


def call(fn: str, *args: Node) -> Call:
    return Call(fn, args, TABLE[fn].typed(tuple(a.type for a in args)))


def integer(value: int) -> Const:
    return Const(value, INT)


# --- printing and parsing are inverses ------------------------


@cache
def trees(type_: Type, depth: int) -> st.SearchStrategy[Node]:
    """Draw trees of a type, at most `depth` calls and reads deep.

    Without this limit, the recursion would not end.
    """
    if depth == 0:
        return LEAVES[type_]

    def calls(names: str, *types: Type) -> st.SearchStrategy[Node]:
        arguments = st.tuples(*(trees(t, depth - 1) for t in types))
        return st.builds(
            lambda fn, args: call(fn, *args), st.sampled_from(names.split()), arguments
        )

    def elements(name: str) -> st.SearchStrategy[Node]:
        indices = st.tuples(*[trees(INT, depth - 1)] * BUFFERS[name].rank)
        return st.builds(lambda args: Read(name, args, type_), indices)

    branches = {
        INT: [
            calls("add sub mul floordiv mod min max", INT, INT),
            calls("neg abs", INT),
            calls("where", BOOL, INT, INT),
            calls("clamp", INT, INT, INT),
        ],
        FLOAT: [
            calls("add sub mul div min max", FLOAT, INT),
            calls("add sub mul div min max", FLOAT, FLOAT),
            calls("div", INT, INT),
            calls(
                "neg abs exp exp2 log log2 sqrt rsqrt tanh sigmoid silu sin cos floor float", FLOAT
            ),
            calls("exp2 float", INT),
            calls("where", BOOL, FLOAT, INT),
        ],
        BOOL: [
            calls("lt le gt ge eq ne", INT, FLOAT),
            calls("lt le gt ge eq ne", INT, INT),
            calls("and or", BOOL, BOOL),
            calls("not", BOOL),
            calls("where", BOOL, BOOL, BOOL),
        ],
    }[type_]
    read = [elements(name) for name, buffer in BUFFERS.items() if buffer.element is type_]
    return st.one_of(LEAVES[type_], *read, *branches)


RESULTS = INT, FLOAT, BOOL
LEAVES: dict[Type, st.SearchStrategy[Node]] = {
    INT: st.builds(integer, st.integers(-(2**31), 2**31 - 1))
    | st.sampled_from([Var(n, INT) for n in INDICES]),
    FLOAT: st.builds(
        lambda x: Const(x, FLOAT), st.floats(width=32, allow_nan=False, allow_infinity=False)
    )
    | st.sampled_from([SCORE, INF]),
    BOOL: st.booleans().map(lambda x: Const(x, BOOL)),
}


def parseable(node: Node) -> bool:
    # No text has these trees: `-3` parses as a literal, not as a minus of 3. `--inf` and
    # `float(inf)` are longer spellings of `inf`.
    infinite = (INF, call("neg", INF))
    return not any(
        (n.fn == "neg" and isinstance(n.args[0], Const) and "-" not in repr(n.args[0].value))
        or (n.fn in ("neg", "float") and n.args[0] in infinite and n != infinite[1])
        for n in walk(node)
        if isinstance(n, Call)
    )


def divides(tree: Node) -> bool:
    """True if no divisor is always zero."""
    divisions = (
        n for n in walk(tree) if isinstance(n, Call) and n.fn in ("div", "floordiv", "mod")
    )
    return not any(is_always_zero(n.args[1], {}) for n in divisions)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from(RESULTS).flatmap(lambda t: trees(t, 4)).filter(parseable).filter(divides))
def test_parse_is_the_inverse_of_print(tree: Node) -> None:
    assert repr(parse_expression(show(tree), SCOPE, tree.type)) == repr(tree)


@pytest.mark.parametrize(
    "text",
    [
        "score + slopes[h] * (kv_idx - q_idx)",
        "q_idx - (kv_idx - h)",
        "q_idx - kv_idx - h",
        "-(q_idx + 1) * 2",
        "2 * -3",
        "score / (score * 2)",
        "q_idx // 2 % 3",
        "where(not (q_idx < h or h == 2) and kv_idx < 3, -inf, max(score, 1.0))",
        "abs(kv_idx - q_idx) * 0.5",
    ],
)
def test_shown_as_a_person_would_write_it(text: str) -> None:
    assert show(parse(text)) == text


# --- nothing but ExpressionError ------------------------


WORDS = (
    "score h q_idx kv_idx doc [ ] ( ) + - * ** // and or not if else lambda : := == < >= , . inf 2 "
    "0.5 max "
    "where tanh True x = \n f'' 1j for in await yield * import return"
)


@settings(deadline=None)
@given(
    st.one_of(
        st.text(),
        st.text(alphabet="()[]{}+-*/%&|~^<>=!.,:;'\"\\#\n\t @01e_xjhbslq"),
        st.lists(st.sampled_from(WORDS.split(" "))).map(" ".join),
    )
)
def test_no_text_raises_anything_else(text: str) -> None:
    lines = text.split("\n")
    for result in RESULTS:
        error: ExpressionError | None = None
        try:
            tree = parse(text, result)
            assert tree.type is result or (tree.type, result) == (INT, FLOAT)
        except ExpressionError as caught:
            error = caught
        if error is not None:
            assert 1 <= error.line <= len(lines)
            assert 1 <= error.column <= len(lines[error.line - 1]) + 1
            assert error.length >= 1
            assert error.hint


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("(" * 9000, "too-deep"),
        ("-" * 9000 + "1", "too-deep"),
        ("not " * 2400 + "True", "too-deep"),
        ("1" + "+1" * 4000, "too-deep"),
        ("score" + ".x" * 4000, "attribute-access"),
        ("1 if True else " * 600 + "2", "too-deep"),
        ("1" + " < 1" * 2000, "too-large"),
        ("a" + " + 1" * 5000, "too-large"),
        ("9" * 9000, "literal-range"),
        ("0x" + "f" * 9000, "literal-range"),
        ("1" + "**2" * 3000, "bad-exponent"),
        (
            "x0 = score\n" + "".join(f"x{i + 1} = x{i} ** 8\n" for i in range(20)) + "x20",
            "too-large",
        ),
        ("max(" + "1, " * 3000 + "2)", "too-deep"),
    ],
    ids=lambda value: value[:12],
)
def test_bombs_are_refused_quickly(text: str, code: str) -> None:
    start = time.process_time()
    assert failure(text).code in {code, "too-deep"}
    assert time.process_time() - start < 2


def test_depth_just_within_the_limit() -> None:
    tree = parse(" + ".join(["score"] * MAX_DEPTH))
    assert sum(isinstance(node, Call) for node in walk(tree)) == MAX_DEPTH - 1


# --- what texts mean ------------------------


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("-3", integer(-3)),
        ("- 2.5", Const(-2.5, FLOAT)),
        ("-2147483648", integer(-(2**31))),
        ("-inf", call("neg", INF)),
        ('float("-inf")', call("neg", INF)),
        ("-math.inf * score", call("mul", call("neg", INF), SCORE)),
        ('-float("-inf")', INF),
        ("+score", SCORE),
        ("-score * 2", call("mul", call("neg", SCORE), integer(2))),
        ("-2 ** 2", call("neg", call("mul", integer(2), integer(2)))),
        ("h ** 3", call("mul", call("mul", H, H), H)),
        ("h ** 4", call("mul", call("mul", H, H), call("mul", H, H))),
        ("max(1, 2, score)", call("max", call("max", integer(1), integer(2)), SCORE)),
        ("score if q_idx >= kv_idx else -1", call("where", call("ge", Q, KV), SCORE, integer(-1))),
        (
            "slopes[h - 1] / 2",
            call("div", Read("slopes", (call("sub", H, integer(1)),), FLOAT), integer(2)),
        ),
        ("bias[h, -1, 0]", Read("bias", (H, integer(-1), integer(0)), FLOAT)),
        ("x = h + 1  # heads count from one\ny = x * x\n\ny - x", None),
        ("(score  # the score\n + 1)", call("add", SCORE, integer(1))),
        ("x = h; x + 1", call("add", H, integer(1))),
    ],
)
def test_meaning(text: str, tree: Node | None) -> None:
    x = call("add", H, integer(1))
    assert parse(text) == (tree or call("sub", call("mul", x, x), x))


@pytest.mark.parametrize(
    "text",
    [
        "0 <= q_idx - kv_idx < 4 and not h == 2",
        "(0 <= q_idx - kv_idx) & (q_idx - kv_idx < 4) & ~(h == 2)",
    ],
)
def test_both_spellings_of_logic(text: str) -> None:
    distance = call("sub", Q, KV)
    both = call("and", call("le", integer(0), distance), call("lt", distance, integer(4)))
    assert parse(text, BOOL) == call("and", both, call("not", call("eq", H, integer(2))))


def test_a_bound_of_a_dtype_is_a_masks_value() -> None:
    text = f"where(h > 1, where(q_idx >= kv_idx, score, {MIN}), score) if h < 9 else {MIN}"
    assert parse(text) == parse(text.replace(MIN, "-inf"))
    scope = Scope({"x": FLOAT}, {})  # without a score, there is no mask
    with pytest.raises(ExpressionError, match="a bound of a dtype"):
        parse_expression(f"where(x > 0, x, {MIN})", scope, FLOAT)


def test_types_of_results() -> None:
    assert parse("h").type is INT
    assert parse("keep[0, 0]", BOOL) == Read("keep", (integer(0), integer(0)), BOOL)
    assert failure("h > 1").code == "wrong-type"
    assert failure("score", BOOL).code == "wrong-type"
    assert failure("score", INT).code == "wrong-type"


MIN = "torch.finfo(torch.float32).min"


@pytest.mark.parametrize(
    ("text", "code", "marked"),
    [
        ("score + (\n  True)", "wrong-type", "+"),
        ("(score)  * (h > 1)", "wrong-type", "*"),
        ("score if h else 1", "wrong-type", "if"),
        ("h and score", "wrong-type", "and"),
        ("where(h, 1, 2)", "wrong-type", "where"),
        ("score + exq(h)", "unknown-function", "exq"),
        ("score + exp(\n  q_ix)", "unknown-name", "q_ix"),
        ("h is not 3", "not-in-language", "is not"),
        ("slopes[1.5]", "wrong-type", "1.5"),
        ("doc[h][h]", "bad-index", "doc[h][h]"),
        ("score.__class__", "dunder-name", "score.__class__"),
        ("inf = 3\ninf", "shadowed-name", "inf"),
        ("tanh = 3\ntanh", "shadowed-name", "tanh"),
        ("score(h)", "bad-call", "score"),
        ("slopes(h)", "bad-call", "slopes"),
        ("tanh", "bad-call", "tanh"),
        ("x += 1\nx", "bad-statement", "x += 1"),
        ("1e39", "literal-range", "1e39"),
        ("2147483648", "literal-range", "2147483648"),
        ("None", "not-in-language", "None"),
        ('float("-inff")', "not-in-language", '"-inff"'),
        ('float("-+inf")', "not-in-language", '"-+inf"'),
        ("-os.inf", "attribute-access", "os.inf"),
        ("score.inf", "attribute-access", "score.inf"),
        (
            "where(h > 1, score, torch.finfo(torch.int32).min)",
            "attribute-access",
            "torch.finfo(torch.int32).min",
        ),
        # The minimum of a dtype means -inf if it is the whole score. Elsewhere it is refused.
        *(
            (text.format(MIN), "not-in-language", MIN)
            for text in (
                *("score + {}", "where(h > 1, 0, {}) + score", "where({} > 1, score, 0)", "{}"),
                *("exp(where(h > 1, score, {}))", "x = {}\nwhere(h > 1, score, x)"),
            )
        ),
        (
            "where(h > 1, score, -torch.finfo(torch.half).min)",
            "not-in-language",
            "-torch.finfo(torch.half).min",
        ),
    ],
)
def test_position_of_errors(text: str, code: str, marked: str) -> None:
    error = failure(text)
    line = text.split("\n")[error.line - 1]
    assert (error.code, line[error.column - 1 :][: error.length]) == (code, marked)


ZEROS = [
    *("0", "0.0", "-0.0", "(1 - 1)", "(0 * q_idx)", "(q_idx - q_idx)"),
    *(
        "((q_idx + 1)**2 - q_idx * q_idx - 2 * q_idx - 1)",
        "min(0, 1)",
        "abs(0)",
        "(3 % 3)",
        "(1 // 2)",
    ),
    *(
        "where(1 > 2, 5, 0)",
        "(two - 2)",
        "(zero * score)",
        "(-zero)",
        "sin(0)",
        "log(1)",
        "floor(0.5)",
    ),
    *("1e-60", "(1 / inf)", "float(0)", "tanh(zero)", "clamp(1, 0, 0)", "(score * 0)"),
    *("sigmoid(-1000)", "silu(-1000)"),
]


@pytest.mark.parametrize("bits", ["-1", "32", "(31 + 1)", "much", "(much - 1)", "~0"])
@pytest.mark.parametrize("operator", ["<<", ">>"])
def test_bits_that_an_integer_does_not_have(bits: str, operator: str) -> None:
    scope = replace(SCOPE, variables={**SCOPE.variables, "much": INT}, constants={"much": 40})
    text = f"(q_idx {operator} {bits}) % 2 == 0"
    with pytest.raises(ExpressionError) as caught:
        parse_expression(text, scope, BOOL)
    error = caught.value
    assert error.code == "bad-shift"
    assert text[error.column - 1 :][: error.length].strip("()") == bits.strip("()")


@pytest.mark.parametrize("bits", ["0", "31", "h", "(much - 9)"])
def test_bits_that_an_integer_has(bits: str) -> None:
    scope = replace(SCOPE, variables={**SCOPE.variables, "much": INT}, constants={"much": 40})
    parse_expression(f"(1 << {bits}) > q_idx >> {bits}", scope, BOOL)


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize(
    "divide", ["1 + score / {}", "where(q_idx // {} > 0, 1, 2)", "score * (h % {})"]
)
def test_a_divisor_that_is_always_zero(zero: str, divide: str) -> None:
    scope = replace(
        SCOPE,
        variables={**SCOPE.variables, "two": INT, "zero": INT},
        constants={"two": 2, "zero": 0},
    )
    text = divide.format(zero)
    with pytest.raises(ExpressionError) as caught:
        parse_expression(text, scope, FLOAT)
    error = caught.value
    if error.code == "wrong-type":
        assert not divide.endswith("score / {}"), "only `//` and `%` are for integers alone"
        return
    assert error.code == "zero-division"
    found = text[error.column - 1 :][: error.length]
    assert found.strip("()") == zero.strip("()") or found in zero


@pytest.mark.parametrize(
    "divisor",
    [
        *(
            "2",
            "q_idx",
            "(q_idx - h)",
            "(score - 1)",
            "1e-37",
            "(window * 1)",
            "doc[0]",
            "log(-1)",
            "inf",
        ),
        *(
            "(q_idx // 2 * 2 - q_idx)",
            "(1 + exp(-score))",
            "(inf - inf)",
            "(score + inf)",
            "exp(1000)",
        ),
    ],
)
def test_a_divisor_that_need_not_be_zero(divisor: str) -> None:
    parse(f"score / {divisor}")


@pytest.mark.parametrize(
    "text",
    [
        "((score**8)**8)**8",
        "((q_idx + kv_idx + b + h)**8)**8 + score",
        "score / ((1 + q_idx + kv_idx + b + h)**8)",
        f"{'abs(' * 20}q_idx{')' * 20} + score",
        f"{'(' * 20}q_idx{' % 7)' * 20} + score",
        " * ".join(["(1 + score)"] * 12),
        "*".join(["(score*score*score*score)"] * 17),
    ],
)
def test_what_would_grow_without_end(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert caught.value.code == "too-large"
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    "text", ["(score**8)**8", "(score + q_idx + kv_idx)**8", "(q_idx - kv_idx)**2 * score"]
)
def test_what_may_be_multiplied_out(text: str) -> None:
    parse(text)
