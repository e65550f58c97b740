#!/bin/bash
# Runs PostgreSQL as the public image does, as far as Berth and its tests use it: POSTGRES_USER, POSTGRES_PASSWORD
# (or _FILE), POSTGRES_DB, POSTGRES_INITDB_ARGS, POSTGRES_HOST_AUTH_METHOD, PGDATA and the folder
# /docker-entrypoint-initdb.d. Other commands run as they are.
set -euo pipefail

for dir in /usr/lib/postgresql/*/bin; do export PATH="$dir:$PATH"; done
export PGDATA=${PGDATA:-/var/lib/postgresql/data}
user=${POSTGRES_USER:-postgres}
database=${POSTGRES_DB:-$user}
password=${POSTGRES_PASSWORD:-}
if [ -n "${POSTGRES_PASSWORD_FILE:-}" ]; then password=$(<"$POSTGRES_PASSWORD_FILE"); fi

if [ "${1:-postgres}" != postgres ] && [ "${1#-}" = "${1:-}" ]; then exec "$@"; fi
if [ "${1:-}" = postgres ]; then shift; fi

# PostgreSQL refuses root.
if [ "$(id -u)" = 0 ]; then
	mkdir -p "$PGDATA" /run/postgresql
	chown postgres:postgres "$PGDATA" /run/postgresql
	chmod 700 "$PGDATA"
	exec setpriv --reuid postgres --regid postgres --init-groups "$0" postgres "$@"
fi

if [ ! -s "$PGDATA/PG_VERSION" ]; then
	if [ -z "$password" ] && [ "${POSTGRES_HOST_AUTH_METHOD:-}" != trust ]; then
		echo "POSTGRES_PASSWORD is empty; set it, or POSTGRES_HOST_AUTH_METHOD=trust on a network you trust" >&2
		exit 1
	fi
	# The arguments of initdb are words, and whoever starts the container chose them.
	# shellcheck disable=SC2086
	initdb -U "$user" --pwfile=<(printf '%s\n' "$password") --auth-local=trust --auth-host=scram-sha-256 \
		-E UTF8 --locale=C.UTF-8 ${POSTGRES_INITDB_ARGS:-}
	echo "host all all all ${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}" >>"$PGDATA/pg_hba.conf"

	# The init folder sees a server on the socket only, so nobody else meets it half made.
	pg_ctl -w -o "-c listen_addresses=''" start
	if [ "$database" != postgres ]; then
		psql -v ON_ERROR_STOP=1 -U "$user" -d postgres -v name="$database" <<<'CREATE DATABASE :"name"'
	fi
	for file in /docker-entrypoint-initdb.d/*; do
		case $file in
		*.sh) if [ -x "$file" ]; then "$file"; else . "$file"; fi ;;
		*.sql) psql -v ON_ERROR_STOP=1 -U "$user" -d "$database" -f "$file" ;;
		esac
	done
	pg_ctl -w -m fast stop
fi
exec postgres -c listen_addresses='*' "$@"
