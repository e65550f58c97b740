package standby

import (
	"testing"
	"time"
)

func TestAPositionCoversOnlyWhatItsOwnLogHadBefore(t *testing.T) {
	t.Parallel()
	first, failedOver := Log{System: 1, Database: 2, Timeline: 1}, Log{System: 1, Database: 2, Timeline: 2}
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	type said struct {
		ms  int
		log Log
		lsn int64
	}
	tests := map[string]struct {
		primary []said
		standby said
		want    int // ms of the mark it covers; -1: none
	}{
		"the youngest mark that it has reached":             {[]said{{0, first, 10}, {100, first, 20}, {200, first, 30}}, said{log: first, lsn: 25}, 100},
		"all marks of an idle primary":                      {[]said{{0, first, 10}, {100, first, 10}, {200, first, 10}}, said{log: first, lsn: 10}, 200},
		"nothing where it has not reached the oldest":       {[]said{{0, first, 10}, {100, first, 20}}, said{log: first, lsn: 9}, -1},
		"nothing before the primary has said anything":      {nil, said{log: first, lsn: 99}, -1},
		"nothing of marks that are older than the bound":    {[]said{{0, first, 10}, {1500, first, 20}}, said{log: first, lsn: 15}, -1},
		"nothing of another timeline, however far it is":    {[]said{{0, failedOver, 10}}, said{log: first, lsn: 99}, -1},
		"nothing from before a failover":                    {[]said{{0, first, 10}, {100, failedOver, 12}}, said{log: first, lsn: 99}, -1},
		"nothing of another system":                         {[]said{{0, first, 10}}, said{log: Log{System: 9, Database: 2, Timeline: 1}, lsn: 99}, -1},
		"nothing of another database":                       {[]said{{0, first, 10}}, said{log: Log{System: 1, Database: 9, Timeline: 1}, lsn: 99}, -1},
		"nothing from before the primary's log went back":   {[]said{{0, first, 30}, {100, first, 20}}, said{log: first, lsn: 19}, -1},
		"what the primary says after its log went back":     {[]said{{0, first, 30}, {100, first, 20}}, said{log: first, lsn: 20}, 100},
		"the timeline after a failover, once it follows it": {[]said{{0, first, 10}, {100, failedOver, 12}}, said{log: failedOver, lsn: 12}, 100},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := marks{bound: time.Second}
			for _, s := range tt.primary {
				m.add(at(s.ms), Position{Log: s.log, LSN: s.lsn})
			}
			got, ok := m.covered(Position{Log: tt.standby.log, LSN: tt.standby.lsn, Recovering: true})
			switch {
			case ok != (tt.want >= 0):
				t.Errorf("covered = %v, want one: %v", got.Sub(start), tt.want >= 0)
			case ok && !got.Equal(at(tt.want)):
				t.Errorf("covered = %v after the start, want %d ms", got.Sub(start), tt.want)
			}
		})
	}
}

func TestMarksAreAsFewAsTheBoundHolds(t *testing.T) {
	t.Parallel()
	m := marks{bound: time.Second}
	start := time.Now()
	for i := range 1000 {
		m.add(start.Add(time.Duration(i)*100*time.Millisecond), Position{LSN: int64(i)})
	}
	if len(m.held) != 11 {
		t.Errorf("%d marks are held after 1000, want the 11 of the last second", len(m.held))
	}
}
