"""Sphinx: MyST Markdown, furo. The build fails when a public class loses the description of one of its fields."""

from __future__ import annotations

import ast
import re
from importlib.metadata import version as _version
from pathlib import Path
from typing import Any

import attrs
import durable_actors
from durable_actors import journal, otp
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer

project = "durable_actors"
author = "the durable_actors authors"
copyright = "2026, the durable_actors authors"
release = _version("durable-actors")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "durable_actors"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
pygments_dark_style = "github-dark"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6b5b", "color-brand-content": "#0b6b5b"},
    "dark_css_variables": {"color-brand-primary": "#5fd0b8", "color-brand-content": "#5fd0b8"},
}
myst_enable_extensions = ["colon_fence", "deflist", "tasklist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
default_role = "code"

PACKAGES = {"durable_actors": durable_actors, "durable_actors.journal": journal, "durable_actors.otp": otp}
HIDDEN = {"Context": {"port"}}
"""Fields that are the engine's own."""


def _written_in() -> dict[str, str]:
    """Class or function → the module whose source has it."""
    package = Path(durable_actors.__file__).parent
    found: dict[str, str] = {}
    for path in sorted(package.rglob("*.py")):
        module = ".".join(["durable_actors", *path.relative_to(package).with_suffix("").parts])
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(f"{module}:{node.name}", module)
    return found


def _restore_modules() -> None:
    """Public classes name the package as their module; autodoc reads descriptions of fields where they are written."""
    written = _written_in()
    for name, package in PACKAGES.items():
        for public in package.__all__:
            value = getattr(package, public)
            if getattr(value, "__module__", None) == name:
                places = [
                    module
                    for key, module in written.items()
                    if key.endswith(f":{public}") and module.startswith(name + ".")
                ]
                near = [module for module in places if ".otp." not in module or name.endswith("otp")]
                if near:
                    value.__module__ = near[0].removesuffix(".__init__")


def _inherit_descriptions() -> None:
    """A TypedDict does not tell autodoc of what it derives: InsertOptions has the fields of RowOptions, too."""
    analyzer = ModuleAnalyzer.for_module("durable_actors.machine._insert_options")
    docs = analyzer.find_attr_docs()
    for scope, name in list(docs):
        if scope == "RowOptions":
            docs["InsertOptions", name] = docs[scope, name]
            analyzer.tagorder[f"InsertOptions.{name}"] = analyzer.tagorder[f"RowOptions.{name}"]


def _fields(value: Any) -> set[str]:
    if not isinstance(value, type):
        return set()
    if attrs.has(value):
        # Options have a table instead: tests/test_docs.py compares it.
        found = {f.name for f in attrs.fields(value) if not f.inherited and "about" not in f.metadata}
    elif hasattr(value, "__total__"):  # a TypedDict
        found = set(value.__annotations__)
    else:
        found = set()
    return {name for name in found if not name.startswith("_")} - HIDDEN.get(value.__name__, set())


def _public_classes() -> list[tuple[type, list[str]]]:
    """Every public class, with the names under which the reference may describe it."""
    found: dict[type, list[str]] = {}
    for package, module in PACKAGES.items():
        for public in module.__all__:
            value = getattr(module, public)
            if isinstance(value, type) and value.__name__ == public:
                found.setdefault(value, []).append(f"{package}.{public}")
                found[value].append(f"durable_actors.errors.{public}")
    return list(found.items())


def _check_fields(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    objects = app.env.get_domain("py").objects  # type: ignore[attr-defined]
    missing = []
    for value, names in _public_classes():
        described = [name for name in names if name in objects]
        if not described:
            missing.append(names[0])
        else:
            missing += [
                f"{names[0]}.{f}"
                for f in sorted(_fields(value))
                if not any(f"{n}.{f}" in objects for n in described)
            ]
    if missing:
        raise ExtensionError("the reference does not describe: " + ", ".join(missing))


def _drop_empty_globs(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Pages that come later have their place in the navigation already; Sphinx would warn that they are missing."""
    if docname == "index":
        here = Path(__file__).parent
        lines = source[0].split("\n")
        source[0] = "\n".join(
            line
            for line in lines
            if not re.fullmatch(r"[a-z-]+/[a-z-]*\*", line) or any(_unlisted(here, line, lines))
        )


def _unlisted(here: Path, pattern: str, listed: list[str]) -> list[str]:
    names = (path.relative_to(here).with_suffix("").as_posix() for path in here.glob(pattern + ".md"))
    return [name for name in names if not any(re.fullmatch(rf"(.*<)?{name}>?", line) for line in listed)]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _drop_empty_globs)
    _restore_modules()
    _inherit_descriptions()
    app.connect("build-finished", _check_fields)
