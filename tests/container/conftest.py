"""The image, built once, and containers that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import shallow
from tests.container.image import Container, Images
from tests.container.workshop import Ended, Workshop

#: They need no image, which is built meanwhile; the last ones end the replicas.
ORDER = ("test_kubernetes.py", "test_router.py", "test_failures.py", "test_image.py")
#: Fixtures that need the image.
IMAGE = {"images", "restricted", "configured"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ending(make): the container that fixture `ended` gives status and log of")


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
    """A replica with little allowed and an API key, as a user that the image does not know."""
    return workshop.restricted.result()


@pytest.fixture(scope="session")
def configured(workshop: Workshop) -> Container:
    """A replica whose method a file chooses, as the image's own user; both take the model from a hub."""
    return workshop.configured.result()


@pytest.fixture
def ended(request: pytest.FixtureRequest, workshop: Workshop) -> Ended:
    """Status and log of the container of the test's mark ``ending``."""
    (marker,) = request.node.iter_markers("ending")
    return workshop.endings[marker.args[0]].result()


@pytest.fixture(scope="session")
def shallow_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shallow.cut(model, tmp_path_factory.mktemp("shallow") / "model")
