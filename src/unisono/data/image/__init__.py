"""Images: decode only what a crop needs, and augment it with randomness keyed by sample. Names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy import lazily

if TYPE_CHECKING:
    from unisono.data.image.augment import Augment as Augment
    from unisono.data.image.augment import CenterCrop as CenterCrop
    from unisono.data.image.augment import Erase as Erase
    from unisono.data.image.augment import Jitter as Jitter
    from unisono.data.image.augment import RandomResizedCrop as RandomResizedCrop
    from unisono.data.image.decoding import ImageInfo as ImageInfo
    from unisono.data.image.decoding import decode as decode
    from unisono.data.image.decoding import probe as probe
    from unisono.data.image.pairs import CutMix as CutMix
    from unisono.data.image.pairs import Mixup as Mixup
    from unisono.data.image.pixels import on_device as on_device
    from unisono.data.image.records import image_records as image_records
    from unisono.data.image.restart import add_restart_markers as add_restart_markers
    from unisono.data.image.restart import encode_jpeg as encode_jpeg
    from unisono.data.image.sheet import contact_sheet as contact_sheet
    from unisono.data.image.tiles import TileGrid as TileGrid
    from unisono.data.image.tiles import decode_region as decode_region
    from unisono.data.image.tiles import tile_grid as tile_grid
    from unisono.data.image.transform import ImageTransform as ImageTransform

_HOMES = {
    "Augment": "augment",
    "CenterCrop": "augment",
    "CutMix": "pairs",
    "Erase": "augment",
    "ImageInfo": "decoding",
    "ImageTransform": "transform",
    "Jitter": "augment",
    "Mixup": "pairs",
    "RandomResizedCrop": "augment",
    "TileGrid": "tiles",
    "add_restart_markers": "restart",
    "contact_sheet": "sheet",
    "decode": "decoding",
    "decode_region": "tiles",
    "encode_jpeg": "restart",
    "image_records": "records",
    "on_device": "pixels",
    "probe": "decoding",
    "tile_grid": "tiles",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
