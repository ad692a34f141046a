"""``kvq calibrate --engine sglang``: calibration of models that only fit an engine with tensor parallelism."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.calibration.clips import ClipErrors
from sglang_kvq.rotations.calibration.hf_model import limit_threads
from sglang_kvq.rotations.calibration.rope import roped_layers, turn_of
from sglang_kvq.rotations.calibration.run import Progress, rotations_from
from sglang_kvq.rotations.calibration.settings import (
    CalibrationSettings,
    check_head_dim,
    draw_contexts,
    first_positions,
)
from sglang_kvq.rotations.calibration.worker_files import read_samples, read_sums
from sglang_kvq.rotations.identity import geometry_of, why_no_transform

#: Settings that SGLang needs on a machine without an accelerator.
CPU = {"device": "cpu", "dtype": "bfloat16", "sampling_backend": "pytorch", "grammar_backend": "none"}


def calibrate_on_engine(
    model_path: str,
    hf_config: Any,
    ids: torch.Tensor,
    settings: CalibrationSettings,
    progress: Progress,
    *,
    folder: Path | None = None,
    **engine: Any,
) -> Rotations:
    """Returns rotations and clip ratios of a model that SGLang runs.

    Sensitivities are left out, because they need gradients, which SGLang does not compute. Every context runs as one
    prompt, so it must fit in a single prefill chunk. Clip ratios are measured on the last context. The folder needs
    disk space for the sums and for one context's BF16 activations of all layers.

    Args:
        hf_config: the model's transformers config.
        ids: int64 ``[tokens]``, the calibration text.
        folder: folder for the workers' files; None uses a temporary one.
        engine: keywords of ``sglang.Engine``, such as tp_size.

    Raises:
        KVQuantError: as in ``rotations.calibration.run.calibrate``; or sglang is missing; or the engine failed; or the
            composition needs more than the workers capture.
    """
    if settings.composition == "transform":
        if (why := why_no_transform(hf_config)) is not None:
            raise KVQuantError(f"--composition transform: {why}")
        raise KVQuantError(
            "--composition transform needs the weights of the output projections and gradients, which --engine sglang "
            "does not give. Leave --engine out, with --device auto for a model that needs all GPUs of this host."
        )
    try:
        from sglang.srt.entrypoints.engine import Engine
    except ImportError as error:
        raise KVQuantError(
            "--engine sglang needs SGLang in this environment: pip install 'sglang-kvq[sglang]'."
        ) from error
    limit_threads()
    layers, kv_heads, head_dim = geometry_of(hf_config)
    check_head_dim(head_dim)
    contexts = draw_contexts(ids, settings)
    chunk = -(-settings.context // PAGE_SIZE) * PAGE_SIZE  # a server's chunks are whole pages
    with tempfile.TemporaryDirectory(prefix="kvq-capture-") as temporary:
        folder = folder or Path(temporary)
        keywords = {
            "kv_quant": "int2",
            "kv_quant_capture": f"{folder}:{settings.context}:{settings.sink}",
            "kv_quant_recent": settings.recent,
            "chunked_prefill_size": chunk,
            "max_prefill_tokens": chunk,
            "disable_radix_cache": True,
            "disable_cuda_graph": True,
            "skip_tokenizer_init": True,
            "log_level": "warning",
            **({} if torch.cuda.is_available() else CPU),
        }
        running = Engine(model_path=model_path, **{**keywords, **engine})
        try:
            for i, context in enumerate(contexts):
                progress("moments", i, len(contexts))
                running.generate(input_ids=context.tolist(), sampling_params={"max_new_tokens": 1, "temperature": 0})
        finally:
            running.shutdown()
        progress("moments", len(contexts), len(contexts))
        rotations = rotations_from(read_sums(folder, len(contexts), settings.sink), hf_config, settings, len(contexts))
        errors = ClipErrors(rotations, settings)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        position = first_positions(settings, 3, hf_config)[1]  # first position of the second of three contexts
        turn = turn_of(hf_config, head_dim)(position) if position else torch.eye(head_dim)
        roped = roped_layers(hf_config, layers)
        for layer, *sample, scale in read_samples(folder, layers, kv_heads):
            progress("clips", layer, layers)
            q, k, v = (x.to(device).float() for x in sample)
            if roped[layer]:
                q, k = (x @ turn.to(x) for x in (q, k))
            errors.add(layer, q, k, v, scale)
        progress("clips", layers, layers)
    chosen = errors.chosen(1)
    return replace(chosen, meta=replace(chosen.meta, sensitivity=None))
