"""Pages say what is so: files that they name are there, and figures are those of the results that
they come from."""

import itertools
import json
import re

import pytest

from tests.conftest import ROOT

# The diary is history: it names what is gone.
PAGES = [
    path
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    if path.name != "diary.md" and "diary" not in path.parts
]
RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))
ROOMS = "common|recipe|models|optim|data|parallel|engines|training|tools|benchmarks|configs|docs|examples|tests|text"
GPU = json.loads((ROOT / "docs" / "results" / "gpu" / "nvidia-h200.json").read_text())
CLAIMS = {claim["name"]: claim for claim in GPU["claims"]}
IMAGES_PER_SECOND = CLAIMS["b4_images_per_second"]["value"]
NUMBER = r"(\d[\d,]*(?:\.\d+)?)"


def ids(path):
    return str(path.relative_to(ROOT))


def named_files(text):
    """Paths of the repository in backticks, without placeholders and what a benchmark leaves in its
    cache."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    path = re.compile(
        rf"(?:{ROOMS})(?:/[\w.-]+)*/[\w-]+\.(?:py|md|yaml|cpp|c|json|sh|png|csv|jsonl)"
    )
    return [
        span
        for span in spans
        if path.fullmatch(span) and "DEVICE" not in span and "/cache/" not in span
    ]


def named_modules(text):
    """Modules behind `python -m`."""
    return set(
        re.findall(
            r"python -m ((?:tools|benchmarks|examples|recipe|training)(?:\.[a-z_0-9]+)*)", text
        )
    )


def is_module(name):
    place = ROOT / name.replace(".", "/")
    return place.with_suffix(".py").exists() or (place / "__main__.py").exists()


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=ids)
def test_files_and_modules_that_a_page_names_are_there(page):
    text = page.read_text()
    assert [name for name in named_files(text) if not (ROOT / name).exists()] == []
    assert [name for name in named_modules(text) if not is_module(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_of_a_page_lead_somewhere(page):
    """Files, and headings in them, by the anchors that GitHub makes."""
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        if not place.exists() or (anchor and anchor not in anchors(place.read_text())):
            missing.append(target)
    assert missing == []


def anchors(text):
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def value(text):
    return float(text.replace(",", ""))


# Page, pattern of a figure on it; its source, pattern of the figure there; digits behind the point
# that are compared.
FIGURES = [
    ("README.md", rf"{NUMBER} strikes, ", "docs/results/elastic.md", rf"\| strikes \| {NUMBER} \|", 0),
    (
        "README.md", rf"strikes, {NUMBER} s lost in the median",
        "docs/results/elastic.md", rf"median seconds lost by a strike, beside a usual step \| {NUMBER} s", 2,
    ),
    (
        "README.md", r"costs no accuracy that we could measure \((-?[\d.]+) ± [\d.]+ points",
        "docs/results/exchange_learning.md", r"top1_loss_topk_update_0\.01_glyphs \| (-?[\d.]+) \|", 1,
    ),
    (
        "README.md", rf"reaches dense accuracy {NUMBER} times faster",
        "docs/results/time_to_accuracy.md", rf"`time_to_dense_accuracy_p8`[^|]*\| \**{NUMBER}", 1,
    ),
    (
        "README.md", rf"a sixteen-fold batch loses {NUMBER} points with LAMB",
        "docs/results/ladder2.md", rf"a sixteen-fold batch costs {NUMBER} ± [\d.]+ points with LAMB", 1,
    ),
    (
        "docs/exchange.md", rf"\| `local`, `local_steps: 8` \| [\d.]+ ± [\d.]+ \| {NUMBER} ± ",
        "docs/results/exchange_learning.md", rf"8 local steps lose {NUMBER} points on glyphs", 1,
    ),
    (
        "docs/batch.md", rf"with {NUMBER} % of the updates",
        "docs/results/ladder2.md", rf"with {NUMBER} % of the updates, at the rate", 1,
    ),
    (
        "README.md", rf"{NUMBER} times timm's rate on one core",
        "docs/results/loader.md", rf"`speedup_over_timm_per_core` \| {NUMBER} ", 1,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("page", "pattern", "source", "there", "digits"), FIGURES)
def test_a_figure_is_that_of_the_result_it_comes_from(page, pattern, source, there, digits):
    found = figures(page, pattern)
    expected = figures(source, there)
    assert found and expected, "both pages have it"
    assert {round(each, digits) for each in found} == {round(expected[0], digits)}


def figures(page, pattern):
    return [value(match[1]) for match in re.finditer(pattern, (ROOT / page).read_text())]


def test_rates_of_the_h200_are_those_of_its_results():
    """Pages and recipes have the rate that was measured, and the days of a training that follow
    from it."""
    pages = [path for path in itertools.chain(PAGES, RECIPES) if "results" not in path.parts]
    texts = {ids(path): path.read_text() for path in pages}
    for name in ("README.md", "docs/gpu.md", "configs/gpu.yaml"):
        assert f"{IMAGES_PER_SECOND:,.0f}" in texts[name], name
    assert round(350 * 1_281_167 / IMAGES_PER_SECOND / 86_400) == 3
    for name in (
        *(ids(path) for path in RECIPES if path.parent.name == "ablation"),
        "configs/gpu.yaml",
    ):
        assert "three days" in texts[name], name
    speedup = CLAIMS["b4_speedup_over_timm_compiled"]["value"]
    for name in ("README.md", "docs/gpu.md"):
        assert f"{speedup:.2f} times" in texts[name], name


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_the_gpu_page_says_which_goals_hold(claim):
    row = re.search(rf"\| `{claim['name']}` \|(.*)\|", (ROOT / "docs" / "gpu.md").read_text())[1]
    assert f"{value(claim['goal'].split()[1]):g}" in row.replace(",", "")
    assert ("does not hold" in row) == (not claim["holds"])


# Words that were so before there were results on a GPU.
OLD = re.compile(
    r"speed (?:there|on a GPU): not measured|no machine with two was at hand|no GPU (?:was|is) at hand"
    r"|several weeks on one GPU|weeks on one GPU"
)


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=ids)
def test_no_page_calls_unmeasured_what_was_measured_on_a_gpu(page):
    assert OLD.findall(page.read_text()) == []


def test_a_page_that_names_what_is_gone_is_found_out():
    text = "in `models/kernels/residual.py` and `docs/gpu.md`, by `python -m benchmarks.nothing`"
    assert [name for name in named_files(text) if not (ROOT / name).exists()] == [
        "models/kernels/residual.py"
    ]
    assert named_modules(text) == {"benchmarks.nothing"} and not is_module("benchmarks.nothing")
    assert OLD.search("weeks on one GPU (speed there: not measured)")


# Goals that were withdrawn; their figures stay. No benchmark claims them.
WITHDRAWN = (
    "best_reader_fraction_of_bare_decode", "top1_loss_local_8_glyphs", "predicted_updates_error",
)  # fmt: skip


@pytest.mark.parametrize("name", WITHDRAWN)
def test_withdrawn_goals_are_claimed_by_no_benchmark(name):
    assert [
        ids(path) for path in (ROOT / "benchmarks").rglob("*.py") if name in path.read_text()
    ] == []


def test_claims_that_do_not_hold_are_called_so_where_they_stand():
    """In tables of results each claim whose goal is missed says so, and no other does."""
    wrong = []
    for page in (ROOT / "docs" / "results").rglob("*.md"):
        wrong += [(page.name, line) for line in page.read_text().splitlines() if is_misjudged(line)]
    assert wrong == []


def is_misjudged(line):
    """Whether a row of claims says the opposite of its value and its goal."""
    cells = [cell.strip() for cell in line.strip("| ").split("|")]
    goal = next((cell for cell in cells[1:] if re.fullmatch(r"[<>]= ?[\d.]+", cell)), None)
    verdict = cells[-1].strip("*")
    if goal is None or verdict in ("", goal):
        return False
    # The newest value stands before the goal, or with a spread between them.
    before = cells[cells.index(goal) - 1]
    own = before if re.fullmatch(NUMBER, before) else cells[1]
    if not re.fullmatch(NUMBER, own):
        return False
    bound = value(goal.strip("<>= "))
    holds = value(own) <= bound if goal.startswith("<") else value(own) >= bound
    return holds == verdict.startswith("does not hold")


def test_a_row_that_says_the_opposite_is_found_out():
    assert is_misjudged("| `worst_time_over_model` | 1.76 | 1.67 to 2.17 | <= 1.15 | holds |")
    assert not is_misjudged(
        "| `worst_time_over_model` | 1.76 | 1.67 to 2.17 | <= 1.15 | **does not hold** |"
    )
    assert is_misjudged("| `spilled_registers` | 2 | 0 | 0 | <= 0 | does not hold |")
