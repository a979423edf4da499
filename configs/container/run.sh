#!/bin/sh
# Starts the container of `Containerfile`:  sh run.sh POLICY_FILE [argument of podman or docker …]
#
# What a container takes away by default, and an attempt needs, is given back one by one. Not --privileged, no capability,
# no device, no root:
#
#   seccomp=seccomp.json    The usual profile forbids user namespaces and mounts to who has no CAP_SYS_ADMIN, and so
#                           every sandbox. This one permits them and forbids what neither the service nor code needs.
#   systempaths=unconfined  The usual masks over parts of /proc keep the kernel from letting a sandbox have a /proc of
#   (podman: unmask=ALL)    its own. As uid 10001 without capabilities, what is unmasked cannot be written.
#   apparmor=unconfined     Docker's AppArmor profile forbids mounts. Where the host restricts user namespaces (Ubuntu
#                           23.10 and later), it also needs the profile that `sluicegate doctor` prints, on the host.
#   label=disable           The same, of SELinux (podman on Fedora and its like).
#
# A container has no writable part of the cgroup tree, so memory is sampled; `sluicegate doctor` says so. --memory bounds
# all attempts together: above it the kernel ends some process of the container, so leave room for all that may run.
set -eu

policy=$(realpath "$1")
shift
here=$(dirname "$(realpath "$0")")
engine=${ENGINE:-podman}
case $engine in
podman) set -- --security-opt unmask=ALL --security-opt label=disable "$@" ;;
*) set -- --security-opt systempaths=unconfined "$@" ;;
esac

exec "$engine" run --rm --init --name sluicegate \
    --user 10001:10001 --cap-drop ALL --security-opt no-new-privileges \
    --security-opt "seccomp=$here/seccomp.json" --security-opt apparmor=unconfined \
    --read-only --tmpfs /tmp:rw,nosuid,nodev,size=256m \
    --pids-limit 4096 --ulimit nofile=524288:524288 --memory "${MEMORY:-10g}" \
    --stop-timeout 75 \
    --volume sluicegate-state:/var/lib/sluicegate --volume sluicegate-run:/run/sluicegate \
    --volume "$policy:/etc/sluicegate/policy.yaml:ro" \
    "$@" sluicegate
