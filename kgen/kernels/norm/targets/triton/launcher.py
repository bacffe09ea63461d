"""The launcher of a norm in Triton: what `_launcher.j2` names, from argument checks to gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kgen.expr.nodes import Const, Node, Type, Var, substitute
from kgen.kernels.norm.plan.planning import NormPlan, Operand
from kgen.targets.arguments import (
    NO_BACKWARD,
    NOT_ASKED_FOR,
    NOT_LEARNED,
    cast_lines,
    dense,
    derivative_fields,
    divisor_lines,
    number_fields,
)
from kgen.targets.triton.text import TORCH_DTYPES, other_dtype

FP8 = {"fp8_e4m3": "float8_e4m3fn"}
HEADS_WIDTH = 2**14
"""The widest row with heads: it is never shared by programs."""


MEANINGS = {
    "x": "the rows to norm",
    "residual": "added to x before the norm",
    "weight": "multiplies the normed rows",
    "bias": "added to the normed rows",
}


def meaning(operand: Operand) -> str:
    """The use of a tensor, for docstrings."""
    return MEANINGS.get(operand.name, "a buffer of the expressions")


def norm_divisors(plan: NormPlan) -> list[str]:
    """The checks of divisors of both expressions."""
    params = plan.spec.params
    numbers: dict[Node, Node] = {
        Var(n, p.scalar): Const(p.value, p.scalar) for n, p in params.items() if p.value is not None
    }
    trees = [substitute(value.tree, numbers) for value in (plan.forward.h, plan.forward.out)]
    return divisor_lines(plan.spec.name, trees, [n for n, p in params.items() if p.runtime])


class NormLauncher:
    """Spells the launcher of one plan."""

    def __init__(self, plan: NormPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.heads = self.spec.heads is not None
        self.runtime = {n: p for n, p in self.spec.params.items() if p.runtime}
        self.scale = bool(self.spec.quantize and self.spec.quantize.scale == "per_tensor")

    def fields(self) -> dict[str, object]:
        """The names that the template uses."""
        spec, plan = self.spec, self.plan
        tensors = [o.name for o in plan.operands] + ["scale"] * self.scale
        scalars = ["eps", *self.runtime]
        types: list[str] = ["float", *(p.type for p in self.runtime.values())]
        positional = [n for n in ("x", "weight", "bias") if n in tensors]
        keywords = [n for n in tensors if n not in positional] + [*self.runtime, f"eps={spec.eps!r}"]
        outputs = self._outputs()
        returned = [o["name"] for o in outputs if o["name"] not in plan.saves]
        learned = " or ".join(f"{o.name}.requires_grad" for o in plan.operands if o.grad)
        needs_grad = f"torch.is_grad_enabled() and (_transformed() or {learned})"
        fields: dict[str, object] = {
            "signature": ", ".join([*positional, "*", *keywords]),
            "usage_args": ", ".join([*positional, *(f"{n}={n}" for n in keywords[:-1])]),
            "op_params": ", ".join(
                [f"{t}: Tensor" for t in tensors] + [f"{n}: {t}" for n, t in zip(scalars, types, strict=True)]
            ),
            "op_names": ", ".join(tensors + scalars),
            "outputs": outputs,
            "output_types": ", ".join(["Tensor"] * len(outputs)),
            "output_names": ", ".join(o["name"] for o in outputs),
            "output_list": [o["name"] for o in outputs],
            "output_rounded": [o["rounded"] for o in outputs],
            "rounds": any(o["rounded"] != o["name"] for o in outputs),
            "returned": ", ".join(returned),
            "returned_words": self._returned(),
            "single": len(returned) == 1,
            "argument_words": self._words(),
            "casts": norm_casts(plan),
            "checks": self._checks(),
            "x_dims": 2 if self.heads else 1,
            "x_words": "[..., H, D]" if self.heads else "[..., D]",
            "input_dtype": TORCH_DTYPES[spec.dtypes["input"]],
            "capability": 89 if spec.quantize else 0,
            "fp8": bool(spec.quantize),
            "forward_rows": self._prepare(plan.forward.loads),
            "rows_words": "[positions, heads, width]" if self.heads else "[rows, width]",
            "eps_default": repr(spec.eps),
            "eps_words": "the variance" if plan.layer else "the mean of squares",
            "save": needs_grad if plan.saves else "False",
            "flags": ["SAVE=save"] if plan.saves else [],
            "dh_out": False,
            **norm_derivatives(plan),
            "dense_check": dense(tensors),
            **number_fields(self.runtime, divisors=norm_divisors(plan)),
        }
        stored = [n for n in ("h", "scale") if n in (*returned, *tensors)]
        pointers = [o.name for o in plan.forward.loads] + ["out", *stored, *plan.saves]
        fields |= self._call("forward", plan.forward.loads, pointers, "x", ["eps"])
        if plan.backward:
            fields |= self._backward(tensors, scalars, types)
        return fields

    def _outputs(self) -> list[dict[str, str]]:
        """What the operator returns: name, shape, dtype, and whether it is only for backward."""
        spec, plan = self.spec, self.plan
        out = spec.dtypes["output"]
        found = [_output("out", "x.shape", (TORCH_DTYPES | FP8)[out], "x")]
        if spec.quantize and spec.quantize.scale == "per_row":
            found.append(_output("scale", "(*x.shape[:-1], 1)", "float32", "x"))
        if plan.stores_h:
            found.append(_output("h", "x.shape", TORCH_DTYPES[spec.dtypes["residual"]], "x"))
        return found + [_output(n, "x.shape[:-1] if save else (0,)", "float32", "x") for n in plan.saves]

    def _returned(self) -> str:
        """What the function returns, in words."""
        spec = self.spec
        shape = "[..., H, D]" if self.heads else "[..., D]"
        dtypes = TORCH_DTYPES | FP8
        words = [f"out {shape} {dtypes[spec.dtypes['output']]}"]
        if spec.quantize and spec.quantize.scale == "per_row":
            words.append("scale [..., 1] float32, what out is to be multiplied by")
        if self.plan.stores_h:
            words.append(f"the sum x + residual {shape} {dtypes[spec.dtypes['residual']]}")
            if spec.input_mod:
                words[-1] = f"h {shape} {dtypes[spec.dtypes['residual']]}"
        return words[0] if len(words) == 1 else f"({'; '.join(words)})"

    def _shape(self, operand: Operand) -> tuple[str, str]:
        """Of an argument other than x: a Python expression, and words."""
        if operand.along == "column":
            return ("x.shape[-2:]", "[H, D]") if self.heads else ("x.shape[-1:]", "[D]")
        if operand.along == "row":
            return "x.shape[:-1]", "[..., H]" if self.heads else "[...]"
        return "x.shape", "[..., H, D]" if self.heads else "[..., D]"

    def _words(self) -> list[str]:
        words = [
            f"{o.name}: {self._shape(o)[1]} {TORCH_DTYPES[o.dtype]}, {meaning(o)}."
            for o in self.plan.operands
        ]
        words[0] = f"{words[0][:-1]}, {self._width_words()}."
        if self.scale:
            words.append("scale: one float32, what the output is divided by.")
        return words + [f"{n}: {p.type}, a parameter of the expressions." for n, p in self.runtime.items()]

    def _width_words(self) -> str:
        width = self.spec.width
        if width == "any":
            return f"D at most {HEADS_WIDTH if self.heads else 2**18}"
        return f"D {width}" if isinstance(width, int) else f"D one of {', '.join(map(str, width))}"

    def _checks(self) -> list[dict[str, str]]:
        spec, width = self.spec, self.spec.width
        checks = []

        def check(wrong: str, message: str, error: str = "ValueError") -> None:
            checks.append({"wrong": wrong, "message": message, "error": error})

        if width == "any":
            most = HEADS_WIDTH if self.heads else 2**18
            check(f"not 1 <= x.shape[-1] <= {most}", f"rows have 1 to {most} elements, got {{x.shape[-1]}}")
        else:
            widths = (width,) if isinstance(width, int) else width
            words = " or ".join(map(str, widths))
            wrong = f"x.shape[-1] != {width}" if isinstance(width, int) else f"x.shape[-1] not in {widths}"
            check(wrong, f"rows have {words} elements, got {{x.shape[-1]}}")
        if isinstance(spec.heads, int):
            check(f"x.shape[-2] != {spec.heads}", f"x must have {spec.heads} heads, got {{x.shape[-2]}}")
        for o in self.plan.operands[1:]:
            shape, words = self._shape(o)
            self._check_dtype(check, o.name, o.dtype)
            got = f"got {{list({o.name}.shape)}} on {{{o.name}.device}}"
            check(
                f"{o.name}.shape != {shape} or {o.name}.device != x.device",
                f"{o.name} must be {{list({shape})}} on {{x.device}}, {got}",
            )
        if self.scale:
            self._check_dtype(check, "scale", "fp32")
            check("scale.numel() != 1 or scale.device != x.device", "scale must be one number on {x.device}")
        return checks

    def _check_dtype(self, check: Callable[..., None], name: str, dtype: str) -> None:
        words = f"{name} must be a tensor of {TORCH_DTYPES[dtype]}, got {{_dtype({name})}}"
        check(other_dtype(name, [dtype]), words, "TypeError")

    # --- calls of kernels ---

    def _prepare(self, loads: Iterable[Operand]) -> list[str]:
        """Lines that make arguments what kernels take: rows for elements, no gaps for the others."""
        lines = [f"{o.name} = _rows({o.name})" for o in loads if o.along == "element"]
        return lines + [f"{o.name} = {o.name}.contiguous()" for o in loads if o.along != "element"]

    def _call(
        self, kernel: str, loads: tuple[Operand, ...], pointers: list[str], first: str, scalars: list[str]
    ) -> dict[str, object]:
        """Arguments of a kernel in the order of its parameters; `first` is a tensor of rows."""
        dims = 2 if self.heads else 1
        # A gradient that is not there has strides that nobody reads.
        there = {"dh_out": "(dout if dh_out is None else dh_out)"}
        strides = [f"*{there.get(o.name, o.name)}.stride()[:{dims}]" for o in loads if o.along == "element"]
        sizes = (
            [f"*{first}.shape[:2]"]
            if self.heads
            else [f"{first}.shape[0]", f"_slots(groups, constants, {first}.device)"]
        )
        return {
            f"{kernel}_pointers": ", ".join(pointers),
            f"{kernel}_strides": ", ".join(strides),
            f"{kernel}_scalars": ", ".join([*self.runtime, *scalars, *sizes]),
        }

    def _backward(self, tensors: list[str], scalars: list[str], types: list[str]) -> dict[str, object]:
        plan, backward = self.plan, self.plan.backward
        assert backward is not None
        saved = [o.name for o in backward.loads] + list(plan.saves)
        first = next(o.name for o in backward.loads if o.along == "element")
        upstream = [o.name for o in plan.upstream]
        loads = (*backward.loads, *plan.upstream)
        grads = [*backward.elements, *backward.rows, *backward.columns]
        sums = [g.name for g in backward.columns]
        shapes = {
            "element": "shape",
            "row": "shape[:-1]",
            "column": "shape[-2:]" if self.heads else "shape[-1:]",
        }
        params = ["dout: Tensor"] + ["dh_out: Optional[Tensor]"] * plan.stores_h
        # Backward needs eps only to compute the statistics again.
        needed = [(n, t) for n, t in zip(scalars, types, strict=True) if n != "eps" or not plan.saves]
        params += [f"{n}: Tensor" for n in saved] + [f"{n}: {t}" for n, t in needed]
        given = {g.of: g.name if g.same_as is None else f"d{g.same_as}" for g in backward.gradients}
        rows = self._prepare([o for o in loads if o.name != "dh_out"])
        if plan.stores_h:
            rows.append("dh_out = None if dh_out is None else _rows(dh_out)")
        pointers = [o.name for o in loads] + list(plan.saves)
        pointers += [f"{g.name}_parts" if g.name in sums else g.name for g in grads]
        return self._call("backward", loads, pointers, first, [] if plan.saves else ["eps"]) | {
            "first": first,
            "backward_params": ", ".join(params),
            "backward_names": ", ".join([*upstream, *saved, *(n for n, _ in needed)]),
            "saved_names": saved,
            "upstream_names": ", ".join([*upstream, *(["*_"] if plan.saves else [])]),
            "dh_out": plan.stores_h,
            "kept_scalars": ", ".join(n for n, _ in needed),
            "input_names": ", ".join([*tensors, *scalars]),
            "gradients": [_output(g.name, shapes[g.along], TORCH_DTYPES[g.dtype], first) for g in grads],
            "gradient_rounded": [_output(g.name, "", TORCH_DTYPES[g.dtype], first)["rounded"] for g in grads],
            "rounds": "bf16" in [*self.spec.dtypes.values(), *(g.dtype for g in grads)],
            "gradient_types": ", ".join(["Tensor"] * len(grads)),
            "gradient_list": [g.name for g in grads],
            "gradient_returns": ", ".join(
                [*(given.get(n, "None") for n in tensors), *("None" for _ in scalars)]
            ),
            "backward_rows": rows,
            "partial_sums": sums,
            "finalize_size": sums[0] if sums else "",
            "finalize_args": ", ".join([*(f"{n}_parts" for n in sums), *sums]),
            "out_dtype": TORCH_DTYPES[self.spec.dtypes["output"]],
        }


def norm_casts(plan: NormPlan) -> list[str]:
    """The lines that cast arguments under autocast."""
    dtypes = {o.name: o.dtype for o in plan.operands if o.type is Type.FLOAT}
    if plan.spec.quantize and plan.spec.quantize.scale == "per_tensor":
        dtypes["scale"] = "fp32"
    return cast_lines({name: f"torch.{TORCH_DTYPES[dtype]}" for name, dtype in dtypes.items()})


def norm_derivatives(plan: NormPlan) -> dict[str, object]:
    """Which arguments have a gradient, and why others have none."""
    spec = plan.spec
    real = {o.name: o.grad for o in plan.operands if o.type is Type.FLOAT}
    if spec.quantize and spec.quantize.scale == "per_tensor":
        real["scale"] = False
    if plan.backward:
        refused = {n: NOT_LEARNED for n, grad in real.items() if not grad}
    else:
        refused = dict.fromkeys(real, NO_BACKWARD if spec.quantize else NOT_ASKED_FOR)
    return derivative_fields(real, refused, derived=plan.backward is not None)


def _output(name: str, shape: str, dtype: str, like: str) -> dict[str, str]:
    """A tensor that a kernel writes: its allocation, and what is returned of it."""
    narrow = dtype in ("bfloat16", *FP8.values())
    stored = f"_stored(torch.{dtype}, {like}.device)" if narrow else f"torch.{dtype}"
    return {
        "name": name,
        "shape": shape,
        "dtype": dtype,
        "empty": f"{like}.new_empty({shape}, dtype={stored})",
        "rounded": f"{name}.to(torch.{dtype})" if narrow else name,
    }
