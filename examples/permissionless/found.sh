#!/usr/bin/env bash
# Found a run that anyone may join. Usage: found.sh CONFIG.toml PUBLIC_HOST [PORT] [DHT_PORT]
# Opens two TCP ports; send the line "others join with: ..." to whoever should know.
set -euo pipefail
config=${1:?usage: found.sh CONFIG.toml PUBLIC_HOST [PORT] [DHT_PORT]}
public=${2:?the address under which others reach this machine}
port=${3:-31330} dht_port=${4:-31331}
exec python -m p2p_diloco.peer --config "$config" --run-dir "runs/founder" \
  --port "$port" --dht-port "$dht_port" --announce "$public:$port"
