#!/usr/bin/env bash
# Two hosts on one machine, to try a cluster before there is one. After `make setup`,
# `sudo infra/two-hosts.sh make smoke ENGINE=deepspeed` makes two network namespaces with a link between them, runs the
# command in the first with CLUSTER=two-namespaces, and removes both at the end. Of the two workers one is on each host;
# only the link connects them. Neither has the internet. What the command writes belongs to root.
set -euo pipefail
CDPATH= cd "$(dirname "$0")/.."

[ $# -gt 0 ] || { echo "error: no command. Write for example: sudo infra/two-hosts.sh make smoke ENGINE=deepspeed" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "error: only root may make network namespaces. Write sudo before it." >&2; exit 2; }
[ -d .venv ] || { echo "error: no .venv, and the hosts have no internet. Run make setup first." >&2; exit 2; }
command -v ip > /dev/null || { echo "error: program ip is missing. Install iproute2." >&2; exit 2; }

first="breadcrumb-first-$$" second="breadcrumb-second-$$" file=conf/cluster/two-namespaces.yaml
[ ! -e "$file" ] || { echo "error: $file is there: another such run is on, or was killed. Then remove the file." >&2; exit 2; }
remove() {
  for host in "$first" "$second"; do
    ip netns pids "$host" 2> /dev/null | xargs --no-run-if-empty kill || true
    ip netns delete "$host" 2> /dev/null || true
  done
  rm -f "$file"
}
trap remove EXIT

ip netns add "$first"
ip netns add "$second"
ip link add link0 netns "$first" type veth peer name link0 netns "$second"
number=1
for host in "$first" "$second"; do
  ip -n "$host" address add "10.78.0.$number/24" dev link0
  ip -n "$host" link set link0 up
  ip -n "$host" link set lo up
  number=2
done

cat > "$file" << EOF
# Made by infra/two-hosts.sh, and removed by it.
address: 10.78.0.1
hosts:
- {name: first, address: 10.78.0.1, interface: link0, workers: 1}
- {name: second, address: 10.78.0.2, interface: link0, workers: 1, start: [ip, netns, exec, $second]}
EOF
BREADCRUMB_CLUSTER=two-namespaces CLUSTER=two-namespaces ip netns exec "$first" "$@"
