"""The version of the cleaning code, by which results of different code are told apart."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from unisono.quality.options import CleanRecipe

# Raise it with every change of this package after which any document is kept or dropped for another reason, or has another text.
# A job of an older version is then not gone on with, and its recipe has another hash.
CLEANING_VERSION: Final = 3


def step_versions(recipe: CleanRecipe) -> dict[str, str]:
    """The versions of the code that decides what becomes of a document, besides those of sketches and of the language model.

    That of ftfy is among them only if the recipe repairs encodings, which needs it.
    """
    versions = {"cleaning": str(CLEANING_VERSION)}
    return {**versions, "ftfy": version("ftfy")} if recipe.normalize.repairs_encoding else versions
