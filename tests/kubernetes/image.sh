#!/usr/bin/env bash
# Builds launch/kubernetes/Dockerfile by buildah, on Debian in place of the base that a registry would give.
#   image.sh STORE    a folder for images; ends with 77, and says why, where that cannot be
set -euo pipefail
store=$1
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/libexec/podman
for program in buildah podman runc debootstrap catatonit ip; do
  command -v $program >/dev/null || { echo "not installed: $program"; exit 77; }
done
[ "$(id -u)" = 0 ] || { echo "containers with networks of their own need root"; exit 77; }

mkdir -p "$store"
cat >"$store/containers.conf" <<'C'
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
C
export CONTAINERS_CONF=$store/containers.conf
where=(--root "$store/store" --runroot "$store/runroot")
base=$(sed -n 's/^FROM //p' launch/kubernetes/Dockerfile)
if ! podman "${where[@]}" image exists "$base"; then
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$store/base"
  ln -sf python3 "$store/base/usr/bin/python"
  tar -C "$store/base" -c . | podman "${where[@]}" import --change 'ENV PATH=/usr/sbin:/usr/bin:/sbin:/bin' - "$base"
  rm -rf "$store/base"
fi
# pip's settings of this machine, and what they name: files, folders, and indexes with the files beside them.
settings=$(.venv/bin/python -m pip config list | sed -nE "s/^[^.]*\.([^=]*)='(.*)'$/\1 = \2/p" | sort -su -t= -k1,1)
printf '[global]\n%s\n' "$settings" >"$store/pip.conf"
mounts=(-v "$store/pip.conf:/etc/pip.conf:ro")
for word in $settings; do
  case $word in file:///*) word=$(dirname "${word#file://}") ;; esac
  case $word in /*) [ ! -e "$word" ] || mounts+=(-v "$word:$word:ro") ;; esac
done
exec buildah "${where[@]}" bud --isolation=chroot --network=host --pull-never --layers "${mounts[@]}" \
  -f launch/kubernetes/Dockerfile -t localhost/titanite .
