#!/usr/bin/env bash
# apply.sh OVERLAY: brings deployments/k8s/overlays/OVERLAY to the cluster of the current kubectl context:
# namespaces, then secrets where SECRETS names a file, then the schema, and only then the services.
#
#   SECRETS     a file with what deployments/k8s/secrets.sh prints; empty: the cluster has them
#   KUBECTL     kubectl and its own flags, such as "kubectl --context kind-berth"
set -euo pipefail
cd "$(dirname "$0")/../.."
overlay=deployments/k8s/overlays/${1:?usage: apply.sh OVERLAY}
read -ra kubectl <<<"${KUBECTL:-kubectl}"

command -v "${kubectl[0]}" >/dev/null || {
	echo "apply.sh: ${kubectl[0]} is not here: install it, or take what \`make k8s-render\` prints to where it is" >&2
	exit 1
}
[ -d "$overlay" ] || {
	echo "apply.sh: no overlay ${1}; there are: $(ls deployments/k8s/overlays | tr '\n' ' ')" >&2
	exit 1
}
"${kubectl[@]}" version >/dev/null 2>&1 || {
	echo "apply.sh: no cluster answers; which one is meant: ${kubectl[*]} config current-context" >&2
	exit 1
}
rendered=$(mktemp)
trap 'rm -f "$rendered"' EXIT
.bin/kustomize build "$overlay" >"$rendered"

"${kubectl[@]}" apply -f "$rendered" -l app.kubernetes.io/component=namespace
if [ -n "${SECRETS:-}" ]; then "${kubectl[@]}" apply -f "$SECRETS"; fi
"${kubectl[@]}" -n berth get secret berth-database >/dev/null || {
	echo "apply.sh: the secrets are missing: deployments/k8s/secrets.sh >secrets.yaml, then SECRETS=secrets.yaml" >&2
	exit 1
}
# What the schema needs first: its database, the way to it, the Job itself, which cannot be changed but made anew.
"${kubectl[@]}" -n berth delete job berth-migrate --ignore-not-found
"${kubectl[@]}" apply -f "$rendered" -l 'app.kubernetes.io/component in (database, migrate, network)'
"${kubectl[@]}" -n berth wait --for=condition=complete --timeout=15m job/berth-migrate
"${kubectl[@]}" apply -f "$rendered"
for workload in deployment/berth-scheduler deployment/berth-gateway; do
	"${kubectl[@]}" -n berth rollout status --timeout=10m "$workload"
done
"${kubectl[@]}" -n berth-nodes rollout status --timeout=15m daemonset/berth-node
