"""The sections `engine` and `ipu`: how devices compute. Neither changes what is learned."""

from typing import List, Literal, Optional

from pydantic import AfterValidator, Field
from typing_extensions import Annotated

from recipe.section import PathText, Section, shares


class EngineSection(Section):
    """How CPUs and GPUs compute the model and its update; results differ in rounding only. IPUs
    take its defaults only.
    """

    compile: bool = False
    """compile before the first step: the model's blocks on GPUs (torch.compile), the update on CPUs
    (C++, which native kernels bring along); without a compiler nothing is compiled, and a line
    reports it"""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's mode for the model's blocks; max-autotune tries more programs, for minutes,
    when it compiles"""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """layout of activations; auto stores its choice in config.yaml: on GPUs it measures both at the
    start of a run (contiguous with run.deterministic), on CPUs it is channels_last with native
    kernels, else contiguous"""
    kernels: Literal["auto", "torch", "native", "group_norm", "group_conv", "triton", "cuda"] = (
        "auto"
    )
    """whose functions compute the model. On CPUs: our own in C++ (native; the update too), or
    torch's; auto: native with float32 where there is a C++ compiler. On GPUs: our own in Triton for
    group normalisation with SiLU, for group convolutions, for both (triton), both with group
    convolutions in CUDA C++ (cuda: not measured yet), or torch's; auto measures all but cuda
    together with the layouts; torch with run.deterministic"""
    graphs: Literal["auto", "never"] = "auto"
    """CUDA graphs of the passes of a micro batch, whose hundreds of launches become two; auto: on
    GPUs, but not where a replica has fewer than four micro batches a step and the exchange begins
    within their last backward pass; what cannot be recorded is computed without, and a line reports
    it"""


class Ipu(Section):
    """run.device=ipu: what the compiler may use, and how data moves. docs/ipu.md says what each key
    becomes.
    """

    pod: Optional[int] = Field(None, ge=1)
    """IPUs of the pod: plans, and run_pod.sh without --replicas, fill it if parallel.replicas is
    auto; null: unknown"""
    relaunch: bool = True
    """where poprun was given nothing but a number of replicas and the recipe needs more (IPUs for
    each, or processes), print the corrected line and start it in the place of this process; false:
    refuse, with that line"""
    available_memory_proportion: Optional[Annotated[List[float], AfterValidator(shares)]] = None
    """share of memory for temporary data: one number for all IPUs of a replica, or one each; null:
    Poplar's (0.6)"""
    partials: Optional[Literal["half", "float"]] = None
    """what convolutions and matrix products add up in; null: half with float16, else float"""
    convolution_dithering: bool = False
    """start convolutions on different tiles: balances memory"""
    shard_optimizer_state: bool = False
    """divide the optimizer's state over the replicas of an instance: less memory, one more gather
    per update"""
    executable_cache: Optional[PathText] = None
    """folder of compiled programs, to compile once"""
    synthetic_data: bool = False
    """numbers made on the device instead of images, for timing only"""
    profile: Optional[PathText] = None
    """folder for Poplar's profile (slow, large); null: none"""
    io_tiles: int = Field(32, ge=32, le=192)
    """tiles of each IPU that only move data, where I/O overlaps"""
    overlap_io: Optional[bool] = None
    """move data while the device computes; impossible with pipelined stages; null: whenever it is
    possible"""
    prefetch_depth: int = Field(3, ge=1, le=64)
    """micro batches that the host keeps ready for each replica"""
    keep_activations: List[str] = []
    """parallel.recompute=true: blocks whose output is kept nonetheless, e.g. [blocks.2.3]"""
    exchange_memory_target: Optional[Literal["cycles", "memory", "balanced"]] = None
    """what the code that moves data between tiles is optimised for; null: Poplar's own (cycles)"""
    evaluation_iterations: Optional[int] = Field(None, ge=1)
    """batches of batch.evaluation images that a replica scores in one call; null: 4 x stages"""
