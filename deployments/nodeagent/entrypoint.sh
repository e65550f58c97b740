#!/bin/sh
# Starts the node agent in its container as an ordinary user without any capability: sandboxes are made with
# user namespaces alone. Root is needed for two things before that. The data folder, a fresh volume, gets
# its owner. And the engine covers parts of /proc, for which the kernel would forbid sandboxes a /proc of
# their own; in a mount namespace of the agent's own the covers go. What they hide only root may read or
# write, and the agent is not root any more.
set -eu
user=65532
if [ "$(id -u)" != 0 ]; then exec berth "$@"; fi
if [ "$(stat -c %u /var/lib/berth)" != $user ]; then chown -R $user:$user /var/lib/berth; fi
exec unshare --mount sh -euc '
	user=$1
	shift
	for cover in $(awk "\$2 ~ /^\/proc\/./ {print \$2}" /proc/self/mounts | sort -r); do umount "$cover"; done
	exec setpriv --reuid "$user" --regid "$user" --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs berth "$@"
' sh $user "$@"
