#!/usr/bin/env bash
# newmigration.sh AREA NAME: an empty migration with the next number of its area's range.
set -euo pipefail
area=${1:-} name=${2:-}
case $area in
shared) low=1 high=99 ;;
sandboxes) low=100 high=199 ;;
gateway) low=200 high=299 ;;
dispatcher) low=300 high=399 ;;
views) low=400 high=499 ;;
*)
	echo "AREA is one of shared, sandboxes, gateway, dispatcher, views; got '$area'" >&2
	exit 2
	;;
esac
[[ $name =~ ^[a-z][a-z0-9_]*$ ]] || {
	echo "NAME is a verb or noun of a-z, 0-9 and _; got '$name'" >&2
	exit 2
}

cd "$(dirname "$0")/../migrations"
next=$low
for file in [0-9][0-9][0-9][0-9][0-9]_*.sql; do
	[ -e "$file" ] || continue
	number=$((10#${file%%_*}))
	if ((number >= low && number <= high && number >= next)); then next=$((number + 1)); fi
done
((next <= high)) || {
	echo "the range of $area ($low to $high) is full" >&2
	exit 1
}

file=$(printf '%05d_%s.sql' "$next" "$name")
cat >"$file" <<'SQL'
-- +goose Up
SET lock_timeout = '50ms';

-- +goose Down
SET lock_timeout = '50ms';
SQL
echo "migrations/$file"
