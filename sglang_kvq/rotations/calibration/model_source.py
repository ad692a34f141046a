"""Where a model comes from: a folder, the hub, or the hub's cache. Answers within seconds, also without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.messages import first_line

#: Seconds to wait for the hub; transformers asks it for one file after another, with retries: a minute in all.
TIMEOUT = 4.0

_CONFIG = "config.json"
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def find_model(path: str, revision: str | None = None) -> dict[str, Any]:
    """Look for a model before anything is loaded.

    Args:
        path: hub id or folder.

    Returns:
        keywords for every ``from_pretrained``: the revision, and ``local_files_only`` where the hub does not answer.

    Raises:
        KVQuantError: there is no such folder, no such model on the hub, or the hub does not answer and its cache has no
            such model.
    """
    if path and Path(path).exists():
        if not Path(path).is_dir():
            raise KVQuantError(f"{path}: a file, not the folder of a model; give its folder.")
        return {"revision": revision}
    if not _HUB_ID.fullmatch(path):
        raise KVQuantError(f"{path}: no such folder, and no hub id ORG/NAME; check the path.")
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    problem = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            HfApi().model_info(path, revision=revision, timeout=TIMEOUT)
            return {"revision": revision}
        except RevisionNotFoundError:
            raise KVQuantError(
                f"--revision {revision}: {path} has no such revision on the hub; leave it out."
            ) from None
        except GatedRepoError as error:
            raise KVQuantError(
                f"{path}: gated on the hub ({first_line(error)}); ask for access, and `hf auth login`."
            ) from None
        except RepositoryNotFoundError:
            problem = "the hub has no model of this name that you may see"
        except HfHubHTTPError as error:
            problem = f"the hub answers {first_line(error)}"
        except Exception as error:  # of whichever HTTP library huggingface_hub uses
            problem = f"the hub does not answer ({type(error).__name__}: {first_line(error)})"
    if cached_folder(path, revision) is None:
        raise KVQuantError(
            f"{path}: no such folder, not in the hub's cache, and {problem}; check the name. Without a network: "
            "download the model where there is one, and give its folder."
        )
    return {"revision": revision, "local_files_only": True}


def cached_folder(path: str, revision: str | None = None) -> Path | None:
    """The folder with a model's files on this machine: its own, or that in the hub's cache; None if not there."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, _CONFIG, revision=revision)
    return Path(found).parent if isinstance(found, str) else None
