"""Norms from C: what `templates/norm/c` names, of the plan that the emitted launcher is made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kgen.kernels.norm.plan.planning import NormPlan, Operand, plan_norm
from kgen.kernels.norm.plan.tiles import norm_tiles
from kgen.kernels.norm.spec import MAX_WIDTH
from kgen.kernels.norm.targets.triton.launcher import HEADS_WIDTH
from kgen.kernels.norm.targets.triton.native_example import norm_example
from kgen.spec.load import Loaded
from kgen.targets import opening
from kgen.targets.native import WORDS, Native, Tiles, prefix_of, tensor, unique
from kgen.targets.template import Untyped
from kgen.targets.triton import tables

Fields = dict[str, Any]


def native(loaded: Loaded, sizes: Mapping[str, Sequence[int]], chips: Collection[int]) -> Native:
    """What calls the kernels of a spec. `sizes` are those of what it leaves open that there is machine code for; all
    chips have the same kernels."""
    return _Fields(loaded, plan_norm(loaded), sizes).native()


class _Fields:
    """Spells one plan."""

    def __init__(self, loaded: Loaded, plan: NormPlan, sizes: Mapping[str, Sequence[int]]) -> None:
        self.loaded, self.open = loaded, sizes
        self.plan, self.spec = plan, plan.spec
        self.name = prefix_of(loaded)
        self.heads = self.spec.heads is not None
        self.sizes = {
            "element": ["p->rows", *["p->heads"] * self.heads, "p->width"],
            "row": ["p->rows", *["p->heads"] * self.heads],
            "column": [*["p->heads"] * self.heads, "p->width"],
        }
        names = {"p->rows": "N", "p->heads": "H", "p->width": "D"}
        self.shapes = {
            along: f"[{', '.join(names[s] for s in sizes)}]" for along, sizes in self.sizes.items()
        }
        inputs = [o.name for o in plan.operands]
        self.taken = {"x", "out", "h", "mean", "rstd", "eps", "scale", "dout", "dh_out"} | {
            f"d{name}" for name in inputs
        }

    def native(self) -> Native:
        plan = self.plan
        found = {"forward_tiles": norm_tiles(self.spec, "forward", plan.forward.loads)}
        if plan.backward:
            loads = (*plan.backward.loads, *plan.upstream)
            found["backward_tiles"] = norm_tiles(self.spec, "backward", loads)
        tiles = [
            Tiles(
                name,
                [
                    (chips, asdict(tile))
                    for chips, own in tables.rows({chip: [tiles] for chip, tiles in table.items()})
                    for tile in own
                ],
            )
            for name, table in found.items()
        ]
        context = self._context()
        context |= {"example": norm_example(self.loaded, plan, context, self.open)}
        header, program, example = (
            Untyped(f"norm/c/{file}.j2", context) for file in ("norm.h", "norm.c", "example.cpp")
        )
        return Native(header, program, example, self._names(context), tiles)

    def _names(self, context: Fields) -> list[str]:
        groups = ("read_by_forward", "written", "saved", "read_by_backward", "gradients")
        tensors = [t for group in groups for t in context[group]]
        names = [f"{t['name']}_ptr" for t in tensors]
        names += [stride["name"] for t in tensors for stride in t["strides"]]
        names += [f"{name}_parts_ptr" for name in context["sums"]]
        names += [name for name, _ in context["plain"]] + [p["name"] for p in context["params"]]
        names += [
            "eps",
            "n_parts",
            "size",
            "slots_ptr",
            "SAVE",
            "WIDTH",
            "ROWS",
            "BLOCK",
            "PARTS",
            "SLOTS",
            "STAGES",
        ]
        return unique([*names, "num_warps", "maxnreg", "launch_cooperative_grid"])

    def _context(self) -> Fields:
        spec, plan = self.spec, self.plan
        forward = [self._of(o) for o in plan.forward.loads]
        quantize = spec.quantize.scale if spec.quantize else None
        if quantize == "per_tensor":
            said = "[1] float32, what the output is divided by"
            forward.append(self._named(tensor("scale", ["1"], "fp32", said, contiguous=True)))
        written, saved = self._outputs(quantize)
        backward = self._backward()
        read = {t["name"]: t for t in (*forward, *backward["read_by_backward"])}
        outputs = {t["name"] for t in (*written, *saved)}
        inputs = [t for t in read.values() if t["name"] not in {*outputs, "dout", "dh_out"}]
        heads = ("[N, H, D]", "N positions of H heads") if self.heads else ("[N, D]", "N rows")
        of = f"x {heads[0]} {WORDS[spec.dtypes['input']]} -> out {heads[0]} {WORDS[spec.dtypes['output']]}"
        return {
            "name": self.name,
            "guard": f"{self.name.upper()}_H",
            "license": spec.license.in_comment(),
            "summary": opening(spec, in_comment=True),
            "passes": ["forward", *["backward"] * bool(plan.backward)],
            "heads": self.heads,
            "shared": not self.heads,
            "heads_of": "a->x.sizes[1]" if self.heads else "1",
            "axis": 2 if self.heads else 1,
            "eps": repr(float(spec.eps)),
            "words": {
                "shapes": f"{of}, {heads[1]}",
                "eps": f"added to {'the variance' if plan.layer else 'the mean of squares'}",
            },
            "inputs": inputs,
            "outputs": [*written, *saved],
            "checks": self._checks(),
            "params": self._params(),
            "plain": [("n_positions", "kgen_integer(p->rows)"), ("H", "kgen_integer(p->heads)")]
            if self.heads
            else [("n_rows", "kgen_integer(p->rows)")],
            "read_by_forward": forward,
            "written": written,
            "saved": saved,
            "save": " && ".join(f"a->{t['member']}.data != NULL" for t in saved),
            "least_programs": "kgen_cdiv(p->heads, p->row_tiles)" if self.heads else "p->row_tiles",
            "columns": "p->heads * p->width",
            "columns_of_call": "p.heads * p.width",
            **backward,
        }

    def _named(self, of: Fields, strides: Iterable[Fields] = ()) -> Fields:
        return of | {"name": of["label"], "strides": list(strides)}

    def _of(self, operand: Operand, said: str = "") -> Fields:
        """What a kernel reads."""
        name, along = operand.name, operand.along
        words = f"{self.shapes[along]} {WORDS.get(operand.dtype, operand.dtype)}{said}"
        own = self.taken - {name}
        how = {"widest": "1"} if along == "element" else {"contiguous": True}
        of = tensor(name, self.sizes[along], operand.dtype, words, own, **how)
        axes = [(f"stride_{name}", 0), *[(f"stride_{name}_head", 1)] * self.heads]
        strides = [{"name": n, "axis": axis} for n, axis in axes] if along == "element" else []
        return self._named(of, strides)

    def _written(self, name: str, along: str, dtype: str, said: str) -> Fields:
        words = f"{self.shapes[along]} {WORDS.get(dtype, dtype)}, contiguous: {said}"
        return self._named(tensor(name, self.sizes[along], dtype, words, contiguous=True))

    def _outputs(self, quantize: str | None) -> tuple[list[Fields], list[Fields]]:
        spec, plan = self.spec, self.plan
        written = [self._written("out", "element", spec.dtypes["output"], "written")]
        if quantize == "per_row":
            written.append(self._written("scale", "row", "fp32", "written, what out is to be multiplied by"))
        if plan.stores_h:
            said = "written, what is normed; read by backward" if plan.backward else "written, what is normed"
            written.append(self._written("h", "element", spec.dtypes["residual"], said))
        said = "written where all of these are there; read by backward"
        return written, [self._written(name, "row", "fp32", said) for name in plan.saves]

    def _backward(self) -> Fields:
        plan = self.plan
        if plan.backward is None:
            none: Fields = {name: [] for name in ("read_by_backward", "gradients", "sums")}
            return none | {"backward": False, "upstream": [], "part_offsets": ""}
        # Packages have machine code for both gradients.
        said = {"dh_out": "; zeros where there is none"}
        read = [self._of(o, said.get(o.name, "")) for o in (*plan.backward.loads, *plan.upstream)]
        read += [self._named(tensor(n, self.sizes["row"], "fp32", "", contiguous=True)) for n in plan.saves]
        same = {g.same_as: g.of for g in plan.backward.gradients if g.same_as is not None}
        gradients = []
        stored = (*plan.backward.elements, *plan.backward.rows, *plan.backward.columns)
        for g in stored:
            also = f", and the gradient of {same[g.of]}" if g.of in same else ""
            gradients.append(self._written(g.name, g.along, g.dtype, f"written{also}"))
        sums = [g.name for g in plan.backward.columns]
        return {
            "backward": True,
            "read_by_backward": read,
            "upstream": [t for t in read if t["name"] in ("dout", "dh_out")],
            "gradients": gradients,
            "sums": sums,
            "part_offsets": "".join(f", {name}" for name in sums),
        }

    def _params(self) -> list[Fields]:
        found = []
        for name, param in self.spec.params.items():
            if param.runtime:
                real = param.type == "float"
                of = tensor(name, [], "fp32", "of the expressions" if real else "an integer", self.taken)
                value = f"{'kgen_real' if real else 'kgen_integer'}(a->{of['member']})"
                kind = "double" if real else "int64_t"
                found.append(of | {"name": name, "type": kind, "real": real, "value": value})
        return found

    def _checks(self) -> list[Fields]:
        spec, width = self.spec, self.spec.width
        if width == "any":
            most = HEADS_WIDTH if self.heads else MAX_WIDTH
            wrong, words = f"p->width < 1 || p->width > {most}", f"rows have 1 to {most} elements"
        else:
            widths = (width,) if isinstance(width, int) else width
            wrong = " && ".join(f"p->width != {w}" for w in widths)
            words = f"rows have {' or '.join(map(str, widths))} elements"
        checks = [{"wrong": wrong, "message": f"{words}, got %lld", "given": ["(long long)p->width"]}]
        checks.append({"wrong": "p->rows < 0", "message": "sizes may not be negative", "given": []})
        if self.heads:
            most_heads = spec.heads if isinstance(spec.heads, int) else None
            wrong = f"p->heads != {most_heads}" if most_heads else "p->heads < 0"
            words = f"x must have {most_heads} heads, got %lld" if most_heads else "got %lld heads"
            checks.append({"wrong": wrong, "message": words, "given": ["(long long)p->heads"]})
        return checks
