"""Both ways to compute the exact tier's steps: by functions of tensors, and compiled."""

import pytest

from detlab.engine.exact import compiled


@pytest.fixture(scope="module", params=(False, True), ids=("tensors", "compiled"))
def steps(request):
    """The tests of a module, once with each."""
    if request.param and not compiled.is_installed():
        pytest.skip("Numba is not installed, so that nothing is compiled")
    with compiled.allowed(request.param):
        yield request.param
