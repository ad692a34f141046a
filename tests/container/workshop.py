"""Builds the image in the background, and starts containers side by side, before the tests that look at them."""

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
#: Bytes of the images.
NEEDED = 3 << 30
#: Volume of the two replicas, in storage of the run's own.
VOLUME = "kvq-home"
#: Key of the replica ``restricted``.
KEY = "the right key"
#: Containers that end by themselves and run at once; each takes one to three gigabytes.
AT_ONCE = 2
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()


def said(log: str, words: str) -> None:
    """Checks that these words are in a log or an answer, and on the page about failures."""
    assert words in log, log
    assert words in PAGE, f"docs/operations.md does not say {words!r}"


@dataclass(frozen=True)
class Ended:
    """Status and log of a container that ended."""

    status: int
    log: str


@dataclass
class Workshop:
    """Image and containers that the tests of one run share, in one folder that goes with it.

    ``with`` starts what is asked for: the image if anything is, the two replicas, and containers that end. Threads live
    until the end, since a container ends with the thread that started it.

    Attributes:
        model: whose first layers are served, from a folder or from a hub on this machine.
        logs: folder for logs and for what containers mount.
    """

    model: Path
    logs: Path
    _exits: ExitStack = field(default_factory=ExitStack)
    _running: list[Container] = field(default_factory=list)

    def __enter__(self) -> Workshop:
        # Unpacking waits for the disk thousands of times; memory does not.
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
        """Starts what tests will ask for."""
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
        """Options of a container that takes ``REPOSITORY`` from the hub on this machine."""
        return ("--env", "HF_HUB_OFFLINE=0", "--env", f"HF_ENDPOINT={self._hub}")

    def container(
        self, name: str, *arguments: str, options: tuple[str, ...] = (), model: Path | None = None
    ) -> Container:
        """Makes a container that is not yet started, once the image is there.

        Args:
            arguments, options, model: as ``Container`` takes them; the model is ``readable`` unless another is given.
        """
        made = Container(
            self.built.result(), self.logs / name / f"{name}.log", model or self.readable, arguments, options
        )
        self._running.append(made)
        return made

    def _build(self) -> Images:
        images = Images(self.folder)
        images.build()
        # Two containers that start at the same time cannot both make it.
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


#: Makes a container that ends by itself, and removes what it needed.
Ending: TypeAlias = Callable[[Workshop], AbstractContextManager[Container]]
