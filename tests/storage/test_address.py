"""Addresses of fsspec: the package that one needs, and whether it is a folder of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.errors import ExtraError
from unisono.storage.address import is_within, local_path, open_address


@pytest.mark.parametrize(
    ("address", "package"), [("s3://x/y.csv", "s3fs"), ("http://h/y.csv", "aiohttp"), ("smb://h/y", "smbprotocol")]
)
def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, address: str, package: str) -> None:
    for name in ("s3fs", "aiohttp", "yarl", "smbclient"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    with pytest.raises(ExtraError) as caught:
        open_address(address, f"the address {address!r}")
    (problem,) = caught.value.problems
    assert problem.given == f"the address {address!r} needs the package {package!r}, which is not installed"
    assert problem.rule.startswith(f"fsspec reads {address.split(':')[0]}:// through a package of its own; it says ")
    assert problem.nearest == f"pip install {package}"


def test_fsspec_itself_comes_with_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ExtraError, match=r"pip install 'unisono\[remote\]'"):
        open_address("s3://x", "the address 's3://x'")


def test_local_folders_are_found_behind_links_and_wrappers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("HOME", str(tmp_path))
    for address in (f"file://{tmp_path}/link", "~/link", f"simplecache::file://{tmp_path}/link"):
        assert local_path(*open_address(address, "a test")) == tmp_path / "real", address
    assert local_path(*open_address("memory://a", "a test")) is None


def test_what_lies_within_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert is_within(tmp_path / "link" / "b" / "new", tmp_path / "a")
    assert is_within(tmp_path / "not" / "there", tmp_path / "not")
    assert not is_within(tmp_path / "a", tmp_path / "a" / "b")
    assert not is_within(tmp_path / "ab", tmp_path / "a")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root: a second mount of a folder was not tried")
def test_a_second_mount_of_a_folder_is_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "mounted").mkdir()
    if subprocess.run(
        ["mount", "--bind", tmp_path / "a", tmp_path / "mounted"], capture_output=True, check=False
    ).returncode:
        pytest.skip("this machine allows no mounts: a second mount of a folder was not tried")
    try:
        assert is_within(tmp_path / "mounted" / "x", tmp_path / "a")
    finally:
        subprocess.run(["umount", tmp_path / "mounted"], check=True)
