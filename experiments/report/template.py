"""From view data to text: the templates of this package, filled.

A template prints and decides nothing. Autoescape is on, and every value that it prints goes through ``clean`` first, so no
text from a model, an item or a file name reaches a page as markup or as a control character. The only values that are let
through as they are (``Markup``) are the drawings and the style sheet, which this package makes itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from experiments.report.text import clean

MACROS = "macros.html"


def render(name: str, view: Mapping[str, Any]) -> str:
    """A template of this package with these values, and the style sheet as ``style``."""
    here = files("experiments.report")
    environment = Environment(
        loader=DictLoader({one: (here / one).read_text("utf-8") for one in (name, MACROS)}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((here / "page.css").read_text("utf-8"))
    return environment.get_template(name).render(style=style, **view)


def _finalize(value: Any) -> Any:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
