"""Charts as inline SVG: bars of lanes, bars of categories, lines and areas over time.

Sizes are in view box units, times in seconds.
"""

from collections.abc import Iterator, Sequence
from html import escape

from jaxferry.units import format_seconds

WIDTH, LEFT, TOP = 960.0, 86.0, 8.0
_PLOT = WIDTH - LEFT - 34.0
_ROW, _HEIGHT, _BELOW = 26.0, 150.0, 34.0
_LABEL = 62.0

Span = tuple[float, float, str, str]
"""Start, end, CSS class and description of a bar."""

Points = Sequence[tuple[float, float]]
"""Times, and values from then on."""


def lanes(rows: Sequence[tuple[str, Sequence[Span]]], begin: float, end: float) -> str:
    """Draws a row of bars for each lane, over the time from `begin` to `end`; a name without bars is a heading."""
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
    return _svg(parts, bottom, (begin, end))


def bars(values: Sequence[tuple[str, float]], unit: str, kind: str) -> str:
    """Draws a bar for each named value; names are left out where there is no room."""
    most = max((value for _, value in values), default=0.0) or 1.0
    each = _PLOT / max(len(values), 1)
    step = max(1, round(_LABEL / each + 0.5)) if each < _LABEL else 1
    parts = _value_axis(most, unit)
    for number, (name, value) in enumerate(values):
        height = _HEIGHT * value / most
        width = min(0.9 * each, 90.0)
        middle, y = LEFT + (number + 0.5) * each, TOP + _HEIGHT - height
        title = f"<title>{escape(name)}: {value:,.4g} {escape(unit)}</title>"
        size = f'width="{width:.2f}" height="{height:.2f}"'
        parts.append(f'<rect class="{kind}" x="{middle - width / 2:.2f}" y="{y:.2f}" {size}>{title}</rect>')
        if number % step == 0:
            parts.append(_text(middle, TOP + _HEIGHT + 16, name, "middle"))
    return _svg(parts, TOP + _HEIGHT)


def lines(series: Sequence[tuple[str, Points]], begin: float, end: float, unit: str) -> str:
    """Draws a line for each (CSS class, points) of `series`."""
    most = max((value for _, points in series for _, value in points), default=0.0) or 1.0
    scale = _PLOT / (end - begin if end > begin else 1.0)
    parts = _value_axis(most, unit)
    for kind, points in series:
        path = " ".join(
            f"{LEFT + (time - begin) * scale:.2f},{_y(value, most):.2f}" for time, value in _corners(points, end)
        )
        parts.append(f'<polyline class="{kind}" points="{path}"/>')
    return _svg(parts, TOP + _HEIGHT, (begin, end))


def areas(series: Sequence[tuple[str, Points]], begin: float, end: float, unit: str) -> str:
    """Draws the values of all (CSS class, points) of `series` on top of each other, the first one at the bottom."""
    times = sorted({max(time, begin) for _, points in series for time, _ in points if time < end} | {begin})
    below, layers = [0.0] * len(times), []
    for kind, points in series:
        above = [low + value for low, value in zip(below, _values_at(points, times), strict=True)]
        layers.append((kind, below, above))
        below = above
    most = max(below, default=0.0) or 1.0
    scale = _PLOT / (end - begin if end > begin else 1.0)
    parts = _value_axis(most, unit)
    for kind, lower, upper in layers:
        top = _corners(list(zip(times, upper, strict=True)), end)
        bottom = list(_corners(list(zip(times, lower, strict=True)), end))[::-1]
        path = " ".join(f"{LEFT + (t - begin) * scale:.2f},{_y(value, most):.2f}" for t, value in (*top, *bottom))
        parts.append(f'<polygon class="{kind}" points="{path}"/>')
    return _svg(parts, TOP + _HEIGHT, (begin, end))


def _corners(points: Points, end: float) -> Iterator[tuple[float, float]]:
    """The corners of a line of steps up to `end`."""
    for (time, value), following in zip(points, [*[time for time, _ in points[1:]], end], strict=True):
        yield time, value
        yield following, value


def _values_at(points: Points, times: Sequence[float]) -> list[float]:
    """The value at each of these ascending times."""
    found, place, value = [], 0, 0.0
    for time in times:
        while place < len(points) and points[place][0] <= time:
            value, place = points[place][1], place + 1
        found.append(value)
    return found


def _y(value: float, most: float) -> float:
    return TOP + _HEIGHT * (1 - value / most)


def _value_axis(most: float, unit: str) -> list[str]:
    shown = f"{most:,.0f}" if most >= 100 else f"{most:.{3 if most >= 1 else 2}g}"
    return [_text(LEFT - 6, TOP + 12, f"{shown} {unit}", "end"), _text(LEFT - 6, TOP + _HEIGHT, "0", "end")]


def _svg(parts: Sequence[str], bottom: float, limits: tuple[float, float] | None = None) -> str:
    """The chart with its axis; `limits` are the times at the axis's ends."""
    axis = [f'<line x1="{LEFT}" y1="{bottom}" x2="{LEFT + _PLOT}" y2="{bottom}"/>']
    if limits is not None:
        begin, end = limits
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            shown = format_seconds(begin + share * (end - begin))
            axis.append(_text(LEFT + share * _PLOT, bottom + 18, shown, "middle"))
    size = f'viewBox="0 0 {WIDTH:.0f} {bottom + _BELOW:.0f}"'
    return f'<div class="figure"><svg {size} role="img">{"".join((*parts, *axis))}</svg></div>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
