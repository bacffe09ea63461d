"""Texts of functions that kernels call if a language lacks them, or has slower ones."""

from __future__ import annotations

from kgen.expr.spelling import MODULES, helped, helped_in_modules

TANH = {
    "triton": helped(
        "_tanh({0})",
        """
            @triton.jit
            def _tanh(x):
                # 1 - 2 / (1 + e^2x) has no branch, and is exact for large |x|. The division is computed as the square
                # of rsqrt: two instructions instead of eight. The absolute error is below 6e-7.
                root = tl.rsqrt(1.0 + tl.exp2(x * 2.8853900817779268))  # 2 * log2(e)
                return 1.0 - 2.0 * root * root
            """,  # noqa: E501
    ),
    "gluon": helped(
        "_tanh_gluon({0})",
        '''
            @gluon.jit
            def _tanh_gluon(x):
                """`_tanh` of four values at a time. The absolute error is below 8e-7.

                One reciprocal, 1 / abcd, replaces four, because the special-function unit limits a soft cap. Powers of
                two are at most 2^30: tanh is 1 there, and abcd does not overflow.
                """
                return gl.inline_asm_elementwise(
                    """
                    {
                    .reg .f32 a, b, c, d, ab, cd, r, s;
                    mul.ftz.f32 a, $4, 0f4038AA3B;  // 2 log2(e)
                    mul.ftz.f32 b, $5, 0f4038AA3B;
                    mul.ftz.f32 c, $6, 0f4038AA3B;
                    mul.ftz.f32 d, $7, 0f4038AA3B;
                    min.NaN.ftz.f32 a, a, 0f41F00000;  // 30
                    min.NaN.ftz.f32 b, b, 0f41F00000;
                    min.NaN.ftz.f32 c, c, 0f41F00000;
                    min.NaN.ftz.f32 d, d, 0f41F00000;
                    ex2.approx.ftz.f32 a, a;
                    ex2.approx.ftz.f32 b, b;
                    ex2.approx.ftz.f32 c, c;
                    ex2.approx.ftz.f32 d, d;
                    add.ftz.f32 a, a, 0f3F800000;  // 1
                    add.ftz.f32 b, b, 0f3F800000;
                    add.ftz.f32 c, c, 0f3F800000;
                    add.ftz.f32 d, d, 0f3F800000;
                    mul.ftz.f32 ab, a, b;
                    mul.ftz.f32 cd, c, d;
                    mul.ftz.f32 r, ab, cd;
                    rcp.approx.ftz.f32 r, r;
                    mul.ftz.f32 r, r, 0fC0000000;  // -2
                    mul.ftz.f32 s, r, cd;
                    mul.ftz.f32 r, r, ab;
                    fma.rn.ftz.f32 $0, s, b, 0f3F800000;  // 1 - 2 / a
                    fma.rn.ftz.f32 $1, s, a, 0f3F800000;
                    fma.rn.ftz.f32 $2, r, d, 0f3F800000;
                    fma.rn.ftz.f32 $3, r, c, 0f3F800000;
                    }
                    """,
                    "=f,=f,=f,=f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4,
                )
            ''',  # noqa: E501
    ),
}
TANH_PRECISE = {
    "triton": helped(
        "_tanh_fp32({0})",
        """
        @triton.jit
        def _tanh_fp32(x):
            # A series near zero, elsewhere a quotient that does not overflow. The error is a few ulps for every x.
            square = x * x
            near = square * (0.13333334 + square * (-0.053968254 + square * (0.021869488 - square * 0.008863236)))
            near = x + x * (square * -0.33333334 + square * near)
            far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(x)))
            return tl.where(square < 0.1225, near, tl.where(x < 0.0, -far, far))
        """,  # noqa: E501
    )
}
_TANH_APPROX_TRITON = helped(
    "_tanh_approx({0})",
    """
    @triton.jit
    def _tanh_approx(x):
        # One instruction. The absolute error is below 5e-4.
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    """,  # noqa: E501
)
TANH_APPROX = {
    **dict.fromkeys(MODULES, _TANH_APPROX_TRITON),
    "cuda": helped(
        "_tanh_approx({0})",
        """
        // One instruction. The absolute error is below 5e-4.
        DEVICE float _tanh_approx(float x) {
            float y;
            asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
            return y;
        }
        """,
    ),
}

GELU = helped_in_modules(
    "_gelu{end}({0})",
    """
    {jit}
    def _gelu{end}(x):
        return 0.5 * x * (1.0 + {tl}.erf(x * 0.7071067811865476))
    """,
)
LOG1P = helped_in_modules(
    "_log1p{end}({0})",
    """
    {jit}
    def _log1p{end}(x):
        # The quotient x / (u - 1) corrects the rounding of u = 1 + x.
        u = 1.0 + x
        return {tl}.where(u == 1.0, x, {tl}.log(u) * (x / (u - 1.0)))
    """,
)
EXPM1 = helped_in_modules(
    "_expm1{end}({0})",
    """
    {jit}
    def _expm1{end}(x):
        # Near zero, e^x - 1 would cancel, so a series replaces it.
        near = 1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7)))
        near = x * (1.0 + x / 2 * (1.0 + x / 3 * near))
        return {tl}.where({tl}.abs(x) < 0.35, near, {tl}.exp(x) - 1.0)
    """,
)
SOFTPLUS = helped_in_modules(
    "_softplus{end}({0})",
    """
    {jit}
    def _softplus{end}(x):
        # log(1 + e^x) without overflow. As in log1p, a quotient corrects the rounding of u = 1 + e.
        e = {tl}.exp(-{tl}.abs(x))
        u = 1.0 + e
        return {tl}.maximum(x, 0.0) + {tl}.where(u == 1.0, e, {tl}.log(u) * (e / (u - 1.0)))
    """,
)
LOG_SIGMOID = helped_in_modules(
    "_log_sigmoid{end}({0})",
    """
    {jit}
    def _log_sigmoid{end}(x):
        # -log(1 + e^-x) without overflow. As in log1p, a quotient corrects the rounding of u.
        e = {tl}.exp(-{tl}.abs(x))
        u = 1.0 + e
        return {tl}.minimum(x, 0.0) - {tl}.where(u == 1.0, e, {tl}.log(u) * (e / (u - 1.0)))
    """,
)
ELU = helped_in_modules(
    "_elu{end}({0})",
    """
    {jit}
    def _elu{end}(x):
        # x above zero, e^x - 1 below. Near zero, a series replaces this difference, as in expm1.
        low = {tl}.minimum(x, 0.0)
        near = 1.0 + low / 4 * (1.0 + low / 5 * (1.0 + low / 6 * (1.0 + low / 7)))
        near = low * (1.0 + low / 2 * (1.0 + low / 3 * near))
        return {tl}.maximum(x, 0.0) + {tl}.where(low > -0.35, near, {tl}.exp(low) - 1.0)
    """,
)
ATAN = helped_in_modules(
    "_atan{end}({0})",
    """
    {jit}
    def _atan{end}(x):
        # The series of Cephes' atanf, for tangents up to tan(pi / 8). The relative error is below 2e-7.
        size = {tl}.abs(x)
        high = size > 2.414213562373095
        middle = size > 0.4142135623730950
        t = {tl}.where(high, -1.0 / size, {tl}.where(middle, (size - 1.0) / (size + 1.0), size))
        z = t * t
        series = ((0.0805374449538 * z - 0.138776856032) * z + 0.199777106478) * z - 0.333329491539
        start = {tl}.where(high, 1.5707963267948966, {tl}.where(middle, 0.7853981633974483, 0.0))
        angle = start + (series * z * t + t)
        return {tl}.where(x < 0.0, -angle, angle)
    """,  # noqa: E501
)
ROUND = helped_in_modules(
    "_round{end}({0})",
    """
    {jit}
    def _round{end}(x):
        low = {tl}.floor(x)
        rest = x - low
        up = (rest > 0.5) | ((rest == 0.5) & (low * 0.5 != {tl}.floor(low * 0.5)))
        return {tl}.where(up, low + 1.0, low)
    """,
)
SIGN = helped_in_modules(
    "_sign{end}({0})",
    """
    {jit}
    def _sign{end}(x):
        return {tl}.where(x > 0.0, 1.0, {tl}.where(x < 0.0, -1.0, 0.0))
    """,
)
POW = helped_in_modules(
    "_pow{end}({0}, {1})",
    """
    {jit}
    def _pow{end}(x, y):
        # For a negative x, only integer powers are real; odd ones are negative.
        size = {tl}.where(y == 0.0, 1.0, {tl}.exp2(y * {tl}.log2({tl}.abs(x))))
        odd = y * 0.5 != {tl}.floor(y * 0.5)
        below = {tl}.where(y != {tl}.floor(y), float("nan"), {tl}.where(odd, -size, size))
        return {tl}.where(x < 0.0, below, size)
    """,
)

MOD_TRITON = helped(
    "_floor_mod({0}, {1})",
    """
    @triton.jit
    def _floor_mod(a, b):
        # The remainder of Python, which has the sign of b.
        r = a % b
        return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
    """,
)
MOD_CUDA = helped(
    "_floor_mod({0}, {1})",
    """
    // The remainder of Python, which has the sign of b.
    template <typename T>
    DEVICE T _floor_mod(T a, T b) {
        const T r = a % b;
        return r != 0 && (r < 0) != (b < 0) ? r + b : r;
    }
    """,
)
FLOORDIV_TRITON = helped(
    "_floor_div({0}, {1})",
    """
    @triton.jit
    def _floor_div(a, b):
        # The quotient of Python, rounded towards minus infinity.
        r = a % b
        r = tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
        return (a - r) // b
    """,
)
FLOORDIV_CUDA = helped(
    "_floor_div({0}, {1})",
    """
    // The quotient of Python, rounded towards minus infinity.
    template <typename T>
    DEVICE T _floor_div(T a, T b) {
        const T q = a / b, r = a % b;
        return r != 0 && (r < 0) != (b < 0) ? q - 1 : q;
    }
    """,
)
