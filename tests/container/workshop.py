"""Builds the image in the background and starts containers side by side, before the tests that use them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from sglang_kvq.server_process import ServerFailed
from tests import shallow
from tests.container.image import RESTRICTED, Container, Images
from tests.rotations.hub_server import REPOSITORY, hub_server

SHARED_MEMORY = Path("/dev/shm")
#: Bytes that the images need.
NEEDED = 3 << 30
#: Volume that both replicas fill, in this run's own storage.
VOLUME = "kvq-home"
#: API key of the replica ``restricted``.
KEY = "the right key"
#: Number of containers that run at once, of those that end by themselves; each takes one to three gigabytes.
AT_ONCE = 2
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()


def said(log: str, words: str) -> None:
    """Asserts that these words are in a log or an answer, and on the page about failures."""
    assert words in log, log
    assert words in PAGE, f"docs/operations.md does not say {words!r}"


@dataclass(frozen=True)
class Ended:
    """Status and log of a container that has ended."""

    status: int
    log: str


@dataclass
class Workshop:
    """Image and containers that the tests of one run share, in one folder that is removed at the end.

    ``begin`` starts what the tests ask for: the image, the two replicas, and containers that end by themselves. Threads
    live until the ``with`` block ends, because a container ends with the thread that started it.

    Attributes:
        model: the model; containers serve its first layers, from a folder or from a hub on this machine.
        logs: folder for logs and for files that containers mount.
    """

    model: Path
    logs: Path
    _exits: ExitStack = field(default_factory=ExitStack)
    _running: list[Container] = field(default_factory=list)

    def __enter__(self) -> Workshop:
        # Unpacking waits for a disk thousands of times, but not for memory.
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > NEEDED
        self.folder = Path(tempfile.mkdtemp(prefix="kvq-container-", dir=SHARED_MEMORY if roomy else None))
        self._exits.callback(shutil.rmtree, self.folder)
        self.folder.chmod(0o755)
        self.readable = shallow.cut(self.model, self.folder / "model", links=False)
        for file in self.readable.iterdir():
            file.chmod(0o644)
        self._hub, _ = self._exits.enter_context(hub_server({"main": ("1" * 40, self.readable)}))
        self._pool, self._few = self._threads(4), self._threads(AT_ONCE)
        return self

    def __exit__(self, *exc: object) -> None:
        for container in self._running:
            container.stop()
        self._exits.close()

    def _threads(self, count: int) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(count)
        self._exits.callback(pool.shutdown, cancel_futures=True)
        return pool

    def begin(self, replicas: bool, endings: Collection[Ending]) -> None:
        """Starts the containers that tests will ask for."""
        self.built = self._pool.submit(self._build)
        if replicas:
            self.restricted = self._pool.submit(self._replica, "restricted", (f"--api-key={KEY}",), RESTRICTED)
            chosen = self.logs / "serve.yaml"
            chosen.write_text("kv-quant: hadamard\n")
            mount = ("-v", f"{chosen}:/serve.yaml:ro")
            self.configured = self._pool.submit(self._replica, "configured", ("--config", "/serve.yaml"), mount)
        self.endings: dict[Ending, Future[Ended]] = {each: self._few.submit(self._end, each) for each in endings}

    @cached_property
    def hub(self) -> tuple[str, ...]:
        """Returns options of a container that loads ``REPOSITORY`` from the hub on this machine."""
        return ("--env", "HF_HUB_OFFLINE=0", "--env", f"HF_ENDPOINT={self._hub}")

    def container(
        self, name: str, *arguments: str, options: tuple[str, ...] = (), model: Path | None = None
    ) -> Container:
        """Creates a container without starting it, after the image has been built.

        Args:
            arguments, options, model: as ``Container`` takes them; the default model is ``readable``.
        """
        made = Container(
            self.built.result(), self.logs / name / f"{name}.log", model or self.readable, arguments, options
        )
        self._running.append(made)
        return made

    def _build(self) -> Images:
        images = Images(self.folder)
        images.build()
        # Two containers that start at the same time cannot both create it.
        subprocess.run(images.podman("volume", "create", VOLUME), check=True, stdout=subprocess.DEVNULL)
        return images

    def _replica(self, name: str, arguments: tuple[str, ...], options: tuple[str, ...]) -> Container:
        """Starts one of two replicas that fill one empty volume, as different users of group 0."""
        options = (*options, *self.hub, "-v", f"{VOLUME}:/home/kvq")
        return self.container(name, f"--model-path={REPOSITORY}", *arguments, options=options).start()

    def _end(self, ending: Ending) -> Ended:
        with ending(self) as container:
            try:
                container.start()
            except ServerFailed:
                return Ended(container.status(), container.log())
            container.stop()
            raise AssertionError(f"{container.name}: it serves, but must not\n{container.log_tail()}")


#: Creates a container that ends by itself, and afterwards removes what that container needed.
Ending: TypeAlias = Callable[[Workshop], AbstractContextManager[Container]]
