#!/usr/bin/env bash
# need.sh WHAT...: checks that what a target uses is on this machine, and names the package where it is not.
# WHAT: postgres, bubblewrap, psql, pgbench, cc, docker, compose, debootstrap, python3.
# With a ? behind it, such as postgres?, it is better to have and not required. As root on Debian or Ubuntu it installs
# what is missing; BERTH_NO_INSTALL=1 keeps it from doing so.
set -euo pipefail

has_postgres() {
	[ -n "${BERTH_TEST_DATABASE_URL:-}" ] && return 0
	command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null ||
		compgen -G '/usr/pgsql-*/bin/initdb' >/dev/null
}

missing=() required=
for what in "$@"; do
	known=${#missing[@]}
	case ${what%\?} in
	postgres) has_postgres || missing+=(postgresql) ;;
	bubblewrap) command -v bwrap >/dev/null || missing+=(bubblewrap) ;;
	psql) command -v psql >/dev/null || missing+=(postgresql-client) ;;
	pgbench) command -v pgbench >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/pgbench' >/dev/null || missing+=(postgresql) ;;
	cc) command -v gcc >/dev/null || command -v cc >/dev/null || missing+=(gcc libc6-dev) ;;
	docker) [ -x /usr/bin/dockerd ] || [ -x /usr/sbin/dockerd ] || docker version >/dev/null 2>&1 || missing+=(docker.io iptables) ;;
	compose) docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || missing+=(docker-compose) ;;
	debootstrap) command -v debootstrap >/dev/null || [ -x /usr/sbin/debootstrap ] || missing+=(debootstrap) ;;
	*)
		echo "need.sh: unknown requirement $what" >&2
		exit 2
		;;
	esac
	if [ ${#missing[@]} -gt "$known" ] && [ "${what%\?}" = "$what" ]; then required=1; fi
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" = 0 ] && [ -z "${BERTH_NO_INSTALL:-}" ] && command -v apt-get >/dev/null; then
	echo "installing: ${missing[*]} (BERTH_NO_INSTALL=1 stops this)" >&2
	# Debian's postgresql package makes and starts a cluster of its own. Berth starts its own server.
	if [ ! -e /etc/postgresql-common/createcluster.conf ]; then
		mkdir -p /etc/postgresql-common
		echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
	fi
	export DEBIAN_FRONTEND=noninteractive
	install=(apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold "${missing[@]}")
	"${install[@]}" >/dev/null 2>&1 || { apt-get update -qq && "${install[@]}" >/dev/null; }
	exit 0
fi

echo "missing: ${missing[*]}. On Debian or Ubuntu: sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
[ -z "$required" ]
