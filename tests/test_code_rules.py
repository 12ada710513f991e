"""Rules of docs/security.md that the source itself shows: what no module may do, over all of the package.

Each list of exceptions is the whole truth: a file outside of it that does the thing fails, and so does one in it that does not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from code_rules import Source, argument, constant, finds, found, is_in, sources

PACKAGE = "src"
Found = Iterator[tuple[ast.AST, str]]

# --- 1, 2, 4, 8: no code from data -----------------------------------------------------------------------------------

PICKLES = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"),
    # their queues, managers and connections pickle
    *("multiprocessing", "torch.multiprocessing", "concurrent.futures.ProcessPoolExecutor"),
    *("torch.distributed.checkpoint", "torch.distributed.rpc", "torch.package", "torch.hub", "torch.jit.load"),
    *("pandas.read_pickle", "numpy.lib.npyio", "runpy", "ray"),
}
RUNS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


# of these only ``send_bytes`` and ``recv_bytes`` are used, which send bytes as they are
BYTES_ONLY = {"multiprocessing.connection.Connection", "multiprocessing.connection.Pipe"}


def code_from_data(source: Source) -> Found:
    has_connections = False
    for node, name in source.imports():
        has_connections |= name in BYTES_ONLY
        if is_in(name, PICKLES) and name not in BYTES_ONLY:
            yield node, name
    for call, name in source.calls():
        if name.removeprefix("builtins.") in RUNS or (is_in(name, PICKLES) and name not in BYTES_ONLY):
            yield call, name
        if has_connections and name.rpartition(".")[2] in ("send", "recv"):
            yield call, f"{name}, which may pickle"
        if name == "torch.load" and constant(argument(call, "weights_only")) is not True:
            yield call, "torch.load without weights_only=True"
        if (allowed := argument(call, "allow_pickle")) is not None and constant(allowed) is not False:
            yield call, "allow_pickle"
        if (weights := argument(call, "weights_only")) is not None and constant(weights) is not True:
            yield call, "weights_only"
        if (trusted := argument(call, "trust_remote_code")) is not None and constant(trusted) is not False:
            yield call, "trust_remote_code"
        if name.endswith(".from_pretrained") and constant(argument(call, "trust_remote_code")) is not False:
            yield call, "from_pretrained without trust_remote_code=False"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute | ast.Name | ast.alias):
            name = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name"}[type(node)]
            if (text := str(getattr(node, name)).rpartition(".")[2]) in OBJECT_COLLECTIVES:
                yield node, text


CODE_FROM_DATA = {
    # the data set and transforms of this process, over a socket pair to its own child: docs/adr/0005
    "src/unisono/data/loading/worker_process.py",
    # runs a configuration that its user wrote in Python and named, or has run before (config/trust.py)
    "src/unisono/config/python_file.py",
    # bytes for tasks of a cluster that the user named; Ray pickles on its own connections: docs/adr/0005
    "src/unisono/quality/duplicates/ray_map.py",
}


BENCHMARKS = {
    "benchmarks/checkpoint_stall.py",  # writes torch's own checkpoints to measure how long that takes; reads none
    "benchmarks/kvstore/convergence.py",  # functions of its own in processes of its own
}


def test_no_module_runs_what_comes_as_data() -> None:
    assert len(sources(PACKAGE)) > 300
    results = found(code_from_data, PACKAGE)
    assert set(results) == CODE_FROM_DATA, results


def test_no_example_and_no_benchmark_runs_what_comes_as_data() -> None:
    results = found(code_from_data, "examples", "benchmarks")
    assert set(results) == BENCHMARKS, results


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from marshal import loads",
        "from importlib import import_module\nimport_module('dill')",
        "from multiprocessing import Queue",
        "from multiprocessing.connection import Connection\nConnection(1).recv()",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "eval(x)",
        "import builtins\nbuiltins.eval(x)",
        "from builtins import exec as e\ne(x)",
        "import yaml as y\ny.load(x)",
        "import torch as t\nt.load(x)",
        "import torch\ntorch.load(x, weights_only=False)",
        "from torch import load\nload(x)",
        "import numpy as np\nnp.load(x, allow_pickle=True)",
        "import numpy as np\nnp.load(x, allow_pickle=chosen)",
        "import torch.distributed as dist\ndist.broadcast_object_list(x)",
        "from torch.distributed import scatter_object_list as s",
        "from transformers import AutoModel\nAutoModel.from_pretrained(x)",
        "import os as o\no.system(x)",
    ],
)
def test_the_search_for_code_from_data_finds_it(text: str) -> None:
    assert finds(code_from_data, text)


# --- 3: no object from a text ----------------------------------------------------------------------------------------


def imports_by_text(source: Source) -> Found:
    for call, name in source.calls():
        if name in ("importlib.import_module", "__import__") and not isinstance(constant(call.args[0]), str):
            yield call, name


IMPORTS_BY_TEXT = {
    "src/unisono/cli/main.py",  # commands of a table
    "src/unisono/data/convert/table_files.py",  # formats of a table
    "src/unisono/data/convert/pack/worker.py",  # --function MODULE:NAME of `data pack`, which its user typed
    "src/unisono/data/nested.py",  # the class of a batch that this process's own child has made
}


def test_no_module_imports_what_a_file_names() -> None:
    results = found(imports_by_text, PACKAGE)
    assert set(results) == IMPORTS_BY_TEXT, results
    assert finds(imports_by_text, "import importlib\nimportlib.import_module(name)")


# --- 5, 16: listeners ------------------------------------------------------------------------------------------------

WEB = {
    *(
        "http.server",
        "socketserver",
        "xmlrpc",
        "wsgiref",
        "aiohttp",
        "flask",
        "fastapi",
        "uvicorn",
        "tornado",
        "bottle",
    ),
    *("tensorboard.program", "tensorboard.main", "torch.utils.tensorboard", "asyncio", "logging.config", "webbrowser"),
}


def web_servers(source: Source) -> Found:
    for node, name in source.imports():
        if is_in(name, WEB):
            yield node, name


def listeners(source: Source) -> Found:
    for call, name in source.calls():
        if name.rpartition(".")[2] in ("create_server", "bind", "listen", "start_server") and "unisono." not in name:
            yield call, name
        if name.endswith("TCPStore") and constant(argument(call, "is_master", 3)) is not False:
            yield call, "a TCPStore that listens"


# each of them checks its address first, and a test of docs/security.md ("Twenty rules", row 5) looks at its socket
LISTENERS = {
    "src/unisono/kvstore/wire/frame_server.py",  # parameter servers: refuse_every_interface, require_private
    "src/unisono/dist/address.py",  # free_port: bound and closed again, never listened at
    "src/unisono/dist/rendezvous.py",  # the job's store: refuse_every_interface, require_private_ranks
    "src/unisono/launch/host_agent.py",  # sockets for ranks and servers of a host: refuse_every_interface
    "src/unisono/launch/job.py",  # loopback
    "src/unisono/launch/multi_host_job.py",  # asks an agent for one
    "src/unisono/kvstore/bench/processes.py",  # loopback
}


def test_nothing_serves_http() -> None:
    assert found(web_servers, PACKAGE) == {}
    assert finds(web_servers, "from http.server import HTTPServer")


def test_every_listener_is_known() -> None:
    results = found(listeners, PACKAGE)
    assert set(results) == LISTENERS, results
    assert finds(listeners, "import socket\nsocket.create_server(('', 0))")
    assert finds(listeners, "from torch.distributed import TCPStore as T\nT('h', 1, None, True)")


# --- 10, 11: archives and downloads ----------------------------------------------------------------------------------


def unpacks(source: Source) -> Found:
    for node, name in source.imports():
        if is_in(name, {"zipfile", "py7zr", "rarfile", "libarchive"}):
            yield node, name
    for call, name in source.calls():
        if name.rpartition(".")[2] in ("extractall", "extract", "unpack_archive"):
            yield call, name
        if name in ("tarfile.open", "tarfile.TarFile"):
            mode = str(constant(argument(call, "mode", 1)) or "r")
            if not mode.startswith("w"):
                yield call, "an archive that tarfile reads"


def test_nothing_unpacks_archives() -> None:
    assert found(unpacks, PACKAGE) == {}
    for text in ("import tarfile\ntarfile.open(p)", "a.extractall(x)", "import shutil\nshutil.unpack_archive(x)"):
        assert finds(unpacks, text), text


CLIENTS = {
    *("urllib.request", "http.client", "requests", "httpx", "urllib3", "ftplib", "smtplib", "boto3"),
    *("huggingface_hub.hf_hub_download", "huggingface_hub.snapshot_download", "datasets.load_dataset"),
}


def downloads(source: Source) -> Found:
    for node, name in source.imports():
        if is_in(name, CLIENTS):
            yield node, name
    for call, name in source.calls():
        if name.rpartition(".")[2] in (
            "hf_hub_download",
            "snapshot_download",
            "load_dataset",
            "load_state_dict_from_url",
        ):
            yield call, name
        if name.endswith(".from_pretrained") and constant(argument(call, "local_files_only")) is not True:
            yield call, "from_pretrained without local_files_only=True"
    for node in ast.walk(source.tree):
        text = constant(node)
        if isinstance(text, str) and re.match(r"(https?|ftp|s3|gs|hf|hdfs)://[\w.-]+/", text):
            yield node, text


# an identifier of the JSON schema's own language, which nothing opens
DOWNLOADS = {"src/unisono/config/json_schema.py"}


def test_nothing_is_downloaded_but_from_addresses_that_a_user_gives() -> None:
    results = found(downloads, PACKAGE)
    assert set(results) == DOWNLOADS, results
    for text in ("import requests", "import urllib.request as u", "x = 'https://example.org/weights'"):
        assert finds(downloads, text), text


def copies(source: Source) -> Found:
    for call, name in source.calls():
        if name.rpartition(".")[2] in ("get_file", "cat_file", "cat_ranges", "url_to_fs", "getfile"):
            yield call, name


# what opens addresses of fsspec; each has its row in the tests of docs/security.md
COPIES = {
    "src/unisono/storage/address.py",
    "src/unisono/data/sources/remote.py",
    "src/unisono/data/recordio/remote_file.py",
    "src/unisono/checkpoint/remote.py",
}


def test_every_place_that_copies_from_an_address_is_known() -> None:
    results = found(copies, PACKAGE)
    assert set(results) == COPIES, results


# --- 12, 13: processes and ssh ---------------------------------------------------------------------------------------

STARTS = {"run", "Popen", "call", "check_call", "check_output"}


def texts_for_a_shell(source: Source) -> Found:
    for call, name in source.calls():
        if name in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"):
            yield call, name
        if name.startswith(("os.spawn", "os.execl", "os.posix_spawn")):
            yield call, name
        if (shell := argument(call, "shell")) is not None and constant(shell) is not False:
            yield call, "shell="
        if name.startswith("subprocess.") and name.rpartition(".")[2] in STARTS:
            command = argument(call, "args", 0)
            if isinstance(command, ast.JoinedStr | ast.BinOp) or isinstance(constant(command), str):
                yield call, f"{name} of a text"
    for node in ast.walk(source.tree):
        texts = [str(constant(each)) for each in node.elts] if isinstance(node, ast.List | ast.Tuple) else []
        if "-c" in texts and any(re.fullmatch(r"(/.*/)?(ba|da|z|k)?sh", text) for text in texts):
            yield node, "a shell with -c"


def test_no_command_is_a_text_for_a_shell() -> None:
    assert found(texts_for_a_shell, PACKAGE) == {}
    for text in (
        "subprocess.run(x, shell=True)",
        "subprocess.Popen(f'ssh {h}')",
        "os.popen(x)",
        "os.execlp(x, y)",
        "x = ['/bin/sh', '-c', y]",
    ):
        assert finds(texts_for_a_shell, f"import os, subprocess\n{text}"), text


def ssh_settings(source: Source) -> Found:
    for node in ast.walk(source.tree):
        if isinstance(text := constant(node), str) and (
            text == "ssh" or re.search(r"HostKeyCheck|KnownHosts|ProxyCommand|LocalCommand|ForwardAgent", text, re.I)
        ):
            yield node, text[:40]


def test_one_function_makes_command_lines_of_ssh_and_leaves_its_checks_on() -> None:
    results = found(ssh_settings, PACKAGE)
    assert list(results) == ["src/unisono/launch/host_agent_client.py"]
    assert [re.sub(r" in line \d+", "", each) for each in results["src/unisono/launch/host_agent_client.py"]] == ["ssh"]


# --- 17: new files and folders ---------------------------------------------------------------------------------------


def new_files(source: Source) -> Found:
    """Files and folders that are made without permissions of their own, or through a link."""
    for call, name in source.calls():
        last = name.rpartition(".")[2]
        if last in ("mkdir", "makedirs") and (argument(call, "mode") is None or argument(call, "parents") is not None):
            yield call, f"{last} without mode, or with parents"
        elif last in ("write_text", "write_bytes", "mktemp") or (last == "touch" and argument(call, "mode") is None):
            yield call, last
        elif name.startswith("shutil.") and last in ("copy", "copy2", "copyfile", "copytree"):
            yield call, name
        elif name in ("open", "io.open") or (last == "open" and not name.startswith(("os.", "tarfile."))):
            mode = argument(call, "mode", 1 if name in ("open", "io.open") else 0)
            is_descriptor = call.args and re.match(r"fd$|handle$|os\.open\(", ast.unparse(call.args[0]))
            writes = re.match(r"[wxa]b?\+?b?$|rb?\+b?$", str(constant(mode))) is not None
            if writes and not is_descriptor and argument(call, "opener") is None:
                yield call, f"{name} for writing"
        elif name == "sqlite3.connect" and not re.search(r"mode=r[ow]|:memory:", ast.unparse(call.args[0])):
            yield call, name
        elif name == "os.open" and "O_CREAT" in (flags := ast.unparse(call.args[1])):
            if "nofollow" not in flags.lower() or len(call.args) < 3:
                yield call, "os.open that follows links, or without mode"
            elif "O_EXCL" not in flags:
                yield call, "os.open of what may be there"


NEW_FILES = {
    # locks, and files that several processes share: they are there for the second one
    "src/unisono/storage/files.py",
    "src/unisono/storage/folder_lock.py",
    "src/unisono/data/loading/sample_cache.py",  # in a folder of mode 0700, and its owner is checked
    "src/unisono/data/recordio/remote_file.py",  # in a folder of this user
    "src/unisono/checkpoint/remote.py",  # a folder at an address, whose filesystem decides who writes to it
    "src/unisono/tasks/pretrained_folder.py",  # in a temporary folder of mode 0700
}


def test_every_new_file_has_permissions_and_follows_no_link() -> None:
    results = found(new_files, PACKAGE)
    assert set(results) == NEW_FILES, results
    for text in (
        "p.mkdir(parents=True)",
        "p.mkdir(mode=0o755, parents=True)",
        "p.open('wb')",
        "open(p, 'x')",
        "p.touch()",
        "p.open('r+b')",
        "import sqlite3\nsqlite3.connect(p)",
        "p.write_text(x)",
        "import os\nos.open(p, os.O_CREAT | os.O_EXCL, 0o600)",
        "import shutil as s\ns.copyfile(a, b)",
    ):
        assert finds(new_files, text), text
    assert not finds(new_files, "open(p, 'wb', opener=opener)\nopen(p, 'rb')\np.open()")


# where a mode stands among the arguments without names; of methods of a path, and of ``os`` in MODE_OF_OS
MODE_OF_PATH = {"mkdir": 0, "chmod": 0, "lchmod": 0, "touch": 0}
MODE_OF_OS = {"open": 2, "mkdir": 1, "makedirs": 1, "chmod": 1, "fchmod": 1, "lchmod": 1, "mkfifo": 1, "mknod": 1}
WRITABLE = {"S_IWGRP", "S_IRWXG", "S_IWOTH", "S_IRWXO"}


def modes(call: ast.Call, name: str) -> Iterator[ast.AST]:
    """The expressions of a call that may be permissions: ``mode=``, or what stands where a mode does."""
    if (named := argument(call, "mode")) is not None:
        yield named
    module, _, last = name.rpartition(".")
    position = MODE_OF_OS.get(last) if module == "os" else MODE_OF_PATH.get(last) if module else None
    if position is not None:
        yield from call.args[position:]


def parts(mode: ast.AST) -> Iterator[ast.AST]:
    """What a mode is put together from, or may be."""
    if isinstance(mode, ast.BinOp):
        yield from (*parts(mode.left), *parts(mode.right))
    elif isinstance(mode, ast.IfExp):
        yield from (*parts(mode.body), *parts(mode.orelse))
    else:
        yield mode


def wide_permissions(source: Source) -> Found:
    """Modes by which a group or others can write."""
    places = [(call, mode) for call, name in source.calls() for mode in modes(call, name)]
    for node in ast.walk(source.tree):  # constants that stand for modes
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and re.fullmatch("[A-Z]+_MODE", target.id) for target in targets):
                places.append((node, node.value))
    for place, mode in places:
        for part in parts(mode):
            value = constant(part)
            if isinstance(value, int) and not isinstance(value, bool) and value & 0o022:
                yield place, oct(value)
            elif source.full_name(part).rpartition(".")[2] in WRITABLE:
                yield place, source.full_name(part)


def test_no_permission_lets_others_or_a_group_write() -> None:
    assert found(wide_permissions, PACKAGE) == {}
    for text in (
        "p.mkdir(mode=0o777)",
        "p.mkdir(mode=0o775)",
        "p.mkdir(0o775)",
        "Path(x).mkdir(0o777)",
        "p.chmod(0o666)",
        "p.touch(0o666)",
        "import os\nos.open(p, os.O_WRONLY | os.O_CREAT, 0o666)",
        "from os import open as o\no(p, 1, 0o620)",
        "import os\nos.mkdir(p, 0o777)",
        "import os\nos.makedirs(p, 0o777, True)",
        "import os as o\no.chmod(p, 0o602)",
        "import os\nos.fchmod(fd, 0o664)",
        "import os, stat\nos.chmod(p, 0o600 | stat.S_IWGRP)",
        "p.chmod(0o600 if x else 0o620)",
        "FILE_MODE: Final = 0o664",
    ):
        assert finds(wide_permissions, text), text
    for text in (
        "import os\nos.open(p, 0o22)",  # flags
        "import os\nos.open(p, os.O_CREAT, 0o644)",
        "p.mkdir(0o755)",
        "p.open('wb')\nopen(p, 'rb', 2)",
        "import os\nos.chmod(p, 0o700)",
    ):
        assert not finds(wide_permissions, text), text


# --- devices ---------------------------------------------------------------------------------------------------------

VENDORS = ("cuda", "xpu", "mps", "npu", "hpu", "mtia")
OF_DEVICES = {
    *("torch.accelerator", "torch.version.cuda", "torch.version.hip", "torch.version.xpu"),
    *(f"torch.{vendor}" for vendor in VENDORS),
    *(f"torch.backends.{library}" for library in ("cuda", "cudnn", "mps", "miopen")),
    *("torch.Event", "torch.Stream", "pynvml", "torch_npu"),
}


def uses_of_a_vendor(source: Source) -> Found:
    """Names of a vendor's backend, its device type, and modules of torch that are looked up by a device type."""
    for node, name in source.imports():
        if is_in(name, OF_DEVICES):
            yield node, name
    for call, name in source.calls():
        if name == "getattr" and call.args and source.full_name(call.args[0]) == "torch":
            looked_up = ast.unparse(call.args[1])
            if looked_up.endswith((".type", "device")) or "device_type" in looked_up:
                yield call, ast.unparse(call)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_in(source.full_name(node), OF_DEVICES):
            yield node, source.full_name(node)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"cuda(:\d+)?", node.value)
        ):
            yield node, repr(node.value)


ADAPTERS = {
    "src/unisono/device/torch_adapters.py",
    "src/unisono/device/health.py",  # pynvml, NVIDIA's bindings, which only it loads
}


def test_devices_are_used_through_their_adapter_alone() -> None:
    results = found(uses_of_a_vendor, PACKAGE)
    assert set(results) == ADAPTERS, results
    for text in (
        "import torch\ntorch.cuda.synchronize()",
        "import torch as t\nn = t.accelerator.device_count()",
        "from torch import cuda",
        "import torch\ntorch.device('cuda')",
        "import torch\ntorch.device('cuda:1')",
        "import torch\ngetattr(torch, device.type).get_rng_state()",
        "import torch\ngetattr(torch, device_type)",
        "import torch\ntorch.backends.cudnn.benchmark = True",
        "import torch\ntorch.Stream(device=device)",
        "import importlib\nimportlib.import_module('pynvml')",
    ):
        assert finds(uses_of_a_vendor, text), text
    assert not finds(uses_of_a_vendor, "import torch\ngetattr(torch, dtype)\nx = 'cudaStreamSynchronize'")
