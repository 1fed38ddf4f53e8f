#!/usr/bin/env bash
# Join a run through any of its peers. Usage: join.sh MULTIADDR [MULTIADDR...]
# Needs nothing but the addresses: config and weights come from the run and are verified. Restarts after a
# crash; ends when the run ends or on Ctrl-C.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: join.sh MULTIADDR [MULTIADDR...]" >&2; exit 2; }
wait_s=2
while true; do
  status=0
  python -m p2p_diloco.peer --initial-peers "$@" --run-dir "runs/joiner" || status=$?
  # 0: left as asked; 2: something that only you can fix, already explained.
  [ "$status" -eq 0 ] || [ "$status" -eq 2 ] && exit "$status"
  echo "the peer ended with status $status; starting it again in $wait_s s" >&2
  sleep "$wait_s"
  wait_s=$((wait_s < 60 ? wait_s * 2 : 60))
done
