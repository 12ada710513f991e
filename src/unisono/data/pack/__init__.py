"""Images, text, tables and what functions make, packed into record files: in parallel, to the same bytes however often cut short.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy import lazily

if TYPE_CHECKING:
    from unisono.data.pack.image_records import pack_images as pack_images
    from unisono.data.pack.image_rows import pack_image_rows as pack_image_rows
    from unisono.data.pack.images import ImageOptions as ImageOptions
    from unisono.data.pack.job import Packed as Packed
    from unisono.data.pack.layout import Layout as Layout
    from unisono.data.pack.look import Stats as Stats
    from unisono.data.pack.look import sheet as sheet
    from unisono.data.pack.look import stats as stats
    from unisono.data.pack.rows import pack_function as pack_function
    from unisono.data.pack.rows import pack_rows as pack_rows
    from unisono.data.pack.text import pack_text as pack_text

_HOMES = {
    "ImageOptions": "images",
    "Layout": "layout",
    "Packed": "job",
    "pack_function": "rows",
    "pack_image_rows": "image_rows",
    "pack_images": "image_records",
    "pack_rows": "rows",
    "pack_text": "text",
    "sheet": "look",
    "Stats": "look",
    "stats": "look",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
