"""Runs random scheduler events on the tiers of a small cache, with batches in flight; checks reads and counts pages.

    python benchmarks/soak_tiers.py --operations 1000000 --out benchmarks/results/soak_cpu.json
    python benchmarks/soak_tiers.py --operations 200000 --shared --out benchmarks/results/soak_cpu.json

With ``--shared``, records and BF16 pages share one memory, whose boundary moves whenever a page is taken.

Runs in torch on a CPU. This implementation defines the rules; the GPU's kernels are compared with it bit by bit
(``tests/kernels/test_tier_schedules.py``). An operation is an event of one request or page: started, a chunk prefilled,
a token decoded, published in the tree, left (finished, aborted or retracted), evicted.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import record
from tests.cache.schedules import Driver, random_model, shared_model


def soak(operations: int, seed: int, look_every: int, shared: bool) -> dict:
    """Returns a row; raises for a wrong read, a lost page, or a BF16 copy that is held at the end."""
    begin = shown = time.monotonic()
    done = models = plans = quantized = moved = 0
    while done < operations:
        rng = random.Random(f"{seed} {models}")
        make = shared_model if shared else random_model
        driver = Driver(make(rng, overlap=True, look_every=look_every), rng)
        driver.run(200)
        driver.finish()
        tiers = driver.model.tiers
        assert int(tiers.errors) == 0, f"model {models}: {int(tiers.errors)} impossible requests"
        done, models, plans = done + driver.operations, models + 1, plans + tiers.steps
        quantized, moved = quantized + int(tiers.records_written), moved + driver.model.moved
        if time.monotonic() > shown + 30:
            shown = time.monotonic()
            print(f"{done:,} operations, {models} models, {done / (shown - begin):,.0f} a second", flush=True)
    return {
        "scenario": "tier_model, shared memory" if shared else "tier_model",
        "operations": done,
        "models": models,
        "plans": plans,
        "pages_quantized": quantized,
        **({"boundaries_moved": moved} if shared else {}),
        "seconds": round(time.monotonic() - begin),
        "wrong_answers": 0,
        "leaked_tokens": 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--look-every", type=int, default=16, help="steps without a plan whose reads are checked")
    parser.add_argument("--shared", action="store_true", help="one memory for records and BF16 pages")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    row = soak(args.operations, args.seed, args.look_every, args.shared)
    print(row)
    if args.out:
        record.merge(args.out, "soak", [row], key="scenario")


if __name__ == "__main__":
    main()
