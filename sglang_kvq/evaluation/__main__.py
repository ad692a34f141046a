"""``python -m sglang_kvq.evaluation``: ``kvq eval`` on hosts without typer."""

import sys

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.command import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KVQuantError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
