package proxy

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// closeWithin is how long the second direction of a tunnel may go on once the first has ended: what
// is under way still arrives, and the other side is closed within a second.
const closeWithin = 500 * time.Millisecond

// switchesAsAsked tells whether a 101 switches to the protocol that was offered.
func switchesAsAsked(offer string, resp *http.Response) bool {
	return offer != "" && hasToken(resp.Header["Connection"], "upgrade") &&
		len(resp.Header["Upgrade"]) == 1 && strings.EqualFold(strings.TrimSpace(resp.Header["Upgrade"][0]), offer)
}

// tunnel answers the client with the 101 of resp and copies bytes both ways until both directions
// have ended or ctx has. It returns the bytes that went in and out.
func tunnel(ctx context.Context, w http.ResponseWriter, resp *http.Response, offer string, x *exchange) (in, out int64, err error) {
	node, ok := resp.Body.(io.ReadWriteCloser)
	if !ok {
		return 0, 0, errors.New("the node's connection cannot be written to")
	}
	defer node.Close()
	client, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return 0, 0, err
	}
	defer client.Close()
	if err := client.SetDeadline(time.Time{}); err != nil {
		return 0, 0, err
	}
	x.set(answering | streaming)

	header := make(http.Header, len(resp.Header)+2)
	passHeader(header, resp.Header)
	header["Connection"] = []string{"Upgrade"}
	header["Upgrade"] = []string{offer}
	if err := writeSwitch(buffered.Writer, header); err != nil {
		return 0, 0, errClientGone
	}

	closeBoth := func() {
		_ = client.Close()
		_ = node.Close()
	}
	defer context.AfterFunc(ctx, closeBoth)()
	grace := time.AfterFunc(time.Hour, closeBoth)
	defer grace.Stop()
	ended := func(failed error, to any) {
		half, ok := to.(interface{ CloseWrite() error })
		if failed != nil || !ok || half.CloseWrite() != nil {
			closeBoth()
			return
		}
		grace.Reset(closeWithin)
	}

	sent := make(chan struct{})
	go func() {
		defer close(sent)
		var failed error
		in, failed = pump(node, buffered.Reader, x, false)
		ended(failed, node)
	}()
	out, failed := pump(client, node, x, true)
	ended(failed, client)
	<-sent
	return in, out, nil
}

func writeSwitch(w *bufio.Writer, header http.Header) error {
	if _, err := w.WriteString("HTTP/1.1 101 Switching Protocols\r\n"); err != nil {
		return err
	}
	if err := header.Write(w); err != nil {
		return err
	}
	if _, err := w.WriteString("\r\n"); err != nil {
		return err
	}
	return w.Flush()
}

// pump copies until src ends. It is not io.Copy: between two TCP connections that holds a pipe, two
// descriptors, for each direction of each tunnel.
func pump(dst io.Writer, src io.Reader, x *exchange, toClient bool) (int64, error) {
	buffer := buffers.Get().(*[bufferBytes]byte) //nolint:errcheck // the pool has nothing else
	defer buffers.Put(buffer)
	var total int64
	for {
		n, err := src.Read(buffer[:])
		if n > 0 {
			x.touch()
			if toClient {
				x.set(writingClient)
			}
			if _, failed := dst.Write(buffer[:n]); failed != nil {
				return total, failed
			}
			x.clear(writingClient)
			x.touch()
			total += int64(n)
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
			return total, nil
		case err != nil:
			return total, err
		}
	}
}
