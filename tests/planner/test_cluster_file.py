"""Clusters as TOML files, as presets with a count, and as they were measured: what they say, and what is refused."""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.errors import ConfigError
from unisono.measure.calibration import CALIBRATION_FILE, DeviceRate, LinkRate, add_to_calibration
from unisono.measure.ceiling import cpu_name
from unisono.planner import measured_cluster
from unisono.planner.cluster_file import as_cluster, find_cluster, read_cluster
from unisono.planner.devices import DEVICES
from unisono.planner.layout import LayoutError
from unisono.planner.layout_columns import read_layout
from unisono.planner.measured_cluster import cluster_text, measured_options, this_machine
from unisono.planner.simulate import predict, predict_rows

OWN = """
device = "box"
num_devices = 4
devices_per_domain = 4
memory_gib = 16
memory_tb_per_s = 0.05
link_gb_per_s = 2
tflops.bf16 = 0.5
"""
RATE = DeviceRate(
    hosts=("a",), name="some CPU", ranks=2, tflops=0.25, memory_bytes=2**34, memory_bytes_per_s=2e10, spread_frac=0.1
)
SUM = LinkRate(
    operation="all_reduce", transport="gloo", ranks=2, hosts=("a",), nbytes=64 << 20, seconds=0.064, spread_frac=0.1
)
SEND = replace(SUM, operation="send", nbytes=4 << 20, seconds=0.004, pair=(0, 1))


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_cluster(path)
    for problem in caught.value.problems:
        assert all((problem.given, problem.rule, problem.consequence, problem.nearest))
    return str(caught.value)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_device_of_ones_own_has_the_figures_of_the_file(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, OWN + "network_gbit_per_s = 8\nefficiency = 0.75\n"))
    device = cluster.device
    assert (device.name, cluster.num_devices, device.domain, device.tflops) == ("box", 4, 4, {"bf16": 0.5})
    assert (device.memory_bytes, device.memory_bytes_per_s) == (16 * 2**30, 0.05e12)
    assert (device.link_bytes_per_s, device.network_bytes_per_s, device.efficiency) == (2e9, 1e9, 0.75)


def test_a_preset_stands_for_what_is_left_out(tmp_path: Path) -> None:
    plain = read_cluster(written(tmp_path, 'device = "h100"\nnum_devices = 16\n'))
    assert plain.device == DEVICES["h100"]
    changed = read_cluster(written(tmp_path, 'device = "H100"\nnum_devices = 16\nmemory_gib = 64\ntflops.bf16 = 800\n'))
    assert changed.device == replace(
        DEVICES["h100"], memory_bytes=64 * 2**30, tflops={**DEVICES["h100"].tflops, "bf16": 800.0}
    )


def test_links_that_nothing_is_sent_over_need_no_figure(tmp_path: Path) -> None:
    alone = "\n".join(
        line for line in OWN.splitlines() if "link" not in line and "num" not in line and "per_d" not in line
    )
    device = read_cluster(written(tmp_path, f"num_devices = 1\n{alone}")).device
    assert (device.link_bytes_per_s, device.network_bytes_per_s, device.domain) == (math.inf, math.inf, 1)
    row = {"model": "gpt2-124m", "gpu_type": str(tmp_path / "mine.toml")}
    (prediction,) = predict([read_layout(row)])
    assert 0 < prediction.step_s < math.inf
    assert "no devices_per_domain" in refused(written(tmp_path, f"num_devices = 2\n{alone}"))
    without = OWN.replace("link_gb_per_s = 2", "")
    assert ": no link_gb_per_s, of device 'box'" in refused(written(tmp_path, without))
    assert ": no network_gbit_per_s, of device 'box'" in refused(written(tmp_path, OWN.replace("= 4", "= 8", 1)))


def test_the_measured_efficiency_takes_the_place_of_the_fitted_one(tmp_path: Path) -> None:
    row = {"model": "llama-3-8b", "gpu_type": str(tmp_path / "mine.toml"), "fsdp": "8"}
    parts: list[float] = []
    for share in (0.49, 0.98):
        written(tmp_path, f'device = "h100"\nnum_devices = 8\nefficiency = {share}\n')
        parts += [predict([read_layout(row)])[0].parts_s["matmul"]]
    assert parts[0] == pytest.approx(2 * parts[1])
    fitted, _ = predict(
        [
            read_layout({**row, "gpu_type": "h100", "gpus": "8"}),
            read_layout(row),
        ]
    )
    assert parts[1] < fitted.parts_s["matmul"] < parts[0]


def test_a_job_may_have_some_of_the_devices(tmp_path: Path) -> None:
    path = written(tmp_path, 'device = "h100"\nnum_devices = 32\n')
    row = {"model": "llama-3-8b", "gpu_type": str(path)}
    assert [read_layout({**row, "gpus": count}).num_devices for count in ("", "8")] == [32, 8]
    right, wrong = predict_rows([row, {**row, "gpu_type": str(tmp_path / "none.toml")}])
    assert float(right["pred_step_time_s"]) > 0
    assert wrong["error"].startswith(f"no file {tmp_path / 'none.toml'}: every configuration that is named exists")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("colour = 1", "unknown key colour = 1"),
        ("tflops.bf15 = 1", "did you mean tflops.bf16"),
        ("memory_gib = 0", "memory_gib must be >= 0.001"),
        ("memory_gib = -8", "memory_gib must be >= 0.001"),
        ("memory_gib = nan", "memory_gib must be >= 0.001"),
        ("memory_gib = inf", "memory_gib must be >= 0.001"),
        ("memory_gib = 1e300", "memory_gib must be >= 0.001 and <= 1000000.0"),
        ('memory_gib = "16"', "memory_gib takes"),
        ("num_devices = 4.5", "num_devices takes"),
        ("num_devices = true", "num_devices takes"),
        ("num_devices = 1_000_000_000_000", "num_devices must be"),
        ("efficiency = 1.5", "efficiency must be"),
        ("tflops = 3", "tflops is a section"),
        ('base = "other.py"', "a cluster is described by one file"),
        ("num_devices = ", "mine.toml:1"),
    ],
)
def test_values_that_are_wrong(tmp_path: Path, line: str, said: str) -> None:
    key = line.partition(" ")[0].partition(".")[0]
    others = "\n".join(each for each in OWN.splitlines() if not each.startswith(key))
    assert said in refused(written(tmp_path, f"{line}\n{others}"))


def test_figures_that_are_missing_are_named(tmp_path: Path) -> None:
    said = refused(written(tmp_path, 'device = "h10"\nnum_devices = 8\ndevices_per_domain = 8\nlink_gb_per_s = 1\n'))
    assert ": no memory_gib, no memory_tb_per_s, no tflops.bf16 (or tflops.fp16), of device 'h10'" in said
    assert "did you mean 'h100'?" in said
    assert ": no num_devices\n" in refused(written(tmp_path, 'device = "h100"\n'))


def test_files_that_are_none(tmp_path: Path) -> None:
    folder, loop, huge = (tmp_path / f"{name}.toml" for name in ("folder", "loop", "huge"))
    folder.mkdir()
    loop.symlink_to(loop)
    with huge.open("wb") as file:
        file.truncate(1 << 30)  # takes no room on the disk
    assert "Is a directory" in refused(folder)
    assert "Too many levels of symbolic links" in refused(loop)
    assert "a configuration has at most" in refused(huge)
    assert "every configuration that is named exists" in refused(tmp_path / "none.toml")


def test_unlike_nodes_are_refused(tmp_path: Path) -> None:
    eight = '[[nodes]]\ndevice = "h100"\nnum_devices = 8\n'
    said = refused(written(tmp_path, eight + eight + eight.replace("h100", "a100-80")))
    assert "which may be mixed" in said
    assert 'device = "h100", num_devices = 16, devices_per_domain = 8, which is the largest equal part' in said
    assert "num_devices = 16, devices_per_domain = 8, which is all of it" in refused(written(tmp_path, eight + eight))
    for odd in ("nodes = 3\n", 'nodes = ["h100"]\n', "[[nodes]]\ndevice = 1\n"):
        assert "try:  the figures of the slowest device for all" in refused(written(tmp_path, odd))


def test_domains_are_equal(tmp_path: Path) -> None:
    said = refused(written(tmp_path, 'device = "h100"\nnum_devices = 12\ndevices_per_domain = 8\n'))
    assert "num_devices = 8, or devices_per_domain = 4" in said
    assert (
        read_cluster(written(tmp_path, 'device = "h100"\nnum_devices = 12\ndevices_per_domain = 4\n')).device.domain
        == 4
    )
    assert "8 or 16 devices" in refused(written(tmp_path, 'device = "h100"\nnum_devices = 12\n'))
    with pytest.raises(LayoutError, match=r"12 devices of h100 in domains of 8: domains are of equal size"):
        find_cluster("h100x12")
    whole, part, few = (find_cluster(name).device.domain for name in ("gb200x144", "gb200x256", "h100x6"))
    assert (whole, part, few) == (72, 64, 8)  # racks are used as 64 of 72


# --- what was measured -----------------------------------------------------------------------------------------------


def test_what_was_measured_is_a_file_that_can_be_read(tmp_path: Path) -> None:
    small = replace(SUM, nbytes=4, seconds=1e-9)
    options = measured_options(RATE, [small, replace(SUM, transport="shared memory", seconds=1e-3), SUM, SEND])
    text = cluster_text(options, "2 ranks on a")
    assert "network" not in text  # it was not measured
    cluster = read_cluster(written(tmp_path, text))
    assert cluster == replace(
        as_cluster(options, place=str(tmp_path / "mine.toml")),
        device=replace(cluster.device, source=cluster.device.source),
    )
    device = cluster.device
    assert (device.name, cluster.num_devices, device.domain, device.tflops) == ("some CPU", 2, 2, {"bf16": 0.25})
    assert (device.memory_bytes, device.memory_bytes_per_s, device.efficiency) == (2**34, 2e10, 1.0)
    assert device.link_bytes_per_s == pytest.approx((64 << 20) / 0.064, rel=1e-3)  # two ranks send as much as they sum


def test_a_device_with_a_preset_keeps_its_peak(tmp_path: Path) -> None:
    rate = replace(RATE, name="NVIDIA H100 80GB HBM3", ranks=8, tflops=692.58, memory_bytes=79 * 2**30)
    sums = replace(SUM, ranks=8, transport="nccl", seconds=(64 << 20) / 200e9)
    device = read_cluster(written(tmp_path, cluster_text(measured_options(rate, [sums]), "8 ranks"))).device
    assert (device.name, device.domain, device.tflops) == ("h100", 8, DEVICES["h100"].tflops)
    assert device.efficiency == pytest.approx(0.7)
    assert device.memory_bytes == 79 * 2**30
    assert device.memory_bytes_per_s == DEVICES["h100"].memory_bytes_per_s
    assert device.link_bytes_per_s == pytest.approx(350e9)
    part = measured_options(replace(rate, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb"), [sums])
    assert (part.device, part.tflops.bf16) == ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 692.6)


def test_of_several_hosts_only_the_network_was_measured(tmp_path: Path) -> None:
    hosts = ("a", "b")
    options = measured_options(
        replace(RATE, hosts=hosts, ranks=4), [replace(each, hosts=hosts, ranks=4) for each in (SUM, SEND)]
    )
    assert (options.devices_per_domain, options.link_gb_per_s) == (2, None)
    assert options.network_gbit_per_s == pytest.approx((4 << 20) / 0.004 * 8 / 1e9, rel=1e-3)
    assert ": no link_gb_per_s, of device 'some CPU'" in refused(written(tmp_path, cluster_text(options, "")))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_cluster, "_accelerator_names", lambda: [])
    return tmp_path / "unisono" / CALIBRATION_FILE


def test_this_machine_is_what_was_measured_on_it_last(cache: Path) -> None:
    with pytest.raises(ConfigError, match="unisono plan calibrate"):
        this_machine()
    host = (socket.gethostname(),)
    elsewhere = replace(RATE, hosts=("elsewhere",), name=cpu_name(), at_s=9.0)
    add_to_calibration(cache, devices=[elsewhere, replace(RATE, hosts=host, name="another CPU")], links=[SUM])
    with pytest.raises(ConfigError, match="was not measured"):
        this_machine()
    mine = replace(RATE, hosts=host, name=cpu_name(), at_s=5.0)
    links = [replace(SUM, hosts=host), replace(SUM, hosts=host, ranks=4)]
    add_to_calibration(cache, devices=[replace(mine, ranks=4, at_s=4.0), mine], links=links)
    cluster = this_machine()
    assert (cluster.num_devices, cluster.device.name, cluster.device.tflops["bf16"]) == (2, cpu_name(), 0.25)


def test_accelerators_are_taken_by_their_names(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has(*names: str) -> None:
        monkeypatch.setattr(measured_cluster, "_accelerator_names", lambda: list(names))

    has(*["NVIDIA H100 80GB HBM3"] * 4)
    assert this_machine() == find_cluster("h100x4")
    has("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ConfigError, match="equal devices"):
        this_machine()
    has("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    with pytest.raises(ConfigError, match="was not measured"):
        this_machine()
    add_to_calibration(
        cache, devices=[replace(RATE, hosts=(socket.gethostname(),), name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", ranks=1)]
    )
    assert this_machine().device.tflops == {"bf16": 0.25}


@pytest.mark.gpu
def test_the_accelerators_of_this_machine_have_names() -> None:
    import torch

    assert len(measured_cluster._accelerator_names()) == torch.accelerator.device_count()
    assert all(measured_cluster._accelerator_names())
