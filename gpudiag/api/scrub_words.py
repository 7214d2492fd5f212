"""What a scrubbed copy keeps: the keys on the list, each with the form of its values; known words and names of code."""

from __future__ import annotations

import hashlib
import re
import secrets
import textwrap
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gpudiag.attribution.call_sites import LIBRARY_PATH
from gpudiag.model import trace

_TEXT = """
    a ac2g accumulate accumulation activity adagrad adam adamw add affine after all all2all allgather allgatherv allocate allocation
    allreduce alltoall alltoalltensors alltoallv allv amp amx and annotation any aot aotdispatcher arch area argmax args argument as
    asked assign async at attempt attention attn attn2 autocast autograd autotuner available averaged avg avx avx2 avx512 await
    awaitable b backbones backend background backward backwards barrier base batch batchnorm before begin bert between bf16 bfloat
    bfloat16 bicubic bilinear bin block board bool boost border bottom broadcast bubble bucket bucketing buffer build bw bwd by byte
    bytecode c c10 cache call callbacks capture cast ccp cdouble cell cfloat cfloat32 char checkpoint chunk circular ckpt clip clock
    cnn coalesced codecache codegen collate collection collective comm command common compile compiled compilefx compileid compiler
    complete complex complexdouble complexfloat compute config configs constant context contiguous conv conv1d conv2d conv3d convert
    coordinator copy core correlation counters cp cpu create criterion csv ctr cublas cuda cudagraph cudnn current d d2d d2h data
    dataloader dataloading dataset ddp decode decoder default delete device discriminator dispatch dist distributed divisions dma
    done double down dp driver dropout dtod dtoh dynamo e e2m1fn e4m3fn e4m3fnuz e5m2 e5m2fnuz e8m0fnu each eager ecc efficient emb
    embed embedding empty encode encoder end energy enforced engine enter entire entry enumerate ep epilogue epoch equal error eval
    evaluate event events example examples execute exit expandable expert experts export external f fake false fc feature features
    fetch ffn figures file final finish first flash float float16 float32 float4 float64 float8 floor flop flops flow flush for fork
    forkserver forward forwardbackward forwards found fp16 fp32 fp4 fp64 fp8 free from frozen fsdp full fullgraph function fused fwd
    fwdbwd fx gan garbage gather gc gelu gen gen2 generate generation generator genericlist get gflop global gloo gpt gpu gpudiag
    grad gradient gradients graph graphics graphlowering group groupnorm gru guard guards h2d half hccl head heads high highest hip
    hook hooks host hpu htod htoh i id ids ieee ij import in index inductor inf infer inference init input inputs insight instance
    instant instantaneous instrumentation insufficient int int16 int32 int64 int8 into invalid ipython is iter iterable iteration
    jit joint json k kernel kernels key keyed kjt kv kwargs labels last latest launch layer layernorm layers lazy learning left
    lengths level lib libs limit line linear link list llama load loaded loader loading local log logging logits long lookup lookups
    loop loss losses lost lower lowering lr lstm m main make malloc map marker markers mask masks math matmul max mb mean medium mem
    memcpy memory memset mesh metric metrics mflop mha micro microbatch min mini mismatch mlp mlu model models module modules moe
    monitor move mpi mps mtia n name nan native nccl ne nearest neg neon new next nn no node none norm not notebook npu npy npz null
    num number nvlink nvtx of often on oop op open operator ops optim optimize optimizer optimizers optional or other out output
    outputs over overhead overheads p p2p pad pageable params pass pcie peer permission permissions permute pg phase pin pin2
    pin_memory pinned pipeline plain pool pooled pooling pos post power power2 pp pre prefetch prefill pregraph premul prepare
    present privateuse1 process processing product profile profiler proj prologue proxy pt pth ptop publish python python2 python3
    pytorch q qint8 qkv queue quint8 r random range rank rccl read rec recat receive recompute record recv reduce reduced
    reducescatter reflect reflection region register release relu replay replicate request reset residual resnet resource result
    resume right rms rmsnorm rmsprop rnn roctracer root rope rotary roundup router run runner runners runtime s safetensors same
    sample sampler samples save scalar scalarlist scale scaler scatter schedule scheduler scope score script scripts seed segments
    select self send sequential sgd shape shard sharded short sigmoid signed silu single sites size slow slower sm softmax sort
    spans sparse spawn split splits src stage start state stdin step steps stop stream streaming strided string subgraph sum
    supported sve swiglu sync synchronize t table tables tanh task temperature tensor tensorlist tensors test tf32 tfevents tflop
    than thread threshold tile time timed timeout times timing to token tokenizer tokens too tools top topk torch torchdynamo tp
    trace traces train trainer training transfer transform transformer triggered trilinear triton true trunc tw txt type u ucc
    uint16 uint32 uint64 uint8 unet uninitialized unknown unscale unshard unsigned up update user util utilization utils uvm v vae
    val valid validate validation value values version view views vit vsx wait warm warmup was weight weights whole whose width
    window with without work worker workers world wrap wrapper write x x2 xccl xid xpu xy y z zero zeros
"""

WORDS = frozenset(_TEXT.split())
"""Lower case. From torch.profiler, torch.distributed, Lightning, Accelerate, DeepSpeed and TorchRec, data types, and training loops."""

FormName = Literal[
    "number", "numbers", "address", "version", "types", "arguments", "letter", "words", "symbol", "device", "operator", "frame"
]
Form = FormName | Mapping[str, Any]
"""The form of a value; of an object, or of a list of objects, the forms of its keys."""

FORMS: dict[FormName, str] = {
    "number": "a number, true or false",
    "numbers": "lists of numbers",
    "address": "a number or an address in memory",
    "version": "a version, which begins with a digit",
    "types": "names of data types; others become empty",
    "arguments": "numbers, truth values and lists of such; texts become empty, but for options such as 'mean' and 'same'",
    "words": "its words as far as they are in gpudiag's vocabulary; each other one becomes a digest",
    "symbol": "a name of code as it is, unless it looks like a secret (URL, e-mail address, absolute path, access token)",
    "device": "the vendor's name of the device as it is",
}

_DEVICE_NUMBERS = """
    id totalGlobalMem computeMajor computeMinor maxThreadsPerBlock maxThreadsPerMultiprocessor regsPerBlock regsPerMultiprocessor
    warpSize sharedMemPerBlock sharedMemPerMultiprocessor numSms sharedMemPerBlockOptin maxSharedMemoryPerMultiProcessor
"""
DEVICE_KEYS: dict[str, Form] = {"name": "device", **dict.fromkeys(_DEVICE_NUMBERS.split(), "number")}
"""Keys of one entry of deviceProperties (libkineto/src/DeviceProperties.cpp, CuptiActivityProfiler)."""

GROUP_KEYS: dict[str, Form] = {
    "pg_name": "words", "pg_desc": "words", "backend_config": "words", "pg_size": "number", "ranks": "numbers",
}  # fmt: skip
DISTRIBUTED_KEYS: dict[str, Form] = {
    "backend": "words", "rank": "number", "world_size": "number", "pg_count": "number", "nccl_version": "version",
    "pg_config": GROUP_KEYS,
}  # fmt: skip
"""Keys of distributedInfo (torch/profiler/profiler.py)."""

_HEADER_NUMBERS = """
    schemaVersion baseTimeNanoseconds record_shapes with_stack with_modules with_flops profile_memory cuda_runtime_version
    cuda_driver_version cupti_version hip_runtime_version hip_driver_version
"""
HEADERS: dict[str, Form] = {
    "deviceProperties": DEVICE_KEYS, "distributedInfo": DISTRIBUTED_KEYS, "displayTimeUnit": "words", "roctracer_version": "version",
    **dict.fromkeys(_HEADER_NUMBERS.split(), "number"),
}  # fmt: skip
"""Top-level keys besides traceEvents."""

_ARGUMENT_NUMBERS = (
    "Sequence number|Fwd thread id|correlation|device|stream|original_stream|bytes|graph node id|graph id|est. achieved occupancy %|"
    "Group size|In msg nelems|Out msg nelems|Seq|Global rank start|Global rank stride|Rank|Src Rank|Dst Rank|External id|external id|"
    "Ev Idx|Python id|Python parent id|Python module id|Record function id|Op count|Trace iteration|cbid|cid|context|queued|"
    "blocks per SM|warps per SM|registers per thread|shared memory|memory bandwidth (GB/s)|num_warps|num_stages|Device Type|Device Id|"
    "Bytes|Total Allocated|Total Reserved|memory kind|Profiler Event Index|sort_index|wait_on_stream|"
    "wait_on_cuda_event_record_corr_id|dur|queue|flops|Flops"
)
ARGUMENTS: dict[str, Form] = {
    **dict.fromkeys(_ARGUMENT_NUMBERS.split("|"), "number"),
    "Input Dims": "numbers", "Input dims": "numbers", "Input Strides": "numbers", "grid": "numbers", "block": "numbers",
    "Process Group Ranks": "numbers", "In split size": "numbers", "Out split size": "numbers",
    "copy kind": "words", "src kind": "words", "dst kind": "words", "Collective name": "words", "Process Group Name": "words",
    "Process Group Description": "words", "dtype": "words", "name": "words", "labels": "words",
    "Input type": "types", "Concrete Inputs": "arguments", "kernel": "symbol", "Addr": "address",
}  # fmt: skip
"""Keys of 'args' (MetadataFieldCatalog.h of pytorch/kineto, torch/csrc/profiler/util.cpp), of complete, instant and metadata events."""

EVENT_KEYS: dict[str, Form] = {
    "ph": "letter", "s": "letter", "bp": "letter", "ts": "number", "dur": "number", "cat": "words", "pid": "words", "tid": "words",
    "id": "words",
}  # fmt: skip
"""Keys of an event beside its name and args."""

NAME_FORMS: dict[str, FormName] = {"op": "operator", "kernel": "symbol", "launch": "symbol", "frame": "frame"}
"""Form of the name by the kind of event; those of other kinds are words."""

MAX_NUMBER = 7
"""Digits of a number that may stand in a text: a layer, a step, a process (up to 4,194,304 on Linux); no account."""

MAX_TEXTS = 100_000
"""Removed texts that are remembered for the check of the copy."""

LONG_CHARACTERS = 9
"""Shorter texts are not looked for in the copy: they stand in it by chance."""

PIECE = re.compile(r"[^\W_]+")
_PART = re.compile(r"\d+|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|.", re.DOTALL)
_ODD = re.compile(r"[^ -~]")
"""What is neither a letter nor printable ASCII: control characters, emoji."""


class Removed:
    """What was taken out: how often, by kind, and which texts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.texts: set[str] = set()

    def note(self, kind: str, *values: Any) -> None:
        """Count one removal; remember the texts in its values that are long enough to be told from others, 1,000 characters of each."""
        self.counts[kind] += 1
        stack = list(values)
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                stack += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                stack += value
            elif isinstance(value, str) and len(value) >= LONG_CHARACTERS and len(self.texts) < MAX_TEXTS:
                self.texts.add(value[:1_000])


class Words:
    """Replaces words by a digest under a key that nobody keeps: equal words stay equal, and no list of guesses finds them out."""

    def __init__(self, removed: Removed) -> None:
        self.removed = removed
        self._key = secrets.token_bytes(16)

    def digest(self, text: str, letter: str = "x") -> str:
        """Return the word that stands for `text`, without digits: numbers in names count the steps."""
        found = hashlib.blake2s(text.encode("utf-8", "surrogatepass"), key=self._key, digest_size=4).hexdigest()
        return letter + found.translate(str.maketrans("0123456789abcdef", "bcdfghjklmnpqrst"))

    def known(self, text: str, vocabulary: frozenset[str] = WORDS) -> str:
        """Return `text` with each word that is not in the vocabulary replaced."""

        def replace(match: re.Match[str]) -> str:
            piece = match.group()
            if is_known_word(piece, vocabulary):
                return piece
            self.removed.note("words replaced", *([piece] if _is_telling(piece) else ()))
            return self.digest(piece)

        found = _ODD.sub("?", PIECE.sub(replace, text))
        if found != text:
            self.removed.note("names changed", *([text] if _is_telling(text) else ()))
        return found


def is_known_word(piece: str, vocabulary: frozenset[str] = WORDS) -> bool:
    """Return whether letters and digits without a gap consist of known words and short numbers."""
    if piece.lower() in vocabulary:
        return True
    if not piece.isascii():
        return False
    return all(part.lower() in vocabulary or (part.isdigit() and len(part) <= MAX_NUMBER) for part in _PART.findall(piece))


def _is_telling(text: str) -> bool:
    return len(text) >= 16 or any(map(str.isdigit, text))


_OPERATOR = re.compile(r"(?:autograd::engine::evaluate_function: )?[A-Za-z_][\w.]{0,199}(?:::[\w.:~<>&*(), ]{1,500})?|\[memory\]", re.ASCII)
_WRITTEN_BY_TORCH = re.compile(
    r"ProfilerStep[#*]+ *\d{1,12}|Optimizer\.(?:step|zero_grad)#\w{1,100}\.(?:step|zero_grad)|enumerate\(DataLoader\)#\w{1,100}\.__next__"
    r"|## Call CompiledFxGraph \w{1,100} ##|(?:nccl|rccl|gloo|mpi|ucc|xccl):\w{1,60}|(?:torch::)?FSDP::\w{1,60}"
    r"|DistributedDataParallel\.\w{1,60}|FullyShardedDataParallel\.\w{1,60}|PP:\d{1,6}[FBIW]\d{1,6}"
    r"|[\w.<>]{1,100} \(dynamo_timed\)|(?:CompiledFunction|CompiledFxGraph)\w{0,60}|\[memory\]",
    re.ASCII,
)
"""Annotations of torch itself; classes of optimizers and loaders, and keys of compiled graphs, stand in them."""

_PUBLIC = re.compile(
    r"(?:vllm|sglang|xfuser|aiter|triton_kernels|flashinfer|megatron|nemo|torchtitan|torchao|torchtune|axolotl|unsloth|liger_kernel|fla"
    r"|mamba_ssm|causal_conv1d|tensordict|torchrl|gymnasium|detectron2|mmcv|mmengine|mmdet|ultralytics|nvidia|cutlass|jax|flax)/"
)
"""Further packages whose folders say nothing about the user."""

_SECRET = re.compile(
    r"\w://|[\w.+-]@[\w-]{1,64}\.\w|(?<![\w<])[/\\](?:home|root|Users|mnt|data|scratch|nfs|tmp|var|opt|workspace)[/\\]"
    r"|\b(?:hf|ghp|gho|ghs|github_pat|glpat|xox[abp]|sk|pk|AKIA|ASIA|AIza|eyJ)[-_A-Za-z0-9]{16,}"
    r"|\b[A-Z][A-Z0-9_]{3,}=\S"
)
"""URLs, e-mail addresses, absolute paths, access tokens by their usual beginnings, variables with their value."""

_FRAME = re.compile(r"(?:(?P<folder>.*)[/\\])?(?P<file>[^/\\]*)\((?P<line>\d{1,9})\): (?P<function>.*)", re.DOTALL)
_SITE = re.compile(r"(?P<file>[^/\\]*):(?P<line>\d{1,9})", re.DOTALL)
_FILE = re.compile(r"[\w-][\w.-]{0,99}\.(?:py|pyx|pyi|ipynb|so)|<frozen [\w.]{1,100}>", re.ASCII)
_FUNCTION = re.compile(r"[\w.<>]{1,200}", re.ASCII)
_MODULE = re.compile(r"nn\.Module: [\w.]{1,200}", re.ASCII)
_BUILTIN = re.compile(
    r"<built-in (?:function|method) [\w.]{0,200}(?: of (?:type |module )?[\w.:]{0,200}(?: object)?(?: at 0x[0-9a-fA-F]{1,16})?)?>", re.ASCII
)
_INSTALLED = re.compile(r"(?:^|.*[/\\])((?:site-packages|dist-packages|lib[/\\]python\d[\d.]*|torch|gpudiag)(?:[/\\].*)?)", re.DOTALL)
_SEPARATOR = re.compile(r"[/\\]")
_STEP = re.compile(r"[\w.+-]{1,100}", re.ASCII)
"""One folder of the path to a library's file."""


class Names:
    """Rewrites names; what a name becomes depends on its text alone."""

    def __init__(self, words: Words, *, keep_names: bool = False) -> None:
        self._words = words
        self._keep = keep_names

    def rewrite(self, form: FormName, name: str) -> str:
        """Return a name or text in its form."""
        by_form = {"operator": self.operator, "symbol": self.symbol, "frame": self.frame}
        return by_form.get(form, self.text)(name)

    def text(self, name: str) -> str:
        """Return an annotation, or another text that a user may have written: its known words, unless names were asked for."""
        if _WRITTEN_BY_TORCH.fullmatch(name):
            return self.symbol(name)
        return self.symbol(name) if self._keep else self._words.known(name)

    def operator(self, name: str) -> str:
        """Return the name of an op or autograd node; an annotation that an old schema files under ops is a text."""
        return self.symbol(name) if _OPERATOR.fullmatch(name) else self.text(name)

    def symbol(self, name: str) -> str:
        """Return the name of code (a kernel, a call, a class), unless it looks like a secret."""
        if _SECRET.search(name) is None:
            return name
        self._words.removed.note("names that look like a secret", name)
        return self._words.digest(name, "removed-")

    def frame(self, name: str) -> str:
        """Return a Python frame: file, line and function, and the folder where it is that of a library."""
        if _MODULE.fullmatch(name) or _BUILTIN.fullmatch(name):
            return self.symbol(name)
        match = _FRAME.fullmatch(name)
        if match is None:
            return self._words.known(name)
        function = match["function"]
        if not _FUNCTION.fullmatch(function):
            function = self._words.known(function)
        return self.symbol(f"{self.path(match['folder'], match['file'], name)}({match['line']}): {function}")

    def site(self, name: str) -> str:
        """Return 'file.py:line'."""
        match = _SITE.fullmatch(name)
        return self._words.known(name) if match is None else self.symbol(f"{self.path(None, match['file'], name)}:{match['line']}")

    def path(self, folder: str | None, file: str, whole: str) -> str:
        """Return the path of a file; `whole`: the name that begins with it."""
        if not _FILE.fullmatch(file):
            file = self._words.known(file)
        if not folder:
            return file
        if LIBRARY_PATH.match(whole) or _PUBLIC.match(whole):
            return f"{self._library(folder)}/{file}"
        installed = _INSTALLED.fullmatch(folder)
        if installed is None:
            steps = folder if self._keep else "/".join(self._words.known(step) for step in _SEPARATOR.split(folder) if step)
            if steps != folder:
                self._words.removed.note("paths shortened", folder.strip("/\\"))
            return f"{self._library(folder) if self._keep else steps}/{file}"
        if installed.start(1):
            self._words.removed.note("paths shortened", folder[: installed.start(1)].strip("/\\"))
        return f"{self._library(installed[1])}/{file}"

    def _library(self, folder: str) -> str:
        steps = (step for step in _SEPARATOR.split(folder) if step)
        return "/".join(step if _STEP.fullmatch(step) else self._words.known(step) for step in steps)


@cache
def list_own_words() -> frozenset[str]:
    """List the words, in lower case, of the source of what writes bundles, and the vocabulary."""
    package = Path(trace.__file__).parents[1]
    sources = (file.read_text("utf-8") for folder in ("capture", "hardware", "model") for file in (package / folder).rglob("*.py"))
    return WORDS.union(*(map(str.lower, re.findall("[A-Za-z]+", text)) for text in sources))


_RULES: dict[str, tuple[str, ...]] = {
    "Kept: names": (
        "ops, autograd nodes, kernels, calls of the driver, classes of modules, optimizers and loaders: as they are, unless they look like "
        "a secret",
        "Python frames: file, line and function as they are; folders of libraries from site-packages on, each of your own is a digest",
        "annotations (record_function), threads, groups: their words as far as they are in the vocabulary below; each other word becomes a "
        "digest, the same one throughout; --keep-names keeps them, and the names of folders",
        "times, process and thread numbers, addresses in memory: as they are",
    ),
    "Removed": (
        "every other key of the header: environment variables, command lines, host names, names of the recording, trace ids",
        "every other argument of an event: call stacks as text, kernel files and hashes, addresses of copies, labels of your own",
        "arguments of flows, counters and other events that carry no times of work",
        "what cannot be read, and other keys of events than those below",
    ),
    "Files of a bundle": (
        "manifest*.json: the fields that gpudiag knows, its sentences without other words; no serial number, command or commit",
        "trace/*.json.gz: as traces",
        "steps/, telemetry/, marks/: their known columns, written anew; names of files become digests, places keep file and line",
        "inductor/*.json, memory/*-owners.json: names of parameters and of the generated code, and numbers",
        "everything else is left out: reports, experiments, snapshots of the allocator, what is kept to open faster",
    ),
}


def format_allow_list(width: int) -> str:
    """Format what a copy keeps and what it does not, in lines of at most `width` characters."""
    sections = dict(_RULES)
    tables = {
        "keys of the header": HEADERS, "distributedInfo": DISTRIBUTED_KEYS, "pg_config": GROUP_KEYS,
        "deviceProperties": DEVICE_KEYS, "keys of events": EVENT_KEYS, "arguments of events": ARGUMENTS,
    }  # fmt: skip
    for title, table in tables.items():
        sections[f"Kept: {title}"] = tuple(
            f"{words}: {', '.join(sorted(key for key, form in table.items() if form == name))}"
            for name, words in FORMS.items()
            if name in table.values()
        )
    sections[f"Vocabulary ({len(WORDS)} words; numbers of up to {MAX_NUMBER} digits)"] = (" ".join(sorted(WORDS)),)
    wrap = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return (
        "\n\n".join("\n".join([title, *(line for text in texts for line in wrap.wrap(text))]) for title, texts in sections.items()) + "\n"
    )
