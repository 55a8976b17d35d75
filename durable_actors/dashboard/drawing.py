"""Small drawings as SVG without styles: sparklines and bars. The page's CSS has their colours. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup


def sparkline(values: Sequence[float], *, width: int = 120, height: int = 28, label: str = "") -> Markup:
    """A line over an area, scaled to its highest value."""
    highest = max(values, default=0.0) or 1.0
    count = max(len(values) - 1, 1)
    points = [
        (round(index * width / count, 1), round(height - 1 - value / highest * (height - 3), 1))
        for index, value in enumerate(values)
    ]
    line = " ".join(f"{x},{y}" for x, y in points)
    area = f"0,{height} {line} {width},{height}" if points else ""
    return Markup(
        '<svg class="spark" viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        '<polygon class="area" points="{area}"/><polyline class="stroke" points="{line}"/></svg>'
    ).format(w=width, h=height, label=label, area=area, line=line)


def bar(share: float, *, label: str = "") -> Markup:
    """A gauge: how much of something is used."""
    filled = round(100 * min(max(share, 0.0), 1.0), 1)
    level = "full" if filled >= 95 else "busy" if filled >= 70 else ""
    return Markup(
        '<svg class="bar {level}" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="{label}">'
        '<rect class="track" width="100" height="6" rx="3"/>'
        '<rect class="fill" width="{filled}" height="6" rx="3"/></svg>'
    ).format(level=level, label=label, filled=filled)
