"""Hand-built specs for tests of tools around emitted files, without YAML and parser."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var
from kgen.targets import Source
from kgen.targets.template import Template
from kgen.verify import emitted

INT, FLOAT, BOOL = Type.INT, Type.FLOAT, Type.BOOL
B, H, Q, K = (Var(name, INT) for name in ("b", "h", "q_idx", "kv_idx"))
SCORE = Var("score", FLOAT)
EMITTED = Path(__file__).parent / "emitted"


def call(fn: str, *args: Node | int | float) -> Call:
    """Return a typed call; numbers become constants."""
    nodes = tuple(number(a) if isinstance(a, int | float) else a for a in args)
    return Call(fn, nodes, TABLE[fn].typed(tuple(node.type for node in nodes)))


def number(value: int | float) -> Const:
    return Const(value, FLOAT if isinstance(value, float) else INT)


CAUSAL = call("ge", Q, K)
ALIBI = call("add", SCORE, call("mul", Read("slopes", (H,), FLOAT), call("sub", K, Q)))
PADDING = call("lt", K, Read("lens", (B,), INT))


def buffer(
    shape: tuple[int | str, ...], dtype: str, grad: bool = False, sorted: bool = False
) -> Any:
    return SimpleNamespace(shape=shape, dtype=dtype, grad=grad, sorted=sorted, within=None)


def loaded(name: str, **changes: Any) -> Any:
    """Return a `Loaded` with the attributes that the tools read."""
    trees = {which: changes.pop(which) for which in ("score_mod", "mask_mod") if which in changes}
    fields: dict[str, Any] = {
        "kernel": "attention",
        "name": name,
        "dtype": "fp32",
        "precision": "ieee",
        "head_dim": SimpleNamespace(qk=8, v=8),
        "gqa": "any",
        "lengths": SimpleNamespace(q="any", kv="any"),
        "buffers": {},
        "params": {},
        "passes": ("forward", "backward"),
        "varlen": False,
        "sinks": False,
        "fast_math": False,
        "accuracy": "usual",
        "targets": (("triton", {}),),
        "aligned_to_end": False,
        "per_batch": False,
        "paged_kv": None,
        "kv_dtype": None,
        "deterministic": None,
    }
    spec = SimpleNamespace(**{**fields, **changes})
    return SimpleNamespace(
        path=Path(f"specs/{name}.yaml"), text="", folder=name, spec=spec, trees=trees
    )


@dataclass(frozen=True)
class Unprinted(Template):
    """Stand-in for a template; it renders nothing."""

    template: ClassVar[str] = ""


def _sources(loaded: Any, target: str, real: Any = emitted.sources) -> list[Source]:
    """Return `triton.py` for a stand-in, which has no plan."""
    return (
        [Source("triton.py", Unprinted(), rank=1)]
        if isinstance(loaded.spec, SimpleNamespace)
        else real(loaded, target)
    )


emitted.sources = _sources


def causal_alibi() -> Any:
    """Return the spec of `emitted/causal_alibi.py`."""
    return loaded(
        "causal_alibi",
        dtype="fp16",
        head_dim=SimpleNamespace(qk=32, v=32),
        gqa=2,
        buffers={"slopes": buffer(("HQ",), "fp32")},
        score_mod=ALIBI,
        mask_mod=CAUSAL,
    )


def plain() -> Any:
    """Return the spec of `emitted/plain.py`."""
    return loaded("plain", buffers={"lens": buffer(("B",), "int32")}, mask_mod=PADDING)


def render(one: Any, generated: Path, **edits: str) -> Path:
    """Write the emitted file of a stand-in, with some text replaced (old=new pairs)."""
    text = (EMITTED / f"{one.spec.name}.py").read_text()
    path = generated / one.spec.name / "triton.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
