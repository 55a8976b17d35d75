"""Which node stands in which layer: cycles are broken, then each node stands below all that it comes after. Pure.

Nodes are their positions in the diagram. Everything is iterative (a chain of 10,000 does not recurse) and depends on
the order of nodes and edges only.
"""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[int, int]


def acyclic(size: int, edges: Sequence[Pair]) -> tuple[list[Pair], list[bool]]:
    """Return the edges with those of them turned round that close a circle, and which ones were turned.

    A depth-first search from the first node on finds them: an edge to a node that is still open goes back. Edges from
    a node to itself are left alone.
    """
    following: list[list[int]] = [[] for _ in range(size)]
    for at, (source, _) in enumerate(edges):
        following[source].append(at)
    turned = [False] * len(edges)
    state = [0] * size  # 1: open, 2: done
    for root in range(size):
        stack = [(root, 0)] if not state[root] else []
        while stack:
            node, at = stack.pop()
            state[node] = 1
            if at == len(following[node]):
                state[node] = 2
                continue
            stack.append((node, at + 1))
            target = edges[following[node][at]][1]
            if state[target] == 1:
                turned[following[node][at]] = target != node
            elif not state[target]:
                stack.append((target, 0))
    straight = [
        (target, source) if back else (source, target)
        for (source, target), back in zip(edges, turned, strict=True)
    ]
    return straight, turned


def longest_paths(size: int, edges: Sequence[Pair]) -> list[int]:
    """Return the layer of each node: 0 for one without predecessors, else one more than the deepest of them.

    The edges have no circles, except those from a node to itself, which do not count.
    """
    following: list[list[int]] = [[] for _ in range(size)]
    missing = [0] * size
    for source, target in edges:
        if source != target:
            following[source].append(target)
            missing[target] += 1
    layer = [0] * size
    ready = [node for node in range(size) if not missing[node]]
    for node in ready:  # grows
        for target in following[node]:
            layer[target] = max(layer[target], layer[node] + 1)
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    return layer
