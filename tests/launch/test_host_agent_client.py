"""An agent that does not speak as one."""

from __future__ import annotations

import io
import resource
import sys
from pathlib import Path

import pytest

from unisono.errors import ConfigError, LaunchError
from unisono.launch import host_agent_client
from unisono.launch.host_agent import _listener
from unisono.launch.host_agent_client import HostAgentClient
from unisono.launch.hostfile import Host

ENDLESS = """
import sys
print('{"event": "hello"}', flush=True)
while True:
    FILE.buffer.write(b"a" * 65536)
"""


@pytest.mark.parametrize("stream", ["stdout", pytest.param("stderr", marks=pytest.mark.full)])
def test_a_line_without_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    command = [sys.executable, "-c", ENDLESS.replace("FILE", f"sys.{stream}")]
    monkeypatch.setattr(host_agent_client, "agent_command", lambda host: command)
    monkeypatch.setattr(host_agent_client, "_ANSWER_S", 3.0)
    monkeypatch.setattr(host_agent_client, "_LINE_BYTES", 2**20)
    said: list[int] = []
    host = Host(name="n1", slots=1)
    client = HostAgentClient(host, tmp_path, io.StringIO(), lambda text: said.append(len(text)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LaunchError) as caught:
        client.open({}, {}, None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
    given = caught.value.problems[0].given
    if stream == "stdout":
        assert given == "n1 has no agent of this launch over ssh: it sent a line of more than 1 MiB"
    else:
        assert given == "n1 has no agent of this launch over ssh: no answer within 3 s"
        assert len(said) > 1
    assert client.lost


@pytest.mark.parametrize("line", ["[" * 100_000, "{half"])
def test_a_line_that_is_no_json_ends_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    (tmp_path / "said").write_text(f'{{"event": "hello"}}\n{line}\n')
    command = ["sh", "-c", 'cat "$0"; exec sleep 60', str(tmp_path / "said")]
    monkeypatch.setattr(host_agent_client, "agent_command", lambda host: command)
    client = HostAgentClient(Host(name="n1", slots=1), tmp_path, io.StringIO(), lambda text: None)
    with pytest.raises(LaunchError) as caught:
        client.open({}, {}, None)
    assert "n1 has no agent of this launch over ssh: it sent a line that is no JSON (" in caught.value.problems[0].given
    assert client.lost


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_an_agent_does_not_listen_on_every_interface(host: str) -> None:
    with pytest.raises(ConfigError, match="means every interface of this machine"):
        _listener(host, 0)
    with _listener("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
