"""Torch's pointwise functions: calls of each function that kgen reads, and the reasons for the
others.

In calls, `s` is the score and `t` a real number of a tensor. `n` is an integer, `m` a non-negative
integer, and `c` a truth value.
"""

from __future__ import annotations

UNARY = (
    *(
        "abs",
        "acos",
        "acosh",
        "angle",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "ceil",
        "cos",
        "cosh",
        "deg2rad",
    ),
    *("erf", "exp", "exp2", "expm1", "floor", "frac", "isfinite", "isinf", "isnan", "isneginf"),
    *("isposinf", "log", "log10", "log1p", "log2", "logical_not", "neg", "positive", "rad2deg"),
    *("reciprocal", "relu", "rsqrt", "sgn", "sigmoid", "sign", "signbit", "sin", "sinc", "sinh"),
    *("sqrt", "square", "tan", "tanh", "trunc", "conj_physical"),
)
"""Functions of one number, `torch.name(s)`."""
BINARY = (
    *("add", "atan2", "copysign", "div", "eq", "fmax", "fmin", "ge", "gt", "hypot", "le", "ldexp"),
    *(
        "logaddexp",
        "logaddexp2",
        "logical_and",
        "logical_or",
        "logical_xor",
        "lt",
        "maximum",
        "minimum",
    ),
    *("mul", "ne", "sub", "true_divide", "xlogy", "heaviside"),
)
"""Functions of two numbers, `torch.name(s, t)`."""
ACTIVATIONS = (
    *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu"),
    *(
        "logsigmoid",
        "mish",
        "relu6",
        "selu",
        "silu",
        "softplus",
        "softshrink",
        "softsign",
        "tanhshrink",
    ),
    "rrelu",
)
"""Functions of one number, `torch.nn.functional.name(s)`."""
SPECIAL = ("entr", "expit", "erfc", "erfcx", "ndtr", "log_ndtr")
"""Functions of one number, `torch.special.name(s)`."""
OTHERS: dict[str, tuple[str, ...]] = {
    "addcdiv": ("torch.addcdiv(s, t, s)", "torch.addcdiv(s, t, s, value=0.5)"),
    "addcmul": ("torch.addcmul(s, t, s)", "torch.addcmul(s, t, s, value=0.5)"),
    "bitwise_and": ("torch.bitwise_and(n, m)",),
    "bitwise_left_shift": ("torch.bitwise_left_shift(n, m % 5)",),
    "bitwise_not": ("torch.bitwise_not(n)", "torch.bitwise_not(c)"),
    "bitwise_or": ("torch.bitwise_or(n, m)",),
    "bitwise_right_shift": ("torch.bitwise_right_shift(n, m % 5)",),
    "bitwise_xor": ("torch.bitwise_xor(n, m)", "torch.bitwise_xor(c, n > 1)"),
    "clamp": (
        "torch.clamp(s, -1.5, 2)",
        "torch.clamp(s, max=t)",
        "torch.clamp(n, min=-2)",
        "s.clamp(0, 1)",
    ),
    "clip": ("torch.clip(s, -1, 1)", "s.clip(max=2)"),
    "max": ("torch.max(s, t)",),
    "min": ("torch.min(s, t)",),
    "clamp_max": ("torch.clamp_max(s, 1.5)", "n.clamp_max(m)"),
    "clamp_min": ("torch.clamp_min(s, 1.5)", "s.clamp_min(t)", "n.clamp_min(0)"),
    "clone": ("s.clone()",),
    "float_power": ("torch.float_power(n, 2)", "torch.float_power(s, 3)"),
    "fmod": ("torch.fmod(s, 2.5)", "torch.fmod(n, 3)", "torch.fmod(n, -3)", "torch.fmod(t, inf)"),
    "lerp": ("torch.lerp(s, t, 0.25)",),
    "logit": ("torch.logit(s)", "torch.logit(s, eps=0.01)", "torch.special.logit(s, None)"),
    "masked_fill": ("s.masked_fill(c, -1.5)",),
    "nan_to_num": (
        "torch.nan_to_num(s, posinf=5.0, neginf=-5.0)",
        "s.nan_to_num(1.5, 7, -7)",
        "torch.nan_to_num(n)",
        "torch.nan_to_num(s).clamp(-1e30, 1e30)",
    ),
    "pow": ("torch.pow(s, 2)", "torch.pow(s, 3)", "torch.pow(s, 0.5)", "torch.pow(2, t)"),
    "remainder": ("torch.remainder(s, 2.5)", "torch.remainder(n, 3)", "torch.remainder(t, inf)"),
    "round": (
        "torch.round(s)",
        "torch.round(s, decimals=1)",
        "torch.round(s, decimals=-1)",
        "n.round()",
    ),
    "rsub": ("torch.rsub(s, t)", "torch.rsub(s, 2.0, alpha=3)"),
    "threshold": ("torch.nn.functional.threshold(s, 0.5, -3.0)",),
    "where": ("torch.where(c, s, t)", "torch.where(c, n, 0.5)"),
    "xlog1py": ("torch.special.xlog1py(s, t)",),
    "floor_divide": ("torch.floor_divide(n, 3)", "torch.div(n, 3, rounding_mode='trunc')"),
}
MORE: dict[str, tuple[str, ...]] = {
    "add": ("torch.add(s, t, alpha=0.5)", "torch.add(n, m)"),
    "sub": ("torch.sub(s, t, alpha=2)",),
    "atan": ("torch.arctan(n)", "n.atan()"),
    "atan2": ("torch.arctan2(n, m)",),
    "celu": ("torch.nn.functional.celu(s, 0.5)",),
    "elu": ("torch.nn.functional.elu(s, 2.0)",),
    "gelu": ("torch.nn.functional.gelu(s, approximate='tanh')",),
    "hardshrink": ("torch.nn.functional.hardshrink(s, lambd=1.5)",),
    "hardtanh": (
        "torch.nn.functional.hardtanh(s, -2.0, 0.5)",
        "torch.nn.functional.hardtanh(s, max_val=3)",
    ),
    "heaviside": ("torch.heaviside(s, torch.tensor(0.5))",),
    "leaky_relu": ("torch.nn.functional.leaky_relu(s, 0.2)",),
    "log10": ("torch.log10(m)",),
    "signbit": ("torch.signbit(n)",),
    "isnan": ("torch.isnan(n)",),
    "isfinite": ("torch.isfinite(n)",),
    "softplus": (
        "torch.nn.functional.softplus(s, beta=2)",
        "torch.nn.functional.softplus(s, 0.5, threshold=3)",
    ),
    "softshrink": ("torch.nn.functional.softshrink(s, 1.5)",),
    "copysign": ("torch.copysign(s, n)",),
    "erfc": ("torch.erfc(s)",),
}
"""Other calls of functions that are listed above."""

SERIES = ("erfc", "erfcx", "ndtr", "log_ndtr")
"""Functions computed as a series with the accuracy of float32, in float64 as well."""

REFUSED = {
    **dict.fromkeys(
        (
            *("digamma", "erfinv", "i0", "igamma", "igammac", "lgamma", "mvlgamma", "polygamma"),
            *("special_airy_ai", "special_bessel_j0", "special_bessel_j1", "special_bessel_y0"),
            *("special_bessel_y1", "special_i0e", "special_i1", "special_i1e", "special_ndtri"),
            *(
                "special_modified_bessel_i0",
                "special_modified_bessel_i1",
                "special_modified_bessel_k0",
            ),
            *("special_modified_bessel_k1", "special_scaled_modified_bessel_k0", "special_zeta"),
            *("special_scaled_modified_bessel_k1", "special_spherical_bessel_j0"),
        ),
        "specs have no such function: put its values into a tensor",
    ),
    **{
        f"special_{name}_polynomial_{letter}": "the degree of the polynomial depends on the pair"
        for name, letters in {
            "chebyshev": "tuvw",
            "shifted_chebyshev": "tuvw",
            "hermite": ("h", "he"),
            "laguerre": "l",
            "legendre": "p",
        }.items()
        for letter in letters
    },
    "gcd": "the number of loop iterations depends on the values",
    "lcm": "the number of loop iterations depends on the values",
    "frexp": "it has two results",
    "nextafter": "its step depends on the dtype, and kernels compute in fp32",
    "glu": "it splits a dimension into halves",
}
"""The reason why kgen refuses each of the others."""
INTERNAL = ("native_dropout_backward", "equal")
"""Internal names of torch, besides the names that end in `_backward`."""


def calls() -> list[str]:
    """Every call."""
    listed = [
        *(f"torch.{name}(s)" for name in UNARY),
        *(f"torch.{name}(s, t)" for name in BINARY),
        *(f"torch.nn.functional.{name}(s)" for name in ACTIVATIONS),
        *(f"torch.special.{name}(s)" for name in SPECIAL),
    ]
    return listed + [call for row in (*OTHERS.values(), *MORE.values()) for call in row]


def refused() -> list[str]:
    """A call of each function that is refused."""
    packages = {"glu": "nn.functional."}
    return [
        f"torch.{packages.get(name, '')}{name.replace('special_', 'special.', 1)}(s, t)"
        for name in REFUSED
    ]


def accepted() -> set[str]:
    """The names of functions that are read."""
    return {*UNARY, *BINARY, *ACTIVATIONS, *SPECIAL, *OTHERS}
