"""Pictures of the README, drawn from the spec, the emitted file and the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from support.docs import speed_tables

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs/pictures"

INK, FAINT, LINE, CARD, ACCENT, SECOND, THIRD = (
    "#1f2328", "#59636e", "#d1d9e0", "#f6f8fa", "#0969da", "#afb8c1", "#dfb57a",
)  # fmt: skip
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return an SVG on white, which is also readable on dark pages."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="{SANS}"'
        f' font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, text: str, **attributes: str) -> str:
    said = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}" xml:space="preserve"{said}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, **attributes: str) -> str:
    said = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{said}/>'


# --- from spec to repository ------------------------

SHOWN_KEYS = ("kernel", "dtype", "head_dim", "buffers", " ", "score_mod", "mask_mod", "passes")
SHOWN_LINES = ("qk = ", "s = qk", "m_new = ", "p = ", "l_i = ")


def flow() -> str:
    """Draw a spec, the files that kgen renders from it, and their destination."""
    spec = (ROOT / "specs/causal_alibi.yaml").read_text(encoding="utf-8").splitlines()
    own = [line for line in spec if line.startswith(SHOWN_KEYS)]
    emitted = (ROOT / "generated/causal_alibi/triton.py").read_text(encoding="utf-8").splitlines()
    loop = emitted[emitted.index("def _forward_tiles(") :]
    kernel = [
        next(line.strip() for line in loop if line.strip().startswith(start))
        for start in SHOWN_LINES
    ]
    cards = (
        ("A spec", "causal_alibi.yaml", own, "your score_mod and mask_mod"),
        (
            "Source of its kernels",
            "causal_alibi/triton.py, hopper.py",
            [
                "@triton.jit",
                "def _forward_tiles(...):",
                "    ...",
                *(f"    {line}" for line in kernel),
            ],
            "kgen verify: as right as eager PyTorch",
        ),
        (
            "Your repository",
            "model.py",
            [
                "from kernels.causal_alibi \\",
                "    import causal_alibi",
                "",
                "out = causal_alibi(",
                "    q, k, v, slopes=slopes)",
                "out.sum().backward()",
            ],
            "needs torch, triton, no kgen",
        ),
    )
    left, top, height, gap = 16, 16, 214, 84
    widths = (302, 300, 198)
    parts = []
    for (head, file, lines, foot), width, does in zip(
        cards, widths, ("kgen render", "git add", ""), strict=True
    ):
        parts.append(_box(left, top, width, height, CARD, rx="6", stroke=LINE))
        parts.append(_text(left + 12, top + 24, head, font_weight="600", font_size="14"))
        parts.append(_text(left + 12, top + 42, file, fill=FAINT))
        for number, line in enumerate(lines):
            place = top + 68 + 15 * number
            parts.append(_text(left + 12, place, line, font_family=MONO, font_size="10"))
        parts.append(_text(left + 12, top + height - 12, foot, fill=FAINT))
        left += width
        if does:
            parts += _arrow(left + 8, left + gap - 8, top + height / 2, does)
            left += gap
    return _svg(
        left + 16, top + height + 16, "A spec becomes source, which lies in your repository", parts
    )


def _arrow(start: float, end: float, y: float, does: str) -> list[str]:
    middle = (start + end) / 2
    return [
        _text(
            middle,
            y - 10,
            does,
            font_family=MONO,
            font_size="10",
            text_anchor="middle",
            fill=ACCENT,
        ),
        f'<path d="M{start:g} {y:g}H{end - 6:g}" stroke="{ACCENT}" stroke-width="2"/>',
        f'<path d="M{end:g} {y:g}l-9 -5v10z" fill="{ACCENT}"/>',
    ]


# --- speed ------------------------

PEERS = (
    ("emitted by kgen", ("kgen",), ACCENT, 9),
    ("FlexAttention, compiled", ("flex",), SECOND, 5),
    ("PyTorch's own, where it has the variant", ("sdpa", "varlen"), THIRD, 5),
)


def speed() -> str:
    """Draw the TFLOP/s of each spec in the first table of performance, and of its peers."""
    reports, condition = speed_tables.race()
    head = "TFLOP/s of attention on one {device}, and how many times faster than FlexAttention"
    most, panel, left, top, row = 800, 330, 132, 88, 27
    height = top + row * len(reports) + 40
    parts = [
        _text(16, 28, head.format(**condition), font_weight="600", font_size="15"),
        *_legend(16, 50),
    ]
    for number, pass_ in enumerate(speed_tables.PASSES):
        start = left + number * (panel + 58)
        parts.append(_text(start, top - 10, pass_, font_weight="600"))
        for tick in range(0, most + 1, 200):
            x = start + panel * tick / most
            parts.append(_box(x, top, 1, height - top - 36, LINE))
            parts.append(
                _text(x, height - 22, str(tick), fill=FAINT, font_size="10", text_anchor="middle")
            )
        for place, (_, by_pass) in enumerate(reports):
            parts += _bars(by_pass[pass_], start, top + row * place + 4, panel / most)
    for place, (spec, _) in enumerate(reports):
        parts.append(
            _text(left - 8, top + row * place + 16, spec, text_anchor="end", font_size="11")
        )
    said = (
        "B {B}, HQ {HQ}, S {SQ}, packed sequences {tokens} tokens; medians of interleaved rounds, "
        "torch {torch}, "
        "triton {triton}"
    )
    parts.append(_text(16, height - 4, said.format(**condition), fill=FAINT, font_size="10"))
    return _svg(
        left + 2 * panel + 58 + 60, height + 8, "TFLOP/s of emitted kernels and their peers", parts
    )


def _legend(x: float, y: float) -> list[str]:
    parts = []
    for name, _, color, _ in PEERS:
        parts += [_box(x, y - 9, 10, 10, color), _text(x + 15, y, name, font_size="11")]
        x += 36 + 6.5 * len(name)
    return parts


def _bars(rows: speed_tables.Peers, x: float, y: float, unit: float) -> Sequence[str]:
    """Draw the bars of one spec and pass, one below the other.

    After the first, print its lead over the second.
    """
    ratio, end = rows["flex"]["ratio"], x + rows["kgen"]["tflops"] * unit
    lead = f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"
    parts = [_text(round(end + 5, 1), y + 8, lead, font_size="10", fill=ACCENT)]
    for names, color, thick in ((names, color, thick) for _, names, color, thick in PEERS):
        if found := next((rows[name] for name in names if name in rows), None):
            parts.append(_box(x, y, round(found["tflops"] * unit, 1), thick, color))
            y += thick + 1
    return parts


PICTURES = {"flow.svg": flow, "speed.svg": speed}
