package cli

import (
	"github.com/spf13/cobra"

	"berth/services/scheduler"
)

func schedulerCommand() *cobra.Command {
	return serve(service[scheduler.Config]{
		name: "scheduler", short: "The service that places sandboxes and remembers where they live",
		long: `A scheduler places new sandboxes on nodes, keeps bindings and nodes in PostgreSQL, and serves scheduler.v1
over gRPC and Twirp. Any number of replicas work on one database, whose schema "berth migrate up" made.`,
		example: `  BERTH_DATABASE_URL=postgres://berth_scheduler_1@db/berth BERTH_SCHEDULER_NODE_TOKENS=… \
    BERTH_SCHEDULER_GATEWAY_TOKENS=… berth scheduler serve --register
  berth scheduler serve --config /etc/agentenv/config.json`,
		config: scheduler.DefaultConfig(), methods: configured[scheduler.Config], run: scheduler.Run,
	})
}
