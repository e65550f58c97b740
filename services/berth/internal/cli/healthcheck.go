package cli

import (
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/spf13/cobra"
)

const (
	healthLimit       = 2 * time.Second
	maxHealthBytes    = 4 << 10
	exampleHealthcall = "  berth healthcheck http://127.0.0.1:9101/readyz"
)

// healthcheckCommand is for containers, whose images have no curl.
func healthcheckCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "healthcheck URL",
		Short:   "Ask a health URL; the exit code is 0 when the answer is 200",
		Hidden:  true,
		Example: exampleHealthcall,
		Args:    exactArgs("URL"),
		RunE: func(cmd *cobra.Command, args []string) error {
			request, err := http.NewRequestWithContext(cmd.Context(), http.MethodGet, args[0], nil)
			if err != nil {
				return usagef(cmd, "%q is no URL", args[0])
			}
			client := http.Client{Timeout: healthLimit}
			answer, err := client.Do(request)
			if err != nil {
				return err
			}
			defer answer.Body.Close()
			body, err := io.ReadAll(io.LimitReader(answer.Body, maxHealthBytes))
			if err != nil {
				return fmt.Errorf("read the answer of %s: %w", args[0], err)
			}
			if answer.StatusCode != http.StatusOK {
				return fmt.Errorf("%s answers %s: %s", args[0], answer.Status, body)
			}
			return nil
		},
	}
}
