"""From files and overrides to a recipe: what is read, what wins, and that every refusal is one
useful line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.errors import ConfigError
from common.yaml_text import parse_value, parse_yaml
from recipe.config import Recipe
from recipe.loading import dump, load, loads
from tests.conftest import QUICKSTART, RECIPES, ROOT

SMALLEST = "run: {epochs: 1}\nschedule: {peak: 1}\n"


@pytest.fixture
def write(tmp_path):
    """write(text, name): the path of a file with that text."""

    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode("utf-8"))
        return path

    return write


def refusal(path, *overrides):
    """The message of the ConfigError that loading raises, without the folder in front of file
    names."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message.replace(f"{Path(path).parent}{os.sep}", "")


def test_an_error_names_the_layer_that_made_it(write):
    """The same fault in the base, in the recipe and on the command line, each time with something
    after it."""
    wrong = "optimizer: {momentun: 0.9}"
    right = "optimizer: {trust: momentum}"
    unknown = "optimizer.momentun: unknown key; did you mean optimizer.momentum?"
    for base, own, override, place in (
        (wrong, right, "optimizer.trust=gradient", "base.yaml"),
        ("", wrong, "optimizer.trust=gradient", "mine.yaml"),
        ("", right, "optimizer.momentun=0.9", "command line"),
    ):
        write(SMALLEST + base, "base.yaml")
        assert (
            refusal(write(f"extends: base.yaml\n{own}"), override, "log.every_steps=3")
            == f"{place}: {unknown}"
        )
    assert refusal(write(SMALLEST), "run.seed=-1", "batch.micro=0").endswith(" (and 1 more)")


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("optimiser.momentum=1", "optimiser: unknown key; did you mean optimizer?"),
        ("seed.x=1", "seed: unknown key; did you mean run.seed?"),
        ("batch.globl=1", "batch.globl: unknown key; did you mean batch.global?"),
        ("batch.global_=1", "batch.global_: unknown key; did you mean batch.global?"),
        ("run.tensorboard=1", "run.tensorboard: unknown key; did you mean log.tensorboard?"),
        ("log.xyz=1", "log.xyz: unknown key; log has every_steps, trust_ratios, noise_scale, "),
        ("xyz.a=1", "xyz: unknown key; the sections are " + ", ".join(Recipe.model_fields)),
        ("extends.x=1", "extends: unknown key; "),
        ("run.seed=true", "run.seed: must be a valid integer, found True"),
        ("run.seed=null", "run.seed: must be a valid integer, found None"),
        ("run.seed=[", "run.seed: not valid YAML: "),
        ("run.seed=1\udcff", "run.seed: not valid YAML: "),
        # mostly the slip of a shell
        ("run.output=", "run.output: the value is empty; write run.output=null to"),
        ("run.deterministic=yes", "run.deterministic: must be a valid boolean, found 'yes'"),
        (
            "schedule.epochs=5",
            "schedule.epochs: unknown key; did you mean run.epochs or schedule.decay_epochs?",
        ),
        ("optimizer.peak=5", "optimizer.peak: unknown key; did you mean schedule.peak?"),
        ("run.device=gpu", "run.device: must be 'auto', 'cpu', 'cuda' or 'ipu', found 'gpu'"),
        ("model.mean=[true, 0.5, 0.5]", "model.mean: [0] must be a valid number, found True"),
        ("model.mean=[1, 2]", "model.mean: [2] is needed"),
        (
            "optimizer.weight_decay=1e999",
            "optimizer.weight_decay: must be a finite number, found inf",
        ),
        ("optimizer.skip=bias", "optimizer.skip: must be a valid list, found 'bias'"),
        (
            "optimizer.skip=[bias, mean]",
            "optimizer.skip: [1] must be 'bias' or 'norm', found 'mean'",
        ),
    ],
)
def test_wrong_keys_and_values_come_with_what_is_expected(write, override, fault):
    assert refusal(write(SMALLEST), override).startswith(f"command line: {fault}")


def test_scalars_are_those_of_yaml_1_2():
    """Where YAML 1.1, as PyYAML reads it, has texts for 1e-5, booleans for on and no, 8 for 010,
    and dates."""
    for text, value in (
("1e-5", 1e-5), ("5e-05", 5e-5), ("1E+3", 1000.0), (".5", 0.5), ("1.", 1.0), ("-.5e1", -5.0), ("010", 10),
        ("-007", -7), ("0", 0), ("+1", 1), ("on", "on"), ("no", "no"), ("yes", "yes"), ("Off", "Off"),
        ("True", "True"), ("true", True), ("false", False), ("null", None), ("~", None), ("", None),
        ("1_000", "1_000"), ("0x1F", "0x1F"), ("0b1", "0b1"), ("1:30", "1:30"), ("2026-01-31", "2026-01-31"),
        (".inf", ".inf"), ("=", "="), (".", "."), ("e5", "e5"), ("1e", "1e"), ("'1e-5'", "1e-5"),
        ("[1e-5, 010, no]", [1e-5, 10, "no"]), ("{on: 1e-5, <<: {a: 010}}", {"on": 1e-5, "<<": {"a": 10}}),
    ):  # fmt: skip
        found = parse_yaml(text, "here")
        assert (found, type(found)) == (value, type(value)), text
    whole = 10**299
    assert parse_yaml(str(whole), "here") == whole
    assert parse_yaml(str(whole * 10), "here") == 1e300
    assert parse_yaml("9" * 5000, "here") == float("inf")
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]\n", "here") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


def test_what_a_caller_changes_is_read_anew_the_next_time():
    for read in (parse_yaml, parse_value):
        read("[1, 2]", "here").append(3)
        assert read("[1, 2]", "here") == [1, 2]


# Nine of nine of nine: 387 million values. A text of 100 kB, 200 times.
LISTS = "a0: &a0 [1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
LONG = f"text: &text '{'x' * 100_000}'\nsplit: [{', '.join(['*text'] * 200)}]\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (LISTS, "mine.yaml:5: not valid YAML: more than 10,000 values, with what aliases repeat"),
        (LONG, "mine.yaml:2: not valid YAML: more than 10,000 values, with what aliases repeat"),
        (
            "run:\n  epochs: 1\n  epochs: 2\n",
            "mine.yaml:3: not valid YAML: key epochs is given twice",
        ),
        ("run: {epochs: 1}\n1: {}\n", "mine.yaml:2: not valid YAML: key 1 is not text"),
        (
            "run: {epochs: 1\n",
            "mine.yaml:2: not valid YAML: expected ',' or '}', but got '<stream end>'",
        ),
        (
            "run: &run {log: *run}\n",
            "mine.yaml:1: not valid YAML: found unconstructable recursive node",
        ),
        ("---\nrun:\n---\nlog:\n", "mine.yaml:3: not valid YAML: but found another document"),
        (
            "run: {seed: !!int abc}\n",
            "mine.yaml:1: not valid YAML: tag tag:yaml.org,2002:int has no place in a recipe",
        ),
        ("run: '\x01'\n", "mine.yaml: not valid YAML: unacceptable character"),
        (
            "run: " + "[" * 400,
            "mine.yaml:1: not valid YAML: lists and mappings are nested more than 32 levels deep",
        ),
        ("- run\n", "mine.yaml: not a recipe: expected sections such as `run:` and `model:`"),
        ("run: 5\n", "mine.yaml: run: expected keys below it, found 5"),
        ("run.seed: 5\n", "mine.yaml: run.seed: unknown key; write it as `run: {seed: ...}`"),
        ('"a\\nb": {}\n', "mine.yaml: a b: unknown key; the sections are run, "),
        (
            SMALLEST + 'log: {"a\\u2028b": 1}\n',
            "mine.yaml: log.a b: unknown key; log has every_steps, ",
        ),
    ],
    ids=lambda text: repr(text[-30:]),
)
def test_what_is_no_recipe_is_refused_with_its_line(write, text, fault):
    assert refusal(write(text)).startswith(fault)


def test_files_that_cannot_be_read(write, tmp_path):
    write("", "folder/mine.yaml")
    (tmp_path / "photo.yaml").write_bytes(b"\xff\xd8\xff")
    os.symlink("loop.yaml", str(tmp_path / "loop.yaml"))
    for name, fault in (
        (
            "none.yaml",
            "No such file or directory; name an existing recipe, e.g. configs/quickstart.yaml",
        ),
        ("folder", "Is a directory; name an existing recipe"),
        ("photo.yaml", "not a text file; it must be YAML in UTF-8"),
        ("loop.yaml", "Too many levels of symbolic links; "),
    ):
        assert refusal(tmp_path / name).startswith(f"{name}: {fault}")


def test_empty_files_and_sections_say_nothing(write):
    write("# only a comment\n", "base.yaml")
    path = write("extends: base.yaml\n" + SMALLEST + "log:\nmodel: {}\n")
    assert load(path) == load(write("\ufeff" + SMALLEST.replace("\n", "\r\n"), "windows.yaml"))
    assert (
        refusal(write(""))
        == "mine.yaml: run: one of epochs, steps, images is needed, found none (and 1 more)"
    )


def test_the_later_layer_wins_key_by_key_and_null_takes_back(write, tmp_path, monkeypatch):
    """Bases are found beside the file that names them."""
    write(
        SMALLEST + "log: {every_steps: 5, tensorboard: false}\nbatch: {global: 12, micro: 2}",
        "base.yaml",
    )
    write(
        "extends: ../base.yaml\nlog: {every_steps: 6}\ndata: {root: /a}\nmodel: {width: 3.5}",
        "deeper/middle.yaml",
    )
    write(f"extends: {tmp_path}/deeper/middle.yaml\nbatch: {{micro: 4}}")
    monkeypatch.chdir("/")
    assert load(tmp_path / "mine.yaml", ["batch.micro=auto"]).batch.micro is None
    recipe = load(
        tmp_path / "mine.yaml",
        ["batch.micro=6", "batch.micro=1", "data.root=null", "model.width=~"],
    )
    assert (recipe.log.every_steps, recipe.log.tensorboard) == (6, False)
    assert (recipe.batch.global_, recipe.batch.micro) == (12, 1)
    assert (recipe.data.root, recipe.model.width) == (None, 1.4)


def test_another_name_over_the_recipe_of_a_run_brings_its_own_size(write):
    """config.yaml has the numbers of the old name; those that were given by hand stay."""
    for text, override, expected in (
        ("{name: efficientnet_b0}", "model.name=efficientnet_b4", {"width": 1.4, "image_size": 380, "dropout": 0.4}),
        ("{name: efficientnet_b0, width: 0.5}", "model.name=efficientnet_b4", {"width": 0.5, "depth": 1.8}),
        ("{name: timm, architecture: vit_tiny_patch16_224}", "model.architecture=resnet10t",
         {"image_size": 176, "mean": (0.485, 0.456, 0.406)}),
    ):  # fmt: skip
        begun = load(write(f"{SMALLEST}model: {text}\n"))
        config = write(dump(begun), "config.yaml")
        model = load(config, [override]).model
        assert {key: getattr(model, key) for key in expected} == expected
        assert load(config) == begun == loads(dump(begun), "stored")


@pytest.mark.parametrize(
    ("base", "fault"),
    [
        (
            "base.yaml",
            "base.yaml: extends none.yaml: No such file or directory; correct the name or make the file",
        ),
        ("5", "mine.yaml: extends: 5 is not the name of a file; name one, or remove the key"),
        ("", "mine.yaml: extends: None is not the name of a file; name one, or remove the key"),
        ('""', "mine.yaml: extends FOLDER: Is a directory; "),
        (
            '"a\\0b"',
            "mine.yaml: extends: holds the character NUL, which no path can have; remove it",
        ),
        ("x" * 5000, "mine.yaml: extends "),
        ("circle.yaml", "circle.yaml: extends itself through mine.yaml; break the circle"),
        ("alias.yaml", "mine.yaml: extends itself through alias.yaml; break the circle"),
    ],
    ids=lambda text: text[:12],
)
def test_a_wrong_base_is_blamed_on_the_file_that_names_it(write, tmp_path, base, fault):
    write("extends: none.yaml", "base.yaml")
    write("extends: ./mine.yaml", "circle.yaml")
    os.symlink("mine.yaml", str(tmp_path / "alias.yaml"))
    assert refusal(write(f"extends: {base}")).startswith(fault.replace("FOLDER", str(tmp_path)))


def test_overrides_are_section_dot_key_equals_value(write):
    path = write(SMALLEST)
    for text in (
        "run.seed",
        "seed",
        "sed=",
        "=1",
        ".seed=1",
        "run.=1",
        "run=1",
        "run.a.b=1",
        "",
        "--seed 1",
        "run.a\nb",
    ):
        assert refusal(path, text) == (
            f"command line: {text!r} is not an override; write section.key=value, e.g. run.seed=1"
        )
    for text, meant in (
        ("seed=1", "run.seed=1"),
        ("epochs=1", "run.epochs=1"),
        ("epoch=1", "run.epochs=1"),
        ("optimizer=sgd", "optimizer.name=sgd"),
        ("crop_fractoin=1", "data.crop_fraction=1"),
        ("every_epochs=2", "evaluation.every_epochs=2 or checkpoint.every_epochs=2"),
    ):
        assert (
            refusal(path, text)
            == f"command line: {text!r} is not an override; did you mean {meant}?"
        )
    assert load(path, ["run.output=a=b"]).run.output == "a=b"
    assert load(path, ["data.crop_area=[0.5, 1]"]).data.crop_area == (0.5, 1.0)


# What YAML would cut, change or refuse.
TYPED = (
    "/photos #1", "/photos: 1", "[x]", "{x: 1}", "@x", "%x", "*x", "&x", "!x", "- x", "~x/y~", "? x", "|", ">-", "`x`",
    "2024", "1e3", "010", "yes", "true", "Null", "-", "a 'b' \"c\"", "'", '"', "'a' or 'b'", "'a' #'b'", " x ",
    "x\ty", "x\ny", "é\U0001f600", "a=b", "#", "...", "---", "<<", ",", "\x1b", "a\\b", "x,", "x:",
)  # fmt: skip


OTHERS = ("data.train_folder", "run.output", "model.init_from", "ipu.profile")


@pytest.mark.parametrize(
    ("key", "texts"),
    [
        pytest.param("data.root", TYPED, id="data.root"),
        *(pytest.param(key, TYPED[::6], id=f"{key}, some") for key in OTHERS),
        *(pytest.param(key, TYPED, id=key, marks=pytest.mark.slow) for key in OTHERS),
    ],
)
def test_a_text_is_taken_as_it_is_typed(key, texts):
    section, _, name = key.partition(".")
    for text in texts:
        typed = text.replace("~x/", "x/")  # of which there is no home folder
        recipe = load(QUICKSTART, ["data.source=folder", "run.device=ipu", f"{key}={typed}"])
        assert getattr(getattr(recipe, section), name) == typed
        assert loads(dump(recipe), "again") == recipe


def test_quotes_around_a_whole_text_are_those_of_yaml_and_null_unsets():
    for text, value in (
        ("'/photos #1'", "/photos #1"),
        ('"/photos #1"', "/photos #1"),
        ("'it''s'", "it's"),
        ('"a\\tb"', "a\tb"),
        ("\"'x'\"", "'x'"),
        ("'null'", "null"),
        ("''", ""),
        ("null", None),
    ):
        assert load(QUICKSTART, [f"run.output={text}"]).run.output == value, text
    data = load(QUICKSTART, ["data.source=folder", "data.root=null", "data.train_folder=null"]).data
    assert (data.root, data.train_folder) == (None, "train")
    for text in ("2024", "null", "1e3"):  # a name cannot be unset, so this is its text
        assert load(QUICKSTART, [f"run.name={text}"]).run.name == text


def test_other_keys_are_yaml_of_which_nothing_is_dropped(write):
    path = write(SMALLEST)
    for key, value in (
        ("run.seed", "1"),
        ("schedule.peak", "1e-5"),
        ("model.mean", "[0.5, 0.5, 0.5]"),
    ):
        assert load(path, [f"{key}= {value}"]) == load(path, [f"{key}={value}"])
        for comment in (" #1", "  # comment", " #"):
            fault = f"command line: {key}: {comment.strip()} would be dropped as a comment; "
            assert refusal(path, f"{key}={value}{comment}").startswith(fault)
    assert "would be dropped" in refusal(path, "run.seed=#1")
    for value in ("\0", "1\x07", "[\ud800]"):  # which YAML has no place for
        assert "command line: run.seed: not valid YAML: " in refusal(path, f"run.seed={value}")
    for value in ("1\x07", "[\ud800]"):
        assert load(path, [f"run.output='{value}'"]).run.output == f"'{value}'"
    assert "run.output: holds the character NUL, which no path" in refusal(path, "run.output=a\0b")
    assert "would be dropped" in refusal(path, "run.seed=| #1")
    assert "found 'a: 1'" not in refusal(path, "run.seed=a: 1")
    blocks = ["1e3", "on", "null", "a #b"]
    parallel = [
        "parallel.stages=5",
        "parallel.split=[1e3, on, null, 'a #b']",
        "parallel.recompute=[010]",
    ]
    found = load(path, parallel).parallel
    assert (found.split, found.recompute) == (blocks, ["010"])
    assert load(path, ["parallel.recompute=true"]).parallel.recompute is True


def test_a_dollar_that_names_no_variable_stays(tmp_path):
    """In the middle of a name, in an address (Azure's container for web pages), or where such a
    folder is there."""
    (tmp_path / "$RECYCLE").mkdir()
    for text in (
        "cost$USD",
        "/photos/5$",
        "https://shop.example/$web/photos",
        str(tmp_path / "$RECYCLE"),
    ):
        assert load(QUICKSTART, ["data.source=folder", f"data.root={text}"]).data.root == text


def test_a_tilde_is_the_home_folder(write, tmp_path, monkeypatch):
    """In every key that is a path, in recipes and overrides; what is stored has the whole path."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    files = ["data.source=folder", "run.device=ipu"]
    keys = ("run.output", "data.root", "data.train_folder", "data.validation_folder", "model.init_from",
            "ipu.executable_cache", "ipu.profile")  # fmt: skip
    for key in keys:
        section, _, name = key.partition(".")
        for text, path in (
            ("~", home),
            ("~/x y", home / "x y"),
            ("./~/x", "./~/x"),
            ("x~", "x~"),
            ("/~", "/~"),
        ):
            recipe = load(QUICKSTART, [*files, f"{key}={text}"])
            assert getattr(getattr(recipe, section), name) == str(path)
            if text != "~":  # which is null in YAML
                path = write(f"extends: {QUICKSTART}\n{section}: {{{name}: '{text}'}}\n")
                assert load(path, files) == recipe
        assert "is no home folder here" in refusal(
            write(SMALLEST), *files, f"{key}=~no-such-user/x"
        )
        for text, variable in (
            ("$HOME/x", "$HOME"),
            ("/scratch/$USER/x", "$USER"),
            ("${SCRATCH}", "${SCRATCH}"),
        ):
            assert f"{variable} is not replaced here; write ${{" in refusal(
                write(SMALLEST), *files, f"{key}={text}"
            )
    assert load(
        QUICKSTART, ["model.init_from=timm:efficientnet_b0:~/x #1"]
    ).model.init_from.endswith(f":{home}/x #1")
    home.mkdir()
    (home / "base.yaml").write_text(SMALLEST)
    assert load(write("extends: ~/base.yaml")) == load(home / "base.yaml")
    assert load(write("extends: ${NO_SUCH:-~}/base.yaml")) == load(home / "base.yaml")


@pytest.mark.parametrize("how", ["config", "extends"])
def test_a_recipe_that_is_no_small_file_is_one_line_at_once(write, tmp_path, how):
    """A named pipe without a writer would hang, a device has no end."""
    os.mkfifo(str(tmp_path / "pipe.yaml"))
    with open(str(tmp_path / "large.yaml"), "wb") as large:
        large.truncate(50_000_000)
    for name, fault in (
        (str(tmp_path / "pipe.yaml"), "not a regular file; "),
        ("/dev/zero", "not a regular file; "),
        (str(tmp_path / "large.yaml"), "50,000,000 bytes, above the limit of 1,048,576; "),
    ):
        assert fault in refusal(name if how == "config" else write(f"extends: {name}"))


def test_an_alternative_replaces_another_of_an_earlier_layer_but_one_layer_gives_one(write):
    write("run: {epochs: 3}\nschedule: {peak: 1, warmup_epochs: 1}", "base.yaml")
    path = write(
        "extends: base.yaml\nrun: {steps: 9}\nschedule: {peak_per_image: 0.1, warmup_images: 5}"
    )
    recipe = load(path, ["run.images=null"])
    assert (recipe.run.epochs, recipe.run.steps, recipe.schedule.peak) == (None, 9, None)
    assert (recipe.schedule.warmup_epochs, recipe.schedule.warmup_images) == (None, 5)
    run = load(path, ["run.images=7", "run.epochs=2"]).run
    assert (run.epochs, run.steps, run.images) == (2.0, None, None)
    write("run: {epochs: 3, steps: 4}\nschedule: {peak: 1}", "base.yaml")
    for overrides in ((), ("run.images=5",)):  # the file is wrong whatever is laid over it
        assert (
            refusal(path, *overrides) == "base.yaml: run: epochs and steps are both given; keep one"
        )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_is_dumped_loads_as_the_same_recipe(path, write):
    """config.yaml of a run folder is such a dump: it is a recipe on its own, and a base for
    others."""
    recipe = load(path)
    config = write(dump(recipe), "config.yaml")
    assert load(config) == recipe and dump(load(config)) == dump(recipe)
    changed = load(
        write("extends: config.yaml\nrun: {steps: 5}\nschedule: {peak: 2}"), ["run.seed=9"]
    )
    assert (changed.run.epochs, changed.run.steps, changed.run.seed) == (None, 5, 9)
    assert (changed.schedule.peak, changed.schedule.peak_per_image) == (2.0, None)


AWKWARD = {
    "schedule.peak": (1, 2**53 + 1, 10**299, 0.3, 1e-5, 5e-324, 1 / 3, 123456.789, 1.7976931348623157e308),
    "run.output": ("1e5", "08", "on", "true", "null", "~", "1.", "0x1F", "2026-01-31", "a: b", "# x", "'", '"\n', " x ",
                   "", "=", "<<", "\ud7ff\U0001f600\x85", "x" * 300 + " " + "y" * 300,
                   "é \x07" * 60),
    "run.seed": (0, 2**63 - 1),
    "parallel.recompute": (True, False, [], ["on", "", "1e5"]),
    "data.image_sizes": (None, [[0, 16], [3, 24]]),
    "log.noise_scale": (True, "auto"),
}  # fmt: skip


@pytest.mark.parametrize("key", AWKWARD)
def test_awkward_values_survive_dumping(key):
    """Also where another program reads config.yaml as YAML 1.1, as PyYAML does."""
    section, _, name = key.partition(".")
    for value in AWKWARD[key]:
        content = {"run": {"steps": 2}, "schedule": {"peak": 2}}
        content[section] = {**content.get(section, {}), name: value}
        recipe = Recipe.model_validate(content)
        dumped = dump(recipe)
        assert loads(dumped, "again") == recipe, value
        assert yaml.safe_load(dumped) == parse_yaml(dumped, "here")


def test_a_wrong_recipe_is_refused_before_torch_is_imported(write):
    """Importing torch takes seconds; a typing error should cost a fraction of one.

    No file of the room needs it.
    """
    path = write(SMALLEST + "optimizer: {momentun: 0.9}")
    files = [
        path.relative_to(ROOT)
        for room in ("common", "recipe")
        for path in (ROOT / room).rglob("*.py")
    ]
    modules = sorted(
        ".".join(path.with_suffix("").parts) for path in files if path.stem != "__init__"
    )
    code = (
        f"import sys, train, {', '.join(modules)}\n"
        f"code = train.main(['--config', {str(path)!r}])\n"
        "print(code, sorted({'torch', 'numpy', 'timm', 'torchvision'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=str(ROOT), capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 []\n"
    assert (
        done.stderr
        == f"{path}: optimizer.momentun: unknown key; did you mean optimizer.momentum?\n"
    )


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "/imagenet"), ("", "/imagenet"), ("/data/a #1", "/data/a #1")]
)
def test_recipes_for_imagenet_take_its_folder_from_the_environment(value, expected, monkeypatch):
    """As shells do, an empty variable counts as one that is not set."""
    if value is None:
        monkeypatch.delenv("IMAGENET_ROOT", raising=False)
    else:
        monkeypatch.setenv("IMAGENET_ROOT", value)
    for name in ("pod256", "gpu", "ablation/bs768"):
        recipe = load(ROOT / "configs" / f"{name}.yaml")
        assert recipe.data.root == expected
        assert loads(dump(recipe), "stored").data.root == expected
    assert load(ROOT / "configs" / "gpu.yaml", ["data.root=/mine"]).data.root == "/mine"


def test_a_variable_alone_is_read_as_on_a_command_line(write, monkeypatch):
    """A number is one, and null or nothing is no folder of that name."""
    own = "run: {epochs: '${EPOCHS:-3}'}\ncheckpoint: {mirror: '${MIRROR:-null}'}\nbatch: {micro: '${MICRO:-auto}'}\n"
    path = write(f"extends: {QUICKSTART}\n{own}data: {{source: folder, root: '${{FOLDER:-}}'}}")
    for name in ("EPOCHS", "MIRROR", "MICRO", "FOLDER"):
        monkeypatch.delenv(name, raising=False)
    recipe = load(path)
    assert (recipe.run.epochs, recipe.checkpoint.mirror, recipe.batch.micro, recipe.data.root) == (
        3,
        None,
        None,
        None,
    )
    for name, value in (
        ("EPOCHS", "1e1"),
        ("MIRROR", "1e1"),
        ("MICRO", "8"),
        ("FOLDER", "/photos #1"),
    ):
        monkeypatch.setenv(name, value)
    recipe = load(path)
    assert (recipe.run.epochs, recipe.checkpoint.mirror) == (10, "1e1")
    assert (recipe.batch.micro, recipe.data.root) == (8, "/photos #1")
    monkeypatch.setenv("EPOCHS", "[")
    assert refusal(path).startswith("mine.yaml: run.epochs: not valid YAML: ")


def test_variables_are_replaced_in_files_only_and_only_where_they_have_a_default(
    write, monkeypatch
):
    monkeypatch.setenv("FOLDER", "/there")
    content = (
        "{source: folder, root: '${FOLDER:-/here}/images', train_folder: 'a$FOLDER ${FOLDER}'}"
    )
    path = write(f"extends: {QUICKSTART}\ndata: {content}")
    data = load(path).data
    assert (data.root, data.train_folder) == ("/there/images", "a$FOLDER ${FOLDER}")
    typed = load(path, ["data.root=${FOLDER:-/here}"])
    assert typed.data.root == "${FOLDER:-/here}"
    assert load(write(dump(typed), "config.yaml")) == typed  # a run has stored it
