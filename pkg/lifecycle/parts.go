package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"syscall"
	"time"
)

// readHeaderTimeout closes connections that never finish a request head.
const readHeaderTimeout = 10 * time.Second

// Closer returns a part that works already and is closed in its turn, like a pool.
func Closer(name string, closePart func(context.Context) error) Part {
	return Part{Name: name, Stop: closePart}
}

// Loop returns a part around run, which blocks until its ctx ends. If run returns before that, the
// process fails, with run's error or, where that is nil, with a text saying that it ended by itself.
// An error after ctx has ended is a failure to stop cleanly, unless it is ctx's own.
func Loop(name string, run func(ctx context.Context) error) Part {
	var (
		end  context.CancelFunc
		done chan error
	)
	return Part{
		Name: name,
		Start: func(ctx context.Context, fail func(error)) error {
			ctx, end = context.WithCancel(ctx)
			done = make(chan error, 1)
			go func() {
				err := run(ctx)
				if ctx.Err() == nil {
					fail(err)
					err = nil // told once
				}
				if errors.Is(err, context.Canceled) {
					err = nil
				}
				done <- err
			}()
			return nil
		},
		Stop: func(ctx context.Context) error {
			end()
			select {
			case err := <-done:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		},
	}
}

// HTTP returns a part that serves h on addr. Start listens, so that an occupied port is an error of
// the start; Stop lets open exchanges finish within its ctx and cuts the rest. opts change the server
// before it serves.
func HTTP(name, addr string, h http.Handler, opts ...func(*http.Server)) Part {
	server := &http.Server{Handler: h, ReadHeaderTimeout: readHeaderTimeout}
	for _, opt := range opts {
		opt(server)
	}
	return Listener(name, addr, func(l net.Listener) error {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	}, func(ctx context.Context) error {
		if err := server.Shutdown(ctx); err != nil {
			return errors.Join(err, server.Close())
		}
		return nil
	})
}

// Listener returns a part for a server of its own kind. Start listens on addr over TCP and calls serve
// in a goroutine; serve returns when stop was called. Stop calls stop and waits for serve within ctx.
func Listener(name, addr string, serve func(net.Listener) error, stop func(context.Context) error) Part {
	var (
		listener net.Listener
		stopping = make(chan struct{})
		done     = make(chan struct{})
	)
	return Part{
		Name: name,
		Start: func(ctx context.Context, fail func(error)) error {
			var config net.ListenConfig
			l, err := config.Listen(ctx, "tcp", addr)
			if err != nil {
				return listenError(name, addr, err)
			}
			listener = l
			go func() {
				defer close(done)
				err := serve(l)
				select {
				case <-stopping:
				default:
					fail(err)
				}
			}()
			return nil
		},
		Stop: func(ctx context.Context) error {
			close(stopping)
			err := stop(ctx)
			// A server that was stopped before serve had begun may not know the listener yet.
			if closeErr := listener.Close(); closeErr != nil && !errors.Is(closeErr, net.ErrClosed) {
				err = errors.Join(err, closeErr)
			}
			select {
			case <-done:
				return err
			case <-ctx.Done():
				return errors.Join(err, ctx.Err())
			}
		},
	}
}

// listenError says what is in the way and what to do about it.
func listenError(name, addr string, err error) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s cannot listen on %s: %w; end the process that has it or choose another address",
			name, addr, syscall.EADDRINUSE)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s cannot listen on %s: %w; choose a port from 1024 on", name, addr, syscall.EACCES)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%s cannot listen on %s: %w; choose an address of this machine", name, addr, syscall.EADDRNOTAVAIL)
	}
	return fmt.Errorf("%s cannot listen on %s; check the address: %w", name, addr, err)
}
