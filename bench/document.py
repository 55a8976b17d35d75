"""`python -m bench.document`: bench/baseline.json as the Markdown tables of docs/explanation/performance.md."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from bench.contest import Figure
from bench.reach import judge
from bench.report import BASELINE, HIDDEN, UNITS, figure, load, spread


def reach(figures: list[Figure]) -> Iterator[str]:
    yield "| measure | goal | measured | met |"
    yield "|---|---|---|---|"
    for each in judge(figures):
        measured = "–" if each.value is None else figure(each.value)
        met = "–" if each.met is None else "yes" if each.met else "**no**"
        yield f"| {each.measure} | {'≥' if each.least else '≤'} {figure(each.goal)} | {measured} | {met} |"


def table(figures: list[Figure], bench: str) -> Iterator[str]:
    rows = [each for each in figures if each.bench == bench]
    names = list(dict.fromkeys(name for row in rows for name in row.values if name not in HIDDEN))
    yield f"| {bench} | " + " | ".join(UNITS.get(name, name.replace("_", " ")) for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for row in rows:
        cells = [spread(row.values[name]) if name in row.values else "" for name in names]
        yield f"| {row.contender} | " + " | ".join(cells) + " |"


def main() -> None:
    figures = load(BASELINE)
    about = msgspec.json.decode(BASELINE.read_bytes())["machine"]
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for lines in (
        reach(figures),
        *(table(figures, name) for name in dict.fromkeys(f.bench for f in figures)),
    ):
        print()
        print("\n".join(lines))


if __name__ == "__main__":
    main()
