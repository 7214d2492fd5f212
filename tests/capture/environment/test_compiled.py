"""What torch.compile did: its calls, graphs, breaks and recompilations, counted against programs that plant them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import msgspec
import pytest

from gpudiag.capture.environment.live_objects import read_compiled
from gpudiag.model.bundle import CompileCall, Compiled


def in_a_process(lines: str) -> Compiled | None:
    program = """
        import msgspec, torch
        from gpudiag.capture.environment.live_objects import find_live_objects, read_compiled
        {lines}
        print(msgspec.json.encode(read_compiled(find_live_objects())).decode())
    """
    text = textwrap.dedent(program).format(lines=textwrap.dedent(lines))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Compiled | None)


@pytest.mark.slow
def test_without_torch_compile_there_is_nothing_and_the_compiler_is_not_imported() -> None:
    assert in_a_process("import sys; assert 'torch._dynamo' not in sys.modules") is None


@pytest.mark.slow
def test_three_shapes_are_two_recompilations_and_a_print_is_a_break() -> None:
    found = in_a_process(
        """
def plain(x): return x.sin() + 1
def broken(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2
f, g = (torch.compile(fn, backend="eager", dynamic=False) for fn in (plain, broken))
for size in (2, 3, 4): f(torch.ones(size))
g(torch.ones(2))
"""
    )
    assert found is not None
    assert (found.graphs, found.graph_breaks, found.recompiles) == (3 + 2, 1, 2)
    assert found.calls == (CompileCall(backend="eager", dynamic=False, fullgraph=False, count=2),)


@pytest.mark.long
def test_modes_are_told_from_the_options_of_the_backend() -> None:
    found = in_a_process(
        """
def plain(x): return x.sin() + 1
kept = [torch.compile(plain), torch.compile(plain, mode="reduce-overhead", fullgraph=True), torch.compile(plain, mode="max-autotune"),
        torch.compile(plain, options={"max_autotune": True})]
kept[0](torch.ones(2))
"""
    )
    assert found is not None
    assert {(call.backend, call.mode, call.fullgraph) for call in found.calls} == {
        ("inductor", "default", False), ("inductor", "reduce-overhead", True), ("inductor", "max-autotune", False),
        ("inductor", "options", False),
    }  # fmt: skip
    assert (found.graphs, found.generated_graphs, found.generated_kernels) == (1, 1, 1)


@pytest.mark.slow
def test_a_function_or_an_object_given_as_backend_has_its_name() -> None:
    found = in_a_process(
        """
def own_backend(graph, inputs): return graph
class Backend:
    def __call__(self, graph, inputs): return graph
def plain(x): return x.sin() + 1
kept = [torch.compile(plain, backend=given) for given in (own_backend, Backend())]
"""
    )
    assert found is not None
    assert {call.backend for call in found.calls} == {"own_backend", "Backend"}


def test_before_the_end_only_counters_are_read() -> None:
    found = read_compiled(None)
    assert found is None or (found.generated_graphs is None and found.calls == ())
