"""Pictures of the README, drawn from the spec, the emitted file and the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from support.docs import speed_tables

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs/pictures"

INK, FAINT, LINE, CARD, ACCENT, SECOND, THIRD, FOURTH, FIFTH = (
    "#1f2328", "#59636e", "#d1d9e0", "#f6f8fa", "#0969da", "#afb8c1", "#dfb57a", "#a371f7",
    "#76b900",
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

RACES = ("attention.json", "attention-flash.json")
"""Reports whose peers are in the chart. Both bars of a row are from the same report."""
PEERS = {
    "flex": ("Flex", "FlexAttention", SECOND),
    "flex-flash": ("Flex, FA4", "FlexAttention with FlashAttention-4", FOURTH),
    "sdpa": ("SDPA", "PyTorch SDPA", THIRD),
    "varlen": ("varlen", "PyTorch varlen_attn", THIRD),
    "cudnn-flex": ("cuDNN", "cuDNN flex_attn_func", FIFTH),
    "fa3": ("FA3", "FlashAttention-3", FOURTH),
    "fa4": ("FA4", "FlashAttention-4", FOURTH),
}
"""Short name, label and color of the peers that can be the best of a row."""


def speed() -> str:
    """Draw the TFLOP/s of each spec in the first table of performance, and of the best peer of each
    row."""
    reports, condition = speed_tables.race()
    specs = [spec for spec, _ in reports]
    pairs = {
        (spec, pass_): speed_tables.best_of_races(spec, pass_, RACES)
        for spec in specs
        for pass_ in speed_tables.PASSES
    }
    best = {pair.peer["peer"] for pair in pairs.values() if pair}
    head = "TFLOP/s of attention on one {device}, and how many times faster than the best peer"
    most, panel, left, top, row = 800, 330, 132, 88, 27
    height = top + row * len(specs) + 40
    parts = [
        _text(16, 28, head.format(**condition), font_weight="600", font_size="15"),
        *_legend(16, 50, [PEERS[name][1:] for name in PEERS if name in best]),
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
        for place, spec in enumerate(specs):
            if pair := pairs[spec, pass_]:
                parts += _bars(pair, start, top + row * place + 4, panel / most)
    for place, spec in enumerate(specs):
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
        left + 2 * panel + 58 + 60,
        height + 8,
        "TFLOP/s of emitted kernels and of their best peers",
        parts,
    )


def _legend(x: float, y: float, peers: Iterable[tuple[str, str]]) -> list[str]:
    parts = []
    for name, color in (("emitted by kgen", ACCENT), *peers):
        parts += [_box(x, y - 9, 10, 10, color), _text(x + 15, y, name, font_size="11")]
        x += 36 + 6.5 * len(name)
    return parts


def _bars(pair: speed_tables.Pair, x: float, y: float, unit: float) -> Sequence[str]:
    """Draw the bar of kgen, and below it the bar of the best peer. Print the lead and its name."""
    ratio = pair.peer["ratio"]
    short, _, color = PEERS[pair.peer["peer"]]
    lead = f"{ratio:.2f}x {short}" if ratio < 100 else f"{ratio:.0f}x {short}"
    bars = ((pair.own["tflops"], ACCENT, 11), (pair.peer["tflops"], color, 7))
    parts = []
    for tflops, fill, thick in bars:
        parts.append(_box(x, y, round(tflops * unit, 1), thick, fill))
        y += thick + 1
    end = x + pair.own["tflops"] * unit
    parts.append(_text(round(end + 5, 1), y - 10, lead, font_size="10", fill=ACCENT))
    return parts


PICTURES = {"flow.svg": flow, "speed.svg": speed}
