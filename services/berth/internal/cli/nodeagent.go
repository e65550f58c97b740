package cli

import (
	"github.com/spf13/cobra"

	"berth/services/nodeagent"
)

func nodeagentCommand() *cobra.Command {
	return serve(service[nodeagent.Config]{
		name: "nodeagent", short: "The agent that runs sandboxes on a node",
		long: `A node agent runs isolated sandboxes on this machine, serves them to gateways, and tells the schedulers
that it lives and what it runs. It needs bubblewrap; without namespaces there is --isolation none, for code
you trust.`,
		example: `  BERTH_SCHEDULER_TOKEN=… BERTH_NODE_KEY=… berth nodeagent serve --node-id n1 \
    --endpoint http://10.0.0.7:8000 --scheduler-grpc 10.0.0.2:9090,10.0.0.3:9090`,
		config: nodeagent.DefaultConfig(), methods: configured[nodeagent.Config], run: nodeagent.Run,
	})
}
