"""Keys that do not go together on CPUs and GPUs: one line with the key and the remedy, a case a
line."""

import pytest

from common.errors import ConfigError
from recipe.batch import divide
from recipe.loading import load
from tests.conftest import QUICKSTART

UPDATE = "exchange.method=gtopk exchange.compress=update"
LOCAL = "exchange.method=local"
NOISE = "batch.schedule=noise batch.largest=300"
GROWING = "batch.schedule=[[0,64],[700,128]]"
THREE = "parallel.stages=2 parallel.schedule=interleaved batch.global=192 batch.micro=64"
GROWS_WITH = r"^batch\.schedule .*; use "

# In quickstart.yaml: 64 images an update, of which a micro batch has 32.
WITHIN_A_SECTION = [
    ("batch.schedule=noise", "needs largest"),
    ("batch.largest=128", "no schedule noise"),
    ("batch.schedule=noise batch.largest=127", "cannot grow"),
    ("batch.schedule=[]", "pairs"),
    ("batch.schedule=[[10,64]]", "begin at 0"),
    ("batch.schedule=[[0,64],[500,100]]", "100 is not a multiple of global 64"),
    (
        "batch.rate_rule=sqrt",
        "rate_rule sqrt has no effect without schedule; give one, or remove it",
    ),
    (
        "parallel.split=[blocks.3.0]",
        "split names 1 cut points but 1 stages need 0; name them, or give split=auto",
    ),
    (
        "parallel.stages=2 parallel.schedule=interleaved parallel.split=[b]",
        "2 stages x 2 virtual need 3",
    ),
    ("parallel.schedule=interleaved", "needs stages of 2 or more"),
    ("parallel.stages=2 parallel.virtual_stages=2", "give virtual_stages=null"),
    ("model.train=head", r"a list of blocks, found 'head'; write a list as \[head\]"),
    (
        "parallel.split=halves",
        r"parallel\.split: must be auto, counted or a list of blocks, found 'halves'",
    ),
    (
        "parallel.recompute=all",
        r"parallel\.recompute: must be true, false or a list of blocks, found 'all'; write",
    ),
    ("exchange.method=half exchange.order=tree", "which method half rounds away"),
    ("exchange.density_warmup=[0.1]", "density_warmup goes with method topk or gtopk, not dense"),
    (
        "exchange.method=topk exchange.density_warmup=[0.1,0.0]",
        r"exchange\.density_warmup: .* above 0 and at most 1",
    ),
    ("exchange.method=half exchange.wire=float32", "must be 'float16' or 'bfloat16'"),
    ("exchange.conserve=7", r"exchange\.conserve"),
    (f"{LOCAL} exchange.fragments=9", "9 fragments need as many updates"),
    (f"{LOCAL} exchange.local_steps=4 exchange.delay=4", "use a delay below local_steps 4"),
    ("exchange.bits=4 exchange.order=tree", "use order=fast"),
    ("exchange.bits=5", r"exchange\.bits"),
    (
        "optimizer.name=adam",
        r"optimizer\.name: must be 'lars', 'sgd', 'rmsprop', 'lamb', 'adamw' or 'muon' "
        r"\(one of your own: --import FILE\.py\), found 'adam'",
    ),
    (
        "optimizer.name=sgd optimizer.momentum=0 optimizer.nesterov=true",
        "nesterov needs a momentum above 0",
    ),
    ("optimizer.momentum=0 optimizer.nesterov=true", "nesterov needs a momentum above 0"),
    (
        "optimizer.trust=momentum optimizer.nesterov=true",
        "only; use trust=gradient, or nesterov=false",
    ),
    ("optimizer.name=lamb optimizer.eps=0", r"optimizer\.eps: must be greater than 0, found 0"),
    (
        "optimizer.name=muon optimizer.momentum=0",
        "nesterov needs a momentum above 0; .* use nesterov=false",
    ),
    ("schedule.reference_batch=768", "reference_batch has no effect without batch_rule"),
    ("schedule.batch_rule=sqrt", "batch_rule sqrt needs peak, and reference_batch"),
    (
        "model.proxy_norm=true model.norm=batch",
        "proxy_norm goes with norm group or layer, not with batch",
    ),
    ("model.init_weights=epoch_average", "init_weights says nothing without init_from"),
    ("model.std=[0.2,0,0.2]", r"model\.std: every value must be positive"),
    ("data.crop_area=[0.5,1.5]", r"data\.crop_area: \[0.5, 1.5\]: a crop cannot exceed the image"),
    ("data.crop_aspect=[2,1]", r"data\.crop_aspect: \[2.0, 1.0\] must be \[low, high\]"),
    ("data.image_sizes=[[0,8],[2,7]]", "every size must be 8 to 8192 pixels"),
    ("data.reader=dali", "reader dali reads files, but source is digits; use reader torch"),
    (
        "data.source=folder data.reader=dali data.interpolation=bicubic",
        "dali resizes bilinear only, not bicubic",
    ),
    (
        "data.source=torchvision data.reader=dali",
        "reader dali reads files, but source is torchvision; use reader",
    ),
    (
        "data.source=huggingface data.reader=dali",
        "reader dali reads files, but source is huggingface; use reader",
    ),
    (
        "data.source=huggingface data.root=/x data.dataset=y",
        "dataset and root are both given; keep one: data.root=nul",
    ),
    ("data.augment=timm_randaugment data.timm_randaugment=rand-x9", r"data\.timm_randaugment: "),
    (
        "data.mixing=null data.cutmix=0.5",
        "cutmix 0.5: with mixing g16 it is 0.62 to 1, .* smaller is stronger; use",
    ),
    (
        "data.mixing=g16 data.cutmix=2",
        "cutmix 2: with mixing g16 .*; use mixing timm for the alpha of a Beta",
    ),
    (
        "data.mixing=null data.cutmix=1",
        "cutmix 1: .* weakest, .* Beta.*; say which by data.mixing=g16 or data.mixing=timm",
    ),
    (
        "log.trace=2 log.profile=1",
        "trace waits for the device at each span, which profile would show; give one",
    ),
    (
        "ipu.available_memory_proportion=[1.5]",
        r"ipu\.available_memory_proportion: .* above 0 and at most 1",
    ),
]

ELASTIC = "parallel.elastic=true exchange.order=tree"
MEASURED = "parallel.shares=measured exchange.order=tree"
ACROSS_SECTIONS = [
    (
        "batch.micro=1 model.norm=batch data.mixup=0",
        r"model\.norm batch .* but batch\.micro is 1; raise it",
    ),
    (
        "batch.micro=1",
        r"data\.mixup mixes images of one micro batch, .*; raise it, or data\.mixup=0",
    ),
    (
        "batch.micro=1 data.mixup=0 data.cutmix=0.85",
        r"data\.cutmix mixes .*; raise it, or data\.cutmix=null",
    ),
    ("log.memory=true run.device=cpu", "run.device is cpu; use log.memory=false"),
    (
        "batch.micro=auto model.norm=batch",
        r"batch\.micro auto: model\.norm batch has statistics .*; give a number",
    ),
    (
        "batch.micro=auto parallel.stages=2",
        r"batch\.micro auto: .* give a number, or parallel\.stages=1",
    ),
    (
        "batch.micro=auto run.device=ipu",
        r"batch\.micro auto on IPUs: programs are compiled for one size",
    ),
    (
        "batch.micro=auto parallel.replicas=3",
        "batch.global 64 is not a multiple of 1 micro x 3 replicas = 3",
    ),
    (
        f"batch.micro=auto {UPDATE} optimizer.name=rmsprop",
        "not with rmsprop; use exchange.compress=gradient",
    ),
    (f"{UPDATE} optimizer.name=rmsprop", "not with rmsprop; use exchange.compress=gradient"),
    (f"{UPDATE} optimizer.name=muon", "not with muon; use exchange.compress=gradient"),
    (f"{UPDATE} exchange.delay=1", "use exchange.compress=gradient or exchange.delay=0"),
    (f"{LOCAL} model.norm=batch", r"exchange\.method local: .*; use model\.norm=group"),
    ("exchange.delay=1 model.norm=batch", "use model.norm=group or exchange.delay=0"),
    (
        "exchange.delay=1 precision.dynamic_loss_scale=true",
        "use precision.dynamic_loss_scale=false",
    ),
    (f"{GROWING} exchange.order=tree", GROWS_WITH),
    ("parallel.shares=measured", "use exchange.order=tree or parallel.shares=even"),
    ("parallel.elastic=true", "goes with exchange.order tree"),
    (f"{ELASTIC} exchange.delay=1", "would be lost with its replica; use exchange.delay=0"),
    (f"{ELASTIC} model.norm=batch", "use model.norm=group"),
    (
        f"{ELASTIC} parallel.stages=2 parallel.schedule=interleaved batch.micro=16",
        "use parallel.schedule=1f1b",
    ),
    (
        f"{ELASTIC} parallel.replicas=2 parallel.minimum=3",
        "parallel.minimum 3 is more than 2 replicas; lower it",
    ),
    (f"{MEASURED} exchange.delay=1", "use exchange.delay=0 or parallel.shares=even"),
    (f"{MEASURED} model.norm=batch", "use model.norm=group or parallel.shares=even"),
    (
        f"{MEASURED} parallel.stages=2 parallel.schedule=interleaved batch.micro=16",
        "use parallel.schedule=1f1b or",
    ),
    (f"{GROWING} {LOCAL}", GROWS_WITH),
    (f"{GROWING} model.norm=batch", GROWS_WITH),
    (
        f"{THREE} batch.schedule=[[0,192],[700,576]]",
        "multiple of 2 stages as accumulation, not 3; use 1f1b",
    ),
    (
        f"{THREE} batch.schedule=noise batch.largest=400",
        "as accumulation, not 3; use 1f1b, or change batch.micro",
    ),
    (f"{NOISE} log.noise_scale=false", "use log.noise_scale=auto"),
    (f"{NOISE} batch.micro=64", "several micro batches in batch.global 64; lower batch.micro"),
    (
        f"{NOISE} exchange.method=none parallel.replicas=2",
        "several micro batches in the 32 images of a replica; lower",
    ),
    (
        "parallel.stages=4 parallel.schedule=1f1b",
        "accumulation is 2 and parallel.stages 4; lower batch.micro, or use",
    ),
    (
        "parallel.stages=4 parallel.schedule=interleaved",
        r"^parallel\.schedule interleaved needs a micro batch a stage",
    ),
    (
        "parallel.stages=2 parallel.schedule=interleaved batch.global=160",
        "a multiple of 2 micro batches, not 5; use 1",
    ),
    (
        "parallel.stages=2 parallel.schedule=sharded",
        r"sharded is for IPUs, but run\.device is auto; use gpipe or 1f1b",
    ),
]


@pytest.mark.parametrize(("overrides", "words"), [*WITHIN_A_SECTION, *ACROSS_SECTIONS])
def test_what_does_not_go_together_is_one_line_with_its_key_and_remedy(overrides, words):
    """Within a section when the recipe is loaded, with its place; across sections when the batch is
    divided."""
    within = (overrides, words) in WITHIN_A_SECTION
    with pytest.raises(ConfigError, match=words) as caught:
        recipe = load(QUICKSTART, overrides.split())
        assert not within
        divide(recipe)
    assert len(str(caught.value).splitlines()) == 1
    assert not within or str(caught.value).startswith(
        f"command line: {overrides.partition('.')[0]}"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        UPDATE,
        f"{UPDATE} optimizer.name=sgd",
        "exchange.delay=1",
        f"{LOCAL} exchange.delay=1 precision.dynamic_loss_scale=true",
        f"{GROWING} exchange.method=auto",
        NOISE,
        "batch.micro=2 model.norm=batch data.cutmix=0.85",
        "parallel.stages=4 parallel.schedule=interleaved batch.micro=8",
        THREE,
        f"{THREE} batch.micro=48 batch.schedule=[[0,192],[700,576]]",
        f"{ELASTIC} parallel.shares=measured parallel.replicas=2 parallel.minimum=2",
        f"{ELASTIC} parallel.minimum=2",  # as many as are started
    ],
)
def test_neighbours_of_what_is_refused_pass(overrides):
    divide(load(QUICKSTART, overrides.split()))


def test_one_replica_of_an_elastic_recipe_is_divided_whatever_its_minimum():
    """Evaluations and trials have one."""
    assert (
        divide(
            load(QUICKSTART, f"{ELASTIC} parallel.replicas=2 parallel.minimum=2".split()), 1
        ).replicas
        == 1
    )
