#!/usr/bin/env bash
# The suites that need a container engine: the compose stack through its main job, and the store tests against
# PostgreSQL in a container. Uses the engine that is there; as root, without one, it starts its own and stops it.
# No image is pulled.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

cache=${BERTH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/berth}
daemon= own= data=

finish() {
	local status=$?
	trap - EXIT
	if [ -n "$daemon" ]; then
		kill "$daemon" 2>/dev/null || true
		for _ in $(seq 100); do
			[ -d "/proc/$daemon" ] || break
			sleep 0.1
		done
	fi
	if [ -n "$own" ]; then rm -rf --one-file-system "$own" "$data" || true; fi
	exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

# Debian's client by its full name where there is one: another may stand before it on PATH.
if [ -z "${BERTH_DOCKER:-}" ]; then
	BERTH_DOCKER=docker
	if [ -x /usr/bin/docker ]; then BERTH_DOCKER=/usr/bin/docker; fi
fi
export BERTH_DOCKER

if ! "$BERTH_DOCKER" version >/dev/null 2>&1; then
	[ "$(id -u)" = 0 ] || {
		echo "test/containers: no engine answers; start one, or run this as root" >&2
		exit 1
	}
	# Sockets have short names; layers stay off a folder for temporary files that may be memory.
	own=$(mktemp -d -t berth-engine-XXXXXX)
	data=$(mkdir -p "$cache" && mktemp -d "$cache/engine-XXXXXX")
	dockerd --ip 127.0.0.1 --data-root "$data" --exec-root "$own/exec" --pidfile "$own/pid" \
		-H "unix://$own/docker.sock" >"$own/log" 2>&1 &
	daemon=$!
	export DOCKER_HOST=unix://$own/docker.sock
	for _ in $(seq 300); do
		"$BERTH_DOCKER" version >/dev/null 2>&1 && break
		[ -d "/proc/$daemon" ] || break
		sleep 0.1
	done
	"$BERTH_DOCKER" version >/dev/null 2>&1 || {
		echo "test/containers: dockerd did not start:" >&2
		tail -n 20 "$own/log" >&2
		exit 1
	}
fi

export BERTH_LOCAL_IMAGES=1
deployments/compose/run.sh image

failed=0
go test -tags containers -count=1 -timeout 10m ${TESTFLAGS:-} ./services/e2e/containers/... || failed=1

# A node under the rights that its Pod has in Kubernetes.
go test -tags containers -count=1 -timeout 10m ${TESTFLAGS:-} -run 'UnderTheRightsOfItsPod' ./tools/k8scheck || failed=1

# The packages that own a store, with the server in a container instead of a local one. make test has looked for
# races in them already.
export TESTCONTAINERS_HOST_OVERRIDE=127.0.0.1 TESTCONTAINERS_RYUK_DISABLED=true
export BERTH_TEST_POSTGRES=container BERTH_TEST_POSTGRES_IMAGE=berth-postgres:local
go test -shuffle=on -count=1 -timeout 10m ${TESTFLAGS:-} ./pkg/pgdb/... ./pkg/pgtest/... ./pkg/migrate/... ./migrations/... ./services/internal/schema/... \
	./services/scheduler/internal/{placement,bindings,nodes}/... || failed=1
exit $failed
