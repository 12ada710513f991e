"""Near-duplicates by imagededup's perceptual hashes: ``python -m benchmarks.quality.imagededup_alone PHOTOS OUT``.

PyPI's torchvision does not load beside torch's CPU wheel; imagededup imports it for its models, which are not used here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

for module in ("imagededup.methods.cnn", "imagededup.utils.models"):
    sys.modules[module] = MagicMock()
from imagededup.methods import PHash  # noqa: E402

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    method = PHash(verbose=False)
    encodings = method.encode_images(image_dir=str(source), num_enc_workers=0)
    near = method.find_duplicates(encoding_map=encodings, num_dist_workers=0)
    # stars in the order of names: a photo near one that is kept is dropped
    dropped: set[str] = set()
    for name in sorted(near):
        if name not in dropped:
            dropped.update(other for other in near[name] if other > name)
    out.mkdir()
    (out / "dropped.json").write_text(json.dumps(sorted(dropped)))
