#!/usr/bin/env bash
# Builds the pinned tools (buf, the protoc plugins, linters, kustomize) once for each state of their go.mod
# and go.sum files into a cache outside the checkout, and points .bin at the result.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"

modules=(tools/pinned tools/pinned/lint tools/pinned/kustomize)
files=()
for module in "${modules[@]}"; do files+=("$module/go.mod" "$module/go.sum"); done
key=$({ go env GOVERSION GOOS GOARCH; sha256sum "${files[@]}"; } | sha256sum | cut -c1-16)
cache=${BERTH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/berth}
bin=$cache/tools-$key

if [ ! -d "$bin" ]; then
	mkdir -p "$cache"
	# Built beside the final folder and renamed, so that an interrupted build is never taken for a whole one.
	building=$(mktemp -d "$cache/building-XXXXXX")
	trap 'rm -rf "$building"' EXIT
	for module in "${modules[@]}"; do
		echo "tools: building $module (a few minutes, once)" >&2
		GOWORK=off GOFLAGS= GOBIN=$building go -C "$module" install tool
	done
	chmod 755 "$building"
	mv -T "$building" "$bin" 2>/dev/null || [ -d "$bin" ] # another make was faster
fi

if [ "$(readlink .bin 2>/dev/null || true)" != "$bin" ]; then
	[ -L .bin ] || rm -rf .bin
	ln -sfn "$bin" .bin
fi
