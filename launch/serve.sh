#!/usr/bin/env bash
# The container's entry point: runs SGLang's server with the given arguments. Without --kv-quant and --config, the method
# is int4, which needs no rotations. A --config file must name the method itself.
set -euo pipefail
# Other users of group 0 may go on with what this one writes to the volume.
umask 0002
# `sglang serve` takes a model without --model-path only as the first word, which is --host here.
case ${1:--} in
  -*) ;;
  *) set -- --model-path "$@" ;;
esac
case " $* " in
  *" --config="*)
    echo "sglang-kvq: --config=FILE: SGLang ignores the file when it is given so. Write --config FILE." >&2
    exit 2
    ;;
  *" --kv-quant"[=\ ]* | *" --config "*) ;;
  *) set -- --kv-quant int4 "$@" ;;
esac
python3 -m sglang_kvq.sglang.doctor.host
exec sglang serve --host 0.0.0.0 --port "${PORT:-30000}" "$@"
