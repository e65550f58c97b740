package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"berth/services/internal/sandbox"
)

// Record is what is remembered of one sandbox id.
type Record struct {
	ID       sandbox.ID       `json:"id"`
	Revision sandbox.Revision `json:"revision,omitempty"` // highest seen
	Answer   json.RawMessage  `json:"answer,omitempty"`   // body of the create's 201
	State    json.RawMessage  `json:"state,omitempty"`    // the sandbox, as its owner spells it
	Deleted  *time.Time       `json:"deleted,omitempty"`  // set: a tombstone
}

// ErrInUse says that another agent has the data folder.
var ErrInUse = errors.New("data folder is in use")

// Full reports whether a write failed because the disk, or what we may have of it, is full.
func Full(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// Journal keeps records in a folder. It is safe for concurrent use; two writes of one id come one after the
// other, and their caller sees to it that the later one is the newer.
type Journal struct {
	dir  string
	lock *os.File

	mu      sync.Mutex
	records map[sandbox.ID]Record
	writing map[sandbox.ID]*sync.Mutex
}

const suffix = ".json"

// Open reads the journal in dir, which is made if missing, and locks it until Close or the process's end. ErrInUse: another
// process has it.
func Open(dir string) (*Journal, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock journal: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: another node agent runs on %s: give each agent its own --data", ErrInUse, filepath.Dir(dir))
		}
		return nil, fmt.Errorf("lock journal: %w", err)
	}
	j := &Journal{dir: dir, lock: lock, records: make(map[sandbox.ID]Record), writing: make(map[sandbox.ID]*sync.Mutex)}
	if err := j.load(); err != nil {
		_ = lock.Close()
		return nil, err
	}
	return j, nil
}

func (j *Journal) load() error {
	entries, err := os.ReadDir(j.dir)
	if err != nil {
		return fmt.Errorf("read journal: %w", err)
	}
	for _, e := range entries {
		name, found := strings.CutSuffix(e.Name(), suffix)
		if !found {
			if strings.HasSuffix(e.Name(), ".new") { // of a write that died: never acknowledged
				_ = os.Remove(filepath.Join(j.dir, e.Name()))
			}
			continue
		}
		path := filepath.Join(j.dir, e.Name())
		text, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read journal: %w", err)
		}
		var r Record
		if err := json.Unmarshal(text, &r); err != nil {
			return fmt.Errorf("read journal: %s is not a record: %w: restore it, or move it away if that sandbox may be forgotten", path, err)
		}
		if string(r.ID) != name {
			return fmt.Errorf("read journal: %s is the record of %q: restore its name", path, r.ID)
		}
		j.records[r.ID] = r
	}
	return nil
}

// Close unlocks the folder.
func (j *Journal) Close() error { return j.lock.Close() }

// Get returns what is remembered of id.
func (j *Journal) Get(id sandbox.ID) (Record, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r, found := j.records[id]
	return r, found
}

// All returns every record, in no order.
func (j *Journal) All() []Record {
	j.mu.Lock()
	defer j.mu.Unlock()
	all := make([]Record, 0, len(j.records))
	for _, r := range j.records {
		all = append(all, r)
	}
	return all
}

// Update reads the record of id (the zero Record if there is none), lets change alter it, and returns when the result is on
// disk. When change returns an error nothing is written and the error is returned. When the write fails, memory keeps what it
// had.
func (j *Journal) Update(id sandbox.ID, change func(*Record) error) error {
	j.mu.Lock()
	one, found := j.writing[id]
	if !found {
		one = new(sync.Mutex)
		j.writing[id] = one
	}
	j.mu.Unlock()
	one.Lock()
	defer one.Unlock()

	r, _ := j.Get(id)
	r.ID = id
	if err := change(&r); err != nil {
		return err
	}
	if err := j.write(r); err != nil {
		return fmt.Errorf("remember %s: %w", id, err)
	}
	j.mu.Lock()
	j.records[id] = r
	j.mu.Unlock()
	return nil
}

// Path returns the file of id's record, for messages.
func (j *Journal) Path(id sandbox.ID) string { return filepath.Join(j.dir, string(id)+suffix) }

func (j *Journal) write(r Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temporary := j.Path(r.ID) + ".new"
	file, err := os.OpenFile(temporary, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(append(text, '\n'))
	if err == nil {
		err = file.Sync()
	}
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(temporary, j.Path(r.ID))
	}
	if err != nil {
		_ = os.Remove(temporary) // the next start removes it, too
		return err
	}
	return j.syncDir()
}

// syncDir makes names durable: without it a new file may be gone after a power cut, whatever was synced into it.
func (j *Journal) syncDir() error {
	dir, err := os.Open(j.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// Forget removes the record of id, for a create that came to nothing.
func (j *Journal) Forget(id sandbox.ID) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := os.Remove(j.Path(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget %s: %w", id, err)
	}
	delete(j.records, id)
	delete(j.writing, id)
	return j.syncDir()
}

// ForgetDeleted removes tombstones from before the given time.
func (j *Journal) ForgetDeleted(before time.Time) error {
	var errs []error
	for _, r := range j.All() {
		if r.Deleted != nil && r.Deleted.Before(before) {
			errs = append(errs, j.Forget(r.ID))
		}
	}
	return errors.Join(errs...)
}
