"""The image, which is built once, and the containers that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import shallow
from tests.container.image import Container, Images
from tests.container.workshop import Ended, Workshop

#: Test files in their order. The first ones need no image, which is built in the meantime; the last ones end the
#: replicas.
ORDER = ("test_scripts.py", "test_kubernetes.py", "test_router.py", "test_failures.py", "test_image.py")
#: Fixtures that need the image.
IMAGE = {"images", "restricted", "configured"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ending(make): makes the container whose status and log the fixture `ended` returns"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = sorted((item for item in items if item.path.parent == here), key=lambda item: ORDER.index(item.path.name))
    items[:] = [*(item for item in items if item.path.parent != here), *ours]


@pytest.fixture(scope="session", autouse=True)
def workshop(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workshop]:
    with Workshop(model, tmp_path_factory.mktemp("containers")) as workshop:
        asked, endings = set(), []
        for item in request.session.items:
            asked |= set(getattr(item, "fixturenames", ())) & IMAGE
            endings += [marker.args[0] for marker in item.iter_markers("ending")]
        if asked or endings:
            workshop.begin(bool(asked - {"images"}), endings)
        yield workshop


@pytest.fixture(scope="session")
def images(workshop: Workshop) -> Images:
    return workshop.built.result()


@pytest.fixture(scope="session")
def restricted(workshop: Workshop) -> Container:
    """Returns a replica with few permissions and an API key, run by a user that the image does not know."""
    return workshop.restricted.result()


@pytest.fixture(scope="session")
def configured(workshop: Workshop) -> Container:
    """Returns a replica that takes its method from a file, run by the image's user; both replicas load from a hub."""
    return workshop.configured.result()


@pytest.fixture
def ended(request: pytest.FixtureRequest, workshop: Workshop) -> Ended:
    """Returns status and log of the container that the test's mark ``ending`` names."""
    (marker,) = request.node.iter_markers("ending")
    return workshop.endings[marker.args[0]].result()


@pytest.fixture(scope="session")
def shallow_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shallow.cut(model, tmp_path_factory.mktemp("shallow") / "model")
