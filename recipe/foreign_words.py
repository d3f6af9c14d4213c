"""Words of other programs for keys of a recipe: the flags of timm, Lightning and torchtitan.

Only remedies of errors use them: docs/coming_from.md says where a key differs from the flag.
"""

from typing import Dict, Tuple

# Without dashes, as names of keys are written.
KEYS: Dict[str, Tuple[str, ...]] = {
    # data
    "aa": ("data.augment",),
    "auto_augment": ("data.augment",),
    "crop_pct": ("data.crop_fraction",),
    "data_dir": ("data.root",),
    "data_path": ("data.root",),
    "dataset_path": ("data.root",),
    "hflip": ("data.flip",),
    "num_workers": ("data.workers",),
    "randaugment": ("data.augment",),
    "ratio": ("data.crop_aspect",),
    "scale": ("data.crop_area",),
    "smoothing": ("data.label_smoothing",),
    "val_dir": ("data.validation_folder",),
    "val_split": ("data.validation_split", "data.validation_folder"),
    # batch and length
    "accumulate_grad_batches": ("batch.global", "batch.micro"),
    "batch_size": ("batch.global", "batch.micro"),
    "global_batch_size": ("batch.global",),
    "grad_accum_steps": ("batch.global", "batch.micro"),
    "local_batch_size": ("batch.micro",),
    "max_epochs": ("run.epochs",),
    "max_steps": ("run.steps",),
    "num_epochs": ("run.epochs",),
    "validation_batch_size": ("batch.evaluation",),
    # model
    "drop": ("model.dropout",),
    "drop_rate": ("model.dropout",),
    "flavor": ("model.name",),
    "img_size": ("model.image_size",),
    "initial_load_path": ("model.init_from",),
    "input_size": ("model.image_size",),
    "num_classes": ("model.classes",),
    "pretrained": ("model.init_from",),
    # optimizer and schedule
    "clip_grad": ("optimizer.clip_norm",),
    "decay_rate": ("schedule.decay_rate",),
    "gradient_clip_val": ("optimizer.clip_norm",),
    "learning_rate": ("schedule.peak",),
    "lr": ("schedule.peak",),
    "lr_base": ("schedule.peak", "schedule.reference_batch"),
    "lr_scheduler": ("schedule.name",),
    "max_norm": ("optimizer.clip_norm",),
    "min_lr": ("schedule.final_ratio",),
    "opt": ("optimizer.name",),
    "opt_eps": ("optimizer.eps",),
    "sched": ("schedule.name",),
    "warmup": ("schedule.warmup_epochs",),
    "wd": ("optimizer.weight_decay",),
    # the rest
    "amp": ("precision.compute",),
    "amp_dtype": ("precision.compute",),
    "channels_last": ("engine.memory_format",),
    "ckpt_path": ("run.resume",),
    "compile": ("engine.compile",),
    "default_root_dir": ("run.output",),
    "devices": ("parallel.replicas",),
    "dump_folder": ("run.output",),
    "ema": ("average.step_decay",),
    "enable_wandb": ("log.wandb",),
    "experiment": ("run.name",),
    "log_interval": ("log.every_steps",),
    "log_wandb": ("log.wandb",),
    "mixed_precision_param": ("precision.compute",),
    "model_ema": ("average.step_decay",),
    "model_ema_decay": ("average.step_decay",),
    "num_nodes": ("parallel.replicas",),
    "pipeline_parallel_degree": ("parallel.stages",),
    "torchcompile": ("engine.compile",),
}
