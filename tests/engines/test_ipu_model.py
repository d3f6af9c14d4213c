"""The modules that an IPU runs, on the CPU; that they learn what other engines do, tests/ipu
has."""

import pytest
import torch
from torch.nn import functional as F

from data import mixing
from engines import ipu_model
from engines.ipu_model import EvaluationModule, HardwareDraws, Marks, TrainingModule, device_model
from models.efficientnet import build

RECIPE = ("model.image_size=20", "data.mixup=0.4", "data.cutmix=0.85")


def images_of(rows, size=20):
    return torch.randint(
        0, 256, (rows, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def drawn(recipe, step, rows=4, size=20):
    plan = mixing.draw(recipe.data, 0, (step, 1), rows=rows, valid=rows, size=(size, size))
    return plan, ipu_model.mixing_rows(plan)


@pytest.mark.parametrize("rows", [2, 3])
def test_images_and_targets_are_mixed_as_on_other_devices(tiny, rows):
    recipe = tiny(*RECIPE)
    images = images_of(rows)
    labels = torch.arange(rows) + 3
    for step in range(6):
        plan, columns = drawn(recipe, step, rows)
        torch.testing.assert_close(
            ipu_model.mix_images(images.float(), columns), mixing.mix_images(images, plan)
        )
        found = ipu_model.mix_targets(F.one_hot(labels, 10).float(), columns)
        torch.testing.assert_close(found, mixing.mix_targets(labels, plan, 10))


def test_images_enter_in_float32(tiny):
    recipe = tiny(*RECIPE)
    half = device_model(recipe.model, recipe.run.seed, torch.float16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}
    entry = half.block("preprocess")
    expected = build(recipe.model, 0).block("preprocess")
    assert torch.equal(entry(images_of(2)), expected(images_of(2)).half())


def test_random_layers_draw_from_the_devices_generator(tiny):
    recipe = tiny(*RECIPE, "model.dropout=0.5", "model.drop_path=0.4")
    model = device_model(recipe.model, recipe.run.seed, torch.float32)
    assert {type(module.draws) for module in model.modules() if hasattr(module, "draws")} == {
        HardwareDraws
    }
    torch.manual_seed(3)
    mask = HardwareDraws(0).keep_mask("head", 0.25, 40000, torch.zeros(1, dtype=torch.float16))
    assert mask.dtype == torch.float16 and set(mask.unique().tolist()) == {
        0.0,
        torch.tensor(1 / 0.75).half().item(),
    }
    assert abs((mask == 0).float().mean() - 0.25) < 0.01  # 4.6 standard errors
    again = HardwareDraws(0).keep_mask("head", 0.25, 40000, torch.zeros(1, dtype=torch.float16))
    assert not torch.equal(mask, again)


def test_marks_are_put_where_they_belong(tiny):
    recipe = tiny(*RECIPE)
    seen = []

    def mark(kind):
        return lambda tensor: seen.append((kind, tuple(tensor.shape))) or tensor

    model = device_model(recipe.model, recipe.run.seed, torch.float32)
    kept = model.names[2]
    module = TrainingModule(model, 0.0, 10, Marks(*map(mark, Marks._fields)), {kept})
    module(images_of(2), torch.tensor([1, 2]).int(), drawn(recipe, 0, 2)[1])
    assert [kind for kind, _ in seen] == [
        "input",
        "input",
        "input",
        "keep",
        "loss",
        "output",
        "output",
    ]
    assert seen[4] == ("loss", ())
    seen.clear()
    EvaluationModule(model, Marks(input=mark("input"), output=mark("output")))(images_of(2))
    assert seen == [("input", (2, 3, 20, 20)), ("output", (2, 10))]
