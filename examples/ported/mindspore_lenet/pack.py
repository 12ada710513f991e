"""Pictures of stripes in five directions, in a MindRecord file, which MindSpore reads.

python pack.py FOLDER
"""

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from unisono.data.mindrecord import MindRecordWriter


def main(folder, count=160, size=32, classes=5):
    rng = np.random.RandomState(0)
    rows, columns = np.mgrid[:size, :size]
    schema = {"label": "int32", "image": "bytes"}
    with MindRecordWriter(folder / "train.mindrecord", schema, overwrite=True) as writer:
        for _ in range(count):
            label = rng.randint(classes)
            angle = np.pi * label / classes
            stripes = 40 * np.sin(rows * np.sin(angle) + columns * np.cos(angle))
            pixels = 128 + stripes[..., None] + rng.normal(0, 60, (size, size, 3))
            png = io.BytesIO()
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(png, "png")
            writer.write({"label": label, "image": png.getvalue()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
