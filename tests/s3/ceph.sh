#!/bin/bash
# One-machine Ceph with an S3 gateway on loopback: a monitor, one OSD, radosgw. No systemd, no root services.
#   ceph.sh PORT     runs until its input ends; everything lives in a folder in /tmp, which then goes
# Needs: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-mgr ceph-common
set -euo pipefail
port=$1 mon_port=$(($1 + 1)) folder=$(mktemp -d -t s3-XXXXXX)
exec 3>&2 2> "$folder/start.log"
trap '[ $? = 0 ] || cat "$folder/start.log" >&3; cat "$folder"/*.pid | xargs -r kill -9; sleep 1; rm -rf "$folder"' EXIT
mkdir -p "$folder"/{mon,osd/0,log}
fsid=$(cat /proc/sys/kernel/random/uuid)
export CEPH_CONF=$folder/ceph.conf

# `ms mon client mode = crc`: without cephx the gateway would hang. `rgw gc`: deleted objects free their space
# within seconds, or the small OSD fills up and writes hang. `tcp_nodelay`: Nagle's algorithm and delayed
# acknowledgements would hold every small answer back for 40 ms.
cat > "$CEPH_CONF" <<CONF
[global]
fsid = $fsid
mon host = v2:127.0.0.1:$mon_port
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
run dir = $folder
admin socket = $folder/\$name.asok
pid file = $folder/\$name.pid
log file = $folder/log/\$name.log
public addr = 127.0.0.1
[mon]
mon data = $folder/mon/\$id
mon cluster log file = $folder/log/cluster.log
[osd]
osd data = $folder/osd/\$id
osd objectstore = bluestore
bluestore block size = 17179869184
osd memory target = 1073741824
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$port tcp_nodelay=1
rgw thread pool size = 64
rgw gc obj min wait = 1
rgw gc processor period = 5
rgw gc processor max time = 5
ms mon client mode = crc
CONF

monmaptool --create --clobber --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon_port]" "$folder/monmap" > /dev/null
ceph-mon --mkfs -i a --monmap "$folder/monmap"
ceph-mon -i a
osd_uuid=$(cat /proc/sys/kernel/random/uuid)
ceph osd new "$osd_uuid" > /dev/null
ceph-osd -i 0 --mkfs --osd-uuid "$osd_uuid"
ceph osd crush add osd.0 1.0 host=localhost root=default > /dev/null
ceph-osd -i 0 > /dev/null
radosgw -n client.rgw
radosgw-admin -n client.rgw user create --uid=test --display-name=test \
    --access-key=testing --secret-key=testing-secret > /dev/null
echo ready
cat > /dev/null
