"""Names are taken apart as drivers print them; variants never pass for the plain product."""

from __future__ import annotations

import pytest

from gpudiag.hardware.device_table import is_device_name, load_table, parse_device_name

ROWS = {row.id: row for row in load_table().devices}


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.id)
def test_every_listed_name_finds_its_row_first(row) -> None:
    for name in row.names:
        assert next(other.id for other in ROWS.values() if is_device_name(other, parse_device_name(name))) == row.id


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090D", "NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 3050 Ti Laptop GPU", "NVIDIA GeForce RTX 2080",
        "NVIDIA GeForce RTX 2080 SUPER", "NVIDIA GeForce RTX 3080 Mobile", "NVIDIA GeForce RTX 4060 Max-Q",
        "NVIDIA A10M", "NVIDIA A100X", "NVIDIA L4T", "Tesla T40", "NVIDIA H2000", "NVIDIA RTX A5000 Laptop GPU", "Quadro RTX 6000",
        "AMD Instinct MI300A", "AMD Instinct MI308X", "AMD Instinct MI100", "NVIDIA A800-SXM4-80GB", "", "NVIDIA",
    ],
)  # fmt: skip
def test_no_row_takes_a_relative(name: str) -> None:
    parsed = parse_device_name(name)
    assert not [row.id for row in ROWS.values() if is_device_name(row, parsed) or is_device_name(row, parsed, family=True)]


def test_partition_suffixes() -> None:
    mig = parse_device_name("NVIDIA A100-SXM4-40GB MIG 3g.20gb")
    assert (mig.text, mig.mig_slices, mig.mig_gib, mig.vgpu) == ("A100-SXM4-40GB", 3, 20, False)
    media = parse_device_name("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me")
    assert (media.text, media.mig_slices, media.mig_gib) == ("H100 80GB HBM3", 1, 10)
    shared = parse_device_name("GRID A10-8Q")
    assert (shared.text, shared.vgpu) == ("A10", True)


@pytest.mark.parametrize(
    "name", ["", "  ", "NVIDIA PG509-210", "AMD Radeon Graphics", "NVIDIA Graphics Device", "AMD Instinct", "gfx942", "NVIDIA PG506"]
)
def test_names_that_say_nothing(name: str) -> None:
    assert parse_device_name(name).anonymous


@pytest.mark.parametrize("name", ["Tesla V100-DGXS-32GB", "NVIDIA A100-PG509-200", "AMD Instinct MI300X VF", "NVIDIA GeForce RTX 5090 D"])
def test_names_that_say_something(name: str) -> None:
    assert not parse_device_name(name).anonymous


def test_board_names_stay_in_their_product_line() -> None:
    families = {row.family for row in ROWS.values() if is_device_name(row, parse_device_name("Tesla V100-DGXS-32GB"), family=True)}
    assert families == {"V100"}


def test_a_hostile_name_is_cut() -> None:
    assert len(parse_device_name("A100 " * 100_000).text) <= 200
