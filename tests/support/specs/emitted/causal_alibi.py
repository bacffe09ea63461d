"""A small hand-written attention file of the documented contract, for tests of the tools.

score_mod: score + slopes[h] * (kv_idx - q_idx), mask_mod: q_idx >= kv_idx, fp16, head size 32, two
query heads per KV head, forward and backward.

    out = causal_alibi(q, k, v, slopes=slopes)
"""

import torch
import triton
import triton.language as tl

DTYPE = torch.float16
HEAD, GROUP = 32, 2
TILE = 64
LN2 = 0.6931471805599453


def _arch(device):
    if device.type == "cpu":
        if triton.knobs.runtime.interpret:
            return 0
        raise ValueError("the kernels need a CUDA device")
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@triton.jit
def _scores(q, k, rows, cols, slope, scale, sq, sk):
    s = tl.dot(q, tl.trans(k)) * scale + slope * (cols[None, :] - rows[:, None]).to(tl.float32)
    keep = (rows[:, None] >= cols[None, :]) & (cols[None, :] < sk) & (rows[:, None] < sq)
    return tl.where(keep, s, float("-inf"))


@triton.jit
def _rows(base, index, stride, stride_d, size, D: tl.constexpr):
    offsets = index[:, None].to(tl.int64) * stride + tl.arange(0, D)[None, :] * stride_d
    return tl.load(base + offsets, mask=index[:, None] < size, other=0.0)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, slopes_ptr, out_ptr, lse_ptr,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, slopes_h,
    heads, sq, sk, scale,
    GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    q = _rows(q_ptr + b.to(tl.int64) * q_b + h * q_h, rows, q_s, q_d, sq, D)
    slope = tl.load(slopes_ptr + h * slopes_h)
    m = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, D), tl.float32)
    for start in range(0, sk, TILE):
        cols = start + tl.arange(0, TILE)
        k = _rows(k_ptr + b.to(tl.int64) * k_b + h // GROUP * k_h, cols, k_s, k_d, sk, D)
        v = _rows(v_ptr + b.to(tl.int64) * v_b + h // GROUP * v_h, cols, v_s, v_d, sk, D)
        s = _scores(q, k, rows, cols, slope, scale, sq, sk)
        peak = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        p = tl.exp(s - safe[:, None])
        shrink = tl.exp(m - safe)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        m = peak
    dead = total == 0
    acc = acc / tl.where(dead, 1.0, total)[:, None]
    lse = tl.where(dead, float("-inf"), m + tl.log(tl.where(dead, 1.0, total)))
    place = tl.program_id(1).to(tl.int64) * sq + rows
    tl.store(lse_ptr + place, lse, mask=rows < sq)
    columns = tl.arange(0, D)
    tl.store(
        out_ptr + place[:, None] * D + columns[None, :], acc.to(q.dtype), mask=rows[:, None] < sq
    )


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, slopes_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, do_b, do_h, do_s, do_d, slopes_h,
    heads, sq, sk, scale,
    GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # KEYS: this program owns a tile of keys and writes dk and dv, else a tile of queries and writes
    # dq.
    mine = tl.program_id(0) * TILE + tl.arange(0, TILE)
    dk = tl.zeros((TILE, D), tl.float32)
    dv = tl.zeros((TILE, D), tl.float32)
    columns = tl.arange(0, D)
    b, first = tl.program_id(1) // heads, tl.program_id(1) % heads
    for member in range(GROUP if KEYS else 1):
        h = first * GROUP + member if KEYS else first
        hq = heads * GROUP if KEYS else heads
        slope = tl.load(slopes_ptr + h * slopes_h)
        for start in range(0, sq if KEYS else sk, TILE):
            other = start + tl.arange(0, TILE)
            rows = other if KEYS else mine
            cols = mine if KEYS else other
            q = _rows(q_ptr + b.to(tl.int64) * q_b + h * q_h, rows, q_s, q_d, sq, D)
            do = _rows(do_ptr + b.to(tl.int64) * do_b + h * do_h, rows, do_s, do_d, sq, D)
            k = _rows(k_ptr + b.to(tl.int64) * k_b + h // GROUP * k_h, cols, k_s, k_d, sk, D)
            v = _rows(v_ptr + b.to(tl.int64) * v_b + h // GROUP * v_h, cols, v_s, v_d, sk, D)
            place = (b * hq + h).to(tl.int64) * sq + rows
            lse = tl.load(lse_ptr + place, mask=rows < sq, other=0.0)
            delta = tl.load(delta_ptr + place, mask=rows < sq, other=0.0)
            s = _scores(q, k, rows, cols, slope, scale, sq, sk)
            p = tl.where(s == float("-inf"), 0.0, tl.exp(s - lse[:, None]))
            ds = (p * (tl.dot(do, tl.trans(v)) - delta[:, None]) * scale).to(q.dtype)
            if KEYS:
                dv += tl.dot(tl.trans(p.to(q.dtype)), do)
                dk += tl.dot(tl.trans(ds), q)
            else:
                dk += tl.dot(ds, k)
    place = tl.program_id(1).to(tl.int64) * (sk if KEYS else sq) + mine
    inside = mine[:, None] < (sk if KEYS else sq)
    if KEYS:
        tl.store(
            dk_ptr + place[:, None] * D + columns[None, :],
            dk.to(k_ptr.dtype.element_ty),
            mask=inside,
        )
        tl.store(
            dv_ptr + place[:, None] * D + columns[None, :],
            dv.to(k_ptr.dtype.element_ty),
            mask=inside,
        )
    else:
        tl.store(
            dq_ptr + place[:, None] * D + columns[None, :],
            dk.to(q_ptr.dtype.element_ty),
            mask=inside,
        )


_LIBRARY = torch.library.Library(
    "kgen_test_" + "".join(c if c.isalnum() else "_" for c in __name__), "FRAGMENT"
)


def _operator(function):
    name = function.__name__
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, _LIBRARY.ns), name).default


def _in_order_of(like, x):
    """x in the memory order of `like`: [B, S, H, D] or [B, H, S, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if like.stride(1) < like.stride(2) else x


@_operator
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _arch(q.device)
    batch, heads, sq, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _forward_kernel[(triton.cdiv(sq, TILE), batch * heads)](
        q, k, v, slopes, out, lse, *q.stride(), *k.stride(), *v.stride(), slopes.stride(0),
        heads, sq, k.shape[2], scale, GROUP=GROUP, D=HEAD, TILE=TILE, num_warps=4, num_stages=1,
    )  # fmt: skip
    return _in_order_of(q, out), lse


@torch.library.register_fake(_forward, lib=_LIBRARY)
def _(q, k, v, slopes, scale):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return _in_order_of(q, out), q.new_empty(q.shape[:3], dtype=torch.float32)


@_operator
def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, scale: float,
    do: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    _arch(q.device)
    batch, heads, sq, _ = q.shape
    heads_kv, sk = k.shape[1], k.shape[2]
    grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride(), slopes.stride(0))
    for keys, owners, size in ((False, heads, sq), (True, heads_kv, sk)):
        _backward_kernel[(triton.cdiv(size, TILE), batch * owners)](
            q, k, v, slopes, do, lse, delta, *grads, *strides, owners, sq, sk, scale,
            GROUP=GROUP, D=HEAD, TILE=TILE, KEYS=keys, num_warps=4, num_stages=1,
        )  # fmt: skip
    return tuple(_in_order_of(t, grad) for t, grad in zip((q, k, v), grads, strict=True))


@torch.library.register_fake(_backward, lib=_LIBRARY)
def _(q, k, v, slopes, scale, do, lse, delta):
    return tuple(
        _in_order_of(t, torch.empty(t.shape, dtype=t.dtype, device=t.device)) for t in (q, k, v)
    )


class _Constant(torch.autograd.Function):
    """What a function gives, without a derivative: to ask for one is an error."""

    @staticmethod
    def forward(function, *args):
        return function(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def _setup(ctx, inputs, output):
    q, k, v, slopes, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, slopes, *output)


def _gradient(ctx, do, dlse):
    q, k, v, slopes, out, lse = ctx.saved_tensors
    delta = (out.float() * do.float()).sum(-1) - dlse
    dq, dk, dv = _Constant.apply(_backward, q, k, v, slopes, ctx.scale, do, lse, delta)
    return dq, dk, dv, None, None


torch.library.register_autograd(_forward, _gradient, setup_context=_setup, lib=_LIBRARY)


def causal_alibi(q, k, v, *, slopes, scale=None, return_lse=False):
    """Attention over [B, H, S, D] tensors of any strides; see the top of the file."""
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (
            t.to(DTYPE) if t.dtype in (torch.bfloat16, torch.float32) else t for t in (q, k, v)
        )
        slopes = slopes.float()
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4 or t.shape[3] != HEAD:
            raise ValueError(f"{name} must be [B, H, S, {HEAD}], got {tuple(t.shape)}")
        if t.dtype != DTYPE:
            raise TypeError(f"{name} must be {DTYPE}, got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q on {q.device}")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or q.shape[1] != GROUP * k.shape[1]:
        raise ValueError(
            f"shapes do not match: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if slopes.shape != q.shape[1:2] or slopes.dtype != torch.float32:
        raise ValueError("slopes must be float32 [HQ]")
    if slopes.device != q.device:
        raise ValueError(f"slopes are on {slopes.device}, q on {q.device}")
    if scale is not None and (type(scale) is not float or not 1e-38 < scale < 2e38):
        raise ValueError("scale must be a positive number, finite in float32")
    _Constant.apply(lambda *_: (), q, k, v, slopes)
    if torch.is_grad_enabled() and slopes.requires_grad:
        raise RuntimeError("slopes have no gradient")
    out, lse = _forward(q, k, v, slopes, HEAD**-0.5 if scale is None else scale)
    return (out, lse) if return_lse else out


def _layouts(*tensors):
    """The function by which a check of launches finds the module that launches."""
    return tensors
