// Package builtin holds the programs that templates may run without anything installed: the berth
// binary runs one of them inside the sandbox. They know nothing of the agent.
package builtin

import (
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

// Names of the programs, as templates write them.
const (
	Echo  = "echo"
	Files = "files"
	Shell = "shell"
)

// DefaultPort is where echo and files listen unless the environment's PORT says otherwise.
const DefaultPort = 3000

// Known reports whether name is a program of this package.
func Known(name string) bool { return name == Echo || name == Files || name == Shell }

// Run runs the named program until it ends, which the servers do on an error only and shell at a signal.
func Run(name string) error {
	switch name {
	case Echo:
		return serve(EchoHandler())
	case Files:
		dir, err := os.Getwd()
		if err != nil {
			return fmt.Errorf("find the workspace: %w", err)
		}
		return serve(http.FileServerFS(os.DirFS(dir)))
	case Shell:
		return idle()
	default:
		return fmt.Errorf("no built-in program %q: there are %s, %s and %s", name, Echo, Files, Shell)
	}
}

func serve(h http.Handler) error {
	port := DefaultPort
	if text, set := os.LookupEnv("PORT"); set { //nolint:forbidigo // this program runs inside a sandbox, where the environment is the template's
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 65535 {
			return fmt.Errorf("PORT is %q: want 1 to 65535", text)
		}
		port = n
	}
	server := &http.Server{
		Addr: ":" + strconv.Itoa(port), Handler: h,
		ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 620 * time.Second,
	}
	return server.ListenAndServe()
}

// idle waits for a signal that asks it to end.
func idle() error {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer signal.Stop(end)
	<-end
	return nil
}
