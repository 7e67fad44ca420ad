"""What every test may rely on: one thread, no hub, and a browser where a test asks for one."""

import os
import shutil

# Before torch and transformers are imported: both read these once. Fresh processes inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """An installed Chromium or Chrome; `DETLAB_REQUIRE_BROWSER=1` turns its absence into a failure."""
    names = ("chromium", "chromium-browser", "google-chrome")
    for name in names:
        if path := shutil.which(name):
            return path
    reason = f"no browser: none of {', '.join(names)} is on PATH; install one, such as Debian's chromium"
    if os.environ.get("DETLAB_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
