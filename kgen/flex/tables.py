"""Tables of torch functions by name. Pointwise functions become terms, mods must not use others."""

from __future__ import annotations

from kgen.flex import composed

ELEMENTWISE: dict[str, tuple[str, tuple[str, ...]]] = {
    **{
        name: (name, ("input",))
        for name in (
            *(
                "abs",
                "atan",
                "ceil",
                "cos",
                "erf",
                "exp",
                "exp2",
                "expm1",
                "floor",
                "log",
                "log10",
                "log1p",
                "log2",
                "neg",
            ),
            *(
                "reciprocal",
                "relu",
                "rsqrt",
                "sigmoid",
                "sign",
                "silu",
                "sin",
                "sqrt",
                "square",
                "tan",
            ),
            *(
                "tanh",
                "trunc",
                "logical_not",
                "logsigmoid",
                "relu6",
                "softsign",
                "cosh",
            ),
        )
    },
    **{
        name: (name, ("input", "other"))
        for name in (
            *("add", "sub", "mul", "div", "pow", "eq", "ne", "lt", "le", "gt", "ge"),
            *("logical_and", "logical_or", "logical_xor"),
        )
    },
    "gelu": ("gelu", ("input",)),
    "leaky_relu": ("leaky_relu", ("input", "negative_slope")),
    "elu": ("elu", ("input", "alpha")),
    "where": ("where", ("condition", "input", "other")),
    "clamp": ("clamp", ("input", "min", "max")),
    "lerp": ("lerp", ("input", "end", "weight")),
    "addcmul": ("addcmul", ("input", "tensor1", "tensor2")),
    "masked_fill": ("masked_fill", ("input", "mask", "value")),
}
for _alias, _name in (
    *(
        ("absolute", "abs"),
        ("negative", "neg"),
        ("fix", "trunc"),
        ("sgn", "sign"),
        ("clip", "clamp"),
    ),
    *(
        ("subtract", "sub"),
        ("multiply", "mul"),
        ("true_divide", "div"),
        ("divide", "div"),
        ("expit", "sigmoid"),
    ),
    *(
        ("not_equal", "ne"),
        ("less", "lt"),
        ("less_equal", "le"),
        ("greater", "gt"),
        ("greater_equal", "ge"),
    ),
):
    ELEMENTWISE[_alias] = ELEMENTWISE[_name]
for _alias, _name in (
    *(("minimum", "min"), ("maximum", "max")),
    *(
        ("floor_divide", "floordiv"),
        ("bitwise_and", "bitand"),
        ("bitwise_or", "bitor"),
        ("bitwise_xor", "bitxor"),
    ),
    *(("bitwise_left_shift", "lshift"), ("bitwise_right_shift", "rshift")),
):
    ELEMENTWISE[_alias] = (_name, ("input", "other"))
ELEMENTWISE["bitwise_not"] = ("invert", ("input",))
ELEMENTWISE |= {name: (name, function.parameters) for name, function in composed.FUNCTIONS.items()}
for _alias, _name in (
    *(("arccos", "acos"), ("arccosh", "acosh"), ("arcsin", "asin"), ("arcsinh", "asinh")),
    *(("arctan", "atan"), ("arctan2", "atan2"), ("arctanh", "atanh")),
    ("log_sigmoid", "logsigmoid"),
):
    ELEMENTWISE[_alias] = ELEMENTWISE[_name]
DEFAULTS: dict[str, dict[str, float]] = {
    "leaky_relu": {"negative_slope": 0.01},
    "elu": {"alpha": 1.0},
    **{name: function.defaults for name, function in composed.FUNCTIONS.items()},
}
"""Default values of arguments."""

REDUCTIONS = frozenset(
    {
        *("sum", "mean", "prod", "dot", "matmul", "mm", "bmm", "mv", "inner", "outer", "einsum"),
        *("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "argmax", "argmin", "all"),
        *("any", "amax", "amin", "max", "min", "median", "std", "var", "count_nonzero"),
        *("sort", "topk", "unique", "bincount", "gather", "scatter", "index_select"),
        *("searchsorted", "bucketize", "cat", "stack", "nonzero", "vdot", "tensordot", "linear"),
    }
)
RANDOM = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
        *("bernoulli", "normal", "multinomial", "dropout", "random", "choice"),
        *("uniform", "shuffle"),
    }
)
SAME = frozenset(
    {
        *("contiguous", "clone", "cpu", "cuda", "to_dense", "requires_grad_", "share_memory_"),
        *("pin_memory", "expand_as", "positive"),
    }
)
"""Methods that return the object itself."""

NO_GRAD = frozenset({"no_grad", "inference_mode"})
"""Contexts and decorators of torch that disable gradients."""
GRADIENT_MODES = NO_GRAD | {"enable_grad", "set_grad_enabled"}
"""Contexts of torch that enable or disable gradients."""

OF_SEQUENCES = frozenset(
    {
        *("append", "clear", "extend", "insert", "pop", "reverse", "setdefault", "update"),
        *("copy", "get", "items", "keys", "values"),
    }
)
"""Methods of lists and dictionaries that are called directly."""

CHANGING = frozenset(
    (
        "append",
        "clear",
        "extend",
        "insert",
        "pop",
        "remove",
        "reverse",
        "setdefault",
        "sort",
        "update",
    )
)
"""Methods that change a list or a dictionary."""

DTYPES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float64": "fp64",
    "double": "fp64",
    "int32": "int32",
    "int": "int32",
    "int64": "int64",
    "long": "int64",
    "bool": "bool",
    "uint8": "uint8",
    "int16": "int16",
    "short": "int16",
    "int8": "int8",
}
"""kgen's names of torch dtypes."""
ALIASES = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "int": "int32",
    "long": "int64",
    "short": "int16",
}
"""Alternative names of dtypes."""
