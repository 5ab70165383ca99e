#!/bin/bash
# One node of the dev cluster: pid 1 of its own namespaces, with its own host name, address, /tmp, /dev/shm and processes.
# node.sh FOLDER NODE ADDRESS CORES [SHARED...]   started by cluster.py, which writes a line when the network is there.
set -eu
folder=$1 node=$2 address=$3 cores=$4
shift 4
mount --make-rprivate /
hostname "$node"
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/none" "$folder/bin" # the commands there enter the cluster; here they are in it already
tmp=$folder/nodes/$node/tmp
for shared in "$folder" "$@"; do # what every node sees, although it lies below /tmp
    case $shared in /tmp/*)
        mkdir -p "$tmp/${shared#/tmp/}"
        mount --rbind "$shared" "$tmp/${shared#/tmp/}"
        ;;
    esac
done
mount --rbind "$tmp" /tmp
mount -t tmpfs -o size=1g tmpfs /dev/shm
read -r _ # the other end of the cable
ip link set lo up
ip addr add "$address/16" dev eth0
ip link set eth0 up
exec taskset -c "$cores" slurmd -D -f "$SLURM_CONF" -N "$node" -c
