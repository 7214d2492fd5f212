"""Names of facts of the first edition that rule files of users may hold: through version 0.2 they mean what they meant, with a warning.

Each stands for a field, for a fact of another name, or for a what-if that a ceiling names by its code now.
"""

from __future__ import annotations

from collections.abc import Callable

from gpudiag.facts import (
    capacity,
    communication,
    hardware_state,
    host_time,
    idle_time,
    input_pipeline,
    matrix_products,
    memory_bound,
    settings,
    whole_run,
)
from gpudiag.facts.fields import find_field
from gpudiag.facts.registry import Fact, fact, gpu_only, require_known, share_of_wall
from gpudiag.facts.window import Window


def _keep(name: str, path: str) -> Fact:
    """Return the fact that field `path` is called now."""
    field = find_field(path)
    assert field is not None, path  # noqa: S101 - a test reads all
    return Fact(name, field.unit, f"Now {path}.", field.measure)


def _keep_what_if(name: str, code: str, otherwise: Callable[[Window], float]) -> Fact:
    return fact(name, "ns", f"Now what-if {code}.", lambda window: window.what_if_ns(code, otherwise=lambda: otherwise(window)))


def _share_of_waits(find: host_time.Find) -> Callable[[Window], float]:
    return share_of_wall(lambda window: host_time.sum_cost_ns(find(window)))


# fmt: off
_FACTS = (
    # fields
    _keep("idle_ns", "breakdown.idle_ns"),
    _keep("idle_launch_ns", "breakdown.buckets_ns.idle_launch"),
    _keep("modelled_share", "coverage.modelled_share"),
    _keep("linked_share", "coverage.linked_share"),
    _keep("mean_power_w", "energy.mean_power_w"),
    fact("peak_memory_bytes", "B", "Now memory.peak_bytes.", lambda window: hardware_state.read_memory(window).peak_bytes),
    fact("fragmentation_share", "share", "Now memory.fragmentation_share.",
         gpu_only(lambda window: require_known(hardware_state.read_memory(window).fragmentation_share, hardware_state.NO_RESERVE))),
    fact("expandable_segments", "bool", 'Now manifest.settings.allocator.expandable_segments == "True".',
         gpu_only(lambda window: require_known(
             window.analysis.manifest, f"a trace does not hold the settings of the run: {settings.HOW_TO_RECORD}"
         ).settings.allocator.get("expandable_segments") == "True")),
    # shares of the wall time
    fact("idle_share", "share", "Now breakdown.idle_ns / wall_ns.", lambda window: window.analysis.breakdown.idle_ns / window.wall_ns),
    fact("busy_ns", "ns", "Now busy_share * wall_ns.", lambda window: window.busy_ns),
    fact("idle_launch_share", "share", "Now breakdown.buckets_ns.idle_launch / wall_ns.",
         lambda window: window.analysis.breakdown.buckets_ns.idle_launch / window.wall_ns),
    # idle time as it was recorded, with what the profiler added
    fact("issuing_ns", "ns", "Now host_idle_ns.", host_time.issuing_ns),
    fact("issuing_share", "share", "Now host_idle_share.", share_of_wall(host_time.issuing_ns, 1.0)),
    fact("dispatching_share", "share", "Now dispatch_idle_share.", share_of_wall(host_time.dispatching_ns, 1.0)),
    fact("read_cost_share", "share", "Now read_idle_share.", _share_of_waits(host_time.find_reads)),
    fact("synchronize_cost_share", "share", "Now synchronize_idle_share.", _share_of_waits(host_time.find_synchronizations)),
    fact("shape_wait_cost_share", "share", "Now shape_idle_share.", _share_of_waits(host_time.find_shape_syncs)),
    fact("profiler_added_ns", "ns", "Now (profiler_slowdown - 1) / profiler_slowdown * wall_ns.", host_time.profiler_added_ns),
    # what-ifs, which a ceiling names by their code
    fact("without_launch_ns", "ns", "Now what-if host=0.", idle_time.without_launch_ns),
    fact("as_graph_ns", "ns", "Now what-if launch=0.", idle_time.as_graph_ns),
    fact("compiled_ns", "ns", "Now what-ifs host=0 and fused.", idle_time.compiled_ns),
    _keep_what_if("chains_fused_ns", "fused", memory_bound.unfused_chain_saving_ns),
    _keep_what_if("copies_overlapped_ns", "copies=overlapped", input_pipeline.pageable_copy_exposed_ns),
    _keep_what_if("communication_overlapped_ns", "communication=overlapped", communication.exposed_communication_ns),
    _keep_what_if("without_allocation_ns", "allocation=0",
                  gpu_only(lambda window: idle_time.measure_idle_ns(window, "idle_allocation"))),
    fact("without_compile_ns", "ns", "Now what-if compile=0.", idle_time.without_compile_ns),
    fact("without_stalls_ns", "ns", "Now what-ifs gc=0 and io=0.", idle_time.without_stalls_ns),
    # parts of what other facts measure
    fact("anomaly_ns", "ns", "Now a part of debug_features_ns.", settings.anomaly_ns),
    fact("blocking_ns", "ns", "Now breakdown.buckets_ns.idle_launch + breakdown.buckets_ns.idle_sync.",
         gpu_only(settings.measure_waits_ns)),
    fact("queued_gap_excess_ns", "ns", "Now a part of as_one_graph_ns.", idle_time.queued_gap_excess_ns),
    fact("pinned_copy_ns", "ns", "Now a part of without_offload_ns.", input_pipeline.pinned_copy_ns),
    fact("skinny_saving_ns", "ns", "Now a part of few_rows_saving_ns.", matrix_products.skinny_saving_ns),
    fact("layout_copy_ns", "ns", "Now layout_copy_share * wall_ns, and without_layout_copies_ns.",
         lambda window: min(int((found := memory_bound.find_layout_copies(window))["time_ns"].sum()), window.exposed_ns(found))),
    fact("large_copy_exposed_ns", "ns", "Now a part of offload_ns.", lambda window: window.exposed_ns(capacity.find_large_copies(window))),
    fact("host_optimizer_ns", "ns", "Now a part of offload_ns.", capacity.host_optimizer_ns),
    fact("model_work_ns", "ns", "Now a part of padded_work_ns.", whole_run.model_work_ns),
)
# fmt: on

OLD_NAMES: dict[str, Fact] = {old.name: old for old in _FACTS}
"""Old name -> what it measures."""
