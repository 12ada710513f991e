"""Lock files: every package of an environment with its version and the SHA-256 of its files.

    python tests/support/locks.py     writes locks/cpu.txt from locks/cuda.txt and locks/torch-cpu.sha256 (see make lock)

``cuda.txt`` is for torch as PyPI has it. ``cpu.txt`` is the same without CUDA's packages. PyPI has no torch without CUDA for
Linux on x86-64: there it takes the builds whose hashes are in ``torch-cpu.sha256``.
"""

from __future__ import annotations

import re
from pathlib import Path

LOCKS = Path(__file__).parents[2] / "locks"
_CUDA = ("nvidia-", "cuda-", "triton")
_NO_CPU_BUILD = "sys_platform == 'linux' and platform_machine == 'x86_64'"
_CPU_BUILD = "sys_platform != 'linux' or platform_machine != 'x86_64'"
_ENTRY = re.compile(
    r"^(?P<name>[a-z0-9][a-z0-9-]*)==(?P<version>\S+)(?P<rest>(?:.*\\\n)(?:    --hash=.*\n?)+)", re.MULTILINE
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def entries(text: str) -> list[tuple[str, str, list[str]]]:
    """Name, version and hashes; a package has two entries where Python's versions need different ones."""
    return [(entry["name"], entry["version"], _HASH.findall(entry["rest"])) for entry in _ENTRY.finditer(text)]


def without_cuda(text: str, torch_hashes: list[str]) -> str:
    """The lock for torch without CUDA."""
    kept, keeps = list[str](), True
    for line in text.splitlines():
        if line[:1].isalnum():
            keeps = not line.startswith(_CUDA)
        if line.startswith("torch=="):
            version = line.split()[0]
            kept.append(f"{version}+cpu ; {_NO_CPU_BUILD} \\")
            kept += [f"    --hash=sha256:{each} \\" for each in torch_hashes[:-1]] + [
                f"    --hash=sha256:{torch_hashes[-1]}"
            ]
            line = f"{version} ; {_CPU_BUILD} \\"
        # comments at the margin head the file; others name what needs an entry
        if keeps and (not line.startswith("    #") or not line.removeprefix("    #").strip().startswith(_CUDA)):
            kept.append(line)
    return "\n".join([*kept, ""])


def main() -> None:
    torch_hashes = [line.split()[0] for line in (LOCKS / "torch-cpu.sha256").read_text().splitlines()]
    (LOCKS / "cpu.txt").write_text(without_cuda((LOCKS / "cuda.txt").read_text(), torch_hashes))


if __name__ == "__main__":
    main()
