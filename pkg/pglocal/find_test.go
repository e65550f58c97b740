package pglocal

import (
	"archive/zip"
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fake makes a folder with programs that say they are of a version.
func fake(t *testing.T, version string) string {
	t.Helper()
	dir := t.TempDir()
	for _, program := range []string{"postgres", "initdb"} {
		script := "#!/bin/sh\necho '" + program + " (PostgreSQL) " + version + "'\n"
		if err := os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestFindKnowsVersions(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		version string
		major   int
		says    string
	}{
		"a release":              {"15.18 (Debian 15.18-0+deb12u1)", 15, ""},
		"a beta":                 {"19beta1", 19, ""},
		"one that is too old":    {"14.9", 0, "at least 15"},
		"something else's words": {"", 0, "has no version"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			found, err := Find(fake(t, tt.version))
			if tt.says == "" && (err != nil || found.Major != tt.major) {
				t.Errorf("Find = %+v, %v; want major %d", found, err, tt.major)
			}
			if tt.says != "" && (!errors.Is(err, ErrNoBinaries) || !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("Find = %v, want ErrNoBinaries with %q", err, tt.says)
			}
		})
	}
}

func TestANamedFolderWithoutBinariesIsAnError(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if _, err := Find(dir); !errors.Is(err, ErrNoBinaries) || !strings.Contains(err.Error(), dir) {
		t.Errorf("Find(%s) = %v, want ErrNoBinaries that names it", dir, err)
	}
}

func TestFindFollowsALinkOnThePath(t *testing.T) {
	real, links := fake(t, "17.1"), t.TempDir()
	for _, program := range []string{"postgres", "initdb"} {
		if err := os.Symlink(filepath.Join(real, program), filepath.Join(links, program)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", links)
	found, err := Find()
	if err != nil {
		t.Fatal(err)
	}
	if want := resolve(real); found.Dir != want || found.Major != 17 {
		t.Errorf("Find = %+v, want %s", found, want)
	}
}

func TestAFolderInTheVariableIsTheOneToUse(t *testing.T) {
	dir := fake(t, "16.2")
	t.Setenv(binVariable, dir)
	if found, err := Find(); err != nil || found.Dir != resolve(dir) {
		t.Errorf("Find = %+v, %v; want %s", found, err, dir)
	}
	t.Setenv(binVariable, "/nowhere")
	if _, err := Find(); !errors.Is(err, ErrNoBinaries) || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("Find = %v, want ErrNoBinaries that names the folder", err)
	}
}

func TestAMachineWithoutPostgreSQLIsToldWhatToInstall(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	before := versionedFolders
	versionedFolders = []string{filepath.Join(t.TempDir(), "*")}
	t.Cleanup(func() { versionedFolders = before })
	_, err := Find()
	if !errors.Is(err, ErrNoBinaries) || !strings.Contains(err.Error(), "apt-get install postgresql") {
		t.Errorf("Find = %v, want ErrNoBinaries and the package", err)
	}
}

// repository serves one archive, as Maven does.
func repository(t *testing.T) *httptest.Server {
	t.Helper()
	txz, err := os.ReadFile("testdata/fake-postgres.txz")
	if err != nil {
		t.Fatal(err)
	}
	var jar bytes.Buffer
	archive := zip.NewWriter(&jar)
	file, err := archive.Create("postgres-linux-x86_64.txz")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.Write(txz); err != nil {
		t.Fatal(err)
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, ".jar") {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write(jar.Bytes())
	}))
	t.Cleanup(server.Close)
	t.Cleanup(http.DefaultClient.CloseIdleConnections) // the library's client
	return server
}

func TestFetchedBinariesAreKept(t *testing.T) {
	server, cache := repository(t), filepath.Join(folder(t), "cache")
	fetched, err := Fetch(t.Context(), cache, server.URL)
	if err != nil {
		t.Fatal(err)
	}
	if fetched.Major != 18 || !strings.HasPrefix(fetched.Dir, cache) {
		t.Errorf("Fetch = %+v, want 18 in %s", fetched, cache)
	}
	o, err := chooseOwner(cache)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(fetched.Path("postgres")); err != nil || fileOwner(info) != o.uid {
		t.Errorf("what was fetched belongs to %d (%v), want %d", fileOwner(info), err, o.uid)
	}
	server.Close()
	again, err := Fetch(t.Context(), cache, server.URL)
	if err != nil || again.Dir != fetched.Dir {
		t.Errorf("Fetch without a network = %+v, %v; want what was kept", again, err)
	}
}

func TestAFailedFetchSaysWhatToInstall(t *testing.T) {
	server := repository(t)
	server.Close()
	_, err := Fetch(t.Context(), filepath.Join(folder(t), "cache"), server.URL)
	if !errors.Is(err, ErrNoBinaries) || !strings.Contains(err.Error(), "apt-get install postgresql") {
		t.Errorf("Fetch from nowhere = %v, want ErrNoBinaries and the package", err)
	}
}
