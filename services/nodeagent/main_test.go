package nodeagent_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/spf13/pflag"
	"go.uber.org/goleak"

	"berth/pkg/flagenv"
	"berth/pkg/telemetry"
	"berth/services/nodeagent"
)

// agentVariable makes this test binary a node agent, so that tests can kill one.
const agentVariable = "BERTH_TEST_AGENT"

func TestMain(m *testing.M) {
	if nodeagent.MaybeInit() {
		os.Exit(0)
	}
	if os.Getenv(agentVariable) != "" { //nolint:forbidigo // set by the test that starts this process
		if err := agentMain(); err != nil {
			fmt.Fprintln(os.Stderr, "agent:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func agentMain() error {
	cfg := nodeagent.DefaultConfig()
	fs := pflag.NewFlagSet("nodeagent", pflag.ContinueOnError)
	cfg.Flags(fs)
	if err := fs.Parse(os.Args[1:]); err != nil {
		return err
	}
	if err := flagenv.Apply(fs, "NODEAGENT", os.LookupEnv); err != nil { //nolint:forbidigo // as main does
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	tel, err := telemetry.New(ctx, telemetry.Config{Service: "nodeagent", Version: "test", LogLevel: cfg.LogLevel, LogFormat: "json"})
	if err != nil {
		return err
	}
	return nodeagent.Run(ctx, cfg, tel, "test")
}
