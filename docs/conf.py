"""Sphinx's configuration.

The source folder is the repository, so that the site's links are the repository's::

    uv run --group docs sphinx-build -W --keep-going -q -c docs -d build/doctrees . build/site
"""

import shutil
from pathlib import Path

from sphinx.application import Sphinx
from wellfed import __version__

DOCS = Path(__file__).parent

project = "wellfed"
version = release = __version__
html_title = f"wellfed {version}"
html_theme = "furo"
html_show_copyright = False
# a file that leads to the first page
html_extra_path = ["site"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "scripts/bench/results/*.md",
    "tests/fakecuda/README.md",
]
exclude_patterns = [".*", "build", "outputs"]
highlight_language = "text"
myst_heading_anchors = 4
# packages that no group of the project's own tools installs
autodoc_mock_imports = ["lightning", "transformers"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_display_short_literal_types = True


def copy_pictures(app: Sphinx, error: Exception | None) -> None:
    """Copies the pictures of HTML elements, which Sphinx does not look into."""
    if not error:
        shutil.copytree(DOCS / "pictures", app.outdir / "docs" / "pictures", dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    """Is called by Sphinx."""
    app.connect("build-finished", copy_pictures)
