"""The sections `engine` and `ipu`: how devices compute. Neither changes what is learned."""

from typing import List, Literal, Optional

from pydantic import Field, field_validator

from recipe.section import Section


class EngineSection(Section):
    """How CPUs and GPUs compute the model and its update; results differ in rounding only. IPUs do not read it."""

    compile: bool = Field(
        False,
        description="run torch.compile before the first step: on the model's blocks on GPUs, on the update only on "
        "CPUs; without a compiler nothing is compiled, and a line reports it",
    )
    memory_format: Literal["auto", "contiguous", "channels_last"] = Field(
        "auto",
        description="layout of activations on GPUs (always contiguous on CPUs); auto measures both at the start of a "
        "run and stores its choice in config.yaml; contiguous with run.deterministic",
    )
    kernels: Literal["auto", "torch", "group_norm", "group_conv", "triton"] = Field(
        "auto",
        description="our own Triton kernels on GPUs: for group normalisation with SiLU, for group convolutions, for "
        "both (triton) or for none (torch); auto measures them together with the layouts; torch with "
        "run.deterministic",
    )


class Ipu(Section):
    """run.device=ipu: what the compiler may use, and how data moves. docs/ipu.md says what each key becomes."""

    pod: Optional[int] = Field(
        None,
        ge=1,
        description="IPUs of the pod that the recipe is for: plans, and run_pod.sh without --replicas, fill it with "
        "replicas if parallel.replicas is auto; a run counts the IPUs that it was given; null: unknown",
    )
    available_memory_proportion: Optional[List[float]] = Field(
        None,
        description="share of an IPU's memory that convolutions and matrix products may use for temporary data: one "
        "number for all IPUs of a replica, or one each; null: Poplar's own (0.6)",
    )
    partials: Optional[Literal["half", "float"]] = Field(
        None, description="what convolutions and matrix products add up in; null: half with float16, else float"
    )
    convolution_dithering: bool = Field(
        False, description="start convolutions on different tiles, which balances memory"
    )
    shard_optimizer_state: bool = Field(
        False,
        description="divide the optimizer's state over the replicas of an instance: less memory, one more gather per "
        "update",
    )
    executable_cache: Optional[str] = Field(
        None, description="folder of compiled programs, so that the same recipe compiles once; null: none"
    )
    synthetic_data: bool = Field(
        False, description="use numbers made on the device instead of images, for timing: nothing sensible is learned"
    )
    profile: Optional[str] = Field(
        None, description="folder for Poplar's profile of compilation and run (slow, large); null: none"
    )
    io_tiles: int = Field(32, ge=32, le=192, description="tiles of each IPU that only move data, where I/O overlaps")
    overlap_io: Optional[bool] = Field(
        None,
        description="move data while the device computes, on tiles of their own; impossible with pipelined stages; "
        "null: whenever it is possible",
    )
    prefetch_depth: int = Field(3, ge=1, le=64, description="micro batches that the host keeps ready for each replica")
    keep_activations: List[str] = Field(
        [], description="parallel.recompute=true: blocks whose output is kept nonetheless, e.g. [blocks.2.3]"
    )
    exchange_memory_target: Optional[Literal["cycles", "memory", "balanced"]] = Field(
        None, description="what the code that moves data between tiles is optimised for; null: Poplar's own (cycles)"
    )
    evaluation_iterations: Optional[int] = Field(
        None,
        ge=1,
        description="batches of batch.evaluation images that a replica scores in one call; null: 4 x stages",
    )

    @field_validator("available_memory_proportion")
    @classmethod
    def _shares(cls, value: Optional[List[float]]) -> Optional[List[float]]:
        if value is not None and (not value or not all(0 < share <= 1 for share in value)):
            raise ValueError(f"{value} must be one or more numbers above 0 and at most 1")
        return value

    @field_validator("io_tiles")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} must be even")
        return value
