#!/usr/bin/env bash
# Environments with the packages that tests marked `peer` compare against, each made once and kept outside the clone:
#
#     eval "$(tests/peers/venvs.sh)"              all of them; `tests/peers/venvs.sh mxnet` only one
#
# Prints an export of UNISONO_<PEER>_PYTHON for each environment that is there or could be made. The others are named on standard
# error, and their tests skip.
set -uo pipefail
PYTHON=${PYTHON:-python3}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/unisono-tests
part=""
trap '[ -z "$part" ] || rm -rf "$part"' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

# environment NAME IMPORT PACKAGE...: prints the export for an environment in which IMPORT works
environment() {
  local name=$1 import=$2
  shift 2
  # other packages or another Python make another environment
  local key folder
  key=$( (echo "$@"; "$PYTHON" -VV) | cksum | cut -d' ' -f1)
  folder=$cache/$name-$key
  part=$folder.part-$$
  if ! [ -x "$folder/bin/python" ]; then
    mkdir -p "$cache"
    rm -rf "$part"
    # a venv cannot be renamed, its python can be called by any path: only bin/python is used afterwards
    if "$PYTHON" -m venv "$part" >&2 &&
      "$part/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2 &&
      "$part/bin/python" -c "$import" >&2; then
      mv -T "$part" "$folder" 2>/dev/null || rm -rf "$part" # another run was faster
    else
      rm -rf "$part"
    fi
  fi
  part=""
  if [ -x "$folder/bin/python" ]; then
    printf 'export UNISONO_%s_PYTHON=%q\n' "${name^^}" "$folder/bin/python"
  else
    echo "no environment with $name: it could not be installed" >&2
    return 1
  fi
}

status=0
for name in ${*:-mxnet mindspore webdataset datasets s3 lightning mlflow ray compressed torchao deepspeed}; do
  case $name in
    # MXNet was made for a NumPy that still had names of its own for Python's types
    mxnet) environment mxnet "import numpy; numpy.bool = bool; import mxnet, cv2" \
      "mxnet==1.9.1" "numpy<1.24" "opencv-python-headless==4.7.0.72" ;;
    mindspore) environment mindspore "import mindspore.mindrecord" "mindspore==2.10.0" "numpy<2" ;;
    webdataset) environment webdataset "import webdataset" "webdataset==1.0.2" "numpy" ;;
    datasets) environment datasets "import datasets" "datasets==5.2.0" "pillow" ;;
    s3) environment s3 "import s3fs, moto.server" "s3fs==2026.9.0" "moto[server]==5.2.5" ;;
    lightning) environment lightning "import lightning" "lightning==2.6.6" "torch==2.13.*" "numpy" ;;
    deepspeed) environment deepspeed "import deepspeed" "deepspeed==0.19.8" "torch==2.13.*" "numpy" ;;
    mlflow) environment mlflow "import mlflow.tracking, sqlalchemy, alembic" "mlflow-skinny==3.17.2" "sqlalchemy==2.1.9" "alembic==1.20.1" ;;
    compressed) environment compressed "import compressed_tensors, transformers" "compressed-tensors==0.20.1" "transformers==5.24.0" \
      "torch==2.13.*" "numpy" ;;
    # without torch: the tests run it with the torch that they have
    torchao) environment torchao "import importlib.metadata; importlib.metadata.version('torchao')" "torchao==0.18.0" ;;
    # with all that the commands for data need, which is not torch
    ray) environment ray "import ray, rensa" "ray==2.60.0" "rensa==0.5.0" "numpy" "safetensors" "msgspec" "tomli-w" "click" "rich" \
      "psutil" "jinja2" "xxhash" "lazy_loader" "packaging" ;;
    *) echo "unknown peer: $name" >&2; false ;;
  esac || status=1
done
exit $status
