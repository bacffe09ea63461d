"""The launcher of norms in CUDA: what `norm.py.j2` says of arguments, of their checks and of those of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kgen.expr.nodes import Type
from kgen.kernels.norm.plan.planning import Operand
from kgen.kernels.norm.spec import MAX_WIDTH
from kgen.kernels.norm.targets.cuda.kernels import KernelFields
from kgen.kernels.norm.targets.triton.launcher import (
    FP8,
    meaning,
    norm_casts,
    norm_derivatives,
    norm_divisors,
)
from kgen.targets import opening
from kgen.targets.arguments import dense, numbers_of
from kgen.targets.triton.text import TORCH_DTYPES


def _prepared(loads: Sequence[Operand]) -> list[str]:
    """Lines that make arguments what kernels take: rows for elements, no gaps for the others."""
    made = (f"_flat({o.name})" if o.along == "element" else f"{o.name}.contiguous()" for o in loads)
    return [f"{o.name} = {value}" for o, value in zip(loads, made, strict=True)]


def _along(loads: Sequence[Operand], along: str) -> list[str]:
    return [o.name for o in loads if o.along == along]


def _empty(shape: str, dtype: str, like: str) -> str:
    return f"torch.empty({shape}, dtype=torch.{dtype}, device={like}.device)"


class LauncherFields:
    """What `norm.py.j2` says: arguments, their checks, and the arguments of the kernels."""

    def __init__(
        self, kernels: KernelFields, forward: dict[str, Any], backward: dict[str, Any] | None
    ) -> None:
        self.plan, self.spec, self.runtime = kernels.plan, kernels.spec, kernels.runtime
        self.forward, self.backward = forward, backward

    def fields(self) -> dict[str, object]:
        """Every name of the template that kernels do not use."""
        plan, spec = self.plan, self.spec
        runtime = list(self.runtime)
        positional = [o.name for o in plan.operands if o.name in ("x", "weight", "bias")]
        keyword = [o.name for o in plan.operands if o.name not in positional]
        # One number for the whole output; a scale for each row is an output itself.
        scale = ["scale"] if spec.quantize and spec.quantize.scale == "per_tensor" else []
        keyword += scale
        tensors = [*(o.name for o in plan.operands), *scale]
        scalars = [f"{n}: {'int' if p.scalar is Type.INT else 'float'}" for n, p in self.runtime.items()]
        keywords = [*keyword, *runtime, f"eps={spec.eps!r}"]
        save = ["save"] if plan.saves else []
        return {
            "summary_line": opening(spec),
            "signature": ", ".join([*positional, "*", *keywords]),
            "usage": ", ".join([*positional, *(f"{n}={n}" for n in (*keyword, *runtime))]),
            "tensor_params": ", ".join(
                [*(f"{n}: Tensor" for n in tensors), *scalars, "eps: float", *(f"{n}: bool" for n in save)]
            ),
            "call_names": ", ".join([*tensors, *runtime, "eps", *save]),
            "input_names": ", ".join([*tensors, *runtime, "eps", *("_" for _ in save)]),
            "output_arguments": ", ".join(["x", *save]),
            "save_words": "; without `save` no statistics, which backward alone needs" if save else "",
            "gradient_operands": [o.name for o in plan.operands if o.grad],
            "operands": [
                *((o.name, TORCH_DTYPES[o.dtype], self._shape(o)) for o in plan.operands),
                *((n, "float32", "()") for n in scale),
            ],
            "argument_words": [
                *(
                    f"{o.name}: {self._words(o)} {TORCH_DTYPES[o.dtype]}, {meaning(o)}."
                    for o in plan.operands
                ),
                *(f"{n}: one float32, what the output is divided by." for n in scale),
                *(f"{n}: {p.type}, a parameter of the expressions." for n, p in self.runtime.items()),
            ],
            "checks": self._checks(),
            "x_words": "[..., H, width]" if spec.heads else "[..., width]",
            "x_dims": 2 if spec.heads else 1,
            "heads": bool(spec.heads),
            "sizes": "heads, width" if spec.heads else "width",
            "sizes_at": "-2:" if spec.heads else "-1",
            "saves": bool(plan.saves),
            "dtype_words": TORCH_DTYPES[spec.dtypes["input"]],
            "out_dtype": (TORCH_DTYPES | FP8)[spec.dtypes["output"]],
            "stores_h": plan.stores_h,
            "has_backward": plan.backward is not None,
            "forward_prepared": _prepared(self.forward["loads"]),
            "forward_elements": _along(self.forward["loads"], "element"),
            "forward_vectors": ["out", *_along(self.forward["loads"], "column")],
            "eps_default": repr(spec.eps),
            "variance_words": "variance" if plan.layer else "mean of squares",
            "casts": norm_casts(plan),
            "derivatives": norm_derivatives(plan),
            "dense_check": dense(tensors),
            "numbers": numbers_of(self.runtime, divisors=norm_divisors(plan)),
            **self._outputs(),
            **(self._backward() if plan.backward else {}),
        }

    def _shape(self, operand: Operand) -> str:
        """The shape of an argument, in Python."""
        dims = 2 if self.spec.heads else 1
        return {"element": "x.shape", "row": "x.shape[:-1]", "column": f"x.shape[-{dims}:]"}[operand.along]

    def _words(self, operand: Operand) -> str:
        """The same in words."""
        heads = "H, " if self.spec.heads else ""
        if operand.name == "x":
            return f"[..., {heads}width]"
        return {"element": "as x", "row": "[...]", "column": f"[{heads}width]"}[operand.along]

    def _checks(self) -> list[dict[str, str]]:
        """Of the shape of x: what would be wrong, and what it has to be."""
        width, heads = self.spec.width, self.spec.heads
        if width == "any":
            wrong, words = f"not 1 <= x.shape[-1] <= {MAX_WIDTH}", f"1 to {MAX_WIDTH}"
        else:
            widths = [width] if isinstance(width, int) else width
            wrong, words = f"x.shape[-1] not in {tuple(widths)}", " or ".join(map(str, widths))
        checks = [{"wrong": wrong, "message": f"rows of x must have {words} elements, got {{x.shape[-1]}}"}]
        if isinstance(heads, int):
            wrong, message = f"x.shape[-2] != {heads}", f"x must have {heads} heads, got {{x.shape[-2]}}"
            checks.append({"wrong": wrong, "message": message})
        return checks

    def _outputs(self) -> dict[str, object]:
        """An operator with one output returns a tensor, not a tuple of one."""
        plan = self.plan
        per_row = plan.spec.quantize is not None and plan.spec.quantize.scale == "per_row"
        returned = ["out", *["scale"] * per_row, *["h"] * plan.stores_h]
        names = [*returned, *plan.saves]
        one = len(names) == 1
        dtypes = TORCH_DTYPES | FP8
        shapes = {
            "out": ("x.shape", dtypes[plan.spec.dtypes["output"]]),
            "scale": ("(*x.shape[:-1], 1)", "float32"),
            "h": ("x.shape", dtypes[plan.spec.dtypes["residual"]]),
            **dict.fromkeys(plan.saves, ("x.shape[:-1] if save else 0", "float32")),
        }
        return {
            "output_names": names,
            "outputs": [_empty(*shapes[n], "x") for n in names],
            "forward_types": "Tensor" if one else f"tuple[{', '.join(['Tensor'] * len(names))}]",
            "first_of_outputs": "[0]" if one else "",
            "returned": ", ".join(returned),
            "returns_words": self._returns(per_row),
        }

    def _returns(self, per_row: bool) -> str:
        words = ["out, shaped as x"]
        if per_row:
            words.append("scale [..., 1] float32, what out is to be multiplied by")
        if self.plan.stores_h:
            words.append("h, the normed sum, shaped as x")
        return words[0] if len(words) == 1 else f"({'; '.join(words)})"

    def _backward(self) -> dict[str, object]:
        plan, b, spec = self.plan, self.plan.backward, self.spec
        assert b is not None
        assert self.backward is not None
        fields = self.backward
        loads: list[Operand] = fields["loads"]
        names = [o.name for o in loads]
        given = [n for n in names if n not in ("dout", "dh_out", "h")]
        optional = [*(["h"] if plan.stores_h else []), *plan.saves]
        tensors = ["dout", *(["dh_out"] if plan.stores_h else []), *optional, *given]
        types = dict.fromkeys(tensors, "Tensor")
        types |= {n: "int" if p.scalar is Type.INT else "float" for n, p in self.runtime.items()}
        types |= {"eps": "float"} if fields["recomputes"] else {}
        results = [*b.elements, *b.rows, *b.columns]
        returned = {g.of: f"d_{g.of}" for g in results}
        for g in b.gradients:
            if g.same_as is not None:
                returned[g.of] = f"d_{g.same_as}"
        # Every gradient has the shape of dout, or of dout without what it is summed over.
        dims = 2 if spec.heads else 1
        shapes = {"element": "dout.shape", "row": "dout.shape[:-1]", "column": f"dout.shape[-{dims}:]"}
        return {
            "backward_params": ", ".join(f"{n}: {of}" for n, of in types.items()),
            "backward_names": ", ".join(types),
            "backward_saved": [*(["h"] if plan.stores_h else []), *plan.saves, *given],
            "gradients": [_empty(shapes[g.along], TORCH_DTYPES[g.dtype], "dout") for g in results],
            "backward_types": "tuple[" + ", ".join(["Tensor"] * len(results)) + "]",
            "gradient_names": [f"d_{g.of}" for g in results],
            "part_names": [f"d_{g.of}_part" for g in b.columns],
            "cotangents": ["dout", *(["dh_out"] if plan.stores_h else []), *(f"_{s}" for s in plan.saves)],
            "backward_prepared": _prepared(loads),
            "backward_elements": _along(loads, "element"),
            "backward_columns": _along(loads, "column"),
            "column_results": [f"d_{g.of}" for g in b.columns],
            "column_count": len(b.columns),
            "has_columns": bool(b.columns),
            "has_scratch": bool(fields["scratch"]),
            "scratch_count": len(fields["scratch"]),
            "backward_scalars": [*self.runtime, *["eps"] * fields["recomputes"]],
            "gradient_words": ", ".join(g.of for g in results),
            "first_of_gradients": "[0]" if len(results) == 1 else "",
            "parts_factor": "shape.rows" if spec.heads else None,
            "share_rows": "(64 * heads)" if spec.heads else "64",
            "heads_factor": "heads" if spec.heads else None,
            "heads_or_one": "heads" if spec.heads else "1",
            "shape_source": "h"
            if plan.stores_h
            else next(o.name for o in loads if o.along == "element" and o.name != "dout"),
            "returns": ", ".join(
                [
                    *(returned.get(o.name, "None") for o in plan.operands),
                    *(["None"] * (len(self.runtime) + (2 if plan.saves else 1))),
                ]
            ),
        }
