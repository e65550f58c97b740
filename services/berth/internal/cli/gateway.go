package cli

import (
	"github.com/spf13/cobra"

	"berth/services/gateway"
)

func gatewayCommand() *cobra.Command {
	return serve(service[gateway.Config]{
		name: "gateway", short: "The one address that clients need",
		long: `A gateway answers the API, has new sandboxes placed by a scheduler, and forwards all traffic of sandboxes to
their nodes. Any number of replicas serve any request; they own nothing.`,
		example: `  BERTH_DATABASE_URL=postgres://berth_gateway_1@db/berth BERTH_SCHEDULER_URL=http://s1:9091,http://s2:9091 \
    BERTH_SCHEDULER_TOKEN=… BERTH_API_KEY=… BERTH_CLUSTER_SECRET=… berth gateway serve --domains box.example.com`,
		config: gateway.DefaultConfig(), methods: configured[gateway.Config], run: gateway.Run,
	})
}
