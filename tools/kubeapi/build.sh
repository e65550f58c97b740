#!/usr/bin/env bash
# Builds a real kube-apiserver and etcd once for each state of this module's go.mod and go.sum into a
# cache outside the checkout, and prints the folder that holds both. Nothing is downloaded but modules.
set -euo pipefail
cd "$(dirname "$0")"

# A test's server: compiled without optimisation, which saves a quarter of the time it takes.
flags=(-trimpath -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$(sed -n 's/^\tk8s.io\/kubernetes \(v[0-9.]*\).*/\1/p' go.mod)"
	-gcflags 'k8s.io/...=-N -l')
key=$({ go env GOVERSION GOOS GOARCH; echo "${flags[@]}"; sha256sum go.mod go.sum; } | sha256sum | cut -c1-16)
cache=${BERTH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/berth}
bin=$cache/kubeapi-$key

if [ ! -d "$bin" ]; then
	mkdir -p "$cache"
	# Built beside the final folder and renamed, so that an interrupted build is never taken for a whole one.
	building=$(mktemp -d "$cache/building-XXXXXX")
	trap 'rm -rf "$building"' EXIT
	export GOWORK=off GOFLAGS= CGO_ENABLED=0
	echo "kubeapi: building etcd and kube-apiserver (ten minutes on two cores, once)" >&2
	go build "${flags[@]}" -o "$building/etcd" go.etcd.io/etcd/server/v3
	go build "${flags[@]}" -o "$building/kube-apiserver" k8s.io/kubernetes/cmd/kube-apiserver
	chmod 755 "$building"
	mv -T "$building" "$bin" 2>/dev/null || [ -d "$bin" ] # another make was faster
fi
echo "$bin"
