"""Pictures of stripes in five directions, as image records. MXNet's own writer gives the same bytes.

python pack.py FOLDER
"""

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from unisono.data.recordio import ImageHeader, RecordWriter, pack_header


def main(folder, count=160, size=16, classes=5):
    rng = np.random.RandomState(0)
    rows, columns = np.mgrid[:size, :size]
    with RecordWriter(folder / "train.rec", overwrite=True) as writer:
        for number in range(count):
            label = rng.randint(classes)
            angle = np.pi * label / classes
            stripes = 60 * np.sin(rows * np.sin(angle) + columns * np.cos(angle))
            pixels = 128 + stripes[..., None] + rng.normal(0, 60, (size, size, 3))
            png = io.BytesIO()
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(png, "png")
            writer.write(pack_header(ImageHeader(label=label, id=number), png.getvalue()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
