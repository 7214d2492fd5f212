"""The call site and the nn.Module of each op, from the Python frames of the same window or of a site window.

A module's name (class and number) is that of one instance throughout a recording, so work that is called again from elsewhere, as
checkpointing does from the backward pass, finds its place in the model by it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Ints, take_rows
from gpudiag.attribution.autograd import pair_forward_ops
from gpudiag.attribution.names import decode_column, decode_names, map_distinct
from gpudiag.attribution.nesting import Nesting, Rows, find_innermost, find_nearest, find_nearest_narrow, mark_ancestors, nest, null_missing
from gpudiag.model.trace import Trace

# Kineto cuts a path at the entry of sys.path that it lies in: the standard library's files then begin with the name of their module. These
# are names that people give to scripts of their own: the user's where the script itself runs (a frame of its <module>), else the library's.
_OWN_NAMES = {"calendar", "code", "cmd", "copy", "profile", "random", "statistics", "test", "this", "timeit", "trace"}
_EITHER = rf"^((?:{'|'.join(sorted(_OWN_NAMES))})\.py)\("
_LIBRARY = "|".join(sorted(sys.stdlib_module_names - _OWN_NAMES))

OWN_FOLDERS = "api|bundle|capture|cli|experiment|fixes|hardware|integrations|recorder|__main__"
"""Folders and modules of gpudiag that stand on the stack of a training: listed, for a checkout of that name may hold the user's script."""

# Frames that are not the user's: torch, installed packages, the interpreter, builtins, modules of nn (no file), gpudiag itself.
_FOREIGN = (
    rf"^(?:{_LIBRARY})(?:/|\.py\()|"
    r"(^|/)torch/|site-packages|dist-packages|/lib/python\d|^lib/python\d|^<|^nn\.Module|^threading\.py"
    rf"|(^|/)gpudiag/(?:{OWN_FOLDERS})\b|(^|/)gpudiag\((?:\d+|\?)\): <module>"
)
# Site-packages is an entry of sys.path too, so nothing but its name tells an installed package from one of the user's: those that training
# scripts call most. A frame of theirs is the user's line only where no other is above it.
INSTALLED = (
    r"^(?:numpy|scipy|pandas|polars|pyarrow|sklearn|joblib|numba|matplotlib|h5py|zarr|lmdb|PIL|cv2|skimage|imageio|albumentations|kornia"
    r"|webdataset|ffcv|nvidia|torchdata|torchvision|torchaudio|torchtext|torchmetrics|timm|einops|transformers|tokenizers|datasets|accelerate"
    r"|peft|trl|diffusers|sentence_transformers|evaluate|huggingface_hub|safetensors|bitsandbytes|lightning|lightning_fabric"
    r"|pytorch_lightning|ignite|fastai|composer|streaming|deepspeed|fairscale|apex|xformers|flash_attn|transformer_engine|triton|horovod|ray"
    r"|torch_geometric|torchrec|fbgemm_gpu|tqdm|rich|loguru|absl|wandb|tensorboard|tensorboardX|mlflow|comet_ml|neptune|clearml|aim|hydra"
    r"|omegaconf|typer|click|fire|fsspec|s3fs|boto3|botocore|requests|urllib3|yaml|orjson|msgpack|pydantic)/|^typing_extensions\.py\("
)
"""Installed packages that programs call, or that call programs, by the beginning of their frames."""
LIBRARY_PATH = re.compile(rf"(?:{_LIBRARY})(?:/|\.py\()|{INSTALLED}", re.ASCII)
"""Frames of the standard library and of such packages, by their beginning."""
# Where such a package holds models, its line says more than the call of the model.
_MODEL = r"/modeling_\w+\.py|/layers/|/nn/|^(?:timm|torchvision)/models/|^diffusers/models/(?:transformers|unets|autoencoders|attention)"
# The training loop of `gpudiag demo` plays the user's script.
DEMO = r"(^|/)gpudiag/capture/demo\.py\("

RECORDER = r"(^|/)gpudiag/(?:capture|integrations)/"
"""Frames of what records a training: they and what they call are the profiler's time, but for the demo and these, which call it."""

_FRAME = r"\((?:\d+|\?)\): "
CALLS_PROGRAM = (
    rf"{DEMO}|{RECORDER}(?:[\w/]*/)?(?:hooks\.py{_FRAME}(?:timed_next|timed_iter|noted_backward)|(?:loop|steps)\.py{_FRAME}(?:__next__|__iter__)"
    rf"|host_marks\.py{_FRAME}(?:noted_collect|noted_enter|timed_save|timed_sync)|device_clock\.py{_FRAME}(?:move|fill)"
    rf"|inventory\.py{_FRAME}noted|torch_settings\.py{_FRAME}entered|torch_profiler\.py{_FRAME}(?:call|enter|start)"
    rf"|memory\.py{_FRAME}record|driver\.py{_FRAME}step|watch\.py{_FRAME}first_backward|accelerate\.py{_FRAME}_synchronised)$"
)
"""Wrappers round what the program calls, which call the original, and the iterators over its loaders (steps.py: before version 0.2)."""


class Frames:
    """The Python frames of a trace, sorted for nesting, with what several stages ask of them: each found once, when first asked for."""

    def __init__(self, table: pl.DataFrame) -> None:
        self.table = table

    @cached_property
    def nesting(self) -> Nesting:
        """Return which frame encloses which."""
        found = nest(self.table)
        return found._replace(parent=found.parent.astype(np.int32)) if len(found.parent) < np.iinfo(np.int32).max else found

    @cached_property
    def user(self) -> Rows:
        """Return for each frame the nearest one at or above it that is the user's own, -1 where there is none."""
        return find_user_frames(self.table, self.nesting)

    @cached_property
    def of_calls(self) -> Bools:
        """Return which frames hold the line of a call (capture/call_lines.py): the user's, of the same function as the one above."""
        mine = np.flatnonzero(self.user == np.arange(len(self.user)))
        above = take_rows(self.user, self.nesting.parent[mine].astype(np.int64))
        function = map_distinct(self.table["name"].gather(mine), lambda names: names.str.replace(r"\((?:\d+|\?)\)", ""))
        found = np.zeros(len(self.user), dtype=bool)
        found[mine] = (above >= 0) & (function == function.gather(np.searchsorted(mine, above))).to_numpy()
        return found

    def forget(self) -> None:
        """Let go of what was found, which takes more memory than the frames; it is found again where it is asked for."""
        for name in ("nesting", "user", "of_calls"):
            self.__dict__.pop(name, None)


class Sites(NamedTuple):
    """The call site of each op row ('file.py(line): function', null where not known)."""

    site: pl.Series
    match_share: float | None
    """Share of the time of top-level ops in steps whose site was found; None without frames."""


def find_sites(timing: Trace, steps: pl.DataFrame, site_window: tuple[Trace, pl.DataFrame] | None, frames: Frames | None = None) -> Sites:
    """Find the sites of the ops of `timing` (stage 'link'), from its own frames or from those of `site_window` (linked, its steps).

    Across windows an op is the n-th call of its name within a step: the same loop body runs in both. `frames`: those of `timing`, where
    other stages ask the same of them.
    """
    site = carry_from_site_window(timing, site_window, lambda trace: find_own_sites(trace, frames if trace is timing else None))
    if not timing.frames.height and (site_window is None or not site_window[0].frames.height):
        return Sites(site, None)
    ops = timing.ops.select("parent", "step", site.alias("site"), (pl.col("end_ns") - pl.col("start_ns")).alias("time"))
    ops = ops.filter(pl.col("parent").is_null() & pl.col("step").is_not_null())
    total = int(ops["time"].sum())
    return Sites(site, int(ops.filter(pl.col("site").is_not_null())["time"].sum()) / total if total else None)


def carry_from_site_window(timing: Trace, site_window: tuple[Trace, pl.DataFrame] | None, own: Callable[[Trace], pl.Series]) -> pl.Series:
    """Return what `own` tells of each op of `timing` from its frames, else of the n-th call of its name in a step of the site window."""
    if timing.frames.height:
        return own(timing)
    if site_window is None or not site_window[0].frames.height:
        return pl.repeat(None, timing.ops.height, dtype=pl.String, eager=True)
    other = site_window[0]
    known = _number_calls(other.ops.with_columns(own(other).alias("site"))).drop_nulls("site")
    known = known.unique(["name", "number"], keep="first", maintain_order=True).select("name", "number", "site")
    found = _number_calls(timing.ops).join(known, on=["name", "number"], how="left", maintain_order="left")
    return found.sort("id")["site"]


def _number_calls(ops: pl.DataFrame) -> pl.DataFrame:
    """Return the ops in steps with `number`: the how-many-eth call of that name in its step."""
    frame = ops.filter(pl.col("step").is_not_null()).with_columns(decode_column("name")).sort("start_ns", "id")
    frame = frame.with_columns(pl.int_range(pl.len()).over("step", "name").alias("number"))
    missing = ops.filter(pl.col("step").is_null()).with_columns(decode_column("name"), pl.lit(None, dtype=pl.Int64).alias("number"))
    return pl.concat([frame, missing], how="diagonal_relaxed")


def find_own_sites(trace: Trace, frames: Frames | None = None) -> pl.Series:
    """Find the site of each op from the trace's own frames; a backward op takes that of its forward op (sequence number).

    Unless Python of the user's runs inside the backward node itself: an autograd.Function, recomputed forward code.
    """
    frames = frames or Frames(trace.frames)
    ops = trace.ops
    threads, starts = ops["thread"].fill_null(-2).to_numpy(), ops["start_ns"].to_numpy()
    known: pl.Series = null_missing(take_rows(frames.user, find_innermost(frames.nesting, find_frame_threads(trace, threads), starts)))
    site = trace.frames["name"].gather(known).alias("site")
    return decode_names(inherit_from_forward(ops, site, trace.frames["start_ns"].gather(known)))


def _find_own_frames(trace: Trace) -> tuple[Ints, Ints]:
    """Return the innermost frame of the program's that each op ran in, and the one around each frame; -1: none."""
    frames, threads = Frames(trace.frames), find_frame_threads(trace, trace.ops["thread"].fill_null(-2).to_numpy())
    rows = take_rows(frames.user, find_innermost(frames.nesting, threads, trace.ops["start_ns"].to_numpy()))
    return rows, take_rows(frames.user, frames.nesting.parent.astype(np.int64))


def find_loop_lines(trace: Trace, few: int) -> pl.Series:
    """Find the line of each op's loop: in the innermost function that runs the op at its line `few` times a step or more; null: no loop."""
    line, above = _find_own_frames(trace)
    names, loops, outer = decode_names(trace.frames["name"]), np.full(len(line), -1, dtype=np.int64), line
    ops = trace.ops.select("step", "name", at=names.gather(null_missing(line)))
    while ((loops < 0) & (outer >= 0)).any():
        calls = ops.select(pl.len().over("step", "name", "at", pl.Series("outer", outer))).to_series().to_numpy()
        loops = np.where((loops < 0) & (outer >= 0) & (calls >= few), line, loops)
        line, outer = outer, take_rows(above, outer)
    return names.gather(null_missing(loops))


def find_own_paths(trace: Trace) -> pl.Series:
    """Find the program's lines that each op ran under, a backward op those of its forward op: outer ones first, one a line of text."""
    (rows, above), paths = _find_own_frames(trace), dict[int, str]()
    around = np.flatnonzero(mark_ancestors(above, rows))  # a frame stands below the one that encloses it
    for row, outer, name in zip(around.tolist(), above[around].tolist(), decode_names(trace.frames["name"].gather(around)), strict=True):
        paths[row] = f"{paths[outer]}\n{name}" if outer >= 0 else name
    found = pl.Series(rows).replace_strict(paths, default=None, return_dtype=pl.String)
    return inherit_from_forward(trace.ops, found, trace.frames["start_ns"].gather(null_missing(rows)))


def find_frame_threads(trace: Trace, threads: Ints) -> Ints:
    """Find the thread whose frames belong to each op: its own, or the only one with frames where the schema writes tid 0 for frames."""
    with_frames = trace.frames["thread"].fill_null(-1).unique().to_numpy()
    if len(with_frames) == 1 and with_frames[0] >= 0 and trace.meta.threads[int(with_frames[0])].tid == "0":
        main = np.bincount(threads[threads >= 0]).argmax() if (threads >= 0).any() else -1
        return np.where(threads == main, with_frames[0], threads)
    return threads


def find_user_frames(table: pl.DataFrame, nesting: Nesting) -> Rows:
    """Find for each frame the nearest one at or above it that is the user's own, else the nearest of an installed package, else -1.

    -1 too for what the recorder's own work calls.
    """
    names = table["name"].unique()
    written = names.cast(pl.String)
    scripts = written.filter(written.str.ends_with(": <module>")).str.extract(_EITHER).drop_nulls().unique()
    foreign = written.str.contains(_FOREIGN) | written.str.extract(_EITHER).is_in(scripts.implode()).not_().fill_null(False)
    own: pl.Series = names.filter(written.str.contains(_FRAME) & (~foreign | written.str.contains(DEMO)))
    spelled = own.cast(pl.String)
    sure = own.filter(~spelled.str.contains(rf"{INSTALLED}|\(\?\): ") | spelled.str.contains(_MODEL))
    near = find_nearest_narrow(nesting.parent, table["name"].is_in(sure.implode()).to_numpy())
    # What our own work calls is nobody's line: a frame of it stands nearer
    ours = names.filter(written.str.contains(RECORDER) & ~written.str.contains(CALLS_PROGRAM))
    recorder = find_nearest_narrow(nesting.parent, table["name"].is_in(ours.implode()).to_numpy()) if len(ours) else np.full_like(near, -1)
    if len(sure) < len(own):
        np.copyto(
            near, find_nearest_narrow(nesting.parent, table["name"].is_in(own.implode()).to_numpy()), where=(near < 0) & (recorder < 0)
        )
    near[recorder > near] = -1
    return near


def inherit_from_forward(ops: pl.DataFrame, site: pl.Series, entered_ns: pl.Series | None = None) -> pl.Series:
    """Return `site`, but below an autograd node that of its forward op (attribution/autograd.py) where the op has none of its own.

    `entered_ns`: when the frame of each site was entered. One that was entered before the node began is not the node's own: on a CPU the
    nodes run under the line that calls backward().
    """
    entered = pl.when(pl.col("site").is_not_null()).then(pl.col("start_ns")) if entered_ns is None else pl.lit(entered_ns)
    frame = ops.select("parent", "start_ns").with_columns(site.alias("site")).with_columns(entered_ns=entered)
    forward_site: pl.Series = site.gather(null_missing(pair_forward_ops(ops).forward)).alias("forward_site")
    above: pl.Series = null_missing(find_nearest(frame["parent"].fill_null(-1).to_numpy(), forward_site.is_not_null().to_numpy()))
    frame = frame.with_columns(forward_site.gather(above), frame["start_ns"].gather(above).alias("began_ns"))
    own = pl.col("began_ns").is_null() | (pl.col("entered_ns") >= pl.col("began_ns")).fill_null(False)
    return frame.select(pl.when(own).then("site").otherwise("forward_site").alias("site")).to_series()


MODULE_FRAME = r"^nn\.Module: (.+)$"
"""Kineto's name of a module's call: class and number of the instance (torch/csrc/autograd/profiler_python.cpp)."""

FORWARD_FRAME = r"\(\d+\): forward$"
"""Where no module was named (older torch, stacks without modules): the user's forward() by its line."""

_LONGEST_PATH = 1_000
"""Characters of a path from which on deeper modules count as the last one named."""


def find_modules(timing: Trace, site_window: tuple[Trace, pl.DataFrame] | None) -> pl.Series:
    """Find the path of each op's module ('Gpt_0.Block_3.Linear_12'), null where it is not known.

    From the trace's own frames, or carried over from `site_window` (linked, its steps) like the call sites. A backward op takes that of
    its forward op.
    """
    return carry_from_site_window(timing, site_window, find_own_modules).alias("module")


def find_own_modules(trace: Trace) -> pl.Series:
    """Find the module of each op from the trace's own frames."""
    frames = nest(trace.frames)
    names = decode_names(trace.frames["name"]).str.extract(MODULE_FRAME, 1)
    is_module = names.is_not_null().to_numpy()
    if is_module.any():
        above = np.append(find_nearest(frames.parent, is_module), -1)[frames.parent]
        rows = np.flatnonzero(is_module)  # a frame stands below the one that encloses it
        own, outer = names.gather(rows).to_list(), above[rows].tolist()
        found = _join_paths(rows.tolist(), outer, own, {})
        around: dict[str, str] = {}
        for parent, name in zip(outer, own, strict=True):
            if parent >= 0:
                around.setdefault(name, found[parent])
        if any(parent < 0 and name in around for parent, name in zip(outer, own, strict=True)):
            found = _join_paths(rows.tolist(), outer, own, around)
        joined = np.full(len(names), None, dtype=object)
        joined[list(found)] = list(found.values())
        paths = pl.Series(joined.tolist(), dtype=pl.String)
    else:
        paths = decode_names(trace.frames["name"])
        is_module = paths.str.contains(FORWARD_FRAME).to_numpy() & (find_user_frames(trace.frames, frames) == np.arange(len(paths)))
    ops = trace.ops
    threads = find_frame_threads(trace, ops["thread"].fill_null(-2).to_numpy())
    inside = find_innermost(frames, threads, ops["start_ns"].to_numpy())
    row = np.append(find_nearest(frames.parent, is_module), -1)[inside]
    path = paths.gather(null_missing(row)).alias("site")
    return inherit_from_forward(ops, path)


def _join_paths(rows: list[int], outer: list[int], names: list[str], around: dict[str, str]) -> dict[int, str]:
    """Return the path of each row: that of the row around it, or of the module `around` it elsewhere, and its own name."""
    found: dict[int, str] = {}
    for row, parent, name in zip(rows, outer, names, strict=True):
        before = found.get(parent) if parent >= 0 else around.get(name)
        found[row] = (
            name[:_LONGEST_PATH] if before is None else before if len(before) > _LONGEST_PATH else f"{before}.{name[:_LONGEST_PATH]}"
        )
    return found
