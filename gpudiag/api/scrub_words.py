"""What a scrubbed copy keeps: the keys on the list, each with the form of its values; names of ops, kernels and libraries; known words."""

from __future__ import annotations

import hashlib
import re
import secrets
import textwrap
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from gpudiag.attribution.call_sites import LIBRARY_PATH
from gpudiag.model import trace

WORDS = frozenset(
    """
    1d 2d 3d ac2g accumulate accumulation activity adadelta adafactor adagrad adam adamax adamw adaptive add affine after all all2all
    allgather allgatherv allocate allocation allreduce alltoall alltoalltensors alltoallv allv amp amx and annotation any aot
    aotdispatcher apply arch area argmax args argument as asgd asked assign async at attempt attention attn attn2 autocast autograd
    autotuner available averaged avg avx avx2 avx512 await awaitable backbones backend background backward backwards bag barrier base
    batch batchnorm bce before begin bert between bf16 bfloat bfloat16 bicubic bilinear bin block board bool boost border bottom
    broadcast bubble bucket bucketing buffer build bw bwd by byte bytecode c10 cache call callbacks capture cast ccp cdouble cell cfloat
    cfloat32 char checkpoint chunk circular ckpt clip clock cnn coalesced codecache codegen collate collection collective comm command
    common compile compiled compilefx compileid compiler complete complex complexdouble complexfloat compute config configs constant
    context contiguous conv conv1d conv2d conv3d convert coordinator copy core correlation counters cp cpu create criterion cross csv
    ctr cu cublas cuda cudagraph cudnn current d2d d2h data dataloader dataloading dataset ddp decode decoder default delete dev device
    dictcomp discriminator dispatch dist distributed divisions dma done double down dp driver dropout dtod dtoh dynamo e2m1fn e4m3fn
    e4m3fnuz e5m2 e5m2fnuz e8m0fnu each eager ecc efficient elementwise emb embed embedding embeddings empty encode encoder end energy
    enforced engine enter entire entropy entry enumerate ep epilogue epoch equal error eval evaluate event events example examples
    execute exit expandable expert experts export external fake false fc feature features fetch ffn figures file final finish first
    flash flatten float float16 float32 float4 float64 float8 floor flop flops flow flush for fork forkserver forward forwardbackward
    forwards found fp16 fp32 fp4 fp64 fp8 free from frozen fsdp full fullgraph fully function fused fwd fwdbwd fx gan garbage gather gc
    gelu gen gen2 generate generation generator genericlist genexpr get getitem gflop git global gloo gpt gpu gpudiag grad gradient
    gradients graph graphics graphlowering group groupnorm gru guard guards h2d half hccl head heads high highest hip hook hooks host
    hpu htod htoh id identity ids ieee ij impl import in index inductor inf infer inference init input inputs insight instance instant
    instantaneous instrumentation insufficient int int16 int32 int64 int8 into invalid ipython is iter iterable iteration jit joint json
    kernel kernels key keyed kjt kv kwargs labels lambda last latest launch layer layernorm layers lazy lbfgs leaky learning left
    lengths level lib libs limit line linear link lion list listcomp llama load loaded loader loading local log logging logits long
    lookup lookups loop loss losses lost lower lowering lr lstm main make malloc map marker markers mask masks math matmul max mb mean
    medium mem memcpy memory memset mesh metric metrics mflop mha micro microbatch min mini mismatch mlp mlu model models module modules
    moe monitor move mpi mps mse mtia multi multihead muon nadam name nan native nccl ne nearest neg neon new next nll nn no node none
    norm normalization not notebook npu npy npz null num number nvlink nvtx of often on oop op open operator ops optim optimize
    optimizer optimizers optional or other out output outputs over overhead overheads p2p packages pad pageable parallel params pass
    pcie peer permission permissions permute pg phase pin pin2 pin_memory pinned pipeline plain pool pooled pooling pos post power
    power2 pp pre prefetch prefill pregraph premul prepare present privateuse1 process processing product profile profiler proj prologue
    proxy pt pth ptop ptr publish py python python2 python3 pytorch qint8 qkv queue quint8 radam random range rank rc rccl read rec
    recat receive recompute record recv reduce reduced reducescatter reflect reflection region register release relu replay replicate
    request reset residual resnet resource result resume right rms rmsnorm rmsprop rnn rocm roctracer root rope rotary roundup router
    rprop run runner runners runtime safetensors same sample sampler samples save scalar scalarlist scale scaler scatter schedule
    scheduler scope score script scripts seed segments select self send sequential setcomp sgd shape shard sharded short sigmoid signed
    silu single site sites size slow slower sm softmax sort spans sparse spawn split splits src stage start state stdin step steps stop
    stream streaming strided string subgraph sum supported sve swiglu sync synchronize table tables tanh task temperature tensor
    tensorlist tensors test tf32 tfevents tflop than thread threshold tile time timed timeout times timing to token tokenizer tokens too
    tools top topk torch torchdynamo torchrun tp trace traces train trainer training transfer transform transformer transpose triggered
    trilinear triton true trunc tw txt type ucc uint16 uint32 uint64 uint8 unet uninitialized unknown unscale unshard unsigned up update
    upsample user util utilization utils uvm vae val valid validate validation value values version view views vit vsx wait warm warmup
    was weight weights whole whose width window with without work worker workers world wrap wrapped wrapper write x2 xccl xid xpu xy
    zero zeros
""".split()  # noqa: SIM905 - a list of strings would take a line each
)
"""Lower case. From torch, its profiler and data types, Lightning, Accelerate, DeepSpeed, TorchRec, and training loops."""

FormName = Literal["number", "list", "version", "device", "words", "sentence", "symbol", "operator", "frame"]
Form = FormName | Mapping[str, Any]
"""The form of a value; of an object, or of a list of objects, the forms of its keys."""


def _list_keys(**keys: str) -> dict[str, Form]:
    return {key: cast("FormName", form) for form, names in keys.items() for key in names.split("|")}


_OBJECTS = {
    "pg_config": _list_keys(words="pg_name|pg_desc|backend_config", number="pg_size", list="ranks"),
    "distributedInfo": _list_keys(words="backend|nccl_version", number="rank|world_size|pg_count"),
    "deviceProperties": _list_keys(
        device="name",
        number="id|totalGlobalMem|computeMajor|computeMinor|maxThreadsPerBlock|maxThreadsPerMultiprocessor|regsPerBlock|"
        "regsPerMultiprocessor|warpSize|sharedMemPerBlock|sharedMemPerMultiprocessor|numSms|sharedMemPerBlockOptin|"
        "maxSharedMemoryPerMultiProcessor",
    ),
}
_OBJECTS["distributedInfo"]["pg_config"] = _OBJECTS["pg_config"]
HEADERS: dict[str, Form] = _list_keys(
    number="schemaVersion|baseTimeNanoseconds|record_shapes|with_stack|with_modules|with_flops|profile_memory|cuda_runtime_version|"
    "cuda_driver_version|cupti_version|hip_runtime_version|hip_driver_version",
    words="displayTimeUnit|roctracer_version",
) | {key: _OBJECTS[key] for key in ("distributedInfo", "deviceProperties")}
"""Top-level keys besides traceEvents (libkineto/src/DeviceProperties.cpp, CuptiActivityProfiler; torch/profiler/profiler.py)."""

ARGUMENTS = _list_keys(
    number="Sequence number|Fwd thread id|correlation|device|stream|original_stream|bytes|graph node id|graph id|Group size|Rank|Seq|"
    "est. achieved occupancy %|In msg nelems|Out msg nelems|Global rank start|Global rank stride|Src Rank|Dst Rank|External id|"
    "external id|Ev Idx|Python id|Python parent id|Python module id|Record function id|Op count|Trace iteration|cbid|cid|context|queued|"
    "blocks per SM|warps per SM|registers per thread|shared memory|memory bandwidth (GB/s)|num_warps|num_stages|Device Type|Device Id|"
    "Bytes|Total Allocated|Total Reserved|memory kind|Profiler Event Index|sort_index|wait_on_stream|wait_on_cuda_event_record_corr_id|"
    "dur|queue|flops|Flops|Addr",
    list="Input Dims|Input dims|Input Strides|grid|block|Process Group Ranks|In split size|Out split size|Input type|Concrete Inputs",
    words="copy kind|src kind|dst kind|Collective name|Process Group Name|Process Group Description|dtype|name|labels",
    symbol="kernel",
)
"""Keys of 'args' (MetadataFieldCatalog.h of pytorch/kineto, torch/csrc/profiler/util.cpp), of complete, instant and metadata events."""

EVENT_KEYS = _list_keys(number="ts|dur", words="ph|s|bp|cat|pid|tid|id")
"""Keys of an event beside its name and args."""

NAME_FORMS: dict[str, FormName] = {"op": "operator", "kernel": "symbol", "launch": "symbol", "frame": "frame"}
"""Form of the name by the kind of event; those of other kinds are words."""

MAX_NUMBER = 7
"""Digits of a number that may stand in a text: a layer, a step, a process (up to 4,194,304 on Linux); no account."""

MAX_TEXTS = 100_000
"""Removed texts that are remembered for the check of the copy."""

LONG_CHARACTERS = 9
"""Shorter texts are not looked for in the copy: they stand in it by chance."""

_PIECE = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}(?![\w.])|[^\W_]+")
"""A word, or the address of a host."""
_PART = re.compile(r"[1-3][dD](?![a-z])|\d+|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|.", re.DOTALL)
_CLASS = re.compile(r"(?:[A-Z]+[a-z]+|[A-Z]{2,4}|\d{1,2}[dD]?)+")
_SHORT = re.compile(r"[A-Za-z]?\d{0,3}|\d{1,3}[FBIW]\d{1,3}", re.ASCII)
"""A letter, also with a number: the kind of an event, a stage; a stage of a pipeline, the pass, a microbatch."""
_ODD = re.compile(r"[^ -~]")
"""What is neither a letter nor printable ASCII: control characters, emoji."""

_OPERATOR = re.compile(r"(?:autograd::engine::evaluate_function: )?[A-Za-z_][\w.]{0,199}(?:::[\w.:~<>&*(), ]{1,500})?|\[memory\]", re.ASCII)
_TIMED = re.compile(r"[\w.<>]{1,100} \(dynamo_timed\)", re.ASCII)  # functions of torch._dynamo
_VERSION = re.compile(r"\d[\w.+-]{0,39}", re.ASCII)
_DEVICE = re.compile(r"[\w .()@/+-]{0,100}", re.ASCII)
_SECRET = re.compile(
    r"\w://|[\w.+-]@[\w-]{1,64}\.\w|(?<![\w<])[/\\](?:home|root|Users|mnt|data|scratch|nfs|tmp|var|opt|workspace)[/\\]"
    r"|\b(?:hf|ghp|gho|ghs|github_pat|glpat|xox[abp]|sk|pk|AKIA|ASIA|AIza|eyJ)[-_A-Za-z0-9]{16,}"
    r"|\b[A-Z][A-Z0-9_]{3,}=\S"
)
"""URLs, e-mail addresses, absolute paths, access tokens by their usual beginnings, variables with their value."""
_BUILTIN = re.compile(
    r"<built-in (?:function|method) [\w.]{0,200}(?: of (?:type |module )?[\w.:]{0,200}(?: object)?(?: at 0x[0-9a-fA-F]{1,16})?)?>", re.ASCII
)
_FRAME = re.compile(r"(?:[\w.+-]{1,100}/)*(?:[\w-][\w.-]{0,99}|<frozen [\w.]{1,100}>)\((?:\d{1,9}|\?)\): [\w.<>]{1,200}", re.ASCII)
_INSTALLED = re.compile(
    r"(?:.*/)?((?:(?:site-packages|dist-packages|lib/python\d[\d.]*)/|gpudiag/(?:api|capture|cli|experiment|hardware|integrations|__main__)\b"
    r"|torch/(?:_\w|accelerator|amp|ao|autograd|backends|compiler|cpu|cuda|distribut|export|func|fx|jit|librar|multiproc|nn|ops|optim"
    r"|overrides|profiler|random|serializ|sparse|storage|tensor|utils|xpu)).*)",
    re.DOTALL,
)
"""From the folder of an installed package on; a folder named torch is also one of a user's, so it counts with what torch has in it."""
_PUBLIC = re.compile(
    r"(?:vllm|sglang|xfuser|aiter|triton_kernels|flashinfer|megatron|nemo|torchtitan|torchao|torchtune|axolotl|unsloth|liger_kernel|fla"
    r"|mamba_ssm|causal_conv1d|tensordict|torchrl|gymnasium|detectron2|mmcv|mmengine|mmdet|ultralytics|nvidia|cutlass|jax|flax)/"
)
"""Further packages whose folders say nothing about the user."""


class Names:
    """Rewrites names and texts of one run.

    Words are replaced by a digest under a key that nobody keeps: equal words stay equal, and no list of guesses finds them out.
    `keep_names`: the user's annotations, folders, files and functions keep their names.
    """

    def __init__(self, *, keep_names: bool = False) -> None:
        self._keep, self._key = keep_names, secrets.token_bytes(16)
        self.removed: Counter[str] = Counter()
        """How often something was taken out, by kind."""
        self.removed_texts: set[str] = set()

    def note(self, kind: str, *values: Any) -> None:
        """Count one removal; remember the texts in its values that are long enough to be told from others, 1,000 characters of each."""
        self.removed[kind] += 1
        stack = list(values)
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                stack += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                stack += value
            elif isinstance(value, str) and len(value) >= LONG_CHARACTERS and len(self.removed_texts) < MAX_TEXTS:
                self.removed_texts.add(value[:1_000])

    def rewrite(self, form: FormName, name: str) -> str:
        """Return a name or text in its form; one that does not have it as the words that are known."""
        if form in ("version", "device"):
            return name if (_VERSION if form == "version" else _DEVICE).fullmatch(name) else self._replace_words(name)
        if form == "sentence":
            return self._replace_words(name, list_own_words())
        if form == "frame":
            return self._rewrite_frame(name.replace("\\", "/"))
        if self._keep or form == "symbol" or _TIMED.fullmatch(name) or (form == "operator" and _OPERATOR.fullmatch(name)):
            return self._keep_symbol(name)
        return self._replace_words(name)  # old schemas file annotations under ops

    def _rewrite_frame(self, name: str) -> str:
        """Return a Python frame: of a library as it is, from its folder on; of the user the words that are known."""
        installed = _INSTALLED.fullmatch(name)
        if installed is not None and installed.start(1):
            self.note("paths shortened", name[: installed.start(1)].strip("/"))
        found = name if installed is None else installed[1]
        public = installed is not None or LIBRARY_PATH.match(name) or _PUBLIC.match(name) or name.startswith("<frozen ")
        if _BUILTIN.fullmatch(name) or (public and _FRAME.fullmatch(found)):
            return self._keep_symbol(found)
        return self._keep_symbol(found.lstrip("/")) if self._keep else self._replace_words(found)

    def _keep_symbol(self, name: str) -> str:
        if _SECRET.search(name) is None:
            return name
        self.note("names that look like a secret", name)
        return self._digest(name, "removed-")

    def _replace_words(self, text: str, vocabulary: frozenset[str] = WORDS) -> str:
        unknown: list[str] = []

        def replace(match: re.Match[str]) -> str:
            piece = match.group()
            if is_known_word(piece, vocabulary):
                return piece
            unknown.append(piece)
            if not _CLASS.fullmatch(piece):
                return self._digest(piece)
            return "".join(part if is_known_word(part, vocabulary) else self._digest(part) for part in _PART.findall(piece))

        found = _ODD.sub("?", _PIECE.sub(replace, text))
        if found != text:
            self.note("names changed", *(name for name in (text, *unknown) if len(name) >= 16 or any(map(str.isdigit, name))))
        return found

    def _digest(self, text: str, letter: str = "x") -> str:
        """Return the word that stands for `text`, without digits: numbers in names count the steps."""
        found = hashlib.blake2s(text.encode("utf-8", "surrogatepass"), key=self._key, digest_size=4).hexdigest()
        return letter + found.translate(str.maketrans("0123456789abcdef", "bcdfghjklmnpqrst"))


def is_known_word(piece: str, vocabulary: frozenset[str] = WORDS) -> bool:
    """Return whether letters and digits without a gap consist of known words and short numbers."""
    if piece.lower() in vocabulary or _SHORT.fullmatch(piece):
        return True
    return piece.isascii() and all(
        part.lower() in vocabulary or (part.isdigit() and len(part) <= MAX_NUMBER) for part in _PART.findall(piece)
    )


def consists_of_known_words(text: str) -> bool:
    """Return whether a text says nothing of its own."""
    return all(map(is_known_word, _PIECE.findall(text)))


@cache
def list_own_words() -> frozenset[str]:
    """List the words, in lower case, of the source of what writes bundles, and the vocabulary."""
    package = Path(trace.__file__).parents[1]
    sources = (file.read_text("utf-8") for folder in ("capture", "hardware", "model") for file in (package / folder).rglob("*.py"))
    return WORDS.union(*(map(str.lower, re.findall("[A-Za-z]+", text)) for text in sources))


_RULES: dict[str, tuple[str, ...]] = {
    "Kept: names": (
        "ops, autograd nodes, kernels, calls of the driver, frames of libraries from site-packages on: as they are, unless they look like "
        "a secret",
        "all others (your files, functions, modules, annotations, threads, groups): their words as far as the vocabulary below has them; "
        "each other word becomes a digest, the same one throughout; --keep-names keeps them",
        "values of the keys below: numbers, addresses in memory, data types, options such as 'mean' and the vendor's name of the device as "
        "they are; texts as names",
    ),
    "Removed": (
        "every other key of the header, of an event and of its arguments: environment variables, command lines, host names, names of the "
        "recording, trace ids, call stacks as text, kernel files and hashes, addresses of copies, labels of your own",
        "arguments of flows, counters and other events that carry no times of work; what cannot be read",
    ),
    "Files of a bundle": (
        "manifest*.json: the fields that gpudiag knows, its sentences without other words; no serial number, command or commit",
        "trace/*.json.gz as traces; steps/, telemetry/, marks/: their known columns, their texts as names; "
        "inductor/*.json, memory/*-owners.json: names and numbers",
        "everything else is left out: reports, experiments, snapshots of the allocator, what is kept to open faster",
    ),
}


def format_allow_list(width: int) -> str:
    """Format what a copy keeps and what it does not, in lines of at most `width` characters."""
    sections = dict(_RULES)
    tables = {"keys of the header": HEADERS, "keys of events": EVENT_KEYS, "arguments of events": ARGUMENTS} | _OBJECTS
    for title, table in tables.items():
        sections[f"Kept: {title}"] = (", ".join(sorted(table)),)
    sections[f"Vocabulary ({len(WORDS)} words; numbers of up to {MAX_NUMBER} digits)"] = (" ".join(sorted(WORDS)),)
    wrap = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    blocks = ("\n".join([title, *(line for text in texts for line in wrap.wrap(text))]) for title, texts in sections.items())
    return "\n\n".join(blocks) + "\n"
