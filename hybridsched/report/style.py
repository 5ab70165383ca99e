"""How pictures of this project look: palette, figures, axes, and their way into SVG and PNG.

Invariants: colours are told apart by people with any colour vision (Okabe and Ito's set) and differ in lightness;
nothing of matplotlib's global state is used or changed; an SVG is the same bytes for the same data, and its text and
lines take the colour of the page around it (``currentColor``), so that it fits light and dark pages.
matplotlib is imported on first use.
"""

from __future__ import annotations

import io
import re
from typing import Any

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY, PALE = "#CC79A7", "#56B4E9", "#F0E442", "#8A8F98", "#C9CDD3"

ACTIVITY_COLOURS = {
    "rollout": BLUE,
    "train": ORANGE,
    "sync": GREEN,
    "switch": VERMILION,
    "wait": GREY,
    "idle": PALE,
}
ACTIVITY_NAMES = {
    "rollout": "rollout",
    "train": "training",
    "sync": "weight sync",
    "switch": "switching",
    "wait": "waiting",
    "idle": "idle",
}

WIDTH = 12.0  #: inches; at 100 dots per inch 1200 pixels
INK = "#010203"  #: stands for the page's text colour; a value that nothing else uses
FAINT = "#040506"  #: the same, faint: grids and frames
_DPI = 100
_LINE_WIDTH = 1.8
_SVG_SETTINGS: Any = {"svg.fonttype": "path", "svg.hashsalt": "hybridsched", "path.simplify": True}


def new_figure(height: float, width: float = WIDTH) -> Any:
    """An empty figure of that many inches, transparent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="none")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Any, title: str, x: str = "", y: str = "", *, grid: str = "y") -> None:
    """Title on the left, light grid behind, two quiet spines, readable sizes. grid: "x", "y", "both" or ""."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(x, fontsize=10, color=INK)
    axes.set_ylabel(y, fontsize=10, color=INK)
    axes.tick_params(labelsize=9, colors=INK, length=3, color=FAINT)
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
        spine.set_alpha(0.4)
    if grid:
        axes.grid(True, axis=grid, color=FAINT, alpha=0.35, linewidth=0.6)
    axes.set_axisbelow(True)


def whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers: cycles are counted."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=12))


def legend(axes: Any, **kwargs: Any) -> None:
    """A frameless legend above the right end of the axes, in one line."""
    handles, _labels = axes.get_legend_handles_labels()
    if not handles and "handles" not in kwargs:
        return
    settings: dict[str, Any] = {
        "loc": "lower right",
        "bbox_to_anchor": (1.0, 1.0),
        "ncols": 8,
        "frameon": False,
        "fontsize": 9,
        "labelcolor": INK,
        "handlelength": 1.4,
        "columnspacing": 1.4,
        "borderaxespad": 0.2,
    }
    axes.legend(**{**settings, **kwargs})


def line(axes: Any, x: Any, y: Any, colour: str, label: str, **kwargs: Any) -> None:
    """A curve; with few points each is marked."""
    marked = {"marker": "o", "markersize": 3.5} if len(x) <= 40 else {}
    axes.plot(x, y, color=colour, label=label, **{"linewidth": _LINE_WIDTH, **marked, **kwargs})


def note(axes: Any, x: float, y: float, text: str, **kwargs: Any) -> None:
    """Small text in the page's colour."""
    settings: dict[str, Any] = {"fontsize": 8.5, "color": INK, "va": "bottom", "ha": "left", "parse_math": False}
    axes.text(x, y, text, **{**settings, **kwargs})


def empty(axes: Any, text: str) -> None:
    """Say why there is nothing to see."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=10, color=INK, alpha=0.7)


def to_svg(figure: Any, label: str) -> str:
    """The figure as an ``<svg>`` element to put into a page. label: what a screen reader says."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context(_SVG_SETTINGS):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="none")
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = text.replace(INK, "currentColor").replace(FAINT, "currentColor")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{_attribute(label)}"', 1)


def to_png(figure: Any, *, dpi: int = _DPI, background: str = "#FFFFFF") -> bytes:
    """The figure as PNG on a plain, light background."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=background)
    return buffer.getvalue()


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
