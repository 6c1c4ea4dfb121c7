#!/usr/bin/env bash
# Two nodes, namespaces titanite-0 and -1 joined by a bridge, until standard input ends.
#   nodes.sh HOSTS    the file for what is their DNS: of pods of the job llama3-8b
set -euo pipefail
net=10.231.77
down() {
  ip link del titanite 2>/dev/null || true
  for node in 0 1; do ip netns del titanite-$node 2>/dev/null || true; done
}
trap down EXIT
down
echo "127.0.0.1 localhost" >"$1"
ip link add titanite type bridge
ip addr add $net.1/24 dev titanite
ip link set titanite up
for node in 0 1; do
  name=titanite-$node
  ip netns add $name
  ip link add $name type veth peer name eth0 netns $name
  ip link set $name master titanite up
  ip -n $name addr add $net.1$node/24 dev eth0
  ip -n $name link set eth0 up
  ip -n $name link set lo up
  echo "$net.1$node llama3-8b-worker-$node llama3-8b-node-0-$node llama3-8b-node-0-$node.llama3-8b" >>"$1"
done
echo ready
cat >/dev/null
