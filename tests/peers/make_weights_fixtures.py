"""Make tests/interop/fixtures/*.params with MXNet 1.9.1, or *.ckpt and *.safetensors with MindSpore 2.10.

$UNISONO_MXNET_PYTHON tests/peers/make_weights_fixtures.py mxnet tests/interop/fixtures
$UNISONO_MINDSPORE_PYTHON tests/peers/make_weights_fixtures.py mindspore tests/interop/fixtures
"""

import sys
from pathlib import Path

import numpy as np


def mxnet(folder: Path) -> None:
    np.bool = bool  # type: ignore[attr-defined]
    import mxnet as mx

    arrays = {
        f"arg:{dtype}": mx.nd.array([[0, 1, 2], [3, 100, 101]], dtype=dtype)
        for dtype in ("float32", "float64", "float16", "uint8", "int32", "int8", "int64")
    }
    arrays["aux:bool"] = mx.nd.array([0, 1, 1], dtype="bool")
    bfloat16 = mx.nd.NDArray(
        mx.ndarray.ndarray._new_alloc_handle((2,), mx.cpu(), False, np.dtype([("bfloat16", np.uint16)]))
    )
    arrays["bfloat16"] = mx.nd.array([1.5, -2.25]).copyto(bfloat16)
    arrays["rows"] = mx.nd.sparse.row_sparse_array((np.array([[1.0, 2, 3], [4, 5, 6]]), [1, 4]), shape=(6, 3))
    arrays["no rows"] = mx.nd.sparse.zeros("row_sparse", (2, 3))
    arrays["csr"] = mx.nd.sparse.csr_matrix(
        (np.array([1.0, 2, 3], np.float32), np.array([0, 2, 1]), np.array([0, 2, 2, 3])), shape=(3, 4)
    )
    mx.nd.save(str(folder / "named.params"), arrays)
    mx.nd.save(str(folder / "list.params"), [mx.nd.array([1.0, 2.0]), mx.nd.array([[3.0]])])
    with mx.util.np_shape():
        numpy_arrays = {
            "number": mx.np.array(3.5),
            "empty": mx.np.zeros((0, 4)),
            "matrix": mx.np.arange(4).reshape(2, 2),
        }
        mx.nd.save(str(folder / "numpy.params"), {name: array.as_nd_ndarray() for name, array in numpy_arrays.items()})


def mindspore(folder: Path) -> None:
    import mindspore as ms

    kinds = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64")
    kinds += ("uint8", "uint16", "uint32", "uint64", "bool_")
    tensors = [{"name": kind, "data": ms.Tensor([[0, 1, 2], [3, 100, 101]], getattr(ms, kind))} for kind in kinds]
    tensors.append({"name": "number", "data": ms.Tensor(3.5, ms.float32)})
    ms.save_checkpoint(tensors, str(folder / "all.ckpt"), append_dict={"epoch": 3, "note": "añb"}, crc_check=True)
    ms.save_checkpoint(tensors[:1], str(folder / "plain.ckpt"))
    ms.save_checkpoint(tensors[:2], str(folder / "plain.safetensors"), format="safetensors")


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    {"mxnet": mxnet, "mindspore": mindspore}[sys.argv[1]](out)
    for made in out.iterdir():
        made.chmod(0o644)
