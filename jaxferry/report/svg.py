"""Charts as inline SVG: bars of lanes, bars of categories, steps over time. Sizes are in units of the view box."""

from collections.abc import Sequence
from html import escape

WIDTH, LEFT, TOP = 960.0, 70.0, 8.0
_PLOT = WIDTH - LEFT - 10.0
_ROW, _HEIGHT, _BELOW = 26.0, 150.0, 34.0

Span = tuple[float, float, str, str]
"""Start, end, CSS class and description of a bar."""


def lanes(rows: Sequence[tuple[str, Sequence[Span]]], begin: float, end: float, unit: str) -> str:
    """Draws a row of bars for each lane, over the time from `begin` to `end`."""
    scale = _PLOT / (end - begin if end > begin else 1.0)
    parts = []
    for number, (name, spans) in enumerate(rows):
        y = TOP + number * _ROW
        parts.append(_text(LEFT - 6, y + 16, name, "end"))
        for start, stop, kind, told in spans:
            first, last = max(start, begin), min(stop, end)
            x, width = LEFT + (first - begin) * scale, max((last - first) * scale, 0.4)
            title = f"<title>{escape(told)}</title>"
            parts.append(f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="20">{title}</rect>')
    bottom = TOP + len(rows) * _ROW
    return _svg(parts, bottom, (begin, end), unit)


def bars(values: Sequence[tuple[str, float]], unit: str, kind: str) -> str:
    """Draws a bar for each named value."""
    most = max((value for _, value in values), default=0.0) or 1.0
    each = _PLOT / max(len(values), 1)
    parts = [_text(LEFT - 6, TOP + 12, f"{most:,.4g} {unit}", "end")]
    for number, (name, value) in enumerate(values):
        height = _HEIGHT * value / most
        x, y = LEFT + number * each, TOP + _HEIGHT - height
        title = f"<title>{escape(name)}: {value:,.4g} {escape(unit)}</title>"
        size = f'width="{0.9 * each:.2f}" height="{height:.2f}"'
        parts.append(f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" {size}>{title}</rect>')
        parts.append(_text(x + 0.45 * each, TOP + _HEIGHT + 16, name, "middle"))
    return _svg(parts, TOP + _HEIGHT, None, "")


def steps(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], end: float, unit: str, axis: str) -> str:
    """Draws values that hold from their time on, one line for each (CSS class, points) of `series`."""
    begin = min((points[0][0] for _, points in series if points), default=0.0)
    most = max((value for _, points in series for _, value in points), default=0.0) or 1.0
    scale = _PLOT / (end - begin if end > begin else 1.0)
    parts = [_text(LEFT - 6, TOP + 12, f"{most:,.4g} {unit}", "end"), _text(LEFT - 6, TOP + _HEIGHT, "0", "end")]
    for kind, points in series:
        path, last = [], TOP + _HEIGHT
        for time, value in points:
            x, y = LEFT + (time - begin) * scale, TOP + _HEIGHT * (1 - value / most)
            path.append(f"{x:.2f},{last:.2f} {x:.2f},{y:.2f}")
            last = y
        path.append(f"{LEFT + _PLOT:.2f},{last:.2f}")
        parts.append(f'<polyline class="{kind}" points="{" ".join(path)}"/>')
    return _svg(parts, TOP + _HEIGHT, (begin, end), axis)


def _svg(parts: Sequence[str], bottom: float, limits: tuple[float, float] | None, unit: str) -> str:
    """The chart with its axis; `limits` are the values at the axis's ends."""
    axis = [f'<line x1="{LEFT}" y1="{bottom}" x2="{LEFT + _PLOT}" y2="{bottom}"/>']
    if limits is not None:
        begin, end = limits
        for share, anchor in ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end")):
            shown = f"{begin + share * (end - begin):,.4g} {unit}"
            axis.append(_text(LEFT + share * _PLOT, bottom + 18, shown, anchor))
    size = f'viewBox="0 0 {WIDTH:.0f} {bottom + _BELOW:.0f}"'
    return f'<svg {size} role="img">{"".join((*parts, *axis))}</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
