"""Manifests for schedulers: their commands are accepted, and what follows an exit code is what the
code means."""

import re
import shlex

import pytest
import yaml

from common.errors import STOPPED, WRONG_INPUT
from recipe import loading
from tests.conftest import ROOT
from tools import launch

DOCS = ROOT / "docs"
# What a Job of Kubernetes needs for each field that is used here (batch/v1, JobSpec).
ACTIONS = {"FailJob", "FailIndex", "Ignore", "Count"}


@pytest.fixture
def jobset():
    return yaml.safe_load((DOCS / "kubernetes.yaml").read_text())


@pytest.fixture
def sky():
    return yaml.safe_load((DOCS / "skypilot.yaml").read_text())


def options_of(command):
    """Return what the launcher understands of a shell's command that ends with its arguments."""
    words = shlex.split(command)
    start = max(words.index(word) for word in words if word in ("tools.launch", "./run_pod.sh"))
    return launch._parser().parse_intermixed_args(words[start + 1 :])


def test_the_job_of_kubernetes_trains_on_as_many_hosts_as_it_has_pods(jobset, monkeypatch):
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][:2] == ["bash", "-c"] and container["command"][2].startswith(
        "exec python -m tools.launch "
    )
    options = options_of(container["command"][2].replace("$JOB_COMPLETION_INDEX", "1"))
    assert options.nnodes == job["parallelism"] == job["completions"] and options.node_rank == 1
    assert job["completionMode"] == "Indexed", "no other mode sets JOB_COMPLETION_INDEX"
    # <jobset>-<group>-<number of the job>-<index of the pod>.<subdomain>, which is the JobSet's
    # name.
    name = jobset["metadata"]["name"]
    assert (
        options.master == f"{name}-{group['name']}-0-0.{name}"
        and jobset["spec"]["network"]["enableDNSHostnames"]
    )
    recipe = loading.load(ROOT / options.config, options.overrides)
    assert recipe.checkpoint.mirror and recipe.data.root == "/images"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert mounts["images"] == recipe.data.root and recipe.run.output.startswith(
        mounts["runs"] + "/"
    )


def test_the_job_of_kubernetes_starts_again_after_75_and_not_after_2(jobset):
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "else podFailurePolicy is refused"
    actions = {}
    for rule in job["podFailurePolicy"]["rules"]:
        assert rule["action"] in ACTIONS
        on_codes = rule.get("onExitCodes")
        if on_codes:
            assert (
                on_codes["operator"] == "In"
                and on_codes["containerName"] == pod["containers"][0]["name"]
            )
            actions.update(dict.fromkeys(on_codes["values"], rule["action"]))
        else:
            assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert actions == {WRONG_INPUT: "FailJob", STOPPED: "Ignore"}
    assert pod["terminationGracePeriodSeconds"] >= 60


def test_the_task_of_skypilot_goes_on_after_75_from_its_mirror(sky):
    assert sky["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED]
    options = options_of(sky["run"])
    recipe = loading.load(ROOT / options.config, options.overrides)
    assert recipe.checkpoint.mirror.startswith("s3://") and recipe.data.root in sky["file_mounts"]
    plan, _, _ = sky["setup"].partition(" && ")
    assert options_of(plan).dry_run


def test_the_package_of_the_mirror_is_installed_in_the_version_of_fsspec(sky):
    """s3fs needs exactly this one."""
    version = re.search(r"^fsspec==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[
        1
    ]
    assert sky["setup"].endswith(f" && .venv/bin/python -m pip install s3fs=={version}")
    kubernetes = (DOCS / "kubernetes.yaml").read_text()
    assert (
        f"docker build --build-arg STORE=s3fs=={version} -t registry.example/largebatch:latest ."
        in kubernetes
    )
    recipe = (ROOT / "Dockerfile").read_text()
    assert "\nARG STORE=\n" in recipe and f"--build-arg STORE=s3fs=={version} " in recipe


def test_manifests_are_named_by_the_page():
    page = (DOCS / "cluster.md").read_text()
    for name in ("kubernetes.yaml", "skypilot.yaml", "train.sbatch"):
        assert re.search(rf"docs/{name}|\({name}\)", page), name
