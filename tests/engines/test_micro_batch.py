"""batch.micro auto: the largest that fits is found in few trials, by all ranks alike, once."""

import gc
import itertools
import weakref

import pytest
import torch

from common.errors import ConfigError
from engines import cache, micro_batch
from engines.micro_batch import largest
from engines.torch_engine import TorchEngine
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide
from tests.engines import threads

CPU = torch.device("cpu")
SIZES = [
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    6144,
]


@pytest.mark.parametrize("room", [0, 1, 5, 31, 32, 33, 64, 191, 192, 193, 6143, 6144, 10**6])
def test_the_largest_that_fits_is_found_in_few_trials_of_which_none_is_far_too_large(room):
    tried = []
    found = largest(SIZES, 32, lambda size: tried.append(size) or size <= room)
    assert found == max((size for size in SIZES if size <= room), default=0)
    assert len(tried) == len(set(tried)) <= 11  # 32 x 2^8 > 6144; then one or two sizes lie between
    assert max(tried) <= max(32, 2 * room)


def test_every_first_size_leads_to_the_same_and_uneven_sizes_are_found_too():
    for first, room in itertools.product(SIZES, (0, 1, 40, 6144)):
        expected = max((size for size in SIZES if size <= room), default=0)
        assert largest(SIZES, first, lambda size, room=room: size <= room) == expected
    assert largest([1, 5, 37, 185], 5, lambda size: size < 100) == 37


def pretend(room, tried, monkeypatch, memory=(15 << 30, 16 << 30)):
    """As if the CPU were a GPU that has room for so many images. room: by rank, or a fault for
    all."""

    def train(recipe, micro, device):
        tried.append(micro)
        if isinstance(room, Exception):
            raise room
        if micro > room[threads.rank() if len(room) > 1 else 0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(micro_batch, "_WITH_TRIALS", ("cpu",))
    monkeypatch.setattr(micro_batch, "_train", train)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a third of a second each, for nothing
    monkeypatch.setattr(micro_batch, "_memory", lambda device: memory)


@pytest.fixture
def resolved(tiny, monkeypatch, tmp_path):
    """resolved(room, *overrides): the recipe that auto becomes, the lines reported, the sizes
    tried."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def resolve(room, *overrides, **options):
        lines = []
        tried = []
        pretend(room if isinstance(room, Exception) else [room], tried, monkeypatch, **options)
        recipe = tiny("run.device=cpu", "batch.global=768", "batch.micro=auto", *overrides)
        found = micro_batch.settle(recipe, divide(recipe), Processes(Topology(), CPU), lines.append)
        assert loading.loads(loading.dump(found), "what was written") == found
        return found, lines, tried

    return resolve


def test_the_largest_that_fits_is_taken_and_the_trials_are_reported(resolved):
    found, lines, tried = resolved(200)
    assert (found.batch.micro, tried) == (192, [32, 64, 128, 256, 192])
    assert lines == [
        "batch.micro auto: images of 16 x 16 in float32 on cpu, tried, 8% of the free memory in reserve",
        *(f"  {size} {'fits' if size <= 200 else 'does not fit'}" for size in tried),
        "  taken: 192, of 18 sizes from 1 to 768",
    ]
    assert divide(found).describe().startswith("768 = 192 micro x 4 accumulation")
    grown = resolved(10**6, "batch.schedule=[[0, 768], [3e3, 1536]]", "model.width=0.5")[0]
    assert grown.batch.micro == 768  # which also divides the larger batch
    # several are needed
    assert resolved(10**6, "batch.schedule=noise", "batch.largest=1536")[0].batch.micro == 384


def test_a_number_is_left_alone(tiny, monkeypatch):
    pretend([1], [], monkeypatch)
    recipe = tiny("run.device=cpu", "batch.micro=12")
    assert (
        micro_batch.settle(recipe, divide(recipe), Processes(Topology(), CPU), pytest.fail)
        is recipe
    )


def test_cpus_and_deterministic_runs_try_nothing(tiny, monkeypatch):
    lines = []

    def resolve(recipe):
        return micro_batch.settle(
            recipe, divide(recipe), Processes(Topology(), CPU), lines.append
        ).batch.micro

    assert resolve(tiny("run.device=cpu", "batch.global=96", "batch.micro=auto")) == 32
    pretend([1], [], monkeypatch)
    assert (
        resolve(
            tiny("run.device=cpu", "batch.global=96", "batch.micro=auto", "run.deterministic=true")
        )
        == 32
    )
    assert [line.partition(", ")[2] for line in lines] == [
        "on a CPU the largest up to 32 that the batch allows",
        "as run.deterministic asks, the largest up to 32 that the batch allows",
    ]


def test_a_device_without_room_is_refused_in_one_line(resolved):
    with pytest.raises(
        ConfigError,
        match=r"^batch.micro auto: not even a micro batch of 1 fits, of images .*; use par",
    ):
        resolved(0)
    with pytest.raises(ConfigError, match=r"not even a micro batch of 2 fits"):
        resolved(1, "data.mixup=0.2")


@pytest.mark.parametrize(
    ("text", "is_memory"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("GET was unable to find an engine to execute this computation", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_libraries_report_a_lack_of_memory_in_their_own_words_and_other_errors_are_raised(
    resolved, text, is_memory
):
    with pytest.raises(
        ConfigError if is_memory else RuntimeError, match="not even" if is_memory else text[:9]
    ):
        resolved(RuntimeError(text))


def test_a_machine_tries_once_and_anew_where_something_else_takes_memory(resolved, tmp_path):
    assert resolved(100)[2]
    found, lines, tried = resolved(1, "run.name=other", "run.seed=5", "schedule.peak=3")
    (file,) = (tmp_path / "cache").rglob("*.json")
    assert (found.batch.micro, tried) == (96, []) and f"tried before ({file})" in lines[0]
    assert len(lines) == 2
    for override in (
        "model.width=0.5", "precision.compute=bfloat16", "optimizer.momentum=0.5", "average.step_decay=0.9",
        "engine.kernels=group_norm", "engine.compile=true", "parallel.recompute=true", "data.mixup=0.2",
        "log.noise_scale=false", "batch.global=1536", "data.image_sizes=[[0, 24]]",
    ):  # fmt: skip
        assert resolved(100, override)[2], override
    assert resolved(100, memory=(8 << 30, 16 << 30))[2]  # another process has half of it
    assert not resolved(100, memory=((15 << 30) + (100 << 20), 16 << 30))[2]


@pytest.mark.parametrize(
    "damage", ["", "[]", "{}", '{"micro": 7}', '{"micro": "96"}', '{"micro": true, "b": 1']
)
def test_a_damaged_file_is_tried_anew_and_mended(resolved, tmp_path, damage):
    resolved(100)
    (file,) = (tmp_path / "cache").rglob("*.json")
    whole = file.read_text()
    file.write_text(damage)
    assert resolved(100)[2] and file.read_text() == whole


def test_all_ranks_take_what_fits_on_each_and_all_try_where_one_has_not(
    tiny, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried = []
    pretend([400, 100], tried, monkeypatch)
    monkeypatch.setattr(micro_batch, "_read", lambda file, sizes: None if threads.rank() else 384)
    recipe = tiny("run.device=cpu", "batch.global=768", "batch.micro=auto")
    kept = {}
    monkeypatch.setattr(
        cache, "write", lambda file, content: kept.update({threads.rank(): content})
    )

    def choose(processes):
        lines = []
        found = micro_batch.settle(recipe, divide(recipe, 2), processes, lines.append)
        return found.batch.micro, lines

    (first, lines), (second, _) = threads.run(2, 1, choose)
    assert first == second == 96 and tried.count(32) == 2
    # Each keeps what its own device has room for.
    assert kept == {0: {"micro": 384}, 1: {"micro": 96}}
    assert (
        lines[-1]
        == "  taken: 96, of 16 sizes from 1 to 384; it is rank 1 that has no room for more"
    )


def test_ranks_without_room_all_raise_and_one_says_why(tiny, monkeypatch):
    pretend([400, 0], [], monkeypatch)
    recipe = tiny("run.device=cpu", "batch.global=768", "batch.micro=auto", "run.name=none")

    def choose(processes):
        with pytest.raises(ConfigError) as caught:
            micro_batch.settle(recipe, divide(recipe, 2), processes, lambda line: None)
        return str(caught.value)

    first, second = threads.run(2, 1, choose)
    assert "not even a micro batch of 1 fits" in first and second == ""


def test_a_trial_is_a_whole_update_of_two_micro_batches_of_the_largest_images_beside_a_reserve(
    tiny, monkeypatch
):
    """Nothing of it is left."""
    seen = []
    engines = weakref.WeakSet()

    class Watched(TorchEngine):
        def train_step(self, micro_batches, update, lr, **options):
            engines.add(self)
            taken = itertools.islice(micro_batches, 3)
            result = super().train_step(taken, update, lr, **options)
            assert len(list(taken)) == 1  # of three
            seen.append(
                (result.images, result.skipped.item(), next(iter(micro_batches)).images.shape)
            )
            return result

    reserved = []
    empty = torch.empty

    def noted(*size, **options):
        reserved.extend(
            size if options.get("dtype") is torch.uint8 and isinstance(size[0], int) else ()
        )
        return empty(*size, **options)

    monkeypatch.setattr("engines.torch_engine.TorchEngine", Watched)
    monkeypatch.setattr(micro_batch, "memory_of", lambda device: 10_000)
    monkeypatch.setattr(torch, "empty", noted)
    recipe = tiny(
        "run.device=cpu", "batch.micro=auto", "batch.global=48", "data.mixup=0.2", "batch.schedule=[[0, 48]]",
        "data.image_sizes=[[0, 16], [1, 24]]", "parallel.replicas=2", "exchange.method=dense",
    )  # fmt: skip
    micro_batch._train(recipe, 6, CPU)
    assert seen == [(12, 0, (6, 3, 24, 24))] and reserved == [800]
    gc.collect()
    assert not engines


@pytest.mark.parametrize(
    "overrides",
    [
        "exchange.method=topk parallel.replicas=2",
        "exchange.method=local exchange.local_steps=4 parallel.replicas=2",
        "exchange.order=tree parallel.elastic=true parallel.minimum=2 parallel.shares=measured parallel.replicas=3",
        "batch.schedule=noise batch.largest=96",
        "exchange.delay=1 exchange.order=tree precision.dynamic_loss_scale=false",
    ],
)
def test_recipes_of_every_kind_can_be_tried_alone(tiny, overrides):
    recipe = tiny("run.device=cpu", "batch.micro=auto", "batch.global=48", *overrides.split())
    divide(recipe)
    assert micro_batch._fault(recipe, 4, CPU) == ""


def test_memory_of_a_trial_that_fails_is_free_before_the_next(tiny, monkeypatch):
    """The error has the frames in which the engine is."""
    engines = weakref.WeakSet()
    alive = []
    begin = TorchEngine.__init__
    train_step = TorchEngine.train_step

    def created(engine, *arguments, **options):
        alive.append(len(engines))
        engines.add(engine)
        begin(engine, *arguments, **options)

    def update(engine, *arguments, **options):
        if engine.batch.micro > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return train_step(engine, *arguments, **options)

    monkeypatch.setattr(TorchEngine, "__init__", created)
    monkeypatch.setattr(TorchEngine, "train_step", update)
    recipe = tiny("run.device=cpu", "batch.micro=auto", "batch.global=16")
    lines = ["16 does not fit", "2 fits", "4 fits", "8 does not fit"]
    assert micro_batch._tried(recipe, [1, 2, 4, 8, 16], 16, CPU) == (4, lines)
    assert alive == [0, 0, 0, 0]
