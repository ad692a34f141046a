"""The image, built once, and its containers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.container.image import Container, Images

SHARED_MEMORY = Path("/dev/shm")
#: Bytes of the images.
NEEDED = 3 << 30


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    # Unpacking waits for the disk thousands of times; memory does not.
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > NEEDED
    folder = Path(tempfile.mkdtemp(prefix="kvq-container-", dir=SHARED_MEMORY if roomy else None))
    folder.chmod(0o755)
    try:
        images = Images(folder)
        images.build()
        yield images
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def readable(model: Path, images: Images) -> Path:
    """A copy of the model that every user may read."""
    copy = shutil.copytree(model, images.folder / "model", dirs_exist_ok=True)
    for file in copy.iterdir():
        file.chmod(0o644)
    copy.chmod(0o755)
    return copy


@pytest.fixture(scope="session")
def container(images: Images, readable: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Container]:
    """Makes a container, not yet started, from its name and what ``Container`` takes after the model."""

    def make(name: str, *arguments: str, options: tuple[str, ...] = (), model: Path = readable) -> Container:
        return Container(images, tmp_path_factory.mktemp(name) / f"{name}.log", model, arguments, options)

    return make
