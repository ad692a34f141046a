"""Builds a row of the result file: the figures of one workload on one server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.bench_serving.stock import Measured, Request
from benchmarks.bench_serving.workloads import Workload
from sglang_kvq.errors import KVQuantError

#: Percentiles in a row.
PERCENTILES = (50, 90, 99)


def scenario(workload: str, method: str) -> str:
    """Returns the row's name, which is unique in a file."""
    return f"bench {workload}, {method}"


def check(workload: Workload, measured: Sequence[Measured]) -> list[Request]:
    """Returns the requests of all loads.

    Raises:
        KVQuantError: a request failed or ended early, or none had an answer.
    """
    requests = [one for load in measured for one in load.requests]
    failed = [one.error for one in requests if one.error]
    if failed:
        raise KVQuantError(f"{workload.name}: {len(failed)} of {len(requests)} requests failed: {failed[0]}")
    early = [one for one in requests if not one.cut and one.tokens != one.asked]
    if early:
        ended = f"an answer ended after {early[0].tokens} of {early[0].asked} tokens"
        raise KVQuantError(f"{workload.name}: {ended}. Read the server's log.")
    if not any(one.tokens for one in requests):
        raise KVQuantError(f"{workload.name}: no token in {workload.seconds:g} s. Give more time: --seconds.")
    return requests


def most_at_once(requests: Sequence[Request]) -> int:
    """Returns the largest number of requests that were between their first and last token at the same time."""
    changes = [(one.begin + one.ttft, 1) for one in requests if one.ttft]
    changes += [(one.begin + one.latency, -1) for one in requests if one.ttft]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def one_after_another(turns: Sequence[Sequence[Measured]]) -> list[Measured]:
    """Returns the loads of all turns with times as if each turn had begun when the one before it ended."""
    loads, end = [], 0.0
    for turn in turns:
        requests = [one for load in turn for one in load.requests]
        shift = end - min((one.begin for one in requests), default=end)
        end = max((one.begin + one.latency + shift for one in requests), default=end)
        for load in turn:
            moved = [replace(one, begin=one.begin + shift) for one in load.requests]
            loads.append(replace(load, requests=moved))
    return loads


def measurements(workload: Workload, measured: Sequence[Measured]) -> dict[str, Any]:
    """Returns the figures of a row.

    A request that was cut counts with the tokens that it had. If it had none, its time to the first token is at least
    the time that it waited; percentiles use that time, and ``waited`` counts such requests. Goodput counts only
    requests with a whole answer.

    Raises:
        KVQuantError: as ``check`` does.
    """
    requests = check(workload, measured)
    begin = min(one.begin for one in requests)
    seconds = max(one.begin + one.latency for one in requests) - begin
    was_cut = any(one.cut for one in requests)
    first = [1e3 * (one.ttft or one.latency) for one in requests]
    done = [one for one in requests if not one.cut]
    each = [1e3 * one.tpot for one in requests if one.tokens > 1]
    good = [one for one in done if 1e3 * one.ttft <= workload.ttft and 1e3 * one.tpot <= workload.tpot]
    answered = [one for one in requests if one.tokens]
    row: dict[str, Any] = {
        "seconds": round(seconds, 2),
        "whole": not was_cut and not any(load.unsent for load in measured),
        "completed": len(done),
        "cut": len(requests) - len(done),
        "waited": len(requests) - len(answered),
        "unsent": sum(load.unsent for load in measured),
        "decoding": most_at_once(requests),
        "output_tokens": sum(one.tokens for one in requests),
        "output_tokens_per_s": round(sum(one.tokens for one in requests) / seconds, 2),
        "input_tokens_per_s": round(sum(one.prompt for one in answered) / seconds, 2),
    }
    for name, values in (("ttft", first), ("tpot", each)):
        for percent in PERCENTILES:
            row[f"{name}_p{percent}_ms"] = round(float(np.percentile(values, percent)), 2) if values else None
    return row | {
        "ttft_limit_ms": workload.ttft,
        "tpot_limit_ms": workload.tpot,
        "goodput_per_s": round(len(good) / seconds, 4),
        "good_share": round(len(good) / len(done), 4) if done else 0.0,
    }
