"""Generated modules: kernels, their buffers and calls are read as text, in the formats of several versions of torch."""

from __future__ import annotations

import pytest
from inductor_text import CPP, OLD_TRITON, TRITON

from gpudiag.capture.inductor import read_cpp, read_graph, read_triton
from gpudiag.model.bundle import GeneratedKernel, KernelBuffer


def test_a_graph_of_triton_kernels() -> None:
    kernels = read_graph(TRITON)
    assert [(kernel.name, kernel.category, kernel.calls) for kernel in kernels] == [
        ("mm", "extern", 2),
        ("triton_poi_fused_mul_silu_view_0", "poi", 2),
        ("triton_red_fused_embedding_mean_1", "red", 1),
    ]


def test_the_buffers_of_a_call_in_place() -> None:
    first = next(kernel for kernel in read_graph(TRITON) if kernel.category == "poi")
    assert first.ops == ("view", "silu", "mul")
    assert first.nodes == ("linear", "silu", "mul")
    assert (first.points, first.reduction) == (131072, None)
    assert first.buffers == (
        KernelBuffer("in_out_ptr0", "bf16", "both", (2, 64, 1024), 2 * 131072),
        KernelBuffer("in_ptr0", "bf16", "read", (128, 1024), 131072),
    )


def test_a_reduction_reads_rows_of_a_table_and_scratch_space_is_no_buffer() -> None:
    found = next(kernel for kernel in read_graph(TRITON) if kernel.category == "red")
    assert (found.points, found.reduction) == (512 * 768, 768)
    assert found.buffers == (
        KernelBuffer("in_ptr0", "int64", "read", (512,), 512 * 768),
        KernelBuffer("in_ptr1", "fp32", "read", (50304, 768), 512 * 768),
        KernelBuffer("out_ptr0", "fp32", "write", (512, 1), 512 * 768),
    )


def test_the_older_format_and_symbolic_sizes() -> None:
    known, symbolic = read_graph(OLD_TRITON)
    assert known.buffers == (
        KernelBuffer("in_ptr0", "fp16", "read", (1000, 64), 64000),
        KernelBuffer("in_ptr1", "fp32", "read", (64,), 64000),
        KernelBuffer("out_ptr0", "fp16", "write", (1000, 64), 64000),
    )
    assert known.ops == ("add",)
    assert symbolic.buffers[2].shape is None


def test_a_graph_of_cpp_kernels() -> None:
    assert read_graph(CPP) == (
        GeneratedKernel(
            "cpp_fused_embedding_gelu_0",
            "cpp",
            buffers=(
                # written in the first loop (as out_ptr0), then updated: what was in it before does not count
                KernelBuffer("in_out_ptr0", "fp32", "write", (8, 64, 64), 512 * 64 + 2 * 100),
                KernelBuffer("in_ptr0", "int64", "read", (8, 64), 512 * 64),
                KernelBuffer("in_ptr1", "bf16", "read", (50304, 64), 512 * 64),
                KernelBuffer("out_ptr1", "fp32", "write", (100,), 100),
            ),
            points=512 * 64,
        ),
    )


def test_loops_of_unknown_length_bound_nothing() -> None:
    loop = "for(int64_t x0=0L; x0<ks0; x0+=1L)\n{\nout_ptr0[x0] = in_ptr0[x0];\n}"
    found = read_cpp(f"void kernel(const float* in_ptr0, float* out_ptr0)\n{{\n{loop}\n}}")
    assert found is not None
    assert found.points is None
    assert [parameter.accesses for parameter in found.parameters] == [None, None]


@pytest.mark.parametrize("name", ["triton_poi_fused_zeros_0", "triton_poi_fused_add_0"])
def test_a_result_in_place_that_is_never_loaded_is_only_written(name: str) -> None:
    loads = "    tmp0 = tl.load(in_out_ptr0 + x0)\n" if "add" in name else ""
    found = read_triton(f"def {name}(in_out_ptr0, xnumel):\n    xnumel = 8\n{loads}    tl.store(in_out_ptr0 + x0, tmp0)\n", name)
    assert found is not None
    assert found.parameters[0].access == ("both" if "add" in name else "write")


def test_text_of_another_kind_has_no_kernels_or_raises_a_plain_error() -> None:
    assert read_graph("x = 1\n") == ()
    assert read_cpp("int main() {}") is None
    assert read_triton("x = 1", "k") is None
    with pytest.raises(SyntaxError):
        read_graph("def call(:")
    with pytest.raises((SyntaxError, RecursionError, MemoryError, ValueError)):
        read_graph("x = " + "(" * 100_000)


def test_a_kernel_whose_text_does_not_parse_keeps_its_calls() -> None:
    source = "k_0 = async_compile.triton('k_0', '''def (''')\ndef call(args):\n    k_0.run(buf0, 1)\n    k_0.run(buf0, 1)\n"
    assert read_graph(source) == (GeneratedKernel("k_0", "user", calls=2),)
