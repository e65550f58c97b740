#!/usr/bin/env bash
# generate.sh [--check]: Go code from the protos in rpc/, by buf and the plugins in .bin.
# With --check nothing in the checkout changes: it generates into a copy and compares, and asks
# whether go.mod and go.sum are what `go mod tidy` would leave.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.bin:$PATH"

generate() { # generate DIR: every buf.gen*.yaml in it, in order of name
	local template
	# A deleted proto must not leave its code behind.
	find "$1" -name '*.pb.go' -delete -o -name '*.twirp.go' -delete
	for template in "$1"/buf.gen*.yaml; do
		(cd "$1" && buf generate --template "${template##*/}")
	done
	find "$1" \( -name '*.pb.go' -o -name '*.twirp.go' \) -exec gofmt -w {} +
}

case ${1:-} in
"")
	(cd "$root/rpc" && buf lint)
	generate "$root/rpc"
	;;
--check)
	copy=$(mktemp -d)
	trap 'rm -rf "$copy"' EXIT
	cp -R "$root/rpc" "$copy/rpc"
	(cd "$copy/rpc" && buf lint && buf format --diff --exit-code >/dev/null) || {
		echo "rpc: buf lint or buf format complains; try: cd rpc && ../.bin/buf format -w" >&2
		exit 1
	}
	generate "$copy/rpc"
	diff -ru "$root/rpc" "$copy/rpc" || {
		echo "generated code is stale: run make generate and commit" >&2
		exit 1
	}
	for module in migrations pkg rpc services tools; do
		GOWORK=off go -C "$root/$module" mod tidy -diff || {
			echo "$module/go.mod is not tidy: run make tidy and commit" >&2
			exit 1
		}
	done
	;;
*)
	echo "usage: generate.sh [--check]" >&2
	exit 2
	;;
esac
