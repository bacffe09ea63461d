"""The example of a norm from C++: what `templates/norm/c/example.cpp.j2` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kgen.expr.nodes import variables
from kgen.kernels.norm.plan.planning import NormPlan
from kgen.spec.load import Loaded
from kgen.targets.native_reference import dtype_of, in_cpp, spelled

Fields = dict[str, Any]
ROWS, INTEGER, REAL = 37, 3, 0.5
"""Rows and run-time params that the example takes."""
ERRORS = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4, "fp8_e4m3": 7e-2}
"""Of the largest number."""


def norm_example(
    loaded: Loaded, plan: NormPlan, context: Mapping[str, Any], sizes: Mapping[str, Sequence[int]]
) -> Fields:
    """Sizes, what is drawn, and the spec's expressions as they were written. Raises `KgenError` for a function that
    C++ has no spelling of here."""
    spec = loaded.spec
    width, heads = _row(spec, sizes)
    along = {o.name: o.along for o in plan.operands}
    called = {t["name"]: t["member"] for t in context["inputs"]}
    values = [*along, "y"]
    names = {name: f"at.{name}_" for name in values}
    for name, param in spec.params.items():
        value = param.value if param.value is not None else INTEGER if param.type == "int" else REAL
        names[name] = f"INT64_C({value})" if param.type == "int" else repr(float(value))
    with spelled(loaded):
        trees = {name: in_cpp(tree, names) for name, tree in loaded.trees.items()}
    plain = "at.x_ + at.residual_" if "residual" in along else "at.x_"
    backward = plan.backward is not None
    used = {name: variables(tree) for name, tree in loaded.trees.items()}
    of_input = used.get("input_mod", {"x", *(["residual"] if "residual" in along else [])})
    of_output = used.get("output_mod", {"y"})
    inputs = [t for t in context["inputs"] if t["name"] in along or t["name"] == "scale"]
    written = [*context["outputs"], *context["upstream"], *context["gradients"]]
    grads = [g for g in plan.backward.gradients if g.same_as is None] if plan.backward else []
    members = {t["name"]: t["member"] for t in context["gradients"]}
    gradients = [
        {"member": members[g.name], "of": g.of, "along": g.along, "value": f"{g.of}_"} for g in grads
    ]
    affine = {"weight": "dy * x_hat[size_t(d)]", "bias": "dy"}
    low = max((*spec.dtypes.values(), *(g.dtype for g in grads)), key=lambda d: ERRORS[d])
    weight = f"({spec.weight_offset!r} + {_column('weight')})" if "weight" in along else "1.0"
    return {
        "rows": ROWS,
        "heads": heads,
        "width": width,
        "tensors": [_sized(t, spec.heads is not None) for t in (*inputs, *written)],
        "drawn": [{"member": t["member"], "draw": _draw(t)} for t in (*inputs, *context["upstream"])],
        "at_element": [f"{name}_" for name in values],
        "input_mod": trees.get("input_mod", plain),
        "output_mod": trees.get("output_mod", "at.y_"),
        "read": [{"value": f"{n}_", "member": called[n], "along": a} for n, a in along.items()],
        "mean": "h[size_t(d)] / D" if plan.layer else "0.0",
        "c2": "dx_hat[size_t(d)] / D" if plan.layer else "0.0",
        "weight": weight,
        "bias": _column("bias") if "bias" in along else "0.0",
        "gradients": gradients if backward else [],
        "of_input": [g for g in gradients if g["of"] in of_input],
        "of_output": [g for g in gradients if g["of"] in of_output],
        "of_affine": [g | {"value": affine[g["of"]]} for g in gradients if g["of"] in affine],
        "dh_out": "tensors.dh_out.numbers[of_element(row, d)]" if plan.stores_h and backward else "0.0",
        "per_row": bool(spec.quantize and spec.quantize.scale == "per_row"),
        "allowed": repr(ERRORS[low]),
        "params": [
            {"member": p["member"], "value": REAL if p["real"] else INTEGER} for p in context["params"]
        ],
    }


def _row(spec: Any, sizes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """The width and the heads of a row, the first of `sizes` where the spec allows any."""
    widths = sizes["width"] if spec.width == "any" else spec.width
    width = widths if isinstance(widths, int) else widths[0]
    return width, sizes["heads"][0] if spec.heads == "any" else spec.heads or 1


def _column(name: str) -> str:
    return f"v.{name}_"


def _sized(of: Fields, heads: bool) -> Fields:
    sizes = [{"p->rows": "N", "p->heads": "H", "p->width": "D"}.get(s, s) for s in of["sizes"]]
    return {"member": of["member"], "sizes": sizes, "dtype": dtype_of(of)}


def _draw(of: Fields) -> str:
    if of["name"] == "scale":
        return "[](int64_t) { return 0.05; }"
    if dtype_of(of) in ("INT32", "INT64", "BOOL"):
        return "[](int64_t i) { return double(i % 2); }"
    return "1.0"
