"""Finds rotation folders on the Hugging Face hub by name, downloads them into the hub cache, and uploads them."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import NamedTuple, TypeVar

from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.storage import published
from sglang_kvq.rotations.storage.registry import HubLocation, published_at
from sglang_kvq.rotations.storage.schema import CONFIG_FILE

TENSOR_FILE = "rotations.safetensors"
#: Seconds after which a hub that has not listed a repo's files counts as unreachable.
TIMEOUT = 10.0

#: Suffixes that may follow a model's name in its folder's name: tags of the calibration, never a variant's name.
_TAIL = r"(?=$|[_@+/]|-(?:seq|prompt|group|fp8|bf16|int2|rot|oscar|calib))"
_COMMIT = re.compile("[0-9a-f]{40}")
_WITHOUT = (
    "Without a network: copy the rotations to a folder and pass it to --kv-quant-rotations, make them with `kvq "
    "calibrate MODEL`, or use --kv-quant int4, which needs none."
)
_T = TypeVar("_T")


def download(location: HubLocation) -> Path:
    """Returns the local folder of a location, or the file in it that the location names; downloads it if needed.

    The hub cache is used if the hub does not answer, and for a revision that is a commit.

    Raises:
        KVQuantError: hub unreachable and nothing cached; no such repository, revision or folder; several folders; only
            shared files of a model that needs one matrix per KV head. An unreachable hub takes ``TIMEOUT`` seconds.
    """
    listing = _cached_commit(location) or _listing(location)
    try:
        folder, names = find_folder(listing.files, location.folder, location.repo, location.revision)
    except KVQuantError as error:
        raise _explained(error, location, listing) from error
    root = listing.snapshot or _fetch(location, [f"{folder}/{n}" if folder else n for n in names])
    found = root / folder
    _check_registry(location, names)
    chosen = location.folder.rpartition("/")[2]
    return found / chosen if chosen in names else found


def find_folder(files: list[str], wanted: str, repo: str, revision: str | None = None) -> tuple[str, tuple[str, ...]]:
    """Returns the folder of a repo that ``wanted`` names, and the names of the rotation files to read in it.

    Args:
        files: paths of the repo's files.
        wanted: a folder's path, a rotation file's path, or a model's name. A model's name means a folder with this
            name in its path, alone or followed by tags of the calibration; the name alone takes precedence.

    Raises:
        KVQuantError: no folder or several match; it has several pairs of files, or rotations of MLA's latents.
    """
    at = f"@{revision}" if revision else ""
    contents = _folders(files)
    parent, _, name = wanted.rpartition("/")
    if published.is_rotation_file(name) and name in contents.get(parent, ()):
        return parent, rotation_files(contents[parent], f"{repo}/{parent}".rstrip("/"), name)
    folder = _match(contents, wanted, repo, at)
    return folder, rotation_files(contents[folder], f"{repo}/{folder}".rstrip("/"))


def rotation_files(names: set[str], where: str, chosen: str | None = None) -> tuple[str, ...]:
    """Returns the files that are read: both files of our layout, or a published pair and its config.json."""
    if chosen is None and {TENSOR_FILE, CONFIG_FILE} <= names:
        return TENSOR_FILE, CONFIG_FILE
    pair = published.choose_pair(names, where, chosen)
    if pair is not None:
        return (*pair, CONFIG_FILE) if CONFIG_FILE in names else tuple(pair)
    raise published.latents_error(where)


def _folders(files: list[str]) -> dict[str, set[str]]:
    """Returns the names of files by folder."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in files:
        folder, _, name = file.rpartition("/")
        found[folder].add(name)
    return found


def _holds_rotations(folder: str, names: set[str]) -> bool:
    parts = {name[0] for name in names if published.is_rotation_file(name)}
    return parts == {"k", "v"} or {TENSOR_FILE, CONFIG_FILE} <= names or published.holds_latents(folder, names)


def _match(contents: dict[str, set[str]], wanted: str, repo: str, at: str) -> str:
    folders = sorted(folder for folder, names in contents.items() if _holds_rotations(folder, names))
    if wanted in folders:
        return wanted
    exact = [f for f in folders if wanted and wanted.lower() in f.lower().split("/")]
    tagged = re.compile(rf"(?:^|[/_]|(?<=-)){re.escape(wanted)}{_TAIL}", re.IGNORECASE)
    matches = exact or [f for f in folders if wanted and tagged.search(f)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = ", ".join(f"{repo}/{f}{at}" for f in matches)
        raise KVQuantError(
            f"{repo}/{wanted}{at}: several folders match this model: {choices}. Choose one with --kv-quant-rotations."
        )
    near = [f for f in folders if wanted and wanted.split("/")[0].lower()[:6] in f.lower()] or folders
    listed = ", ".join(f"{repo}/{f}{at}" for f in near[:8]) or "none at all"
    asked = f"{repo}/{wanted}{at}" if wanted else f"{repo}{at}"
    raise KVQuantError(
        f"{asked}: this repo has no rotations in {wanted or 'its root'}; folders with rotations: {listed}. Pass one as "
        f"--kv-quant-rotations {repo}/FOLDER{at}, make your own with `kvq calibrate MODEL`, or use --kv-quant int4."
    )


class _Listing(NamedTuple):
    """Paths of a repo's files.

    ``snapshot`` is their folder if the list is the cache's; ``error`` is the hub's, if it was asked and did not answer.
    """

    files: list[str]
    snapshot: Path | None = None
    error: Exception | None = None


def _listing(location: HubLocation) -> _Listing:
    """Lists the hub's files at a location's revision, or those of the cached snapshot if the hub does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        info = _within(TIMEOUT, lambda: HfApi().model_info(location.repo, revision=location.revision, timeout=TIMEOUT))
        return _Listing([sibling.rfilename for sibling in info.siblings or ()])
    except RevisionNotFoundError as error:
        raise KVQuantError(
            f"{location}: {location.repo} has no revision {location.revision}. Pass a branch, tag or commit that it "
            f"has: https://huggingface.co/{location.repo}/commits/main lists them. It goes last: "
            "org/name/folder@revision."
        ) from error
    except Exception as error:  # network, no permission: all end here with the same fix
        snapshot = cached(location.repo, location.revision)
        if snapshot is None:
            raise _unreachable(location, error) from error
        return _Listing(files_of(snapshot), snapshot, error)


def _cached_commit(location: HubLocation) -> _Listing | None:
    """Lists the cached snapshot of a commit, which cannot have changed; None if it lacks the location's folder."""
    if not _COMMIT.fullmatch(location.revision or ""):
        return None
    snapshot = cached(location.repo, location.revision)
    files = files_of(snapshot) if snapshot else []
    try:
        find_folder(files, location.folder, location.repo, location.revision)
    except KVQuantError:
        return None
    return _Listing(files, snapshot)


def files_of(snapshot: Path) -> list[str]:
    """Returns the paths of a cached repo's files."""
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """Returns a call's result, or raises ``TimeoutError`` after ``seconds``.

    A name server or an address that does not answer takes longer than the client's own timeout.
    """
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="kvq-hub").start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} seconds")
    return answer.result()


def _fetch(location: HubLocation, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(location.repo, revision=location.revision, allow_patterns=patterns))
    except Exception as error:  # network, no permission, disk
        raise _unreachable(location, error) from error


def _check_registry(location: HubLocation, names: tuple[str, ...]) -> None:
    """Refuses shared rotations of a model that needs one matrix per KV head."""
    entry = published_at(location)
    if entry and entry.per_head and not set(published.PER_HEAD) <= set(names):
        raise KVQuantError(
            f"{location}: of this model's rotations only the shared ones are here ({', '.join(names)}), with which "
            f"it loses most of its accuracy; {' and '.join(published.PER_HEAD)} are needed. Fetch them with a network, "
            "or make rotations with `kvq calibrate MODEL`."
        )


def _explained(error: KVQuantError, location: HubLocation, listing: _Listing) -> KVQuantError:
    """Extends the error for a folder that was not found with reasons why the search may have missed it."""
    text, entry = str(error), published_at(location)
    if listing.error is not None:
        reason = _reason(listing.error)
        text = f"{text} The hub cannot be reached ({reason}), so only the cached copy {listing.snapshot} was searched."
    if entry is not None and entry.inferred:
        text = f"{text} The name {entry.path} is inferred from its authors' scripts."
    return KVQuantError(text)


def push(folder: Path, target: str, card: str) -> str:
    """Uploads a rotation folder and its card; ``target`` is ``org/name[/folder]``. Returns its address.

    Raises:
        KVQuantError: as ``check_push``; or the upload failed, which leaves the local folder unchanged.
    """
    from huggingface_hub import HfApi

    repo, sub = check_push(target)
    where = "/".join(sub) or None
    try:
        api = HfApi()
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=str(folder),
            path_in_repo=where,
            allow_patterns=[TENSOR_FILE, CONFIG_FILE, "k_rotation*.pt", "v_rotation*.pt"],
            commit_message=f"Rotations {folder.name}",
        )
        api.upload_file(
            repo_id=repo,
            path_or_fileobj=card.encode(),
            path_in_repo="/".join((*sub, "README.md")),
            commit_message=f"Card of {folder.name}",
        )
    except Exception as error:
        raise KVQuantError(
            f"{target}: uploading {folder} failed ({type(error).__name__}: {first_line(error)}). The folder is "
            f"complete. Check the network and your rights to {repo}, then `kvq push {folder} {target}`."
        ) from error
    return f"https://huggingface.co/{repo}" + (f"/tree/main/{where}" if where else "")


def check_push(target: str, *, flag: str = "") -> tuple[str, list[str]]:
    """Refuses a push that cannot work, before hours of calibration; returns the repo id and the folder's parts.

    Raises:
        KVQuantError: not ``org/name[/folder]``; no token, or one that the hub refuses; hub unreachable.
    """
    from huggingface_hub import HfApi, get_token

    location = HubLocation.parse(target)
    if location is None or location.revision is not None:
        raise KVQuantError(f"{flag}{target}: must be ORG/REPO or ORG/REPO/FOLDER on the Hugging Face hub.")
    if not get_token():
        raise KVQuantError(
            f"{flag}{target}: no Hugging Face token here. Run `hf auth login` with a token that may write, or set "
            "HF_TOKEN."
        )
    try:
        HfApi().whoami()
    except Exception as error:
        raise KVQuantError(
            f"{flag}{target}: the hub does not accept the token ({type(error).__name__}: {first_line(error)}). "
            "Check the network, and make a token that may write at https://huggingface.co/settings/tokens."
        ) from error
    return location.repo, [part for part in location.folder.split("/") if part]


def cached(repo: str, revision: str | None = None) -> Path | None:
    """Returns the snapshot of a repo in the hub cache, or None. It may hold only some of the repo's files."""
    from huggingface_hub import snapshot_download

    try:
        # Without patterns for files, the client does not insist that all of the repo's files are cached.
        return Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
    except Exception:  # no snapshot or a broken cache, which are the same for the caller
        return None


def _unreachable(location: HubLocation, error: Exception) -> KVQuantError:
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    at = f" at revision {location.revision}" if location.revision else ""
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return KVQuantError(
            f"{location}: no such folder here, and no such repository on the Hugging Face hub, or none that you may "
            f"read. Check the name; if {location.repo} is private, run `hf auth login` or set HF_TOKEN."
        )
    offline = " HF_HUB_OFFLINE is set: unset it to download." if constants.HF_HUB_OFFLINE else ""
    return KVQuantError(
        f"{location}: no such folder here, the Hugging Face hub cannot be reached ({_reason(error)}), and "
        f"{location.repo}{at} is not in the cache {constants.HF_HUB_CACHE}.{offline} {_WITHOUT}"
    )


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    offline = isinstance(error, OfflineModeIsEnabled)
    return "offline mode" if offline else f"{type(error).__name__}: {first_line(error)}"
