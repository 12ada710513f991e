"""Certificates from a folder: values travel, and whoever has no good one is told so at once."""

from __future__ import annotations

import random
import re
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority

from unisono.dist.address import require_private
from unisono.errors import CommError, ConfigError
from unisono.kvstore.wire.auth import AuthError
from unisono.kvstore.wire.frame import Frame, Limits, Op
from unisono.kvstore.wire.tls import load_tls, read_tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")

HASTY = Limits(handshake_s=0.5)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "jobs")


@pytest.fixture(scope="module")
def ours(jobs: Authority) -> Path:
    return jobs.host("n1")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Authority(tmp_path_factory.mktemp("tls") / "others").host("n1")


@pytest.mark.parametrize("slot_bytes", [0, 1 << 20], ids=["socket", "memory"])
def test_values_travel_under_tls(wires: Any, counting: Any, ours: Path, slot_bytes: int) -> None:
    server = wires.serve(counting, tls=load_tls(ours))
    connection = wires.connect(server.addresses[0], tls=read_tls({"UNISONO_TLS": str(ours)}), slot_bytes=slot_bytes)
    data = random.Random(0).randbytes(1 << 20)
    futures = [connection.request(Frame(Op.PUSH, seq=seq, payload=data)) for seq in range(20)]
    got = [bytearray(len(data)) for _ in futures]
    futures += [connection.request(Frame(Op.PULL, seq=seq), into=memoryview(got[seq])) for seq in range(20)]
    for future in futures:
        future.result(30)
    assert all(bytes(each) == data for each in got)
    traffic = connection.traffic()
    assert traffic.shared_sent_bytes == (20 * len(data) if slot_bytes else 0)
    assert (traffic.sent_bytes < len(data)) == bool(slot_bytes)


def test_nothing_of_a_value_can_be_read_on_the_line(wires: Any, counting: Any, ours: Path) -> None:
    server, heard = wires.serve(counting, tls=load_tls(ours)), bytearray()
    with socket.create_server(("127.0.0.1", 0)) as tap:
        taps = threading.Thread(target=_pass_on, args=(tap, server.addresses[0], heard))
        taps.start()
        connection = wires.connect(tap.getsockname()[:2], tls=load_tls(ours))
        connection.request(Frame(Op.PUSH, seq=1, payload=b"gradient" * 1000)).result(10)
        connection.close()
        taps.join(10)
    assert counting.held[1] == b"gradient" * 1000
    assert len(heard) > 8000
    assert b"gradient" not in heard
    assert b"nonce" not in heard


def _pass_on(tap: socket.socket, address: tuple[str, int], heard: bytearray) -> None:
    def one_way(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                heard.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    near, _ = tap.accept()
    with near, socket.create_connection(address) as far:
        back = threading.Thread(target=one_way, args=(far, near))
        back.start()
        one_way(near, far)
        back.join()


def test_a_server_of_another_authority_is_refused_at_once(wires: Any, counting: Any, ours: Path, foreign: Path) -> None:
    server = wires.serve(counting, tls=load_tls(foreign))
    with pytest.raises(
        AuthError, match=r"the certificate of the server at 127.0.0.1:[0-9]+ is not accepted here: self-signed"
    ):
        wires.connect(server.addresses[0], tls=load_tls(ours))


def test_a_worker_of_another_authority_is_told_by_the_server(
    wires: Any, counting: Any, ours: Path, foreign: Path, tmp_path: Path
) -> None:
    server = wires.serve(counting, tls=load_tls(ours))
    both = shutil.copytree(foreign, tmp_path / "both")
    (both / "authority.pem").write_text((foreign / "authority.pem").read_text() + (ours / "authority.pem").read_text())
    with pytest.raises(AuthError, match=r"did not accept this side's certificate \(tlsv1 alert unknown ca\)") as caught:
        wires.connect(server.addresses[0], tls=load_tls(both))
    assert caught.value.exit_code == 2
    assert counting.arrived == []


def test_a_certificate_names_the_address_it_is_reached_at(
    wires: Any, counting: Any, jobs: Authority, ours: Path
) -> None:
    server = wires.serve(counting, tls=load_tls(jobs.host("elsewhere", "DNS:n7", "IP:10.0.0.7")))
    with pytest.raises(AuthError, match=r"IP address mismatch, certificate is not valid for '127.0.0.1'"):
        wires.connect(server.addresses[0], tls=load_tls(ours))


def test_one_side_without_tls(wires: Any, counting: Any, another_counting: Any, ours: Path) -> None:
    with pytest.raises(AuthError, match=r"the server at 127.0.0.1:[0-9]+ does not speak TLS") as caught:
        wires.connect(wires.serve(counting).addresses[0], tls=load_tls(ours))
    assert caught.value.problems[0].nearest == "the same launch.tls for servers and workers"
    server = wires.serve(another_counting(), tls=load_tls(ours), limits=HASTY)
    with pytest.raises(CommError, match=r"has not answered for .* has ended, or waits for TLS"):
        wires.connect(server.addresses[0], deadline_s=0.3, limits=HASTY)


def test_a_public_address_needs_tls() -> None:
    with pytest.raises(ConfigError) as caught:
        require_private("8.8.8.8", tls=False)
    assert caught.value.problems[0].given == "the address 8.8.8.8 is not a private one, and no TLS is set up"
    assert caught.value.problems[0].nearest.startswith("launch.tls=FOLDER (or unisono launch --tls FOLDER)")
    require_private("8.8.8.8", tls=True)
    for host in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "::1", "fe80::1%eth0"):
        require_private(host, tls=False)


def _without_key(folder: Path, jobs: Authority, foreign: Path) -> None:
    (folder / "key.pem").unlink()


def _open_key(folder: Path, jobs: Authority, foreign: Path) -> None:
    (folder / "key.pem").chmod(0o640)


def _other_key(folder: Path, jobs: Authority, foreign: Path) -> None:
    shutil.copy(foreign / "key.pem", folder)


def _other_authority(folder: Path, jobs: Authority, foreign: Path) -> None:
    shutil.copy(foreign / "authority.pem", folder)


def _no_pem(folder: Path, jobs: Authority, foreign: Path) -> None:
    (folder / "authority.pem").write_text("no certificate\n")


def _password(folder: Path, jobs: Authority, foreign: Path) -> None:
    command = "openssl ec -aes128 -passout pass:abcd -in key.pem -out locked.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    (folder / "locked.pem").replace(folder / "key.pem")


def _expired(folder: Path, jobs: Authority, foreign: Path) -> None:
    jobs.expire(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without_key, "has no key.pem"),
        (_open_key, "has mode 0640, so others than its owner can read it"),
        (_other_key, "cannot be used (key values mismatch)"),
        (_other_authority, "cannot be used (unable to get local issuer certificate)"),
        (_no_pem, "cannot be used (no certificate or crl found)"),
        (_password, "cannot be used (the key has a password)"),
        (_expired, "cannot be used (certificate has expired)"),
    ],
)
def test_a_bad_folder_is_found_before_anything_is_opened(jobs: Authority, foreign: Path, spoil: Any, said: str) -> None:
    folder = jobs.host(f"bad{spoil.__name__}")
    spoil(folder, jobs, foreign)
    with pytest.raises(ConfigError) as caught:
        load_tls(folder)
    assert said in caught.value.problems[0].given


def test_no_folder(tmp_path: Path) -> None:
    assert read_tls({}) is None
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        load_tls(tmp_path / "nowhere")


def test_the_commands_of_the_manual_make_a_folder(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/kvstore.md").read_text()
    text = page.partition("## Encryption and admission")[2].partition("\n## ")[0]
    commands = re.findall(r"^    ((?:umask|mkdir|openssl|cp) .*)$", text, re.MULTILINE)
    assert len(commands) == 5
    script = tmp_path / "make.sh"
    script.write_text("\n".join(["set -e", *commands]))
    subprocess.run(["sh", script], cwd=tmp_path, check=True, capture_output=True)
    load_tls(tmp_path / "n1")
