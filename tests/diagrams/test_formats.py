"""Mermaid, DOT and SVG: names are data, whatever they contain; the same diagram gives the same text."""

from __future__ import annotations

import re
import shutil
import subprocess
from xml.etree import ElementTree as ET

import attrs
import pytest
from durable_actors.diagrams import FORMATS, Diagram, DiagramNode, Edge, render
from durable_actors.diagrams.model import printable
from tests.diagrams.kit import HOSTILE, diamond, hostile, random_diagram

SVG = "{http://www.w3.org/2000/svg}"
SAFE = r"(?:[^\W_]|[ _\-.,/()…→←✓✗]|#\d+;|<br/>)*"
"""What may stand inside the quotes of a Mermaid label: `<br/>` is ours."""
MERMAID = re.compile(
    rf'title: "[^"\\<>#&%{{}}]*"|---|flowchart TD|    (n\d+|more)(\["{SAFE}"\]|\(\["{SAFE}"\]\))'
    rf'|    n\d+ (-->|==>|-\.->)(\|"{SAFE}"\|)? n\d+'
    r"|    classDef \w+ [\w:#,-]+|    class n\d+(,n\d+)* \w+|    %% note: [^%{}<>\"]*"
)
QUOTED = r'"(?:[^"\\]|\\["\\nl])*"'
DOT = re.compile(
    rf"digraph \{{|\}}|    label={QUOTED}; labelloc=t; rankdir=TB;"
    rf"|    (graph|node|edge) \[.*|    \w+ \[label={QUOTED}[^\"]*(\"[#\w,]*\"[^\"]*)*\];"
    rf"|    n\d+ -> n\d+ \[(label={QUOTED})?[^\"]*(\"#\w+\"[^\"]*)?\];"
)


@pytest.mark.parametrize("kind", ["tasks", "steps"])
def test_mermaid_interprets_no_name(kind: str):
    text = render(hostile(kind), "mermaid")
    for line in text.splitlines():
        assert MERMAID.fullmatch(line), line
    assert "script" in text
    assert "<script" not in text
    assert "%%{" not in text


@pytest.mark.parametrize("kind", ["tasks", "steps"])
def test_dot_interprets_no_name(kind: str):
    text = render(hostile(kind), "dot")
    for line in text.splitlines():
        assert DOT.fullmatch(line), line
    assert r"\\N \\G back\\slash\\" in text
    assert "&amp;amp;" in text


def test_graphviz_reads_it_as_it_is_meant():
    dot = shutil.which("dot")
    if dot is None:
        pytest.skip("Graphviz is not installed")
    drawn = subprocess.run(
        [dot, "-Tsvg"], input=render(hostile(), "dot"), capture_output=True, text=True, check=True
    )
    shown = {
        " ".join("".join(each.itertext()).split()) for each in ET.fromstring(drawn.stdout).iter(f"{SVG}text")
    }
    for name in HOSTILE:
        assert " ".join(printable(name).split()) in shown | {""}, name


@pytest.mark.parametrize("kind", ["tasks", "steps"])
def test_svg_shows_names_as_text(kind: str):
    root = ET.fromstring(render(hostile(kind), "svg"))
    tags = {each.tag.removeprefix(SVG) for each in root.iter()}
    assert tags == {"svg", "title", "desc", "style", "defs", "marker", "path", "rect", "g", "text", "circle"}
    attributes = {name for each in root.iter() for name in each.attrib}
    assert not {name for name in attributes if name.startswith("on") or "href" in name}
    names = {each.text or "" for each in root.iter(f"{SVG}text") if each.get("class") == "name"}
    assert names == {printable(each, 36) for each in HOSTILE}


def test_svg_has_both_colour_schemes_and_loads_nothing():
    text = render(random_diagram(1), "svg")
    assert "@media (prefers-color-scheme:dark)" in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "url(" not in text.replace("url(#da-", "")


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_diagram_is_drawn_the_same_way(form: str):
    for seed in range(5):
        assert render(random_diagram(seed), form) == render(random_diagram(seed), form)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_left_out_is_said(form: str):
    text = render(diamond(300), form, limit=20)  # type: ignore[arg-type]
    assert "and 282 more" in text
    assert "not drawn" in text


@pytest.mark.parametrize("form", FORMATS)
def test_states_and_the_current_node_can_be_seen_without_colours(form: str):
    nodes = (
        DiagramNode(id="a", label="one", state="failed", detail="no stock"),
        DiagramNode(id="b", label="two", current=True),
    )
    diagram = Diagram(
        kind="tasks", title="t", nodes=nodes, edges=(Edge(source="a", target="b", label="l", observed=True),)
    )
    text = render(diagram, form)  # type: ignore[arg-type]
    assert "failed, no stock" in text
    if form != "text":  # text names what comes before
        assert "observed" in text
    if form != "text":  # which has it in the colours of the terminal
        elsewhere = attrs.evolve(diagram, nodes=(nodes[0], attrs.evolve(nodes[1], current=False)))
        assert text != render(elsewhere, form)  # type: ignore[arg-type]


def test_several_edges_of_a_step_to_itself_are_one_loop_with_all_labels():
    edges = tuple(Edge(source="a", target="a", label=label) for label in ("retry", "signal 'go'"))
    diagram = Diagram(kind="steps", title="t", nodes=(DiagramNode(id="a", label="a"),), edges=edges)
    root = ET.fromstring(render(diagram, "svg"))
    paths = [each for each in root.iter(f"{SVG}path") if (each.get("class") or "").startswith("edge")]
    assert len(paths) == 1
    [label] = [each.text for each in root.iter(f"{SVG}text") if each.get("class") == "label"]
    assert label == "retry · signal 'go'"
