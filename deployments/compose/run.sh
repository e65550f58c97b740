#!/usr/bin/env bash
# run.sh image|up|ps|logs|down|env: the compose stack, with whichever compose is installed.
#
#   BERTH_LOCAL_IMAGES=1  make the base images from Debian packages instead of asking a registry
#   BERTH_DOCKER          the docker client (default: docker)
#   BERTH_COMPOSE         the compose command (default: `docker compose`, else docker-compose)
#   BERTH_ENV_FILE        where the secrets are (default: deployments/compose/.env, made when missing)
#   V=1                   with down: remove the volumes, and with them all data
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
export BERTH_DOCKER=${BERTH_DOCKER:-docker}
env_file=${BERTH_ENV_FILE:-deployments/compose/.env}

compose() {
	local command files=(-f docker-compose.yml)
	if [ -n "${BERTH_LOCAL_IMAGES:-}" ]; then files+=(-f deployments/compose/local.override.yml); fi
	if [ -n "${BERTH_COMPOSE:-}" ]; then
		read -ra command <<<"$BERTH_COMPOSE"
	elif "$BERTH_DOCKER" compose version >/dev/null 2>&1; then
		command=("$BERTH_DOCKER" compose)
	elif command -v docker-compose >/dev/null; then
		command=(docker-compose)
	else
		echo "run.sh: neither docker compose nor docker-compose is here: apt-get install docker-compose" >&2
		exit 1
	fi
	"${command[@]}" --project-name "${COMPOSE_PROJECT_NAME:-berth}" --project-directory "$root" --env-file "$env_file" "${files[@]}" "$@"
}

secret() { head -c 24 /dev/urandom | od -An -vtx1 | tr -d ' \n'; }

secrets() {
	[ -e "$env_file" ] && return
	mkdir -p "$(dirname "$env_file")"
	(
		umask 077
		for name in POSTGRES_PASSWORD BERTH_SCHEDULER_DB_PASSWORD BERTH_GATEWAY_DB_PASSWORD BERTH_SESSIONS_DB_PASSWORD \
			BERTH_NODE_TOKEN BERTH_GATEWAY_TOKEN BERTH_OPERATOR_TOKEN BERTH_NODE_KEY BERTH_CLUSTER_SECRET; do
			echo "$name=$(secret)"
		done >"$env_file"
		echo "BERTH_API_KEY=e2b_$(secret)" >>"$env_file" # the form that the SDKs insist on
	)
	echo "new secrets in $env_file" >&2
}

image() {
	local base=${NODE_BASE:-}
	[ -x bin/berth ] || {
		echo "run.sh: bin/berth is missing: make build" >&2
		exit 1
	}
	if [ -n "${BERTH_LOCAL_IMAGES:-}" ]; then
		deployments/compose/images.sh
		base=${base:-berth-node-base:local}
	fi
	"$BERTH_DOCKER" build -q -f deployments/Dockerfile --target berth -t "${BERTH_IMAGE:-berth:local}" . >/dev/null
	"$BERTH_DOCKER" build -q -f deployments/Dockerfile --target nodeagent ${base:+--build-arg NODE_BASE="$base"} \
		-t "${BERTH_NODE_IMAGE:-berth-nodeagent:local}" . >/dev/null
	echo "built ${BERTH_IMAGE:-berth:local} and ${BERTH_NODE_IMAGE:-berth-nodeagent:local}" >&2
}

case ${1:-} in
image) image ;;
env) secrets ;;
up)
	secrets
	image
	compose up -d "${@:2}"
	echo "gateways: http://127.0.0.1:${BERTH_GATEWAY_1_PORT:-8080} and http://127.0.0.1:${BERTH_GATEWAY_2_PORT:-8081}; key: grep BERTH_API_KEY $env_file" >&2
	;;
ps) compose ps "${@:2}" ;;
logs) compose logs -f --tail=100 "${@:2}" ;;
down) compose down --remove-orphans ${V:+--volumes} "${@:2}" ;;
*)
	sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
	exit 2
	;;
esac
