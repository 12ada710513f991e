"""Sphinx configuration. ``make docs`` builds the pages without a network; every warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reference import write_reference

import unisono

project = "unisono"
author = "the unisono authors"
copyright = "the unisono authors"
release = "0.1.0"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "README.md"]
html_theme = "furo"
html_title = "unisono"
html_static_path = ["_static"]
html_css_files = ["pairs.css"]

# Links between pages are written as they work on a file browser too: `plans.md`, `adr/0001-packages.md#context`.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
suppress_warnings = ["myst.xref_missing", "myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # A field named `type` must not be the target of every annotation `type[...]`.
napoleon_custom_sections = [("Source", "Source"), ("Shapes", "Shapes")]

assert unisono.__all__  # the reference is made from what packages export
write_reference(Path(__file__).parent / "reference")
