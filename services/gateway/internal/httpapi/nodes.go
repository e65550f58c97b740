package httpapi

import (
	"net/http"
	"net/url"
	"strings"

	"github.com/labstack/echo/v4"

	"berth/services/gateway/internal/body"
)

// listNodes shows the observed nodes, sorted by id and without their addresses: GET /nodes?clusterID=,
// called by operators. It changes nothing.
func (a *API) listNodes(c echo.Context) error {
	x, r := of(c), c.Request()
	cluster, err := clusterOf(x.target.Raw)
	if err != nil {
		return err
	}
	nodes, err := a.Nodes.Nodes(r.Context(), cluster)
	if err != nil {
		return err
	}
	return writeJSON(x, http.StatusOK, nodes)
}

// getNode shows one observed node: GET /nodes/{id}?clusterID=, called by operators. It changes nothing.
func (a *API) getNode(c echo.Context) error {
	x, r := of(c), c.Request()
	cluster, err := clusterOf(x.target.Raw)
	if err != nil {
		return err
	}
	n, err := a.Nodes.Node(r.Context(), cluster, x.target.Node)
	if err != nil {
		return err
	}
	return writeJSON(x, http.StatusOK, n)
}

func clusterOf(raw string) (string, error) {
	_, query, _ := strings.Cut(raw, "?")
	values, err := url.ParseQuery(query)
	if err != nil {
		return "", body.Wrongf("invalid query: not a valid query string")
	}
	cluster := strings.TrimSpace(values.Get("clusterID"))
	if strings.ContainsRune(cluster, 0) {
		return "", body.Wrongf("invalid clusterID: \\u0000 is not allowed")
	}
	return cluster, nil
}
