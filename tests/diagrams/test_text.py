"""Diagrams as text: what a terminal of 80 columns shows, whatever the names and however many nodes."""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest
from durable_actors.diagrams import Diagram, DiagramNode, Edge, render
from durable_actors.diagrams.model import capped
from durable_actors.diagrams.text import columns, render_text
from tests.diagrams.kit import HOSTILE, diamond, hostile, random_diagram, tasks


def test_tasks_stand_in_layers_and_name_what_they_come_after():
    diagram = tasks(
        ["fetch", "rates", "clean", "chart", "mail"],
        [("fetch", "clean"), ("clean", "chart"), ("rates", "chart"), ("chart", "mail"), ("fetch", "mail")],
    )
    states = {"fetch": "done", "rates": "running", "mail": "waiting"}
    nodes = tuple(attrs.evolve(node, state=states.get(node.id, "plain")) for node in diagram.nodes)
    assert render(attrs.evolve(diagram, nodes=nodes)).splitlines() == [
        "tasks",
        "",
        "  1 ✓ fetch  done",
        "    ▶ rates  running",
        "  2 ○ clean           ← fetch",
        "  3 ○ chart           ← clean, rates",
        "  4 ◌ mail   waiting  ← chart, fetch",
    ]


def test_steps_name_what_follows_them():
    diagram = Diagram(
        kind="steps",
        title="Order v1",
        nodes=(
            DiagramNode(id="a", label="begin", state="done"),
            DiagramNode(id="b", label="ask", state="waiting", detail="for a person", current=True),
            DiagramNode(id="z", label="done", shape="end"),
        ),
        edges=(
            Edge(source="a", target="b", passed=True),
            Edge(source="a", target="a", label="retry"),
            Edge(source="b", target="z", label="approved", flow="wait"),
            Edge(source="b", target="a", observed=True),
        ),
        notes=("a word",),
    )
    assert render(diagram).splitlines() == [
        "Order v1",
        "",
        "✓ begin  done",
        "    ⇒ ask",
        "    ↻ begin  retry",
        "◌ ask  waiting, for a person",
        "    → done   approved",
        "    ⇢ begin  observed",
        "",
        "note: a word",
    ]


@pytest.mark.parametrize("kind", ["tasks", "steps"])
@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal_and_no_name_leaves_its_line(kind: str, width: int):
    text = render_text(hostile(kind), width)
    for line in text.splitlines():
        assert columns(line) <= width, line
        assert all(each.isprintable() for each in line)
    assert "\\x1b[31m" in text
    assert "\\u202e" in text
    # No name makes a line of its own: each begins as the lines of this format do.
    starts = (" ", "◌ ", "note:")
    assert [line for line in text.splitlines()[1:] if line and not line.startswith(starts)] == []


def test_a_long_list_of_tasks_is_cut_and_says_so():
    text = render(diamond(10_000), limit=8)
    lines = text.splitlines()
    assert len(lines) == 2 + 8 + 1
    assert "… and 9994 more: 9994 plain; " in lines[-1]
    assert lines[-1].endswith("lines not drawn")


def test_a_task_that_comes_after_many_names_some():
    assert (
        render(diamond(40)).splitlines()[-1]
        == "  3 ○ last   ← l0_0, l0_1, l0_2, l0_3, l0_4, l0_5 and 34 more"
    )


def test_what_needs_attention_stays_when_others_are_cut():
    states = ["done"] * 50 + ["failed", "running", "waiting", "cancelled"] + ["done"] * 50
    nodes = tuple(DiagramNode(id=str(at), label=str(at), state=state) for at, state in enumerate(states))
    small = capped(Diagram(kind="tasks", title="t", nodes=nodes, edges=()), 4)
    assert [node.id for node in small.nodes] == ["50", "51", "52", "53"]
    assert small.hidden == {"done": 100}
    here = capped(
        Diagram(kind="tasks", title="t", nodes=(*nodes[:9], attrs.evolve(nodes[9], current=True)), edges=()),
        1,
    )
    assert [node.id for node in here.nodes] == ["9"]


def test_a_chain_of_ten_thousand_does_not_recurse():
    names = [f"t{number}" for number in range(10_000)]
    text = render(tasks(names, pairwise(names)), limit=10_000)
    assert "\n10000 ○ t9999  ← t9998\n" in text


@pytest.mark.parametrize("seed", range(20))
def test_every_node_and_edge_is_there(seed: int):
    diagram = random_diagram(seed)
    text = render(diagram)
    for node in diagram.nodes:
        assert f"○ {node.label[:20]}" in text
    arrows = sum(line.lstrip()[:1] in "→↻" for line in text.splitlines() if line.strip())
    assert arrows == len(diagram.edges)


def test_a_diagram_without_nodes():
    assert render(Diagram(kind="tasks", title="nothing", nodes=(), edges=())) == "nothing\n"


def test_a_diagram_is_checked():
    node = DiagramNode(id="a", label="a")
    with pytest.raises(ValueError, match="same id"):
        Diagram(kind="tasks", title="", nodes=(node, node), edges=())
    with pytest.raises(ValueError, match="not there"):
        Diagram(kind="tasks", title="", nodes=(node,), edges=(Edge(source="a", target="b"),))
    with pytest.raises(ValueError, match="none of text, mermaid, dot, svg"):
        render(Diagram(kind="tasks", title="", nodes=(), edges=()), "png")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        render(Diagram(kind="tasks", title="", nodes=(), edges=()), limit=0)
    assert len(HOSTILE) == len(set(HOSTILE))
