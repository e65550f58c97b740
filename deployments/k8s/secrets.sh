#!/usr/bin/env bash
# secrets.sh [--cnpg]: prints every Secret that the manifests refer to, with fresh random values.
#
#   PGHOST, PGPORT, PGDATABASE   where PostgreSQL is (postgres.berth.svc, 5432, berth)
#   PGUSER, PGPASSWORD           a login that may create roles and owns the database (postgres, a fresh password)
#   PGSSLMODE                    require, verify-full … (prefer)
#   PGPOOLER                     host of a transaction pooler for schedulers and gateways; empty: none
#   PGSTANDBY                    host of the standbys, for components/query; empty: none
#
# --cnpg also prints the Secret that overlays/with-cnpg gives to the operator, for PGUSER=berth_migrate. Apply what is
# printed once: a second run makes other values, with which running services are refused until they are restarted.
set -euo pipefail

secret() { head -c 24 /dev/urandom | od -An -vtx1 | tr -d ' \n'; }
encode() { # of a user's own password, which stands in a URL
	local text=$1 i c
	for ((i = 0; i < ${#text}; i++)); do
		c=${text:i:1}
		case $c in
		[a-zA-Z0-9._~-]) printf %s "$c" ;;
		*) printf '%s' "$c" | od -An -vtx1 | tr -d '\n' | tr ' ' % | tr a-f A-F ;;
		esac
	done
}
quote() { printf "'%s'" "${1//\'/\'\'}"; }

cnpg=
case ${1:-} in
"") ;;
--cnpg) cnpg=1 ;;
*)
	sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
	exit 2
	;;
esac
if [ -n "$cnpg" ]; then
	user=${PGUSER:-berth_migrate} host=${PGHOST:-berth-db-rw.berth.svc} sslmode=${PGSSLMODE:-require} standby=${PGSTANDBY:-berth-db-ro.berth.svc}
else
	user=${PGUSER:-postgres} host=${PGHOST:-postgres.berth.svc} sslmode=${PGSSLMODE:-prefer} standby=${PGSTANDBY:-}
fi
password=${PGPASSWORD:-$(secret)}
scheduler=$(secret) gateway=$(secret) sessions=$(secret)
node_token=$(secret) gateway_token=$(secret) operator_token=$(secret) node_key=$(secret)

url() { # url USER PASSWORD HOST [MORE]
	printf 'postgres://%s:%s@%s:%s/%s?sslmode=%s%s' "$(encode "$1")" "$(encode "$2")" "$3" "${PGPORT:-5432}" "${PGDATABASE:-berth}" "$sslmode" "${4:-}"
}
# Statements prepared by name are another client's behind a transaction pooler.
pooled= front=$host
if [ -n "${PGPOOLER:-}" ]; then pooled='&default_query_exec_mode=cache_describe' front=$PGPOOLER; fi

document() { # document NAMESPACE NAME TYPE KEY VALUE …
	printf -- '---\napiVersion: v1\nkind: Secret\nmetadata: {name: %s, namespace: %s}\ntype: %s\nstringData:\n' "$2" "$1" "$3"
	shift 3
	while [ $# -gt 0 ]; do
		printf '  %s: %s\n' "$1" "$(quote "$2")"
		shift 2
	done
}

query=()
if [ -n "$standby" ]; then query=(query-url "$(url scheduler "$scheduler" "$standby")"); fi
document berth berth-database Opaque "${query[@]}" \
	migrate-url "$(url "$user" "$password" "$host")" \
	scheduler-url "$(url scheduler "$scheduler" "$front" "$pooled")" \
	gateway-url "$(url gateway "$gateway" "$front" "$pooled")" \
	gateway-direct-url "$(url gateway "$gateway" "$host")" \
	sessions-url "$(url sessions "$sessions" "$front" "$pooled")" \
	logins "scheduler:berth_scheduler:$scheduler,gateway:berth_gateway:$gateway,sessions:berth_sessions:$sessions"
document berth berth-scheduler Opaque \
	node-tokens "$node_token" gateway-tokens "$gateway_token" operator-tokens "$operator_token"
document berth berth-gateway Opaque \
	scheduler-token "$gateway_token" api-key "e2b_$(secret)" node-key "$node_key" cluster-secret "$(secret)"
document berth-nodes berth-node Opaque \
	scheduler-token "$node_token" node-key "$node_key"
if [ -n "$cnpg" ]; then
	document berth berth-db-migrate kubernetes.io/basic-auth username "$user" password "$password"
else
	document berth berth-postgres Opaque password "$password"
fi
