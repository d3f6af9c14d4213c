"""timm's weights on class folders: one command, with no key but the weights and the folder."""

import timm
import torch

import train
from tests.conftest import ROOT
from tests.pictures import write_pictures


def test_weights_fit_and_the_classifier_is_new(tmp_path, capsys):
    folder = write_pictures(tmp_path / "images", "abcde", size=64, train=8, val=4)
    trained = timm.create_model("tf_efficientnet_b0").state_dict()
    torch.save(
        {"state_dict": trained, "state_dict_ema": dict(trained), "epoch": 3}, tmp_path / "b0.pth"
    )
    weights = f"model.init_from=timm:tf_efficientnet_b0:{tmp_path}/b0.pth"
    command = [
        "--config",
        str(ROOT / "configs" / "finetune_timm.yaml"),
        weights,
        f"data.root={folder}",
    ]
    short = ["model.image_size=32", "run.epochs=1", "schedule.warmup_epochs=0.1", "data.workers=0"]
    assert train.main([*command, f"run.output={tmp_path}/run", *short]) == 0
    out = capsys.readouterr().out
    assert (
        "b0.pth: of its trained and ema weights the trained ones are taken (state_dict, not state_dict_ema)"
        in out
    )
    assert "new: head.classifier.weight, head.classifier.bias" in out
    assert "40 training and 20 validation images of 5 classes (folder)" in out
    keys = (tmp_path / "run" / "config.yaml").read_text()
    assert all(
        key in keys
        for key in ("name: efficientnet_b0", "norm: batch", "norm_eps: 0.001", "padding: same")
    )
