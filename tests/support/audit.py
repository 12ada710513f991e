"""Known vulnerabilities of the packages in a lock file, asked of pip-audit's database.

    python tests/support/audit.py LOCK [OPTION OF pip-audit...]

Ends with 1 if there are any, or if no answer about the lock comes from a database that answers; with 0 if there are none,
or if the database cannot be reached, which is said.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# a release of 2010 with known vulnerabilities: who finds none in it has asked no database
KNOWN = "jinja2==2.4.1 --hash=sha256:" + 64 * "0" + "\n"


def findings(lock: Path, options: list[str]) -> tuple[list[str], str]:
    """A line for each vulnerability; or none, and why pip-audit has no answer."""
    argv = [sys.executable, "-m", "pip_audit", "-r", str(lock), "--require-hashes", "--disable-pip", "--format", "json"]
    done = subprocess.run([*argv, "--progress-spinner", "off", *options], capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return [], (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return [
        f"{package['name']} {package.get('version')}: {found['id']}, mended in {', '.join(found['fix_versions']) or 'no release'}"
        for package in packages
        for found in package.get("vulns", [])
    ], ""


def main(lock: Path, options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "known.txt"
        probe.write_text(KNOWN)
        known, reason = findings(probe, options)
    if not known:
        reason = reason or "it has no vulnerability of jinja2 2.4.1"
        print(f"pip-audit: NOT CHECKED, the database of vulnerabilities could not be asked: {reason}")
        return 0
    found, reason = findings(lock, options)
    if reason:
        print(f"pip-audit: NOT CHECKED, though the database answers: {reason}")
        return 1
    print("\n".join(found) or f"pip-audit: no known vulnerability in {lock}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
