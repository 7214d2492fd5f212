"""Arms do not share a port, reach no tracker, and get what their fixes ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpudiag.experiment import arm
from gpudiag.experiment.design import Arm


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun --master-port 29500 train.py", "torchrun --master-port 4242 train.py"),
        ("torchrun --master_port=29500 train.py", "torchrun --master_port=4242 train.py"),
        ("torchrun --rdzv-endpoint=localhost:29400 train.py", "torchrun --rdzv-endpoint=localhost:4242 train.py"),
        ("torchrun --rdzv_endpoint 127.0.0.1:29400 train.py", "torchrun --rdzv_endpoint 127.0.0.1:4242 train.py"),
        ("torchrun --rdzv_endpoint localhost train.py", "torchrun --rdzv_endpoint localhost:4242 train.py"),
        ("accelerate launch --main_process_port 1 train.py", "accelerate launch --main_process_port 4242 train.py"),
        # a port that is free anyway, another machine, and what is no port
        ("torchrun --rdzv-endpoint=localhost:0 train.py", "torchrun --rdzv-endpoint=localhost:0 train.py"),
        ("torchrun --rdzv-endpoint=node7:29400 train.py", "torchrun --rdzv-endpoint=node7:29400 train.py"),
        ("python train.py --port 80 --master-port", "python train.py --port 80 --master-port"),
    ],
)
def test_ports_of_this_machine_are_replaced(command: str, expected: str) -> None:
    assert arm.replace_ports(tuple(command.split()), 4242) == tuple(expected.split())


def test_the_environment_is_quiet_and_the_arm_has_the_last_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("MINE", "kept")
    environ = arm.build_arm_environment(Arm(name="a", command=("python",), environ={"HF_HUB_OFFLINE": "0"}), tmp_path, 4242)
    assert environ["WANDB_MODE"] == "disabled"
    assert environ["MLFLOW_TRACKING_URI"].startswith("file://")
    assert environ["HF_HUB_OFFLINE"] == "0"
    assert environ["MINE"] == "kept"
    assert environ["MASTER_PORT"] == environ["PET_MASTER_PORT"] == "4242"
    assert environ["PET_LOG_DIR"] == f"{tmp_path}/ranks"
    assert os.environ["WANDB_MODE"] == "online"
