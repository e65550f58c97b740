package dev

import (
	"fmt"
	"strings"
)

// Banner says in a few lines where everything is and what to try; berth is how the program is called.
func (s *Stack) Banner(berth string, color bool) string {
	bold, plain := "", ""
	if color {
		bold, plain = "\x1b[1m", "\x1b[0m"
	}
	info := s.Info()
	var schedulers, nodes []string
	for _, sc := range info.Schedulers {
		schedulers = append(schedulers, sc.Twirp+" (gRPC "+sc.GRPC+")")
	}
	for _, n := range info.Nodes {
		nodes = append(nodes, n.ID+" "+n.Endpoint)
	}
	data := s.dir
	if s.o.Ephemeral {
		data += " (deleted at the end)"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%sBerth is ready.%s Ctrl-C stops it.\n\n", bold, plain)
	for _, line := range [][2]string{
		{"Gateways", strings.Join(info.Gateways, "  ")},
		{"Schedulers", strings.Join(schedulers, "  ")},
		{"Nodes", strings.Join(nodes, "  ")},
		{"Sandboxes", "http://{port}-{sandbox}." + info.Domain + strings.TrimPrefix(info.Gateways[0], "http://127.0.0.1") + "/"},
		{"API key", info.APIKey},
		{"SQL", "psql '" + info.DatabaseURL + "'"},
		{"Data", data},
	} {
		fmt.Fprintf(&b, "  %-11s %s\n", line[0], line[1])
	}
	fmt.Fprintf(&b, "\n%sTry, in another terminal:%s\n\n", bold, plain)
	fmt.Fprintf(&b, "  export BERTH_GATEWAY_URL=%s BERTH_API_KEY=%s\n", info.Gateways[0], info.APIKey)
	fmt.Fprintf(&b, "  export BERTH_SCHEDULER_URL=%s BERTH_SCHEDULER_TOKEN=%s\n\n", info.Schedulers[0].Twirp, s.state.OperatorToken)
	for _, command := range []string{
		"%s sandbox create echo", "curl \"$(%s sandbox url SANDBOX)\"", "%s placement explain SANDBOX",
	} {
		fmt.Fprintf(&b, "  "+command+"\n", berth)
	}
	return b.String()
}
