#!/usr/bin/env bash
# The container's health check: asks the server, on the last port that its command line names.
set -euo pipefail
port=${PORT:-30000}
mapfile -d '' -t words < /proc/1/cmdline
for n in "${!words[@]}"; do
  case ${words[n]} in
    --port) port=${words[n + 1]} ;;
    --port=*) port=${words[n]#*=} ;;
  esac
done
exec curl --fail --silent --show-error --noproxy '*' --max-time 20 "http://localhost:$port/health"
