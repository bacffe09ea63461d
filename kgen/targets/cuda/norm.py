"""The CUDA target of norms: a plan becomes the names that `templates/cuda/norm.cu.j2` and `norm.py.j2` use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.nodes import Node, Type, variables
from kgen.plan.norm import Gradient, NormPlan, Operand, Value, plan_norm
from kgen.plan.norm_shapes import Shape, backward_shapes, forward_shapes
from kgen.plan.sizes import ELEMENT_SIZE
from kgen.spec.load import Loaded
from kgen.spec.norm import MAX_WIDTH
from kgen.targets import Source
from kgen.targets.cuda.elements import ELEMENTS, used
from kgen.targets.cuda.printer import Printer, literal
from kgen.targets.triton.text import TORCH_DTYPES
from kgen.expr.nodes import Const

TYPES = {**ELEMENTS, "int32": "int", "int64": "long long", "bool": "bool"}
SCALARS = {Type.FLOAT: "float", Type.INT: "int", Type.BOOL: "bool"}
ZEROS = {Type.FLOAT: "0.0f", Type.INT: "0", Type.BOOL: "false"}
TAKEN = frozenset(
    # Names of the kernels' own, and words of C++ that are none of Python's.
    "t v i n p s to from first stage stages turn step begin live rank vector vectors column prefetch ring moments sums sum squares hs outs head"
    " lane stripe total shared means statistic finish one mine theirs load store rounded read_x bf16 fp16 auto bool char const constexpr"
    " default delete do double enum extern float goto inline int long namespace new operator private protected public register short"
    " signed sizeof static struct switch template this throw typedef union unsigned using virtual void volatile".split()
)
HELPERS = ("floor_mod", "floor_div", "tanh_approx", "sigmoid", "silu")


def sources(loaded: Loaded) -> list[Source]:
    """`cuda.cu` with the kernels, `cuda.py` with the PyTorch operators. Raises `KgenError` for what is not supported yet."""
    plan = plan_norm(loaded)
    _refuse(loaded, plan)
    context = _Fields(plan).context()
    return [Source("cuda.cu", "cuda/norm.cu.j2", context), Source("cuda.py", "cuda/norm.py.j2", context)]


def _refuse(loaded: Loaded, plan: NormPlan) -> None:
    unsupported = {
        "an output in eight bits": plan.spec.quantize is not None,
        "`statistics: recompute`": plan.spec.statistics == "recompute" and plan.backward is not None,
    }
    for what, asked in unsupported.items():
        if asked:
            message = f"the target `cuda` does not support {what} yet"
            hint = "remove the target: `triton` supports it"
            raise KgenError(Diagnostic("unsupported-target", message, file=str(loaded.path), hint=hint))


class _Fields:
    """Spells one plan. Every value is a line of scalar code inside a loop over the elements of an access."""

    def __init__(self, plan: NormPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        constants = {n: p for n, p in self.spec.params.items() if not p.runtime}
        self.runtime = {n: p for n, p in self.spec.params.items() if p.runtime}
        names = {n: self.local(n) for n in (*self.spec.buffers, *self.runtime)} | {n: n.upper() for n in constants}
        self.printer = Printer(names, self.spec.fast_math)
        self.constants = [
            {"name": n.upper(), "type": SCALARS[p.scalar], "value": literal(Const(p.value, p.scalar))[0]}
            for n, p in constants.items()
        ]

    @staticmethod
    def local(name: str) -> str:
        """What kernels call a buffer or a parameter."""
        return f"{name}_" if name in TAKEN else name

    def context(self) -> dict[str, object]:
        """Every name of the templates."""
        plan, spec = self.plan, self.spec
        forward = self._forward()
        backward = self._backward() if plan.backward else None
        dtypes = {o.dtype for o in plan.operands} | set(spec.dtypes.values())
        sizes = [ELEMENT_SIZE[spec.dtypes[n]] for n in ("input", "output", *(["residual"] if spec.residual else []))]
        return {
            "name": spec.name,
            "summary": spec.summary.rstrip(".") + "." if spec.summary else f"{spec.name}.",
            "formula": self._formula(),
            "heads_words": ", rows of different heads one after the other" if spec.heads else "",
            "elements": used(dtypes),
            "rounds": True,
            "moments": plan.layer,
            "constants": self.constants,
            "forward": forward,
            "backward": backward,
            "helpers": {h: h in self.printer.helpers for h in HELPERS},
            "row_gradients": bool(backward and backward["row_sums"]),
            "vector": 16 // min(sizes),
            "dynamic_shared": True,
            "shared_argument": "shared",
            "config_arguments": "grid, block, shared, cluster",
            "launch_config": "grid=grid, cluster=cluster if cluster > 1 else None, block=block, shmem_size=shared",
            **self._launcher(),
        }

    def _formula(self) -> list[str]:
        spec = self.spec
        h = " ".join((spec.input_mod or ("x + residual" if spec.residual else "x")).split("\n"))
        y = "x_hat" + (f" * ({'1 + ' if spec.weight_offset else ''}weight)" if spec.weight else "") + (" + bias" if spec.bias else "")
        centred = "(h - mean(h)) / sqrt(var(h) + eps)" if self.plan.layer else "h / sqrt(mean(h * h) + eps)"
        lines = [f"h = {h}", f"x_hat = {centred}", f"y = {y}"]
        return [*lines, f"out = {' '.join((spec.output_mod or 'y').splitlines())}"]

    # --- lines ---

    def _scalar(self, operand: Operand) -> str:
        """A line that names one element of an access."""
        name = self.local(operand.name)
        element = f"{name}_at.at[i]"
        value = {Type.FLOAT: f"to_float({element})", Type.INT: f"(int){element}", Type.BOOL: element}[operand.type]
        return f"const {SCALARS[operand.type]} {name} = {value};"

    def _value(self, value: Value) -> str:
        text = self.printer.real(value.tree)
        if value.rounded is not None:
            text = f"rounded<{TYPES[value.rounded]}>({text})"
        return f"const float {value.name} = {text};"

    def _body(self, operands: Sequence[Operand], values: Sequence[Value], ends: Sequence[tuple[str, Node]]) -> list[str]:
        """Lines that compute `ends`, statements with a hole for their tree, and only what these need before."""
        needed = {n for _, tree in ends for n in variables(tree)}
        kept: list[Value] = []
        for value in reversed(values):
            if value.name in needed:
                kept.append(value)
                needed |= set(variables(value.tree))
        scalars = [self._scalar(o) for o in operands if o.along != "row" and o.name in needed]
        statements = [form.format(self.printer.real(tree)) for form, tree in ends]
        return [*scalars, *(self._value(v) for v in reversed(kept)), *statements]

    def _reads(self, operands: Iterable[Operand], lines: Sequence[str]) -> list[dict[str, str]]:
        """The accesses that some lines use."""
        text = "\n".join(lines)
        names = [self.local(o.name) for o in operands if o.along != "row"]
        return [{"name": n, "read": f"read_{n}(v)"} for n in names if f"({n}_at.at" in text or f" {n}_at.at" in text or f"){n}_at.at" in text]

    # --- operands ---

    def _streams(self, operands: Iterable[Operand]) -> list[dict[str, str]]:
        streams, before = [], "0"
        for o in operands:
            name = self.local(o.name)
            slots, begin = f"{name.title().replace('_', '')}Slots", f"{name.upper()}_BEGIN"
            streams.append({"name": name, "element": TYPES[o.dtype], "slots": slots, "begin": begin, "after": before})
            before = f"{begin} + {slots}::BYTES"
        return streams

    def _end(self, streams: Sequence[dict[str, str]]) -> str:
        return f"{streams[-1]['begin']} + {streams[-1]['slots']}::BYTES"

    def _columns(self, operands: Iterable[Operand], head: str) -> list[dict[str, str]]:
        offset, row_offset = (f" + {head}", " + head_of_row") if self.spec.heads else ("", "")
        return [
            {
                "name": (n := self.local(o.name)),
                "element": TYPES[o.dtype],
                "address": f"{n}_ptr{offset}",
                "row_address": f"{n}_ptr{row_offset}",
            }
            for o in operands
        ]

    def _rows(self, operands: Iterable[Operand]) -> list[dict[str, str]]:
        def value(o: Operand) -> str:
            at = f"{self.local(o.name)}_ptr[row]"
            return {Type.FLOAT: f"to_float({at})", Type.INT: f"(int){at}", Type.BOOL: at}[o.type]

        return [
            {"name": self.local(o.name), "type": SCALARS[o.type], "value": value(o), "zero": ZEROS[o.type]} for o in operands
        ]

    def _params(self, loads: Iterable[Operand], outputs: Sequence[str], sizes: Sequence[str]) -> str:
        lines = []
        for o in loads:
            stride = f", long long {self.local(o.name)}_stride" if o.along == "element" else ""
            lines.append(f"const {TYPES[o.dtype]}* __restrict__ {self.local(o.name)}_ptr{stride}")
        lines += [*outputs, ", ".join(sizes)]
        lines += [f"{SCALARS[p.scalar]} {self.local(n)}" for n, p in self.runtime.items()]
        return ",\n".join(lines)

    def _sizes(self) -> list[str]:
        return ["long long rows", "long long width_", *(["long long heads"] if self.spec.heads else [])]

    # --- kernels ---

    def _forward(self) -> dict[str, Any]:
        plan, f = self.plan, self.plan.forward
        streams = self._streams(o for o in f.loads if o.along == "element")
        h_lines = self._body(f.loads, [], [(f"const float h = {self._rounding(f.h)};", f.h.tree)])
        out_lines = self._body(f.loads, f.normed, [("outs[i] = {};", f.out.tree)])
        outputs = [f"{TYPES[self.spec.dtypes['output']]}* __restrict__ out_ptr"]
        if plan.stores_h:
            outputs.append(f"{TYPES[self.spec.dtypes['residual']]}* __restrict__ h_ptr")
        outputs += [f"float* __restrict__ {s}_ptr" for s in plan.saves]
        loads = sorted(f.loads, key=lambda o: ("element", "column", "row").index(o.along))
        params = self._params(loads, outputs, [*self._sizes(), "float eps"])
        vectors = [f"{self.local(o.name)}_ptr" for o in f.loads if o.along == "column"]
        stored = ["out_ptr", *(["h_ptr"] if plan.stores_h else [])]
        return {
            **self._host(params, ()),
            **self._host_alignment(streams, [*vectors, *stored]),
            "streams": streams,
            "stage": self._end(streams),
            "columns": self._columns((o for o in f.loads if o.along == "column"), "head"),
            "rows": self._rows(o for o in f.loads if o.along == "row"),
            "early": self._reads(f.loads, h_lines),
            "late": self._reads(f.loads, out_lines),
            "h_lines": h_lines,
            "out_lines": out_lines,
            "saves": bool(plan.saves),
            "saves_mean": "mean" in plan.saves,
            "stores_h": plan.stores_h,
            "heads": bool(self.spec.heads) and any(o.along == "column" for o in f.loads),
            "parts": 2 if plan.layer else 1,
            "params": params,
            "loads": loads,
        }

    def _host(self, params: str, bytes_of: Sequence[str]) -> dict[str, str]:
        """The same parameters for the C launcher: without `__restrict__`, then by name; `bytes_of` are none of the caller's."""
        lines = [line.replace(" __restrict__", "") for line in params.split(",\n")]
        lines = [line for line in lines if line.split()[-1] not in bytes_of]
        # C has no types of ours.
        lines = [line.replace("bf16*", "void*").replace("fp16*", "void*") for line in lines]
        names = [part.split()[-1] for line in params.split(",\n") for part in line.split(", ")]
        return {"host_params": ",\n".join(lines), "host_names": ", ".join(names)}

    def _host_alignment(self, streams: Sequence[dict[str, str]], pointers: Sequence[str]) -> dict[str, str]:
        strides = [f"{s['name']}_stride" for s in streams]
        return {
            "host_pointers": ", ".join([*(f"{s['name']}_ptr" for s in streams), *pointers]),
            "host_strides": ", ".join([*strides, "width_"]),
        }

    def _rounding(self, value: Value) -> str:
        return "{}" if value.rounded is None else f"rounded<{TYPES[value.rounded]}>({{}})"

    def _backward(self) -> dict[str, Any]:
        plan, b, spec = self.plan, self.plan.backward, self.spec
        assert b is not None
        dout = Operand("dout", spec.dtypes["output"], Type.FLOAT, "element")
        upstream = [dout] + ([Operand("dh_out", spec.dtypes["residual"], Type.FLOAT, "element")] if plan.stores_h else [])
        operands = [*upstream, *b.loads]
        order = ("element", "column", "row")
        loads = sorted(operands, key=lambda o: order.index(o.along))
        later = {"dh", *(m.name for m in b.means)}

        def late(g: Gradient) -> bool:
            return bool(later & set(variables(g.tree)))

        def adds(gradients: Iterable[Gradient]) -> list[tuple[str, Node]]:
            return [(f"if constexpr (ELEMENTS > 0) d{self.local(g.of)}[v][i] += {{}};", g.tree) for g in gradients]

        means = [{"name": m.name, "index": str(i)} for i, m in enumerate(b.means)]
        ends = [(f"means[{i}] += {{}};", m.tree) for i, m in enumerate(b.means)]
        values = [*b.before, b.dh]
        first = self._body(loads, b.before, [*ends, *adds(g for g in b.columns if not late(g))])
        stores = [(f"d{self.local(g.of)}_at[i] = {{}};", g.tree) for g in b.elements]
        row_ends = [(f"row_sums[{i}] += {{}};", g.tree) for i, g in enumerate(b.rows)]
        second = self._body(loads, values, [*stores, *row_ends, *adds(g for g in b.columns if late(g))])
        alone = self._body(loads, values, [(f"d{self.local(g.of)}[v][i] += {{}};", g.tree) for g in b.columns])
        scratch = any(late(g) for g in b.columns)
        streams = self._streams(o for o in loads if o.along == "element")
        columns = [o for o in loads if o.along == "column"]
        sums = [
            {"name": f"d{self.local(g.of)}", "index": str(i), "element": TYPES[g.dtype]} for i, g in enumerate(b.columns)
        ]
        saved = [f"const float* __restrict__ {s}_ptr" for s in plan.saves]
        outputs = [*saved, *(f"{TYPES[g.dtype]}* __restrict__ d{self.local(g.of)}_ptr" for g in (*b.elements, *b.rows))]
        outputs += [f"float* __restrict__ {s['name']}_part" for s in sums]
        outputs += ["float* __restrict__ means_ptr"] * scratch
        finalize = [f"const float* __restrict__ {s['name']}_part" for s in sums]
        finalize += [f"{s['element']}* __restrict__ {s['name']}_ptr" for s in sums]
        params = self._params(loads, outputs, self._sizes())
        ours = [f"{s['name']}_part" for s in sums] + ["means_ptr"] * scratch
        host = self._host(params, ours)
        host["host_params"] += "".join(
            f",\n{'void' if s['element'] in ('bf16', 'fp16') else s['element']}* {s['name']}_ptr" for s in sums
        )
        parts = [{"name": s["name"] + "_part", "begin": f"{i} * parts * width_"} for i, s in enumerate(sums)]
        if scratch:
            parts.append({"name": "means_ptr", "begin": f"{len(sums)} * parts * width_"})
        floats = f"{len(sums)} * parts * width_" + (f" + {len(b.means)} * rows" if scratch else "")
        vectors = [f"{self.local(o.name)}_ptr" for o in columns]
        return {
            **host,
            **self._host_alignment(streams, [*vectors, *(f"d{self.local(g.of)}_ptr" for g in b.elements)]),
            "host_parts": parts,
            "host_floats": floats if sums else "",
            "host_heads": "heads" if spec.heads else "1",
            "host_multiple": "heads / std::gcd(heads, static_cast<long long>(shape.rows))" if spec.heads else "1",
            "host_share": "(64 * heads)" if spec.heads else "64",
            "host_times_rows": " * shape.rows" if spec.heads else "",
            "host_times_heads": " * heads" if spec.heads else "",
            "host_refuse": " || heads < 1 || rows % heads != 0" if spec.heads else "",
            "host_finalize": ", ".join(
                [*(f"{s['name']}_part" for s in sums), *(f"{s['name']}_ptr" for s in sums), "parts", "width_"]
            ),
            "streams": streams,
            "stage": self._end(streams),
            "columns": self._columns(columns, "head"),
            "rows": self._rows(o for o in loads if o.along == "row"),
            "statistics": list(plan.saves),
            "first_reads": self._reads(loads, first),
            "second_reads": self._reads(loads, second),
            "column_reads": self._reads(loads, alone),
            "column_streams": [x for x in streams if x["name"] in {r["name"] for r in self._reads(loads, alone)}],
            "column_columns": [
                x for x in self._columns(columns, "head") if x["name"] in {r["name"] for r in self._reads(loads, alone)}
            ],
            "first_lines": first,
            "second_lines": second,
            "column_lines": alone,
            "means": means,
            "means_count": str(len(means)),
            "parts": str(len(means)),
            "elements": [{"name": f"d{self.local(g.of)}"} for g in b.elements],
            "sums": sums,
            "sums_count": str(len(sums)),
            "row_sums": [
                {"store": f"store_one(d{self.local(g.of)}_ptr + row, row_sums[{i}]);"} for i, g in enumerate(b.rows)
            ],
            "row_sums_count": str(len(b.rows)),
            "scratch": scratch,
            "heads": bool(spec.heads) and bool(columns),
            "held_words": " of a head" if spec.heads else "",
            "params": params,
            "finalize_params": ",\n".join([*finalize, "long long parts, long long width"]),
            "loads": loads,
        }

    # --- the launcher ---

    def _launcher(self) -> dict[str, object]:
        return Launcher(self).fields()


def _tuple(names: Sequence[str]) -> str:
    """Names as Python unpacks into them."""
    return ", ".join(names) + ("," if len(names) == 1 else "")


class Launcher:
    """What `norm.py.j2` says: arguments, their checks, and the arguments of the kernels."""

    def __init__(self, fields: _Fields) -> None:
        self.fields_, self.plan, self.spec = fields, fields.plan, fields.plan.spec

    def fields(self) -> dict[str, object]:
        """Every name of the template that kernels do not use."""
        plan, spec = self.plan, self.spec
        runtime = list(self.fields_.runtime)
        positional = [o.name for o in plan.operands if o.name in ("x", "weight", "bias")]
        keyword = [o.name for o in plan.operands if o.name not in positional]
        tensors = [o.name for o in plan.operands]
        scalars = [f"{n}: {'int' if p.scalar is Type.INT else 'float'}" for n, p in self.fields_.runtime.items()]
        keywords = [*keyword, *runtime, f"eps={spec.eps!r}"]
        return {
            "summary_line": spec.summary.rstrip(".") + "." if spec.summary else f"The norm `{spec.name}`.",
            "signature": ", ".join([*positional, "*", *keywords]),
            "usage": ", ".join([*positional, *(f"{n}={n}" for n in (*keyword, *runtime))]),
            "tensor_params": ", ".join([*(f"{n}: Tensor" for n in tensors), *scalars, "eps: float"]),
            "tensor_names": ", ".join(tensors),
            "scalar_names": ", ".join([*runtime, "eps"]),
            "call_names": ", ".join([*tensors, *runtime, "eps"]),
            "operands": [
                {
                    "name": o.name,
                    "torch_dtype": TORCH_DTYPES[o.dtype],
                    "shape": {"element": "x.shape", "row": "x.shape[:-1]", "column": f"x.shape[-{2 if spec.heads else 1}:]"}[o.along],
                    "words": ("[..., H, width]" if spec.heads else "[..., width]")
                    if o.name == "x"
                    else {"element": "as x", "row": "[...]", "column": "[H, width]" if spec.heads else "[width]"}[o.along],
                }
                for o in plan.operands
            ],
            "positional": positional,
            "x_words": "[..., H, width]" if spec.heads else "[..., width]",
            "x_dims": 2 if spec.heads else 1,
            "heads": bool(spec.heads),
            "fixed_heads": spec.heads if isinstance(spec.heads, int) else None,
            "widths": f"({_tuple([str(w) for w in ([spec.width] if isinstance(spec.width, int) else spec.width)])})",
            "fixed_width": spec.width != "any",
            "dtype_words": TORCH_DTYPES[spec.dtypes["input"]],
            "out_dtype": TORCH_DTYPES[spec.dtypes["output"]],
            "h_dtype": TORCH_DTYPES[spec.dtypes["residual"]],
            "stores_h": plan.stores_h,
            "saves": list(plan.saves),
            "save_mean": "mean" in plan.saves,
            "save_rstd": "rstd" in plan.saves,
            "forward_table": self._table(forward_shapes(plan)),
            "backward_table": self._table(backward_shapes(plan)) if plan.backward else [],
            "has_backward": plan.backward is not None,
            "runtime_names": runtime,
            "runtime_tuple": _tuple(runtime),
            "max_width": MAX_WIDTH,
            "width_words": " or ".join(map(str, [spec.width] if isinstance(spec.width, int) else spec.width)),
            "variance_words": "variance" if plan.layer else "mean of squares",
            **self._outputs(),
            **self._forward(),
            **(self._backward() if plan.backward else {}),
        }

    def _outputs(self) -> dict[str, object]:
        """An operator with one output returns a tensor, not a tuple of one."""
        plan = self.plan
        returned = ["out", *(["h"] if plan.stores_h else [])]
        names = [*returned, *plan.saves]
        one = len(names) == 1
        return {
            "output_names": ", ".join(names) + ("," if one else ""),
            "forward_types": "Tensor" if one else f"tuple[{', '.join(['Tensor'] * len(names))}]",
            "first_of_outputs": "[0]" if one else "",
            "as_tuple": "," if one else "",
            "returned": ", ".join(returned),
            "returns_words": "out and h, what was normed" if plan.stores_h else "out",
        }

    def _table(self, shapes: Sequence[Shape]) -> list[Shape]:
        widths = [self.spec.width] if isinstance(self.spec.width, int) else self.spec.width
        if widths == "any":
            return list(shapes)
        # A wider shape serves where a narrower one does not fit in shared memory.
        least = min(widths)
        return [s for s in shapes if s.width >= least]

    def _bytes(self, loads: Iterable[Operand]) -> int:
        return sum(ELEMENT_SIZE[o.dtype] for o in loads if o.along == "element")

    def _argument(self, o: Operand) -> str:
        if o.along == "element":
            return f"*_rows({o.name})"
        return f"{o.name}.data_ptr()"

    def _scalars(self) -> list[str]:
        kinds = {Type.INT: "ctypes.c_int", Type.FLOAT: "ctypes.c_float"}
        return [f"{kinds[p.scalar]}({n})" for n, p in self.fields_.runtime.items()]

    def _forward(self) -> dict[str, object]:
        plan = self.plan
        loads = sorted(plan.forward.loads, key=lambda o: ("element", "column", "row").index(o.along))
        outputs = ["out", *(["h"] if plan.stores_h else []), *plan.saves]
        sizes = ["rows", "width", *(["heads"] if self.spec.heads else []), "ctypes.c_float(eps)"]
        return {
            "forward_arguments": [*(self._argument(o) for o in loads), *(f"{n}.data_ptr()" for n in outputs), *sizes, *self._scalars()],
            "forward_aligned": f"({_tuple([o.name for o in loads if o.along == 'element'])}), "
            f"({_tuple(['out', *(o.name for o in loads if o.along == 'column')])})",
            "forward_elements": [o.name for o in loads if o.along == "element"],
            "forward_columns": [o.name for o in loads if o.along == "column"],
            "forward_rows": [o.name for o in loads if o.along == "row"],
            "forward_bytes": self._bytes(loads),
        }

    def _backward(self) -> dict[str, object]:
        plan, b, spec = self.plan, self.plan.backward, self.spec
        assert b is not None
        fields = self.fields_._backward()
        loads: list[Operand] = fields["loads"]
        names = [o.name for o in loads]
        given = [n for n in names if n not in ("dout", "dh_out", "h")]
        optional = [*(["h"] if plan.stores_h else []), *plan.saves]
        params = ["dout: Tensor", *(["dh_out: Tensor"] if plan.stores_h else []), *(f"{n}: Tensor" for n in (*optional, *given))]
        scalars = [f"{n}: {'int' if p.scalar is Type.INT else 'float'}" for n, p in self.fields_.runtime.items()]
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
        sizes = ["rows", "width", *(["heads"] if spec.heads else [])]
        fixed = [*(self._argument(o) for o in loads), *(f"{s}.data_ptr()" for s in plan.saves)]
        fixed += [f"d_{g.of}.data_ptr()" for g in (*b.elements, *b.rows)]
        return {
            "backward_params": ", ".join([*params, *scalars]),
            "backward_names": ", ".join([n.split(":")[0] for n in (*params, *scalars)]),
            "backward_given": given,
            "backward_saved": [*(["h"] if plan.stores_h else []), *plan.saves, *given],
            "backward_results": outputs,
            "backward_types": "tuple[" + ", ".join(["Tensor"] * len(outputs)) + "]",
            "backward_aligned": f"({_tuple([o.name for o in loads if o.along == 'element'])}), "
            f"({_tuple([o.name for o in loads if o.along == 'column'])})",
            "gradient_names": _tuple([o["name"] for o in outputs]),
            "part_names": _tuple([f"d_{g.of}_part" for g in b.columns]),
            "finalize_arguments": [
                *(f"d_{g.of}_part.data_ptr()" for g in b.columns),
                *(f"d_{g.of}.data_ptr()" for g in b.columns),
                "parts",
                "width",
            ],
            "saved_tuple": _tuple([*(["h"] if plan.stores_h else []), *plan.saves, *given]),
            "cotangents": ["dout", *(["dh_out"] if plan.stores_h else []), *(f"_{s}" for s in plan.saves)],
            "backward_elements": [o.name for o in loads if o.along == "element"],
            "backward_columns": [o.name for o in loads if o.along == "column"],
            "backward_rows": [o.name for o in loads if o.along == "row"],
            "backward_bytes": self._bytes(loads),
            "backward_arguments": fixed,
            "backward_sizes": [*sizes, *self._scalars()],
            "column_results": [f"d_{g.of}" for g in b.columns],
            "column_count": len(b.columns),
            "has_columns": bool(b.columns),
            "has_scratch": fields["scratch"],
            "means_count": len(b.means),
            "gradient_words": ", ".join(g.of for g in results),
            "width_used": any("width" in o["shape"] for o in outputs),
            "heads_used": any("heads" in o["shape"] for o in outputs),
            "first_of_gradients": "[0]" if len(outputs) == 1 else "",
            "as_tuple_of_gradients": "," if len(outputs) == 1 else "",
            "parts_factor": " * shape[\"rows\"]" if spec.heads else "",
            "share_rows": "(64 * heads)" if spec.heads else "64",
            "heads_factor": " * heads" if spec.heads else "",
            "heads_or_one": "heads" if spec.heads else "1",
            "shape_source": "h" if plan.stores_h else next(o.name for o in loads if o.along == "element" and o.name != "dout"),
            "returns": ", ".join([*(returned.get(o.name, "None") for o in plan.operands), *(["None"] * (len(self.fields_.runtime) + 1))]),
        }
