#!/usr/bin/env bash
# images.sh: makes berth-postgres:local and berth-node-base:local without a registry, from the packages of the
# distribution this machine runs and from the mirror it is set up to use. Needs root and debootstrap.
# The two root filesystems are kept outside the checkout, keyed by this recipe, and made once.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
docker=${BERTH_DOCKER:-docker}

. /etc/os-release
suite=$VERSION_CODENAME
key=$({ echo "$suite $(dpkg --print-architecture)"; cat "$here/images.sh" "$here/postgres/entrypoint.sh"; } | sha256sum | cut -c1-16)
cache=${BERTH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/berth}
kept=$cache/images-$key

have() { "$docker" image inspect "$1" >/dev/null 2>&1; }

if have "berth-postgres:$key" && have "berth-node-base:$key"; then
	"$docker" tag "berth-postgres:$key" berth-postgres:local
	"$docker" tag "berth-node-base:$key" berth-node-base:local
	exit 0
fi

if [ ! -d "$kept" ]; then
	[ "$(id -u)" = 0 ] || {
		echo "images.sh: debootstrap needs root; run it with sudo once, or use the public images (without local.override.yml)" >&2
		exit 1
	}
	mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Created-By: Packages' | awk -v suite="$suite" '$2 == suite {print $1; exit}')
	[ -n "$mirror" ] || {
		echo "images.sh: apt knows no mirror for $suite" >&2
		exit 1
	}
	mkdir -p "$cache"
	# Not among the temporary files where those are mounted nodev or noexec: a root filesystem needs both.
	making=$(mktemp -d "$cache/making-XXXXXX")
	trap 'rm -rf --one-file-system "$making"' EXIT
	root=$making/root
	echo "images: a minimal $suite, and PostgreSQL in it (some minutes, once)" >&2

	slim() { # what an image does not need
		rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/cache/apt/*.bin "$root"/var/lib/apt/lists/* \
			"$root"/usr/share/{doc,man,info,locale}/* "$root"/var/log/*
		mkdir -p "$root/var/log" "$root/usr/share/man/man1" "$root/usr/share/man/man7"
	}
	pack() { tar -C "$root" --one-file-system -cf "$making/$1.tar" .; }

	debootstrap --variant=minbase --include=bubblewrap,ca-certificates "$suite" "$root" "$mirror" >"$making/log" 2>&1 || {
		tail -n 20 "$making/log" >&2
		exit 1
	}
	slim
	pack node-base

	# No server starts while packages are being installed, and none of Debian's own is made.
	printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
	chmod +x "$root/usr/sbin/policy-rc.d"
	mkdir -p "$root/etc/postgresql-common"
	echo 'create_main_cluster = false' >"$root/etc/postgresql-common/createcluster.conf"
	cp /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null || true
	{
		chroot "$root" apt-get update
		DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y --no-install-recommends \
			-o Dpkg::Options::=--force-confold postgresql
	} >"$making/log" 2>&1 || {
		tail -n 20 "$making/log" >&2
		exit 1
	}
	slim
	rm -f "$root/usr/sbin/policy-rc.d"
	mkdir -p "$root/docker-entrypoint-initdb.d" "$root/var/lib/postgresql/data"
	install -m 755 "$here/postgres/entrypoint.sh" "$root/usr/local/bin/docker-entrypoint.sh"
	pack postgres

	rm -rf --one-file-system "$root"
	chmod 755 "$making"
	mv -T "$making" "$kept" 2>/dev/null || [ -d "$kept" ]
fi

"$docker" import "$kept/node-base.tar" "berth-node-base:$key" >/dev/null
"$docker" import \
	--change 'ENV LANG=C.UTF-8 PGDATA=/var/lib/postgresql/data' \
	--change 'VOLUME /var/lib/postgresql/data' \
	--change 'EXPOSE 5432' \
	--change 'ENTRYPOINT ["docker-entrypoint.sh"]' \
	--change 'CMD ["postgres"]' \
	"$kept/postgres.tar" "berth-postgres:$key" >/dev/null
"$docker" tag "berth-postgres:$key" berth-postgres:local
"$docker" tag "berth-node-base:$key" berth-node-base:local
