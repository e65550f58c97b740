package proxy

import (
	"html/template"
	"net/http"
	"strconv"
	"strings"
)

// wantsPage tells whether r is a person's browser opening a page: GET or HEAD, an Accept that
// prefers text/html to JSON, and no fetch of a script.
func wantsPage(r *http.Request) bool {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return false
	}
	if mode := r.Header.Get("Sec-Fetch-Mode"); mode != "" && mode != "navigate" {
		return false
	}
	accept := r.Header["Accept"]
	html := quality(accept, "text", "html")
	return html > 0 && html > quality(accept, "application", "json")
}

// quality returns the weight, in thousandths, that an Accept header gives a media type: that of the
// most specific range that covers it, 0 where none does (RFC 9110, section 12.5.1).
func quality(accept []string, major, minor string) int {
	weight, specific := 0, -1
	for _, line := range accept {
		for item := range strings.SplitSeq(line, ",") {
			mediaRange, params, _ := strings.Cut(item, ";")
			a, b, ok := strings.Cut(strings.ToLower(strings.TrimSpace(mediaRange)), "/")
			if !ok {
				continue
			}
			level := -1
			switch {
			case a == major && b == minor:
				level = 2
			case a == major && b == "*":
				level = 1
			case a == "*" && b == "*":
				level = 0
			}
			if level > specific {
				specific, weight = level, parameterQ(params)
			}
		}
	}
	return weight
}

func parameterQ(params string) int {
	for param := range strings.SplitSeq(params, ";") {
		name, value, ok := strings.Cut(param, "=")
		if !ok || !strings.EqualFold(strings.TrimSpace(name), "q") {
			continue
		}
		q, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil || q < 0 || q > 1 {
			return 0
		}
		return int(q * 1000)
	}
	return 1000
}

// page is all a browser is shown. It fetches nothing and shows nothing of the request but what was
// parsed as an id and a port.
var page = template.Must(template.New("error").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{.Title}}</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:36rem;margin:15vh auto;padding:0 1rem;color:#222}
h1{font-size:1.4rem}code{background:#eee;padding:.1em .3em}small{color:#666}</style></head>
<body><h1>{{.Title}}</h1><p>{{.What}}{{if .Sandbox}} (sandbox <code>{{.Sandbox}}</code>{{if .Port}}, port <code>{{.Port}}</code>{{end}}){{end}}.</p>
<p>{{.Advice}}</p><p><small>Request {{.RequestID}}</small></p></body></html>
`)) //nolint:gochecknoglobals // a constant

func writePage(w http.ResponseWriter, r *http.Request, id string, e Error) {
	advice := "Reloading will not help before that changes."
	if e.RetryAfter > 0 || e.Status == http.StatusGatewayTimeout || e.Code == "node_unreachable" {
		advice = "Reload in a moment."
	}
	var body strings.Builder
	if err := page.Execute(&body, map[string]any{
		"Title": strconv.Itoa(e.Status) + " " + http.StatusText(e.Status), "What": e.Message, "Sandbox": string(e.Sandbox),
		"Port": e.Port, "Advice": advice, "RequestID": id,
	}); err != nil { // constant template, plain values
		panic(err)
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Length", strconv.Itoa(body.Len()))
	w.WriteHeader(e.Status)
	if r.Method != http.MethodHead {
		_, _ = w.Write([]byte(body.String()))
	}
}
