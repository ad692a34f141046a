#!/usr/bin/env bash
# The container's entry point: SGLang's server with the arguments given, in 2 bits unless they say otherwise.
# The container's entry point: runs SGLang's server with the given arguments, and --kv-quant oscar unless they name one.
set -euo pipefail
case " $* " in
  *" --kv-quant "* | *" --kv-quant="*) ;;
  *) set -- "$@" --kv-quant oscar ;;
esac
exec python3 -m sglang.launch_server --host 0.0.0.0 --port "${PORT:-30000}" "$@"
