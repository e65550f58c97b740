package httpapi

import (
	"net/http"
	"strings"
	"time"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/sandboxes"
	"berth/services/nodeagent/internal/templates"
)

// create makes a sandbox: POST /sandboxes, /v2/sandboxes, /sandboxes-cold, called by a gateway. With Berth-Sandbox-Id a second call
// gives the first one's answer; without, each call makes another sandbox.
func (a *API) create(w http.ResponseWriter, r *http.Request, _ sandbox.ID) {
	var body createBody
	id, reservation, err := givenID(r)
	if err == nil {
		err = readBody(r, false, &body)
	}
	if err != nil {
		a.refuse(w, r, id, err)
		return
	}
	if body.TemplateID == "" && strings.HasPrefix(r.RequestURI, "/sandboxes-cold") {
		body.TemplateID = templates.DefaultName // a cold create may name an image only
	}
	if body.TemplateID == "" {
		a.refuse(w, r, id, badf("templateID is required"))
		return
	}
	c, err := body.create()
	if err != nil {
		a.refuse(w, r, id, err)
		return
	}
	c.ID, c.Reservation = id, reservation
	answer, err := a.Sandboxes.Create(r.Context(), c)
	if err != nil {
		a.refuse(w, r, id, err)
		return
	}
	if id != "" {
		w.Header().Set("X-Agentenv-Sandbox-Id", string(id)) // a gateway need not read the body for it
	}
	writeJSON(w, http.StatusCreated, answer)
}

func givenID(r *http.Request) (sandbox.ID, string, error) {
	reservation := r.Header.Get("Berth-Reservation")
	text := r.Header.Get("Berth-Sandbox-Id")
	if text == "" {
		return "", reservation, nil
	}
	id, err := sandbox.ParseID(text)
	if err != nil {
		return "", "", badf("Berth-Sandbox-Id is not a sandbox id")
	}
	return id, reservation, nil
}

// get shows a sandbox: GET /sandboxes/{id}.
func (a *API) get(w http.ResponseWriter, r *http.Request, id sandbox.ID) {
	v, err := a.Sandboxes.Get(id)
	if err != nil {
		a.refuse(w, r, id, err)
		return
	}
	d := a.detail(v)
	d.Lifecycle = &lifecycle{AutoResume: v.AutoResume, OnTimeout: "kill"}
	if v.AutoPause {
		d.Lifecycle.OnTimeout = "pause"
	}
	writeJSON(w, http.StatusOK, d)
}

// delete ends a sandbox: DELETE /sandboxes/{id}. A second call is 404.
func (a *API) delete(w http.ResponseWriter, r *http.Request, id sandbox.ID) {
	a.done(w, r, id, a.Sandboxes.Delete(r.Context(), id))
}

func (a *API) done(w http.ResponseWriter, r *http.Request, id sandbox.ID, err error) {
	if err != nil {
		a.refuse(w, r, id, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// pause freezes a sandbox: POST /sandboxes/{id}/pause. A second call is 409. Memory is always kept: the processes stay, frozen.
func (a *API) pause(w http.ResponseWriter, r *http.Request, id sandbox.ID) {
	var body struct{}
	if err := readBody(r, true, &body); err != nil {
		a.refuse(w, r, id, err)
		return
	}
	a.done(w, r, id, a.Sandboxes.Pause(r.Context(), id))
}

type timeoutBody struct {
	Timeout *number `json:"timeout"`
}

// resume thaws a sandbox: POST /sandboxes/{id}/resume, of older clients. A second call is 409.
func (a *API) resume(w http.ResponseWriter, r *http.Request, id sandbox.ID) {
	timeout, err := readTimeout(r, true, time.Second)
	var v sandboxes.View
	if err == nil {
		if timeout == 0 {
			timeout = sandboxes.DefaultTimeout
		}
		v, err = a.Sandboxes.Resume(r.Context(), id, timeout)
	}
	if err != nil {
		a.refuse(w, r, id, err)
		return
	}
	writeJSON(w, http.StatusCreated, newCreateAnswer(a.NodeID, a.Domain, v))
}

// connect makes a sandbox run for at least the timeout: POST /sandboxes/{id}/connect, also under /v2. It may be repeated; 201 says that
// it was paused. It never shortens a life.
func (a *API) connect(w http.ResponseWriter, r *http.Request, id sandbox.ID) {
	timeout, err := readTimeout(r, true, time.Second)
	var v sandboxes.View
	var resumed bool
	if err == nil {
		v, resumed, err = a.Sandboxes.Connect(r.Context(), id, timeout)
	}
	if err != nil {
		a.refuse(w, r, id, err)
		return
	}
	status := http.StatusOK
	if resumed {
		status = http.StatusCreated
	}
	writeJSON(w, status, newCreateAnswer(a.NodeID, a.Domain, v))
}

func readTimeout(r *http.Request, optional bool, least time.Duration) (time.Duration, error) {
	var body timeoutBody
	if err := readBody(r, optional, &body); err != nil {
		return 0, err
	}
	if body.Timeout == nil && !optional {
		return 0, badf("timeout is required")
	}
	return seconds("timeout", body.Timeout, least, maxTimeout)
}

// timeout sets when a sandbox ends: POST /sandboxes/{id}/timeout. 0 ends it now. A repeated call counts from then.
func (a *API) timeout(w http.ResponseWriter, r *http.Request, id sandbox.ID) {
	timeout, err := readTimeout(r, false, 0)
	if err == nil {
		err = a.Sandboxes.SetTimeout(r.Context(), id, timeout)
	}
	a.done(w, r, id, err)
}

// refreshes lengthens a sandbox's life: POST /sandboxes/{id}/refreshes, of older clients.
func (a *API) refreshes(w http.ResponseWriter, r *http.Request, id sandbox.ID) {
	var body struct {
		Duration *number `json:"duration"`
	}
	err := readBody(r, true, &body)
	var duration time.Duration
	if err == nil {
		duration, err = seconds("duration", body.Duration, time.Second, maxRefresh)
	}
	if err == nil {
		if duration == 0 {
			duration = sandboxes.DefaultTimeout
		}
		err = a.Sandboxes.Refresh(r.Context(), id, duration)
	}
	a.done(w, r, id, err)
}
