"""Hosts files: three dialects, and what must never reach ssh. Who sits where, and which variables travel."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from unisono.errors import LaunchError
from unisono.launch import LaunchOptions
from unisono.launch.forwarded_env import forwarded, parse_settings
from unisono.launch.host_agent_client import agent_script
from unisono.launch.hostfile import Host, read_hostfile
from unisono.launch.mpi_slurm import mpirun, srun
from unisono.launch.network_interface import interface_by_name, interface_towards
from unisono.launch.process_layout import JobLayout, ProcessSlot, assign_processes
from unisono.sanitize import REDACTED, redact


def _read(folder: Path, text: str, port: int | None = None) -> list[Host]:
    (folder / "hosts").write_text(text)
    return read_hostfile(folder / "hosts", port=port)


def test_our_own_form(tmp_path: Path) -> None:
    text = "# four\nn1 slots=4 port=2222\n\n n2.example.org slots=2 role=server # big\nn3 role=scheduler\n"
    assert _read(tmp_path, text) == [
        Host(name="n1", slots=4, port=2222),
        Host(name="n2.example.org", slots=2, role="server"),
        Host(name="n3", role="scheduler"),
    ]


def test_open_mpis_form(tmp_path: Path) -> None:
    assert _read(tmp_path, "n1 slots=4 max_slots=8\nn2:4\nn3 max-slots=2\n") == [
        Host(name="n1", slots=4),
        Host(name="n2", slots=4),
        Host(name="n3"),
    ]


def test_dmlcs_form_and_the_port_of_all_others(tmp_path: Path) -> None:
    assert _read(tmp_path, "10.0.0.1\n10.0.0.2:2222\nn3:22\nfe80::1\n", port=2200) == [
        Host(name="10.0.0.1", port=2200),
        Host(name="10.0.0.2", port=2222),
        Host(name="n3", port=22),
        Host(name="fe80::1", port=2200),
    ]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("n1; touch x", r"line 1: host name 'n1;'\n  rule: a name has letters, digits"),
        ("n1;touch", r"host name 'n1;touch'"),
        ("-oProxyCommand=touch", r"host name '-oProxyCommand=touch'"),
        ("$(touch)", r"host name '\$\(touch\)'"),
        ("`touch`", r"host name '`touch`'"),
        ("user@n1", r"host name 'user@n1'"),
        ("n1\rtouch", r"line 1: 'touch'\n  rule: after the name come slots, max_slots"),
        ("n1\x00", r"host name 'n1\\x00'"),
        ("nö", r"host name 'nö'"),
        ("n1 slots=0", r"slots='0'\n  rule: slots is a whole number from 1 to 65535"),
        ("n1 slots=٣", r"slots='٣'"),
        ("n1 port=65536", r"port='65536'"),
        ("n1 role=boss", r"role='boss'\n  rule: a role is one of worker, server, scheduler"),
        ("n1 slot=2", r"'slot=2'\n  rule: .*did you mean 'slots'\?"),
        ("n1\nn1 slots=2", r"n1 is there 2 times\n  rule: a host has one line; slots=N counts"),
        ("", r"no host for workers"),
        ("n1 role=server", r"no host for workers"),
    ],
)
def test_lines_that_are_refused(line: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=text) as caught:
        _read(tmp_path, line)
    assert "so:   no host was contacted and nothing was started" in str(caught.value)


def test_all_wrong_lines_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"^2 problems"):
        _read(tmp_path, "-n1\nn2\nn3 slots=x\n")
    with pytest.raises(LaunchError, match=r"no such file|cannot be read: No such file or directory"):
        read_hostfile(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match=r"cannot be read: it is not text"):
        read_hostfile(tmp_path / "binary")


# --- who sits where ----------------------------------------------------------------------------------------------------


def test_workers_fill_hosts_in_order_and_servers_go_round_them() -> None:
    hosts = [Host(name="a", slots=2), Host(name="b", slots=3)]
    assert assign_processes(hosts, 4, 3) == (
        ProcessSlot(role="worker", index=0, host=0, local_rank=0, local_world=2),
        ProcessSlot(role="worker", index=1, host=0, local_rank=1, local_world=2),
        ProcessSlot(role="worker", index=2, host=1, local_rank=0, local_world=2),
        ProcessSlot(role="worker", index=3, host=1, local_rank=1, local_world=2),
        ProcessSlot(role="server", index=0, host=0),
        ProcessSlot(role="server", index=1, host=1),
        ProcessSlot(role="server", index=2, host=0),
    )
    assert len(assign_processes(hosts, None, 0)) == 5


def test_servers_have_hosts_of_their_own_where_there_are_any() -> None:
    hosts = [Host(name="s", role="server"), Host(name="w", slots=2)]
    assert [(seat.role, seat.host) for seat in assign_processes(hosts, None, 2)] == [
        *(("worker", 1), ("worker", 1), ("server", 0), ("server", 0))
    ]
    with pytest.raises(LaunchError, match=r"hosts with role=server \(s\) and no --servers"):
        assign_processes(hosts, None, 0)
    with pytest.raises(LaunchError, match=r"--processes 3 on 1 hosts with 2 slots in all"):
        assign_processes(hosts, 3, 1)


def test_a_host_without_a_rank_counts_neither_for_meeting_nor_for_loopback() -> None:
    hosts = (Host(name="a", slots=2), Host(name="b"))
    job = JobLayout(
        command=("x",),
        server_command=(),
        hosts=hosts,
        slots=assign_processes(hosts, 2, 0),
        run_id="r",
        options=LaunchOptions(),
        environ={},
    )
    assert job.on_one_host
    assert job.rendezvous_host(job.slots[0]) == "127.0.0.1"


# --- which variables travel --------------------------------------------------------------------------------------------


def test_only_what_is_named_travels_and_never_a_credential() -> None:
    environ = {
        **{
            "PATH": "/bin",
            "PYTHONPATH": "/x",
            "CUDA_VISIBLE_DEVICES": "0",
            "NCCL_DEBUG": "INFO",
            "OMP_NUM_THREADS": "2",
        },
        **{"UNISONO__RUN__SEED": "3", "UNISONO_FAULT": "x", "HOME": "/root", "SSH_AUTH_SOCK": "/s", "LS_COLORS": "x"},
        **{
            "AWS_SECRET_ACCESS_KEY": "c",
            "HF_TOKEN": "c",
            "NCCL_API_KEY": "c",
            "UNISONO_SECRET_FILE": "c",
            "UNISONO_RANK": "1",
        },
        **{
            "UNISONO_TRACKER_TOKEN": "c",
            "NCCL_PASSPHRASE": "c",
            "OMP_AUTHORIZATION": "c",
            "UNISONO_SESSION_COOKIE": "c",
        },
    }
    assert forwarded(environ, {"CHOSEN": "y"}) == {
        **{
            "PATH": "/bin",
            "PYTHONPATH": "/x",
            "CUDA_VISIBLE_DEVICES": "0",
            "NCCL_DEBUG": "INFO",
            "OMP_NUM_THREADS": "2",
        },
        **{"UNISONO__RUN__SEED": "3", "UNISONO_FAULT": "x", "CHOSEN": "y"},
    }


def test_an_address_with_a_password_does_not_travel(caplog: pytest.LogCaptureFixture) -> None:
    environ = {
        "UNISONO__DATA__CORPUS": "ftp://me:canary@host/a.rec",
        "NCCL_PROXY": "http://me:canary@proxy",
        "NCCL_X": "a@b",
    }
    without = {"UNISONO__DATA__TRAIN": "abfss://data@acct.dfs.core.windows.net/c", "PATH": "/usr/lib:/home/a:b@x:/bin"}
    assert forwarded(environ | without, {}) == {"NCCL_X": "a@b"} | without
    assert "UNISONO__DATA__CORPUS is not forwarded to other hosts: its value has a password" in caplog.text
    assert parse_settings(["A=sftp://alice@nas/data"], {}) == {"A": "sftp://alice@nas/data"}
    with pytest.raises(LaunchError) as caught:
        parse_settings(["NCCL_PROXY", "A=ftp://me:canary@host"], environ)
    assert str(caught.value).count("rule: an address with a password is never forwarded") == 2
    assert "canary" not in str(caught.value) + caplog.text


def test_settings() -> None:
    assert parse_settings(["A=1=2", "B", "C="], {"B": "b"}) == {"A": "1=2", "B": "b", "C": ""}
    with pytest.raises(LaunchError) as caught:
        parse_settings(["HF_TOKEN=canary", "A;x=1", "ABSENT", "B=1", "B=canary"], {})
    text = str(caught.value)
    assert "--env 'HF_TOKEN'\n  rule: credentials are never forwarded" in text
    assert "--env 'A;x'\n  rule: a variable's name has letters, digits and _" in text
    assert "--env 'ABSENT'\n  rule: without a value the launcher's own is forwarded, and it has none" in text
    assert "--env 'B'\n  rule: each variable is given once" in text
    assert "canary" not in text


# --- interfaces --------------------------------------------------------------------------------------------------------


def test_interfaces() -> None:
    lo = interface_towards("127.0.0.1")
    assert (lo.name, lo.address, lo.why) == ("lo", "127.0.0.1", "the way from here to 127.0.0.1 leads over it")
    assert interface_by_name("lo").environ() == dict.fromkeys(
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DMLC_INTERFACE"), "lo"
    )
    with pytest.raises(LaunchError) as caught:
        interface_by_name("ib7")
    assert "--interface 'ib7' on host " in str(caught.value)
    assert "try:  one of: " in str(caught.value)
    assert "lo" in str(caught.value).rpartition("one of: ")[2].split(", ")
    with pytest.raises(LaunchError, match=r"does not reach 'no-such-host\.invalid'"):
        interface_towards("no-such-host.invalid")


@pytest.mark.parametrize(
    "name", ["NCCL_X;touch canary", "NCCL_X,PATH", "NCCL_X=1", "NCCL_$(id)", "NCCL_X\nid", "NCCL_É", ""]
)
def test_names_of_variables_that_mean_more_to_a_shell(name: str) -> None:
    assert forwarded({name: "1", "NCCL_DEBUG": "INFO"}, {}) == {"NCCL_DEBUG": "INFO"}
    with pytest.raises(LaunchError, match="a variable's name has letters, digits and _") as caught:
        agent_script({name: "1"})
    assert str(caught.value).startswith(f"environment variable {name!r}\n  rule:")
    options = {"processes": 1, "interface": None, "forwarded": {name: "1"}}
    with pytest.raises(LaunchError, match="environment variable"):
        srun(["true"], **options)
    with pytest.raises(LaunchError, match="environment variable"):
        mpirun(["true"], hostfile=None, options=LaunchOptions(), **options)


def test_a_remote_shell_runs_no_name_and_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = forwarded({"NCCL_X;touch canary;": "1", "NCCL_DEBUG": "$(touch canary)'; touch canary; '"}, {})
    script = agent_script(environ).replace("exec ", 'printf %s "$NCCL_DEBUG"; exit; ')
    done = subprocess.run(["/bin/sh", "-s"], input=script, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "$(touch canary)'; touch canary; '"
    assert list(tmp_path.iterdir()) == []


def test_a_hosts_file_without_end() -> None:
    with pytest.raises(LaunchError, match="it has more than 16,777,216 bytes"):
        read_hostfile(Path("/dev/zero"))


def test_what_is_not_forwarded_is_not_recorded_either() -> None:
    """``launch.json`` has the arguments of the command, such as ``env NAME=VALUE``, as ``redact`` leaves them."""
    names = (
        "GITHUB_PAT AZDO_PAT AZURE_SAS DB_PASS REDIS_PASS PGPASSWORD SMTP_PASSWD MLFLOW_TRACKING_PASSWORD SSH_PASSPHRASE "
        "WANDB_API_KEY WANDB_KEY GITHUB_KEY GITLAB_KEY HF_KEY OPENAI_API_KEY OPENAI_KEY SSH_KEY SSH_PRIVATE_KEY DEPLOY_KEY "
        "AZURE_STORAGE_KEY AZURE_KEY AZURE_CLIENT_SECRET AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN HF_TOKEN GH_TOKEN "
        "HUGGING_FACE_HUB_TOKEN SLACK_BOT_TOKEN NEPTUNE_API_TOKEN CI_JOB_TOKEN GOOGLE_APPLICATION_CREDENTIALS APIKEY "
        "UNISONO_SECRET_FILE NCCL_PASSWORD DJANGO_SECRET"
    )
    for name in names.split():
        with pytest.raises(LaunchError, match="credentials are never forwarded"):
            parse_settings([f"{name}=canary"], {})
        for argument in (f"{name}=canary", f"--env={name}=canary, more"):
            assert redact(["env", argument]) == ["env", f"{argument.partition('canary')[0]}{REDACTED}"]
        option = f"--{name.lower().replace('_', '-')}"
        assert redact([option, "canary"]) == [option, REDACTED]
