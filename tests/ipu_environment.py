"""Loaded by ./run_tests.sh --ipu-environment: what torch 2.0.1 cannot do on a CPU is skipped there,
and says so."""

import pytest

# Of a test's path and name -> why it is left out.
LEFT_OUT = {
    "tests/recipe/test_schema.py": "configs/schema.json is written by the pydantic of requirements.txt",
    "test_the_json_schema": "configs/schema.json is written by the pydantic of requirements.txt",
    "kernels": "Triton's kernels are for GPUs, and need a newer Triton",
    "test_triton": "Triton's kernels are for GPUs, and need a newer Triton",
    "test_without_a_compiler": "torch.compile is not for IPUs, and torch 2.0.1 has another",
    "as on GPUs": "torch 2.0.1 does not copy lists of tensors, which only GPUs are made to do",
    "bfloat16": "no IPU computes in bfloat16, and torch 2.0.1's kernels for it on CPUs are less exact",
}
# Of an error's message -> why torch 2.0.1 raises it where newer ones do not.
CANNOT = {
    "not implemented for 'Half'": "torch 2.0.1 has few float16 kernels for CPUs",
    "Found no NVIDIA driver": "torch 2.0.1 needs a GPU even for tensors without values",
}


def pytest_configure(config):
    # Raised within torch 2.0.1 itself, by torch.load(weights_only=True).
    config.addinivalue_line("filterwarnings", "ignore:TypedStorage is deprecated:UserWarning")
    # An unbuffered file that Python 3.8 leaves to its collector. Which test meets it depends on all
    # tests before it, and whose it is was not found: neither tempfile's nor os.fdopen's. The newer
    # Python never tells of one.
    config.addinivalue_line(
        "filterwarnings",
        r"ignore:Exception ignored in. <_io\.FileIO:pytest.PytestUnraisableExceptionWarning",
    )


def pytest_ignore_collect(collection_path):
    """Triton's kernels cannot even be imported with the Triton of torch 2.0.1."""
    return True if collection_path.match("tests/models/kernels") else None


def pytest_collection_modifyitems(items):
    for item in items:
        for part, reason in LEFT_OUT.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    try:
        return (yield)
    except RuntimeError as error:
        for part, reason in CANNOT.items():
            if part in str(error):
                pytest.skip(reason)
        raise
