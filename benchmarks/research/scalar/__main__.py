"""Measures the bits that codes beyond scalar quantization save on a model, with the calibrations of ``transform``.

    python -m benchmarks.research.scalar .models/SmolLM2-135M-Instruct --work families-work --cases 4
    python -m benchmarks.research.scalar --report --work families-work --out benchmarks/results/below_scalar.json

Run ``benchmarks.research.families`` first: contexts and calibration are those that it stores in the folder ``--work``.
The model runs on the CPU. ``error`` is the squared error as the calibration weighs it. To find the bits gained, the
product's codes are interpolated between the measured budgets to the same error or divergence; the gain is their bits
minus the bits used.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.research.families import __main__ as families
from benchmarks.research.families.base import History, Method
from benchmarks.research.families.cases import Case, draw
from benchmarks.research.families.catalog import Calibration
from benchmarks.research.families.judge import Judge
from benchmarks.research.families.served import served
from benchmarks.research.scalar.coding import (
    Coder,
    Coding,
    bits_of,
    channel_widths,
    foreseen,
    plane_widths,
    transform_of,
    weighted_errors,
)
from benchmarks.research.scalar.lattice import Lattice
from benchmarks.research.scalar.prediction import Predicted, Predictor, value_widths
from benchmarks.research.scalar.trellis import Trellis
from benchmarks.research.scalar.uniform import Levels, TwoGains, row_gain, uniform
from sglang_kvq.evaluation import provenance
from sglang_kvq.evaluation.tasks.statistics import clustered
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_config, load_model, tokenize
from sglang_kvq.rotations.calibration.rope import turn_of
from sglang_kvq.rotations.resolve import coding_parts

#: Budgets of the product's own codes, between which other codes are placed, and budgets of those other codes.
CURVE, TRIED = (1.6, 2.0, 2.25, 2.5, 3.0), (2.0, 2.5)
#: Budgets at which the calibration predicts errors, of the product's codes and of finer widths.
FORESEEN_CURVE, FORESEEN = (1.25, 1.4, 1.6, 1.8, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0), (1.6, 2.0, 2.5, 3.0)
#: Bits of a trellis's window, and rows on which tables are trained.
MEMORY, TRAINED = 8, 512


def samples(rotations: Rotations, calibration: Calibration, bits: float) -> torch.Tensor:
    """Returns coded channels of calibration rows in units of their gain, float32 ``[n, 32]``."""
    k_widths, v_widths = plane_widths(rotations, bits)
    coding, found = Coding(rotations.whole(), k_widths, v_widths, lambda x, w: x), []
    for layer, history in calibration.histories():
        for (x, _), widths in zip(coding.read(layer, history), (k_widths, v_widths)):
            coded = widths[layer, 0] > 0
            rows = (x / row_gain(x.flatten(0, 1), widths[layer, 0]).view(*x.shape[:2], 1))[..., coded]
            found.append(rows.flatten(0, 1)[:, : rows.shape[-1] // 32 * 32].reshape(-1, 32))
    rows = torch.cat(found)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:TRAINED]]


def variants(rotations: Rotations, coders: dict[str, Coder], bits: float) -> dict[str, Coding]:
    """Returns codes at a budget, by name."""
    whole = rotations.whole()
    planes, channels = plane_widths(rotations, bits), channel_widths(rotations, bits, per_head=False)
    heads = channel_widths(rotations, bits, per_head=True)
    two = plane_widths(rotations, bits, gains=2)
    return {
        "uniform": Coding(whole, *planes, uniform),
        "trellis": Coding(whole, *planes, coders["trellis"]),
        "channels-heads": Coding(whole, *heads, uniform),
        "channels": Coding(whole, *channels, uniform),
        "lattice": Coding(whole, *planes, coders["lattice"]),
        "two-gains": Coding(whole, *two, TwoGains(), gains=2),
        "levels": Coding(whole, *planes, coders["levels"]),
        "trellis-channels-heads": Coding(whole, *heads, coders["trellis"]),
    }


def predicted(rotations: Rotations, calibration: Calibration, turns: torch.Tensor, bits: float) -> dict[str, Method]:
    """Returns codes with and without prediction of values from keys; both have widths per channel and head."""
    layers = len(rotations.k)
    texts = [[one.history(layer) for layer in range(layers)] for one in calibration.read]
    k_widths, _ = channel_widths(rotations, bits, per_head=True)
    share = 2 * bits - (float(k_widths.double().mean()) + 8 / k_widths.shape[-1])  # bits that keys leave for values
    importance = coding_parts(rotations)[1][1]
    found: dict[str, Method] = {}
    for name, predicts in (("refitted", False), ("predicted", True)):
        fitted = Predictor.fitted(rotations, texts, turns, predicts=predicts)
        v_widths = value_widths(fitted.energies, importance, share)
        found[name] = Predicted(rotations.whole(), fitted, k_widths, v_widths, uniform)
    return found


def foreseen_gains(rotations: Rotations) -> list[dict[str, Any]]:
    """Returns the predicted gain of finer widths, by the number of widths in a row, per head or not."""
    curve = []
    for bits in FORESEEN_CURVE:
        widths = plane_widths(rotations, bits)
        curve.append((bits_of(rotations, widths), foreseen(rotations, widths)))
    found = []
    dim = rotations.k.shape[-1]
    for bits, parts, per_head in product(FORESEEN, (4, 8, 16, dim), (False, True)):
        widths = channel_widths(rotations, bits, per_head=per_head, group=dim // parts)
        used = bits_of(rotations, widths)
        gain = bits_at(curve, foreseen(rotations, widths)) - used
        name = f"{parts} widths a row{', of each head' if per_head else ''}"
        found.append({"variant": name, "budget": bits, "bits": used, "bits_gained": gain})
    return found


def energy_saved(rotations: Rotations, calibration: Calibration, turns: torch.Tensor) -> float:
    """Returns the bits per value that a prediction saves at high rates, on text that it was not fitted to."""
    layers = range(len(rotations.k))
    texts = [[one.history(layer) for layer in layers] for one in calibration.read]
    logs = []
    fits = [Predictor.fitted(rotations, texts[:-1], turns, predicts=p) for p in (False, True)]
    for layer in layers:
        one = texts[-1][layer]
        v = one.v @ rotations.whole().v[layer]  # type: ignore[index]
        means = [fit.whiten(layer, one.k, one.positions, v).square().mean(1) * fit.energies[layer] for fit in fits]
        logs.append((means[0].log2() - means[1].log2()).mean() / 2)
    return float(torch.stack(logs).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder of a transformers model")
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="the texts that families read, in that order")
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--of", type=int, default=8, help="cases that families drew")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--following", type=int, default=96, help="tokens whose divergence is measured")
    parser.add_argument("--transform", help="rotations of transform, if the zoo has none")
    parser.add_argument("--tried", nargs="*", type=float, default=list(TRIED), help="budgets of the variants")
    parser.add_argument("--only", nargs="*", default=[], help="names of variants")
    parser.add_argument("--errors", action="store_true", help="squared errors only: the model reads nothing")
    parser.add_argument("--every", type=int, default=2, help="measure squared errors on every N-th token")
    parser.add_argument("--work", type=Path, default=Path("families-work"))
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.report:
        if args.out is None:
            parser.error("--report: give --out FILE")
        report(args.work, args.out)
        return
    if not (args.model and args.text):
        parser.error("give MODEL and --text")
    run(args)


def run(args: argparse.Namespace) -> None:
    """Measures every variant on every context that families has read and that has no outcome yet."""
    model, tokenizer = None, None
    if args.errors:
        config, tokenizer = load_config(args.model)
    else:
        model, tokenizer = load_model(args.model, device="cpu")
        config = model.config
    name = Path(args.model).name.lower()
    calibration = Calibration(*torch.load(args.work / name / "calibration.pt", weights_only=False, map_location="cpu"))
    rotations = transform_of(args.model, config, args.transform)
    methods = all_methods(args, config, rotations, calibration)
    log = args.work / f"{name}.scalar"
    done = {(one["case"], one["variant"], one["budget"], one["kind"]) for one in families.read(log)}
    rows = embedding_rows(model or config)
    texts = [tokenize(tokenizer, path.read_text()[: families.MOST], rows) for path in args.text]
    commit, dirty = provenance.commit()
    cases = draw(lambda s: tokenizer(s, add_special_tokens=False)["input_ids"], tokenizer.decode, texts, args.of,
                 args.length, args.following)  # fmt: skip

    def write(kind: str, case: str, key: tuple[str, float], found: dict[str, Any]) -> None:
        line = {"model": name, "kind": kind, "case": case, "variant": key[0], "budget": key[1]}
        with log.open("a") as file:
            file.write(json.dumps(line | {"commit": commit, "dirty": dirty} | found) + "\n")

    if ("all", "predicted", 0.0, "energy") not in done:
        turns = turns_of(config, rotations, calibration)
        write("energy", "all", ("predicted", 0.0), {"bits_saved": energy_saved(rotations, calibration, turns)})
    if not any(one["kind"] == "foreseen" for one in families.read(log)):
        for one in foreseen_gains(rotations):
            write("foreseen", "all", (one["variant"], one["budget"]), one)
    for case in list(cases)[: args.cases]:
        prefilled = families.kept(args.work / name, case.name)
        if prefilled is None:
            families.say(f"{case.name}: not read by benchmarks.research.families yet")
            continue
        for key, method in methods.items():
            if key[0] == "served" or (case.name, *key, "error") in done:
                continue
            histories = [every(prefilled.history(layer), args.every) for layer in range(len(prefilled.k))]
            parts = [weighted_errors(rotations, method, layer, one) for layer, one in enumerate(histories)]
            total = sum(float(error.sum()) for errors, _ in parts for error in errors)
            found = {"bits": sum(bits for _, bits in parts) / sum(one.elements for one in histories), "error": total}
            if isinstance(method, Coding):
                widths = list(zip(method.k_widths, method.v_widths))
                without = [e[w == 0].sum() for (errors, _), of in zip(parts, widths) for e, w in zip(errors, of)]
                found["share_without_codes"] = float(torch.stack(without).sum()) / total
            write("error", case.name, key, found)
        families.say(f"{name}: errors of case {case.name}")
        if args.errors:
            continue
        # Uniform codes equal the served ones, except for rounding.
        left = {key: one for key, one in methods.items() if (case.name, *key, "outcome") not in done}
        left = {key: one for key, one in left.items() if key[0] != "uniform"}
        if left:
            asked = {"exact_keys": case.questions["exact_keys"]}
            judge = Judge(model, Case(case.name, case.ids, case.following, asked), prefilled)
            for key, method in left.items():
                write("outcome", case.name, key, judge.outcome(method))
            families.say(f"{name}: outcomes of case {case.name}")


def every(history: History, step: int) -> History:
    """Returns every ``step``-th token of a history."""
    k, v, mass, observed = (x[:, ::step] for x in (history.k, history.v, history.mass, history.observed))
    return History(k, v, history.positions[::step], mass, observed)


def turns_of(hf_config: Any, rotations: Rotations, calibration: Calibration) -> torch.Tensor:
    turn, longest = turn_of(hf_config, rotations.k.shape[-1]), max(one.tokens for one in calibration.read)
    return torch.stack([turn(at) for at in range(2 * longest)]).float()


def all_methods(
    args: argparse.Namespace, hf_config: Any, rotations: Rotations, calibration: Calibration
) -> dict[tuple[str, float], Method]:
    """Returns methods by variant and budget, the product's curve first."""
    if args.only and set(args.only) <= {"served", "uniform"}:
        curve: dict[tuple[str, float], Method] = {}
        for bits in CURVE:
            curve["served", bits] = served(f"transform:{bits:g}", args.model, hf_config, args.transform)
            curve["uniform", bits] = Coding(rotations.whole(), *plane_widths(rotations, bits), uniform)
        return {key: one for key, one in curve.items() if key[0] in args.only}
    rows = samples(rotations, calibration, 2.0)
    coders: dict[str, Coder] = {"levels": Levels.trained(rows.flatten(), 6), "lattice": Lattice.trained(rows, 6)}
    coders["trellis"] = Trellis.trained(rows, MEMORY, 6)
    turns = turns_of(hf_config, rotations, calibration)
    found: dict[tuple[str, float], Method] = {}
    for bits in CURVE:
        found["served", bits] = served(f"transform:{bits:g}", args.model, hf_config, args.transform)
        found["uniform", bits] = variants(rotations, coders, bits)["uniform"]
    for bits in args.tried:
        found |= {(name, bits): one for name, one in variants(rotations, coders, bits).items() if name != "uniform"}
        found |= {(name, bits): one for name, one in predicted(rotations, calibration, turns, bits).items()}
    return {key: one for key, one in found.items() if not args.only or key[0] in args.only}


def bits_at(curve: Sequence[tuple[float, float]], value: float) -> float:
    """Returns the bits at which a curve of (bits, error) has this error: linear in log error, extended at both ends."""
    points = sorted(curve)
    logs = [math.log2(error) for _, error in points]
    wanted = math.log2(value)
    at = next((i for i in range(1, len(points)) if logs[i] <= wanted), len(points) - 1)
    (a, _), (b, _) = points[at - 1], points[at]
    return a + (b - a) * (logs[at - 1] - wanted) / (logs[at - 1] - logs[at])


def gained(outcomes: Sequence[dict[str, Any]], variant: str, budget: float, base: str,
           measure: Callable[[dict[str, Any]], tuple[float, float]]) -> tuple[float, float | None]:  # fmt: skip
    """Returns the bits that a variant gains over a curve, and the error from leaving out each context."""
    cases = sorted({one["case"] for one in outcomes if (one["variant"], one["budget"]) == (variant, budget)})

    def over(chosen: Sequence[str]) -> float:
        def mean(name: str, at: float) -> tuple[float, float] | None:
            of = [one for one in outcomes if (one["variant"], one["budget"]) == (name, at) and one["case"] in chosen]
            parts = [measure(one) for one in of]
            return (
                (of[0]["bits"], sum(a for a, _ in parts) / sum(b for _, b in parts)) if len(of) == len(chosen) else None
            )

        curve = [found for at in CURVE if (found := mean(base, at))]
        bits, value = mean(variant, budget) or (math.nan, math.nan)
        return bits_at(curve, value) - bits

    whole = over(cases)
    if len(cases) < 3:
        return whole, None
    left = [over([one for one in cases if one != case]) for case in cases]
    middle, n = sum(left) / len(left), len(left)
    return whole, math.sqrt((n - 1) / n * sum((x - middle) ** 2 for x in left))


MEASURES: dict[str, tuple[str, str, Callable[[dict[str, Any]], tuple[float, float]]]] = {
    "error": ("error", "uniform", lambda one: (one["error"], 1)),
    "kl": ("outcome", "served", lambda one: (one["kl"], one["tokens"])),
}


def report(work: Path, out: Path) -> None:
    """Writes one row per model, variant, budget and measure."""
    found: list[dict[str, Any]] = []
    lines = [one for log in sorted(work.glob("*.scalar")) for one in families.read(log)]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in lines:
        groups[one["model"]].append(one)
    for model, of in groups.items():
        for one in of:
            if one["kind"] == "foreseen":
                found.append(
                    {"model": model, "variant": one["variant"], "budget": one["budget"], "measure": "foreseen"}
                    | {"allocated_bits": one["bits"], "bits_gained": one["bits_gained"]}
                )
            if one["kind"] == "energy":
                found.append(
                    {"model": model, "variant": "predicted", "measure": "energy", "bits_gained": one["bits_saved"]}
                )
        for measure, (kind, base, value) in MEASURES.items():
            outcomes = [one for one in of if one["kind"] == kind]
            keys = sorted({(one["variant"], one["budget"]) for one in outcomes}, key=lambda k: (k[1], k[0]))
            for variant, budget in keys:
                mine = [one for one in outcomes if (one["variant"], one["budget"]) == (variant, budget)]
                score, se = clustered(*zip(*(value(one) for one in mine)))
                row = {"model": model, "variant": variant, "budget": budget, "measure": measure, "score": score,
                       "score_se": se, "allocated_bits": mine[0]["bits"], "cases": len(mine)}  # fmt: skip
                shares = [one["share_without_codes"] for one in mine if "share_without_codes" in one]
                if shares:
                    row["share_without_codes"] = sum(shares) / len(shares)
                row["bits_gained"], row["bits_gained_se"] = gained(outcomes, variant, budget, base, value)
                if measure == "kl":
                    keys_ = [one["exact_keys"] for one in mine]
                    row["exact_keys_nats"], row["exact_keys_nats_se"] = clustered(
                        [one["nats"] for one in keys_], [one["tokens"] for one in keys_]
                    )
                    row["exact_keys"] = sum(one["copied"] for one in keys_) / len(keys_)
                found.append(row)
    if not found:
        raise SystemExit(f"--work {work}: no outcomes. Run it with a model first.")
    record.write(out, out.stem, found)
    families.say(f"{len(found)} rows in {out}")


if __name__ == "__main__":
    main()
