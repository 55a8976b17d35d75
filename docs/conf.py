"""Sphinx: MyST Markdown, furo."""

from importlib.metadata import version as _version

project = "durable_actors"
author = "the durable_actors authors"
copyright = "2026, the durable_actors authors"
release = _version("durable-actors")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "durable_actors"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
suppress_warnings = ["myst.xref_missing"]
default_role = "code"
