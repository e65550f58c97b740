package launch

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	schedulerv1 "berth/rpc/scheduler/v1"
)

func TestIdsAreFoundWhereNodesPutThem(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		in   string
		want []string
	}{
		"at the top":                     {`{"sandboxID":"a"}`, []string{"a"}},
		"in other spellings":             {`{"sandboxId":"a","sandbox_id":"b"}`, []string{"a", "b"}},
		"once each":                      {`{"sandboxID":"a","sandboxId":"a","data":{"sandboxID":"a"}}`, []string{"a"}},
		"in data":                        {`{"data":{"sandboxID":"a"}}`, []string{"a"}},
		"in a list of sandboxes":         {`{"sandboxes":[{"sandboxID":"a"},{"sandboxID":"b"}]}`, []string{"a", "b"}},
		"in data's list":                 {`{"data":{"sandboxes":[{"sandboxID":"a"}]}}`, []string{"a"}},
		"in a list, as a fork answers":   {`[{"sandbox":{"sandboxID":"a"}},{"error":{"code":429}},{"sandboxID":"b"}]`, []string{"a", "b"}},
		"not deeper":                     {`{"x":{"sandboxID":"a"}}`, nil},
		"not a number":                   {`{"sandboxID":1}`, nil},
		"not an empty text":              {`{"sandboxID":""}`, nil},
		"not in a text that is no JSON":  {`sandboxID a`, nil},
		"not in half an object":          {`{"sandboxID":"a"`, nil},
		"not in a top that is no object": {`"sandboxID"`, nil},
		"a deep answer does not matter":  {`{"a":[[[[1]]]],"sandboxID":"a"}`, []string{"a"}},
	}
	for name, tt := range tests {
		if diff := cmp.Diff(tt.want, bodyIDs([]byte(tt.in))); diff != "" {
			t.Errorf("%s: bodyIDs(%s) (-want +got):\n%s", name, tt.in, diff)
		}
	}
}

func TestACompressedAnswerIsRead(t *testing.T) {
	t.Parallel()
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	if _, err := w.Write(bytes.Repeat([]byte(" "), 1000)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := plain(packed.Bytes(), http.Header{"Content-Encoding": {"GZIP"}}, 1000)
	if err != nil || len(got) != 1000 {
		t.Errorf("plain = %d bytes, %v", len(got), err)
	}
	if _, err := plain(packed.Bytes(), http.Header{"Content-Encoding": {"gzip"}}, 999); err == nil {
		t.Error("a bomb passed its limit")
	}
	if _, err := plain(nil, http.Header{"Content-Encoding": {"br"}}, 999); err == nil {
		t.Error("an encoding nobody here knows passed")
	}
}

func TestAColdCreateNamesItsSizeAndImages(t *testing.T) {
	t.Parallel()
	got, err := ParseColdAsk([]byte(`{"image":"base","cpuCount":2,"memoryMB":512,"metadata":{"a":"b"},
		"attachedDrives":[{"source":{"image":"data"}},{"source":{"volume":"v"}}],"timeout":60}`), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	want := &schedulerv1.ScheduleRequestHint{Kind: &schedulerv1.ScheduleRequestHint_NewColdSandbox{
		NewColdSandbox: &schedulerv1.NewColdSandboxHint{
			CpuCount: 2, MemoryMb: 512, Images: []string{"base", "data"}, Metadata: map[string]string{"a": "b"},
		},
	}}
	if diff := cmp.Diff(want, got.Hint, protocmp.Transform()); diff != "" {
		t.Errorf("hint (-want +got):\n%s", diff)
	}
}

func TestAManagedSandboxIsAskedForByName(t *testing.T) {
	t.Parallel()
	got, err := ParseAsk([]byte(`{"templateID":"a","autoResume":{"enabled":true},"berth":{"name":"n","idleAfter":60}}`), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	want := &schedulerv1.NewSandbox{Name: "n", IdleAfterMs: 60_000, WakeOnTraffic: true}
	if diff := cmp.Diff(want, got.Managed, protocmp.Transform()); diff != "" {
		t.Errorf("managed (-want +got):\n%s", diff)
	}
	if plain, err := ParseAsk([]byte(`{"templateID":"a"}`), time.Hour); err != nil || plain.Managed != nil {
		t.Errorf("a plain create = %v, %v", plain.Managed, err)
	}
}
