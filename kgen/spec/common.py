"""Fields that the specs of all families share: names, texts in emitted source, element types,
parameters.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kgen.diagnostics import shown
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var
from kgen.expr.parse import FLOAT32_MAX, INT32
from kgen.spec.problems import SpecModel, all_known, problem
from kgen.spec.user_text import UserText

ELEMENTS = {
    "fp32": Type.FLOAT,
    "bf16": Type.FLOAT,
    "fp16": Type.FLOAT,
    "int32": Type.INT,
    "int64": Type.LONG,
    "uint8": Type.INT,
    "bool": Type.BOOL,
}

MAX_RANK = 4
"""Largest number of dimensions of a buffer."""
REALS = ("fp32", "bf16", "fp16")
"""The dtypes that a tensor may have for a buffer with `dtype: any`."""

ELSEWHERE = frozenset(
    {
        # Arguments of every launch in Triton, and of the function that Triton generates to bind
        # them.
        *("debug", "instrumentation_mode", "launch_cooperative_grid", "launch_pdl", "maxnreg"),
        *("num_ctas", "num_stages", "num_warps"),
        *("backend", "options", "params", "specialize_impl"),
        # An attribute of every torch.ops namespace, and a package that emitted files import.
        *("name", "cuda"),
    }
)
"""Names with a meaning outside emitted files. `kgen.spec.names` has the names that are in the
files.
"""


def checked_name(name: str) -> str:
    """Return a name that emitted source can use: lower_snake_case, no keyword, builtin or function.

    Raises `bad-name` or `reserved-name`.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > 60:
        hint = "use lower-case letters, digits and single underscores, a letter first"
        raise problem("bad-name", f"{shown(name)} is not a lower_snake_case name", hint)
    return _free_name(name)


def checked_own_name(name: str) -> str:
    """Return the name of a buffer or parameter, in any case: `DOC`, `offsets_T`. Raises as
    `checked_name`.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*", name) or len(name) > 60:
        hint = "use letters, digits and single underscores, a letter first"
        raise problem("bad-name", f"{shown(name)} is not a name in snake_case", hint)
    return _free_name(name)


def _free_name(name: str) -> str:
    if keyword.iskeyword(name) or hasattr(builtins, name):
        raise problem("reserved-name", f"`{name}` is a name of Python", "choose another name")
    if name in TABLE:
        raise problem(
            "reserved-name", f"`{name}` is a function of expressions", "choose another name"
        )
    if name in ELSEWHERE:
        message = f"`{name}` is a name of Triton, PyTorch or CUDA"
        raise problem("reserved-name", message, "choose another name")
    return name


def _checked_summary(summary: UserText) -> UserText:
    # The summary is in a comment or docstring of every emitted file, in Python and in C++.
    text = summary.written.strip()
    if not text.isprintable() or any(mark in text for mark in ('"""', "\\", "*/")):
        hint = "write one line of plain text, without `\\`, `*/` or three quotes in a row"
        raise problem("bad-summary", "a comment cannot contain this summary", hint)
    if len(text) > 200:
        raise problem(
            "bad-summary", f"the summary has {len(text)} characters, the limit is 200", "shorten it"
        )
    return UserText(text)


def _checked_license(spdx: UserText) -> UserText:
    text = spdx.written
    identifier = r"[A-Za-z0-9][A-Za-z0-9.+-]*"
    if not re.fullmatch(rf"{identifier}( (AND|OR|WITH) {identifier})*", text) or len(text) > 100:
        hint = "see https://spdx.org/licenses, for example `Apache-2.0` or `MIT OR Apache-2.0`"
        raise problem("bad-license", f"{shown(text)} is not an SPDX license identifier", hint)
    return spdx


def _checked_text(value: Any) -> Any:
    if value is None:
        hint = "write it after the colon, or remove the key"
        raise problem("empty-expression", "the expression is empty", hint)
    if isinstance(value, bool | int | float):
        raise problem(
            "wrong-type", f"an expression must be text, not {shown(value)}", "put quotes around it"
        )
    return value


def refuse(reserved: Collection[str]) -> Callable[[str], str]:
    """Return a check that raises `reserved-name` for a name in `reserved`, which the kernels of a
    family use.
    """

    def check(name: str) -> str:
        if name in reserved:
            raise problem(
                "reserved-name", f"`{name}` already has a meaning in kernels", "choose another name"
            )
        return name

    return check


Summary = Annotated[UserText, AfterValidator(_checked_summary)]
License = Annotated[UserText, AfterValidator(_checked_license)]
Expression = Annotated[UserText | None, BeforeValidator(_checked_text)]


def is_integer(value: Any) -> bool:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


class ParamSpec(SpecModel):
    """A scalar that expressions use by name: a compile-time constant, or an argument of every
    call.
    """

    type: Annotated[Literal["int", "float"], Field(examples=["float"])]
    """The type in expressions."""
    value: int | float | None = None
    """The value of a compile-time parameter."""
    runtime: bool = False
    """True: every call passes the value."""

    @property
    def scalar(self) -> Type:
        """The type in expressions."""
        return Type.INT if self.type == "int" else Type.FLOAT

    @model_validator(mode="after")
    def _check(self) -> ParamSpec:
        if self.runtime and self.value is not None:
            message = "a run-time parameter has no value in the spec"
            raise problem(
                "bad-param", message, "remove `value` or `runtime`", at=("value",), key=True
            )
        if not self.runtime and self.value is None:
            raise problem(
                "bad-param",
                "the parameter has no value",
                "write its number, or add `runtime: true`",
            )
        if self.value is not None and self.type == "int" and not isinstance(self.value, int):
            raise problem(
                "wrong-type", f"{self.value} is not an integer", "use `type: float`", at=("value",)
            )
        return self


def number_or_param(value: Any) -> Any:
    """Return the mapping of a parameter: a number stands for a compile-time constant. Raise for
    other values.
    """
    number = value.get("value") if isinstance(value, dict) else value
    if isinstance(number, int | float) and not isinstance(number, bool):
        if (isinstance(number, int) and number not in INT32) or not abs(number) <= FLOAT32_MAX:
            at = ("value",) if isinstance(value, dict) else ()
            message = f"{shown(number)} does not fit in 32 bits"
            raise problem(
                "literal-range", message, "integers are int32, real numbers are float32", at=at
            )
        if not isinstance(value, dict):
            return {"type": "int" if isinstance(number, int) else "float", "value": number}
    if isinstance(value, dict | ParamSpec):
        return value
    hint = "write a number, or `{type: float, runtime: true}`"
    raise problem(
        "wrong-type", f"a parameter must be a number or a mapping, not {shown(value)}", hint
    )


def compiled_in(params: Mapping[str, ParamSpec]) -> dict[str, int | float]:
    """Return the values of compile-time parameters, by name."""
    return {name: param.value for name, param in params.items() if param.value is not None}


def numbers(params: Mapping[str, ParamSpec]) -> dict[Node, Node]:
    """Return the same values as trees, by the variables that they replace."""
    return {
        Var(name, param.scalar): Const(param.value, param.scalar)
        for name, param in params.items()
        if param.value is not None
    }


def checked_passes(supported: tuple[str, ...]) -> Callable[[Any], Any]:
    """Return a check of `passes`: each name once, in the order of `supported`, including
    `forward`.
    """

    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        all_known(value, supported, "unknown-pass", "pass")
        if "forward" not in value:
            raise problem(
                "missing-pass", "`passes` needs `forward`", "write `passes: [forward, backward]`"
            )
        if list(value) != [name for name in supported if name in value]:
            hint = f"write `[{', '.join(name for name in supported if name in value)}]`"
            raise problem("bad-value", "`passes` names each pass once, forward first", hint)
        return value

    return check


def taken_names(name: str, sections: Mapping[str, Collection[str]]) -> None:
    """Raise `name-taken` if a name of a section is `name` or a name of an earlier section.

    Sections are `buffers` and `params`; `name` is the name of the spec.
    """
    taken = {name: "the kernel"}
    for section, names in sections.items():
        for n in names:
            if n in taken:
                message = f"`{n}` is already the name of {taken[n]}"
                raise problem(
                    "name-taken", message, "choose another name", at=(section, n), key=True
                )
        taken |= dict.fromkeys(names, f"a {section.removesuffix('s')}")


def differentiable(node: Node) -> frozenset[str]:
    """Return the buffers and scalars in which the value is differentiable.

    A condition, an index, or a function with derivative zero does not count.
    """
    if isinstance(node, Read | Var) and node.type is Type.FLOAT:
        return frozenset({node.buffer if isinstance(node, Read) else node.name})
    if isinstance(node, Call) and TABLE[node.fn].derivative is not None:
        return frozenset().union(*(differentiable(a) for a in node.args if a.type is Type.FLOAT))
    return frozenset()


Param = Annotated[
    ParamSpec, BeforeValidator(number_or_param, json_schema_input_type=int | float | ParamSpec)
]
