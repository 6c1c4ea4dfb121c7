#!/usr/bin/env bash
# A pod as OpenShift's kubelet would run it: no rights, any user of group 0, nothing to write to but its volumes.
#   pod.sh STORE NAME NODE RUNS HOSTS [options of podman run] IMAGE [arguments]
set -euo pipefail
store=$1 name=$2 node=$3 runs=$4 hosts=$5
shift 5
mkdir -pm 777 "$runs"
exec podman --root "$store/store" --runroot "$store/runroot" run --rm --name "$name" --hostname "$name" \
  --network "ns:/run/netns/titanite-$node" --no-hosts --volume "$hosts:/etc/hosts:ro" \
  --volume "$runs:/runs" --tmpfs /scratch:exec,mode=1777 --tmpfs /dev/shm:mode=1777 --entrypoint launch/node.sh \
  --read-only --read-only-tmpfs=false --user 12345:0 --cap-drop=all --security-opt=no-new-privileges "$@"
