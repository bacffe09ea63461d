"""The launcher of norms in CUDA: what `norm.py.j2` says of arguments, of their checks and of those of kernels."""

from __future__ import annotations

from typing import Any

from kgen.expr.nodes import Type
from kgen.kernels.norm.plan.planning import Operand
from kgen.kernels.norm.spec import MAX_WIDTH
from kgen.kernels.norm.targets.cuda.kernels import ORDER, KernelFields
from kgen.kernels.norm.targets.triton.launcher import FP8, norm_derivatives
from kgen.targets import opening
from kgen.targets.arguments import number_fields
from kgen.targets.triton.text import TORCH_DTYPES


def _by_place(loads: list[Operand]) -> list[list[str]]:
    """Their names, by what they vary along."""
    return [[o.name for o in loads if o.along == along] for along in ORDER]


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
            "tensor_names": ", ".join(tensors),
            "scalar_names": ", ".join([*runtime, "eps"]),
            "call_names": ", ".join([*tensors, *runtime, "eps", *save]),
            "input_names": ", ".join([*tensors, *runtime, "eps", *("_" for _ in save)]),
            "output_arguments": ", ".join(["x", *save]),
            "save_words": "; without `save` no statistics, which backward alone needs" if save else "",
            "gradient_operands": [o.name for o in plan.operands if o.grad],
            "operands": [
                {
                    "name": o.name,
                    "torch_dtype": TORCH_DTYPES[o.dtype],
                    "shape": {
                        "element": "x.shape",
                        "row": "x.shape[:-1]",
                        "column": f"x.shape[-{2 if spec.heads else 1}:]",
                    }[o.along],
                    "words": ("[..., H, width]" if spec.heads else "[..., width]")
                    if o.name == "x"
                    else {
                        "element": "as x",
                        "row": "[...]",
                        "column": "[H, width]" if spec.heads else "[width]",
                    }[o.along],
                }
                for o in plan.operands
            ],
            "positional": positional,
            "x_words": "[..., H, width]" if spec.heads else "[..., width]",
            "x_dims": 2 if spec.heads else 1,
            "heads": bool(spec.heads),
            "fixed_heads": spec.heads if isinstance(spec.heads, int) else None,
            "widths": [str(w) for w in ([spec.width] if isinstance(spec.width, int) else spec.width)],
            "fixed_width": spec.width != "any",
            "dtype_words": TORCH_DTYPES[spec.dtypes["input"]],
            "out_dtype": (TORCH_DTYPES | FP8)[spec.dtypes["output"]],
            "h_dtype": TORCH_DTYPES[spec.dtypes["residual"]],
            "stores_h": plan.stores_h,
            "saves": list(plan.saves),
            "save_mean": "mean" in plan.saves,
            "save_rstd": "rstd" in plan.saves,
            "has_backward": plan.backward is not None,
            "max_width": MAX_WIDTH,
            "width_words": " or ".join(map(str, [spec.width] if isinstance(spec.width, int) else spec.width)),
            "variance_words": "variance" if plan.layer else "mean of squares",
            **norm_derivatives(plan),
            **number_fields(self.runtime),
            **self._outputs(),
            **self._forward(),
            **(self._backward() if plan.backward else {}),
        }

    def _outputs(self) -> dict[str, object]:
        """An operator with one output returns a tensor, not a tuple of one."""
        plan = self.plan
        per_row = plan.spec.quantize is not None and plan.spec.quantize.scale == "per_row"
        returned = ["out", *["scale"] * per_row, *["h"] * plan.stores_h]
        names = [*returned, *plan.saves]
        one = len(names) == 1
        return {
            "output_names": names,
            "forward_types": "Tensor" if one else f"tuple[{', '.join(['Tensor'] * len(names))}]",
            "first_of_outputs": "[0]" if one else "",
            "returned": ", ".join(returned),
            "returns_words": self._returns(per_row),
        }

    def _returns(self, per_row: bool) -> str:
        words = ["out"]
        if per_row:
            words.append("scale [..., 1], what out is to be multiplied by")
        if self.plan.stores_h:
            words.append("h, what was normed")
        return " and ".join(words) if len(words) < 3 else f"{words[0]}, {words[1]}, and {words[2]}"

    def _forward(self) -> dict[str, object]:
        loads: list[Operand] = self.forward["loads"]
        elements, columns, rows = _by_place(loads)
        return {
            "forward_elements": elements,
            "forward_columns": columns,
            "forward_rows": rows,
            "forward_vectors": ["out", *columns],
        }

    def _backward(self) -> dict[str, object]:
        plan, b, spec = self.plan, self.plan.backward, self.spec
        assert b is not None
        assert self.backward is not None
        fields = self.backward
        loads: list[Operand] = fields["loads"]
        names = [o.name for o in loads]
        given = [n for n in names if n not in ("dout", "dh_out", "h")]
        optional = [*(["h"] if plan.stores_h else []), *plan.saves]
        params = [
            "dout: Tensor",
            *(["dh_out: Tensor"] if plan.stores_h else []),
            *(f"{n}: Tensor" for n in (*optional, *given)),
        ]
        scalars = [f"{n}: {'int' if p.scalar is Type.INT else 'float'}" for n, p in self.runtime.items()]
        scalars += ["eps: float"] * fields["recomputes"]
        results = [*b.elements, *b.rows, *b.columns]
        returned = {g.of: f"d_{g.of}" for g in results}
        for g in b.gradients:
            if g.same_as is not None:
                returned[g.of] = f"d_{g.same_as}"
        like = {g.of: (g.of if g.of in given else None) for g in results}
        outputs = [
            {
                "name": f"d_{g.of}",
                "like": "dout" if g.along == "element" else g.of,
                "shape": "dout.shape" if g.along == "element" else f"{g.of}.shape",
                "torch_dtype": TORCH_DTYPES[g.dtype],
            }
            for g in results
        ]
        # Gradients of operands that backward does not read have the shape of something that it does read.
        for g, o in zip(results, outputs, strict=True):
            if like[g.of] is None and g.along == "column":
                o["shape"] = "(heads, width)" if spec.heads else "(width,)"
            if like[g.of] is None and g.along == "row":
                o["shape"] = "dout.shape[:-1]"
        elements, columns, rows = _by_place(loads)
        return {
            "backward_params": ", ".join([*params, *scalars]),
            "backward_names": ", ".join([n.split(":")[0] for n in (*params, *scalars)]),
            "backward_given": given,
            "backward_saved": [*(["h"] if plan.stores_h else []), *plan.saves, *given],
            "backward_results": outputs,
            "backward_types": "tuple[" + ", ".join(["Tensor"] * len(outputs)) + "]",
            "gradient_names": [o["name"] for o in outputs],
            "part_names": [f"d_{g.of}_part" for g in b.columns],
            "cotangents": ["dout", *(["dh_out"] if plan.stores_h else []), *(f"_{s}" for s in plan.saves)],
            "backward_elements": elements,
            "backward_columns": columns,
            "backward_rows": rows,
            "column_results": [f"d_{g.of}" for g in b.columns],
            "column_count": len(b.columns),
            "has_columns": bool(b.columns),
            "has_scratch": bool(fields["scratch"]),
            "scratch_count": len(fields["scratch"]),
            "backward_scalars": [*self.runtime, *["eps"] * fields["recomputes"]],
            "gradient_words": ", ".join(g.of for g in results),
            "width_used": any("width" in o["shape"] for o in outputs),
            "heads_used": any("heads" in o["shape"] for o in outputs),
            "first_of_gradients": "[0]" if len(outputs) == 1 else "",
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
