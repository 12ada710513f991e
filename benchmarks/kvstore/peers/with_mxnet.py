"""MXNet's distributed store, one process of it: scheduler, server or worker as DMLC_ROLE says. For MXNet's own environment.

    with_mxnet.py KIND SIZES REPEATS CODEC

A worker pushes and pulls one key of each size (bytes of float32, separated by commas; "a+b+c" is a set of keys pushed together)
and prints, as JSON, the seconds of each round from the push of the first key to the arrival of the last value.
"""

import json
import sys
import time

import mxnet as mx  # servers and the scheduler serve in here and end here
import numpy as np

kind, sizes, repeats, codec = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4]
store = mx.kv.create(kind)
if codec != "none":
    store.set_gradient_compression({"type": codec, "threshold": 0.5})
if kind == "dist_async":
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1e-6))
times = {}
first = 0
for size in sizes:
    numels = [int(each) // 4 for each in size.split("+")]
    keys = [str(first + number) for number in range(len(numels))]
    first += len(keys)
    values = [mx.nd.array(np.ones(numel, dtype=np.float32)) for numel in numels]
    out = [mx.nd.zeros(numel) for numel in numels]
    store.init(keys, values)
    store.pull(keys, out=out)
    mx.nd.waitall()
    rounds = []
    for _ in range(repeats):
        store._barrier()
        began = time.perf_counter()
        for place, (key, value) in enumerate(zip(keys, values, strict=True)):
            store.push(key, value, priority=-place)
        for place, (key, each) in enumerate(zip(keys, out, strict=True)):
            store.pull(key, out=each, priority=-place)
        mx.nd.waitall()
        rounds.append(time.perf_counter() - began)
    times[size] = rounds
store._barrier()
print(json.dumps({"rank": store.rank, "times": times}), flush=True)
