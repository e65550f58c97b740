// Command archcheck compares the imports of every package in the workspace with the rules of who
// may know whom, and looks for files that grew too long and errors that are asked by their text.
//
// It prints each breach with the reason of its rule and exits with 1 if there was one.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

func main() {
	breaches, packages, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "archcheck:", err)
		os.Exit(2)
	}
	for _, b := range breaches {
		fmt.Fprintln(os.Stderr, b)
	}
	if len(breaches) > 0 {
		fmt.Fprintf(os.Stderr, "archcheck: %d breaches\n", len(breaches))
		os.Exit(1)
	}
	fmt.Printf("archcheck: %d packages keep the rules\n", packages)
}

func run() ([]string, int, error) {
	packages, err := list()
	if err != nil {
		return nil, 0, err
	}
	if len(packages) == 0 {
		return nil, 0, errors.New("go list found no package; run it inside the workspace")
	}
	var breaches []string
	for _, p := range packages {
		for _, b := range checkImports(p) {
			breaches = append(breaches, b.String())
		}
		for _, name := range p.files() {
			found, err := checkFile(filepath.Join(p.Dir, name))
			if err != nil {
				return nil, 0, err
			}
			breaches = append(breaches, found...)
		}
	}
	return breaches, len(packages), nil
}

// list returns every package of every module of the workspace, with the files behind build tags.
func list() ([]Package, error) {
	dirs, err := goCommand("list", "-m", "-f", "{{.Dir}}/...")
	if err != nil {
		return nil, err
	}
	fields := "-json=ImportPath,Dir,Imports,TestImports,XTestImports,GoFiles,IgnoredGoFiles,TestGoFiles,XTestGoFiles"
	out, err := goCommand(append([]string{"list", "-e", "-tags", "containers", fields}, strings.Fields(string(dirs))...)...)
	if err != nil {
		return nil, err
	}
	var packages []Package
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p Package
		switch err := decoder.Decode(&p); {
		case errors.Is(err, io.EOF):
			return packages, nil
		case err != nil:
			return nil, fmt.Errorf("read the answer of go list: %w", err)
		}
		packages = append(packages, p)
	}
}

func goCommand(args ...string) ([]byte, error) {
	cmd := exec.Command("go", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, stderr.Bytes())
	}
	return out, nil
}
