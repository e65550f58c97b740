package cli

import (
	"fmt"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"
)

const (
	defaultDomain = "berth.localhost"
	defaultPort   = 3000 // of the built-in templates
)

func sandboxURLCommand() *cobra.Command {
	var (
		g      gatewayFlags
		out    output
		domain string
	)
	cmd := &cobra.Command{
		Use:   "url SANDBOX [PORT]",
		Short: "Print the URL of a port of a sandbox",
		Long: `Print the URL under which a server inside a sandbox answers: {port}-{sandbox}.{domain}, at the
gateway's port. PORT is 3000 unless it is given, where the built-in templates listen.

The domain must lead to the gateway; names under localhost do so on this machine in most programs. Where
they do not, send the request to the gateway itself with the header pair that -o json shows.`,
		Example: `  curl "$(berth sandbox url ID)"
  berth sandbox url ID 8000 -o json`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 2 {
				args = args[:1]
			}
			return exactArgs("SANDBOX")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			port := uint64(defaultPort)
			if len(args) == 2 {
				var err error
				if port, err = strconv.ParseUint(args[1], 10, 16); err != nil || port == 0 {
					return usagef(cmd, "PORT %q: a number from 1 to 65535 is wanted", args[1])
				}
			}
			path, err := sandboxPath(args[0])
			if err != nil {
				return err
			}
			client, err := g.client(cmd)
			if err != nil {
				return err
			}
			text, _, err := client.call(cmd.Context(), "GET", path, nil)
			if err != nil {
				return fmt.Errorf("sandbox %s: %w", args[0], err)
			}
			var s sandboxDetail
			if err := decode(text, &s); err != nil {
				return err
			}
			if s.Domain != "" && !cmd.Flags().Changed("domain") {
				domain = s.Domain
			}
			address := sandboxURL(client.base, args[0], port, domain)
			if out.json() {
				return out.writeJSON(cmd.OutOrStdout(), map[string]any{
					"url": address, "gateway": client.base.String(),
					"headers": map[string]string{"x-agentenv-sandbox-id": args[0], "x-agentenv-target-port": strconv.FormatUint(port, 10)},
				})
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), address)
			return err
		},
	}
	fs := cmd.Flags()
	g.flags(fs, clientTimeout)
	out.flags(fs)
	fs.StringVar(&domain, "domain", defaultDomain, "the gateway's sandbox domain, where the sandbox does not say it")
	names := gatewayVariables()
	names["domain"] = []string{"BERTH_DOMAIN"}
	variables(fs, names)
	return cmd
}

// sandboxURL is the address of a port of a sandbox at the gateway at base.
func sandboxURL(base *url.URL, id string, port uint64, domain string) string {
	host := fmt.Sprintf("%d-%s.%s", port, id, domain)
	if p := base.Port(); p != "" {
		host += ":" + p
	}
	return base.Scheme + "://" + host + "/"
}
