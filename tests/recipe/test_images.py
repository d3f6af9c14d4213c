"""The section of images, as far as it answers without opening any."""

import pytest

from recipe import config, validation_share
from recipe.images import scores_training_images


def section(text):
    """A section of `source key=value ...`."""
    source, *settings = text.split()
    return config.Data(source=source, **dict(setting.split("=") for setting in settings))


@pytest.mark.parametrize(
    ("trained", "scored", "seen"),
    [
        ("folder root=/a", "folder root=/a", False),
        ("folder root=/a", "folder root=/a validation_folder=train/", True),
        ("folder root=/a", "folder root=/a/train validation_folder=.", True),
        ("folder root=/a", "folder root=/b/../a validation_folder=train", True),
        ("folder", "folder validation_folder=train", False),
        ("shards root=s3://b/a", "shards root=s3://b/a", False),
        ("shards root=s3://b/a", "shards root=s3://b/a/ validation_folder=train", True),
        ("shards root=s3://b/a", "shards root=s3://b validation_folder=a/train", True),
        ("list root=/a", "list root=/a", False),
        ("list root=/a", "list root=/a validation_list=train.csv", True),
        ("list root=/a", "list validation_list=/a/train.csv", True),
        ("huggingface dataset=a", "huggingface dataset=a", False),
        ("huggingface dataset=a", "huggingface dataset=a validation_split=train", True),
        ("huggingface dataset=a", "huggingface dataset=b validation_split=train", False),
        (
            "huggingface dataset=a subset=x",
            "huggingface dataset=a subset=y validation_split=train",
            False,
        ),
        ("huggingface root=/a", "huggingface root=/a", False),
        ("digits", "digits", False),
        ("torchvision dataset=CIFAR10", "torchvision dataset=CIFAR10", False),
        ("glyphs", "glyphs", False),
    ],
)
def test_scored_images_were_trained_on_where_both_have_one_address(trained, scored, seen):
    assert scores_training_images(section(trained), section(scored)) == seen


@pytest.mark.parametrize("source", ["folder", "list"])
@pytest.mark.parametrize(
    ("trained", "scored"), [(0, 0), (0.2, 0.2), (0.2, 0.1), (0.2, 0.3), (0.2, 0), (0, 0.2)]
)
def test_shares_of_one_folder_have_images_in_common_as_their_hashes_say(source, trained, scored):
    names = [b"%d.jpg" % number for number in range(1000)]

    def of(share):
        whole = "validation_list=train.csv" if source == "list" else "validation_folder=train"
        return section(f"{source} root=/a {whole}").model_copy(update={"validation_share": share})

    train = validation_share.of_split(names, trained, "train")
    validation = validation_share.of_split(names, scored, "validation")
    common = any(one and other for one, other in zip(train, validation))
    assert scores_training_images(of(trained), of(scored)) == common
