"""Rotation folders on the Hugging Face hub: found by name in a repo, downloaded into the hub cache, uploaded."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.messages import first_line
from sglang_kvq.rotations.storage import published

TENSOR_FILE = "rotations.safetensors"
CONFIG_FILE = "config.json"
#: ``format_version`` in the latter, of rotations for transform coding.
TRANSFORM_VERSION = 3
#: Files of a rotation folder, by layout.
LAYOUTS = ((TENSOR_FILE, CONFIG_FILE), (published.K_FILE, published.V_FILE))

HUB_ID = re.compile(r"^[\w][\w.-]*/[\w][\w.-]*(/[\w.@+=,-]+)*$")
#: What may follow a model's name in a folder that is about this model: its calibration, never a variant's name.
_TAIL = r"(?=$|[_@+/]|-(?:seq|prompt|group|fp8|bf16|int2|rot|oscar|calib))"


def download(location: str, *, sha256: dict[str, str] | None = None) -> Path:
    """The local folder of ``org/name[/folder]``: fetched, or taken from the hub cache where the hub does not answer.

    ``folder`` is a path in the repo, or a model's name, as long as one folder only is about this model.

    Args:
        sha256: digests that the folder's files must have, by file name.

    Raises:
        KVQuantError: hub unreachable and nothing cached; no such folder; several; a file of another digest.
    """
    org, name, *sub = location.split("/")
    repo = f"{org}/{name}"
    files = _repo_files(repo, location)
    folder, names = find_folder(files, "/".join(sub), repo)
    from huggingface_hub import snapshot_download

    patterns = [f"{folder}/{n}" if folder else n for n in names]
    try:
        root = snapshot_download(repo, allow_patterns=patterns)
    except Exception as error:  # network, no permission, disk: all end here with the same fix
        raise _unreachable(location, error) from error
    found = Path(root) / folder
    for file, wanted in (sha256 or {}).items():
        digest = hashlib.sha256((found / file).read_bytes()).hexdigest() if (found / file).is_file() else "missing"
        if digest != wanted:
            raise KVQuantError(
                f"{location}: sha256 of {file} is {digest}, the registry expects {wanted}; the repo changed or the "
                "download "
                f"is damaged: delete {found} to fetch it again, or pass rotations you trust to --kv-quant-rotations."
            )
    return found


def find_folder(files: list[str], wanted: str, repo: str) -> tuple[str, tuple[str, ...]]:
    """The folder of a repo that ``wanted`` means, and the names of the rotation files in it.

    Args:
        files: paths of the repo's files.
        wanted: a folder's path, or a model's name: a folder whose path contains it, whole but for tags of the
            calibration after it; an exact name goes first.

    Raises:
        KVQuantError: none or several; the message lists what there is.
    """
    present = set(files)
    folders: dict[str, tuple[str, ...]] = {}
    for file in files:
        folder = file.rpartition("/")[0]
        for layout in LAYOUTS:
            if folder not in folders and all((f"{folder}/{n}" if folder else n) in present for n in layout):
                folders[folder] = layout
    if wanted in folders:
        return wanted, folders[wanted]
    exact = [f for f in folders if wanted and wanted.lower() in f.lower().split("/")]
    tagged = re.compile(rf"(?:^|[/_]|(?<=-)){re.escape(wanted)}{_TAIL}", re.IGNORECASE)
    matches = exact or [f for f in folders if wanted and tagged.search(f)]
    if len(matches) == 1:
        return matches[0], folders[matches[0]]
    if matches:
        choices = ", ".join(f"{repo}/{f}" for f in sorted(matches))
        raise KVQuantError(
            f"{repo}/{wanted}: several folders are about this model: {choices}. Choose one with --kv-quant-rotations."
        )
    near = sorted(f for f in folders if wanted.lower()[:6] in f.lower()) or sorted(folders)
    listed = ", ".join(f"{repo}/{f}" for f in near[:8]) or "none at all"
    raise KVQuantError(
        f"{repo}/{wanted}: this repo has no rotations in {wanted or 'its root'}; folders with rotations: {listed}. "
        "Pass one "
        f"as --kv-quant-rotations {repo}/FOLDER, make your own with `kvq calibrate MODEL`, or use --kv-quant hadamard."
    )


def push(folder: Path, target: str, card: str) -> str:
    """Upload a rotation folder and its card; ``target`` is ``org/name[/folder]``. Returns its address.

    Raises:
        KVQuantError: as ``check_push``; the upload failed (the local folder stays as it is).
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
            allow_patterns=[name for layout in LAYOUTS for name in layout],
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
            f"{target}: the hub did not take {folder} ({type(error).__name__}: {first_line(error)}). The folder is "
            f"complete; check the network and your rights to {repo}, then `kvq push {folder} {target}`."
        ) from error
    return f"https://huggingface.co/{repo}" + (f"/tree/main/{where}" if where else "")


def check_push(target: str) -> tuple[str, list[str]]:
    """Refuse a push that cannot work, before hours of calibration. Returns the repo id and the folder's parts.

    Raises:
        KVQuantError: not ``org/name[/folder]``; no token, or one that the hub refuses; hub unreachable.
    """
    from huggingface_hub import HfApi, get_token

    if not HUB_ID.match(target):
        raise KVQuantError(f"--push {target}: must be ORG/REPO or ORG/REPO/FOLDER on the Hugging Face hub.")
    if not get_token():
        raise KVQuantError(
            f"--push {target}: no Hugging Face token here; run `hf auth login` with a token that may write, or set "
            "HF_TOKEN."
        )
    try:
        HfApi().whoami()
    except Exception as error:
        raise KVQuantError(
            f"--push {target}: the hub does not accept the token ({type(error).__name__}: {first_line(error)}); "
            "check the network, and make a token that may write at https://huggingface.co/settings/tokens."
        ) from error
    org, name, *sub = target.split("/")
    return f"{org}/{name}", sub


def cached(repo: str) -> Path | None:
    """The newest snapshot of a repo in the hub cache, or None."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, local_files_only=True))
    except Exception:  # not there, or a broken cache: the same for the caller
        return None


def _repo_files(repo: str, location: str) -> list[str]:
    """Paths of a repo's files: the hub's list, or that of the cached snapshot where the hub does not answer."""
    from huggingface_hub import HfApi

    try:
        return list(HfApi().list_repo_files(repo))
    except Exception as error:
        snapshot = cached(repo)
        if snapshot is None:
            raise _unreachable(location, error) from error
        return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]


def _unreachable(location: str, error: Exception) -> KVQuantError:
    from huggingface_hub import constants

    offline = " HF_HUB_OFFLINE is set: unset it to download." if constants.HF_HUB_OFFLINE else ""
    return KVQuantError(
        f"{location}: no such folder here, the Hugging Face hub did not give it ({type(error).__name__}: "
        f"{first_line(error)}), and it is not in the cache {constants.HF_HUB_CACHE}.{offline} Without a network: "
        "copy the rotations to a folder and pass it to --kv-quant-rotations, make them with `kvq calibrate MODEL`, or "
        "use --kv-quant hadamard, which needs none."
    )
