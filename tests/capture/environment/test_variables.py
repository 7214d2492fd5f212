"""Few environment variables are kept, and only in forms that hold neither a secret nor a path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.capture.environment.process import FORMS, MAX_VALUE, read_variables

DOCUMENTED = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,>:8]",
    "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
    "PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:512",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "OMP_NUM_THREADS": "4,2",
    "MKL_NUM_THREADS": "8",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_MODULE_LOADING": "LAZY",
    "NVIDIA_TF32_OVERRIDE": "0",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "HIPBLASLT_ALLOW_TF32": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_ALGO": "allreduce:tree,ring;broadcast:ring",
    "NCCL_PROTO": "^LL128",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "NCCL_DEBUG": "INFO",
    "TORCH_LOGS": "+dynamo,recompiles,-guards",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

SECRETS = (
    "hf_PLANTEDPLANTEDPLANTED", "/home/someone/secret", "AKIAIOSFODNN7EXAMPLE", "user@host", "postgres://a:b@c/d", "1;echo x", "..",
    "C:\\x",
    "expandable_segments:/home/x", "allreduce", "ghp_0123456789abcdef0123456789abcdef0123",
)  # fmt: skip


def test_documented_values_are_kept() -> None:
    assert set(DOCUMENTED) == set(FORMS)
    assert read_variables(DOCUMENTED) == DOCUMENTED


@pytest.mark.parametrize("secret", SECRETS)
def test_a_value_of_another_form_is_only_said_to_be_set(secret: str) -> None:
    assert read_variables(dict.fromkeys(FORMS, secret)) == dict.fromkeys(FORMS, None)


def test_other_variables_and_empty_ones_are_left_out() -> None:
    assert read_variables({"HF_TOKEN": "1", "PATH": "1", "OMP_NUM_THREADS": ""}) == {}


@given(st.sampled_from(sorted(FORMS)), st.text(max_size=300))
def test_whatever_is_kept_is_short_and_holds_no_path(name: str, value: str) -> None:
    kept = read_variables({name: value} if value else {}).get(name)
    assert kept is None or (len(kept) <= MAX_VALUE and not set(kept) & set("/\\@~$ \n\0") - {" "})
