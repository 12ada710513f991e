"""Runs the snippets of one file of examples/migrate and writes what each returned, or its traceback, as JSON.

    python migration_run.py FILE.py FOLDER [--slow | --only NAME,NAME]

Each snippet is a function. Its parameters are made by the function ``given`` of the file, anew for each; all ranks of a job run
the same snippets in the order of the file, and rank 0 writes FOLDER/results.json. With ``--slow`` the functions that the file
names in SLOW run too; those in FRAGILE run with ``--only`` alone, those in ALONE in one process only, those in TOGETHER in
one of several only. The libraries' own Pythons run it too, so it imports nothing but the standard library.
"""

import importlib
import inspect
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "migrate"


def _environ(names, default):
    return int(next((os.environ[name] for name in names if name in os.environ), default))


def rank():
    return _environ(("UNISONO_RANK", "RANK", "RANK_ID", "OMPI_COMM_WORLD_RANK"), 0)


def world_size():
    return _environ(("UNISONO_WORLD", "WORLD_SIZE", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE"), 1)


def snippets(names, slow, only):
    """The functions of the file that are to run, by name."""
    left_out = set() if slow else set(names.get("SLOW", ()))
    left_out |= set() if only else set(names.get("FRAGILE", ()))
    left_out |= set(names.get("ALONE" if world_size() > 1 else "TOGETHER", ()))
    found = {}
    for name, value in names.items():
        own = inspect.isfunction(value) and value.__module__ == names["__name__"]
        if own and not name.startswith("_") and name != "given" and name not in left_out and (not only or name in only):
            found[name] = value
    return found


def plain(value):
    """``value`` as JSON has it."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    for method in ("asnumpy", "detach"):
        if hasattr(value, method):
            return getattr(value, method)().tolist()
    return value.tolist() if hasattr(value, "tolist") else value


def run(path, folder, slow=False, only=()):
    """Write FOLDER/results.json: by name ``{"result": …}`` or ``{"error": traceback}``."""
    sys.path[:0] = [str(Path(path).parent), str(EXAMPLES)]
    names = vars(importlib.import_module(Path(path).stem))
    results = {}
    for name, function in snippets(names, slow, only).items():
        shared = Path(folder) / name
        shared.mkdir(parents=True, exist_ok=True)
        os.chdir(str(shared))
        try:
            made = names["given"]()
            wanted = {each: made[each]() for each in inspect.signature(function).parameters}
            try:
                results[name] = {"result": plain(function(**wanted))}
            finally:
                for value in wanted.values():
                    if hasattr(value, "close"):
                        value.close()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            if world_size() > 1:
                print(name, results[name]["error"], flush=True)
    # a rank that ended would break the connections of one that still computes: torch's goes last, together
    group = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        group.barrier()
    if rank() == 0:
        partial = tempfile.mktemp(dir=str(folder))
        Path(partial).write_text(json.dumps(results))
        os.replace(partial, str(Path(folder) / "results.json"))
    return 0


def main(facts):
    """For a process of ``nursery``."""
    return run(**facts)


if __name__ == "__main__":
    program, target, *rest = sys.argv[1:]
    chosen = rest[-1].split(",") if "--only" in rest else ()
    sys.exit(run(Path(program).resolve(), Path(target).resolve(), "--slow" in rest, chosen))
