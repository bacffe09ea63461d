"""Rules that explain why a mutant lives that verification cannot be expected to find, with their
reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from mutating.operators import Mutant

ROOT = Path(__file__).resolve().parents[2]
Rule = Callable[[str, Mutant], bool]
"""Predicate of the file (`spec/file name`) and the mutant."""

MORE_MASKED = (
    ("j < n_last_masked", "j <= n_last_masked"),
    ("n_first_masked > 0", "n_first_masked >= 0"),
    ("MASKED", "True"),
)

CLAMPED = ("tl.minimum(following, NT)", "following")
BEHIND = "q_last + 1 - WINDOW"

_ROWS = "(tile * ROWS + tl.arange(0, ROWS))"
SEEN_BY_LARGE = (
    ("_add_to_dq", "tile"),
    ("_dq_of_sums_kernel", "tl.program_id(0)"),
    ("_forward_kernel", "number"),
    ("_dqdk_kernel", "number"),
    ("_dvdh_kernel", "number"),
    ("_forward_kernel", _ROWS),
    ("_backward_kernel", _ROWS),
)
"""Conversions to int64 whose removal fails on a GPU, by function and converted expression."""

NOTHING: dict[str, Rule] = {
    "launches are looked up by it: another one costs time": lambda _, m: (
        (m.operator == "launch" and m.old == "layouts") or "_COMPILED" in m.old
    ),
    "a tile that needs no mask may have one": lambda _, m: (
        (m.old, m.new) in MORE_MASKED
        or (
            m.function.startswith("_dkdv_hopper")
            and m.old == "kv_start + BLOCK_N > SK"
            and m.new.endswith(("True", ">= SK"))
        )
    ),
    "kernels that do not begin ahead of time wait for each other": lambda _, m: (
        (m.operator, m.old, m.new) == ("launch", "True", "False")
        and m.function.endswith("_on_hopper")
    ),
    "PyTorch refuses tangents of operators by itself, in this version": lambda _, m: (
        m.operator == "comparison" and m.old.startswith("torch.autograd.forward_ad._current_level")
    ),
    (
        "gradients of q, k and v are laid out in rows of multiples of 16: one is compiled for as "
        "another"
    ): lambda file, m: (
        # Gradients are as wide as heads, which are multiples of 16 in all specs but siglip.
        m.operator == "key" and m.old in ("dq", "dk", "dv") and not file.startswith("siglip/")
    ),
    "a number of keys below zero is none": lambda _, m: (
        m.operator == "bound"
        and m.old.endswith(", 0)")
        and m.new in ("gl.minimum(lens_b, SK)", "tl.minimum(lens_b, SK)")
    ),
    "what TMA loads can be loaded by pointers": lambda _, m: (
        m.operator == "guard" and m.kernel and (m.old, m.new) == ("TMA", "False")
    ),
    "2**31 rows of `out` are more than a device has memory for": lambda _, m: (
        converts_to_int64(m) and m.old.split(".to(")[0] in ("b_h", "h", "(b * HQ + h)")
    ),
    "queries past the end are zeros, and so is all that is summed of them": lambda file, m: (
        m.operator == "mask"
        and "dkdv" in m.function
        and m.old.startswith("q_live[None, :] & ")
        and m.new.strip("()") == m.old.removeprefix("q_live[None, :] & ").strip("()")
        and "alibi" not in file
    ),
    "tiles whose pairs are all masked cost time alone": lambda _, m: (
        m.function == "_backward_hopper_consumer" and (m.old, m.new) == ("not DQ", "False")
    ),
    (
        "a window alone: its first whole tile is not ahead of the first that it reaches"
    ): lambda file, m: (
        file.startswith(("gemma2/", "gpt_oss/", "sliding_window/"))
        and m.operator == "bound"
        and m.new in (BEHIND, f"tl.cdiv(tl.maximum({BEHIND}, 0), BLOCK_N) * BLOCK_N")
    ),
    "an output may have either order of memory where that of `like` is both": lambda _, m: (
        m.function == "_empty" and m.operator == "comparison"
    ),
    "partial sums of columns are of few programs, and lie within 2**31": lambda _, m: (
        converts_to_int64(m) and m.function == "_finalize_kernel"
    ),
    "what raises for gradients of gradients is harmless where none are asked for": lambda _, m: (
        m.function == "_once" and (m.operator, m.new) == ("guard", "True")
    ),
    "any number of splits is right": lambda _, m: (
        m.function in ("_decode", "_splits")
        and m.operator in ("order", "bound", "comparison")
        and not m.kernel
    ),
    "each row of a causal mask sees a key in its first tile": lambda file, m: (
        file.startswith(("causal/", "causal_alibi/", "varlen_causal/"))
        and m.operator == "guard"
        and m.old == 'm_new == float("-inf")'
        and m.new.endswith("False")
    ),
    "Triton launches nothing over an empty grid": lambda _, m: (
        m.operator == "guard"
        and (m.old, m.new)
        in (("programs", "True"), ("out.numel()", "True"), ("not programs", "False"))
    ),
    "tiles of other chips are as right": lambda _, m: (
        (m.function, m.old, m.new) == ("_arch", "major * 10", "major")
    ),
    "fewer registers cost time alone": lambda _, m: (
        m.function == "_schedule"
        and m.old.endswith("// 8 * 8")
        and m.old.removesuffix(" * 8") == m.new
    ),
    "a masked tile is right for any tile; ptxas asks for one": lambda _, m: (
        m.old == "gl.maximum(n_masked, 1)" and m.new == "n_masked"
    ),
    "a masked tile is right for any tile, and with longer tiles of queries more are": lambda _, m: (
        (m.function, m.old, m.new) == ("_dq_hopper_consumer", "BLOCK_N", "BLOCK_M")
    ),
    "a maximum that is not 8 above the one before is not followed": lambda _, m: (
        m.function == "_hopper_softmax"
        and m.operator == "bound"
        and m.old.startswith("gl.maximum(m_i, gl.max(")
    ),
    "a stride of just the bound is right by itself and as a copy": lambda _, m: (
        m.operator == "comparison"
        and ".stride(-1)" in m.old
        and m.old.replace(" > ", " >= ") == m.new
    ),
    "it waits for a kernel whose results it does not need": lambda _, m: (
        m.function == "_hopper_producer" and (m.old, m.new) == ("LAG > 0", "True")
    ),
    "one kernel for all gradients or two, whose sums have another order": lambda _, m: (
        m.function == "sums_for_dq"
        and m.operator == "guard"
        and m.old.startswith("_in_one_kernel(")
    ),
    "kernels of this key have no such argument: `launches` finds the others": lambda file, m: (
        m.operator == "key"
        and m.function in ("_forward_op", "_backward_op")
        and _of_linear_attention(file.partition("/")[0])
    ),
    "clamped offsets end before the last slot": lambda _, m: (
        (m.old, m.new) in (("tl.minimum(last, NT)", "last"), CLAMPED)
    ),
    "no sequence has more keys than there is room for": lambda _, m: (
        m.function == "_clear_hidden" and m.operator == "comparison" and "SK" in m.old
    ),
}
"""Equivalent mutants: the same numbers for every call that the launcher accepts."""

ON_A_GPU: dict[str, Rule] = {
    "calls of more than 2**31 elements tell: `scripts/large` was seen to": lambda _, m: (
        converts_to_int64(m) and (m.function, m.old.partition(".to(")[0]) in SEEN_BY_LARGE
    ),
    "several programs share a row on a GPU alone": lambda _, m: m.old == "part * BLOCK",
    "Triton's interpreter has float32 in place of bfloat16": lambda _, m: (
        m.operator == "dtype" and m.old.endswith(".to(tl.float32)")
    ),
    "it asks for the interpreter, which is there": lambda _, m: (
        m.function == "_arch" and "TRITON_INTERPRET" in m.old
    ),
    "it asks whether a GPU is there": lambda _, m: (
        m.old.endswith('device.type == "cuda"') and m.new == "False"
    ),
    "CUDA makes no descriptor of an empty tensor, Triton's interpreter does": lambda _, m: (
        m.function == "_by_tma" and m.old == "x.numel() > 0"
    ),
}
"""Mutants that only a GPU can find."""


FEWER_WHOLE = "fewer tiles are whole, and more are masked for nothing"
_OF_COLUMNS = "mask=cols < WIDTH, other=0"
BESIDE_FLOAT32 = (
    ("causal_alibi/triton.py", "_delta_kernel", "o"),
    ("layer_norm/triton.py", "_backward_kernel", f"tl.load(weight_ptr + cols, {_OF_COLUMNS})"),
    ("layer_norm/triton.py", "_forward_kernel", f"tl.load(bias_ptr + cols, {_OF_COLUMNS})"),
    ("padding/triton.py", "_delta_kernel", "o"),
    (
        "rms_norm/triton.py",
        "_backward_kernel",
        "tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=live, other=0)",
    ),
    ("rms_norm/triton.py", "_forward_kernel", f"tl.load(weight_ptr + cols, {_OF_COLUMNS})"),
)
"""Operands whose conversion to float32 is redundant, by file and function. GPU runs without it were
right.
"""
LIVED = (
    ("decode_gqa/hopper.py", "tile in _hopper_producer: `BLOCK_N` -> `(2 * BLOCK_N)`", FEWER_WHOLE),
    (
        "decode_gqa/triton.py",
        "mask in _decode_tiles: `(kv_idx < SK) & (kv_idx < kv_lens_b)` -> `kv_idx < kv_lens_b`",
        "no case has more keys in a cache than there is room for",
    ),
    (
        "decode_gqa/triton.py",
        "bound in _splits_by_batch: `tl.minimum(batches, B - 1)` -> `B - 1`",
        "any number of splits is right",
    ),
    (
        "document_causal/triton.py",
        "guard in document_causal: `(SQ - 1) * doc.stride(-1) >= 2**31` -> `False`",
        "a buffer that spans 2**31 elements would tell",
    ),
    (
        "fused_add_rms_norm/triton.py",
        "dtype in _forward_kernel: `(x + residual).to(tl.bfloat16)` -> `x + residual`",
        "the interpreter has float32 in place of bfloat16",
    ),
    (
        "gated_delta_rule/triton.py",
        (
            "comparison in gated_delta_rule_decode: `max(max(x.stride()[-2:]) for x in (state, "
            "states) if x is not None) >= 2**23` -> `max(max(x.stride()[-2:]) for x in (state, "
            "states) if x is not None) > 2**23`"
        ),
        "a stride of just 2**23 would tell",
    ),
    (
        "gemma2/triton.py",
        "comparison in gemma2: `max(SQ, SK) > 2**29` -> `max(SQ, SK) >= 2**29`",
        "just 2**29 positions would tell",
    ),
    ("gemma2/triton.py", "tile in _forward_kernel: `BLOCK_N` -> `BLOCK_M`", FEWER_WHOLE),
    (
        "gpt_oss/hopper.py",
        "guard in _masked_first: `i < n_first_masked` -> `(i < n_first_masked) | True`",
        (
            "keys that end more than a window ahead of the queries would tell: no case on the CPU "
            "has them"
        ),
    ),
    (
        "gpt_oss/hopper.py",
        "tile in _dkdv_hopper_producer: `BLOCK_M` -> `(2 * BLOCK_M)`",
        FEWER_WHOLE,
    ),
    (
        "gpt_oss/triton.py",
        "launch in _backward_op: `B` -> `HQ`",
        "heads come in eights, and programs in groups of four of them",
    ),
    (
        "gpt_oss/triton.py",
        "bound in _dq_kernel: `tl.maximum(q_start + 1 - WINDOW, 0)` -> `0`",
        "what the window hides is masked: it costs time alone",
    ),
    (
        "linear_attention_elu/triton.py",
        "tile in _keys_back_kernel: `BLOCK_K` -> `BLOCK_V`",
        "both tiles have the same size on each chip",
    ),
    (
        "padding/hopper.py",
        "comparison in _clear_hidden: `kv_last < lens_b` -> `kv_last <= lens_b`",
        "no case lacks just the last key of a tile, with NaN there",
    ),
    (
        "padding/triton.py",
        "guard in _portable_because: `TRITON not in GLUON_TRITONS` -> `False`",
        "another Triton would tell",
    ),
    ("padding/triton.py", "tile in _dq_kernel: `BLOCK_N` -> `(2 * BLOCK_N)`", FEWER_WHOLE),
    (
        "rms_norm/triton.py",
        'guard in _arch: `os.environ.get("TRITON_INTERPRET") == "1"` -> `True`',
        "Triton refuses tensors of the CPU, in other words",
    ),
    (
        "sliding_window/triton.py",
        "bound in _dq_kernel: `1` -> `2`",
        "tiles of queries begin where tiles of keys do",
    ),
    (
        "varlen_causal/hopper.py",
        (
            "comparison in _hopper_producer: `number < n_packed_slots * HQ` -> `number <= "
            "n_packed_slots * HQ`"
        ),
        "the slot behind the last has no tile where heads are fewer than GROUP",
    ),
    ("varlen_causal/triton.py", "bound in _by_ends: `1` -> `2`", "no index comes to the bound"),
    *(
        (
            file,
            f"dtype in {function}: `{x}.to(tl.float32)` -> `{x}`",
            "Triton makes a float32 of what stands beside one: the same numbers",
        )
        for file, function, x in BESIDE_FLOAT32
    ),
)
"""Reasons for mutants that lived, by file and change."""
UNSEEN = {(file, change): why for file, change, why in LIVED}


def unseen(file: str, mutant: Mutant) -> str:
    """Return the reason why verification does not find a mutant, or "" if none is recorded."""
    return UNSEEN.get((file, mutant.change), "")


@cache
def _of_linear_attention(spec: str) -> bool:
    text = (ROOT / "specs" / f"{spec}.yaml").read_text(encoding="utf-8")
    return "kernel: linear_attention\n" in text


def converts_to_int64(m: Mutant) -> bool:
    return m.operator == "dtype" and m.old.endswith((".to(tl.int64)", ".to(gl.int64)"))


def reason(file: str, mutant: Mutant) -> tuple[str, str]:
    """Return `equivalent` or `gpu` and the reason for a mutant that lived, or two empty strings."""
    for what, rules in (("equivalent", NOTHING), ("gpu", ON_A_GPU)):
        for why, rule in rules.items():
            if rule(file, mutant):
                return what, why
    return "", ""
